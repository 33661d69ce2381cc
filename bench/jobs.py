"""What the kernel benchmark runs: every op on what users train, other ways to do the same, and a check of results."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from bench.limits import Stream
from bench.shard import STATES, UPDATES, Kind, Shard, segments_of
from bench.systems import HYPER
from bench.timing import Call
from zerox import ops
from zerox.memory.forms import master_of
from zerox.plan.form import BLOCK_NUMEL
from zerox.rules.reference import AdamState, LionState, SgdState, adam_step, lion_step, sgd_step
from zerox.rules.rule import MASTER, REMAINDER

OURS, CEILING = "zerox", "stream (ceiling)"
MASKED = "zerox, 80% masked"
WIDE = "zerox, fp32 state"
TRAINED = (
    Kind("fp32", torch.float32),
    Kind("bf16 + remainder", torch.bfloat16, REMAINDER),
    Kind("bf16 + fp32", torch.bfloat16, MASTER),
    Kind("fp16 + fp32", torch.float16, MASTER),
    Kind("fp32", torch.float32, state="bf16"),
    Kind("fp32", torch.float32, state="8bit"),
    Kind("bf16 + remainder", torch.bfloat16, REMAINDER, state="bf16"),
    Kind("bf16 + remainder", torch.bfloat16, REMAINDER, state="8bit"),
)
# Before the update a master plays no part.
SENT = (Kind("fp32", torch.float32), Kind("bf16", torch.bfloat16), Kind("fp16", torch.float16))


def kinds_of(op: str) -> tuple[Kind, ...]:
    """What an op is run on. A rule without states has none to store in another way."""
    if op not in UPDATES:
        return SENT
    has_states = UPDATES[op].rule.wanted_states([UPDATES[op].group])
    return tuple(kind for kind in TRAINED if has_states or kind.state == "fp32")


def bytes_an_element(op: str, kind: Kind, num_slices: int = 1) -> float:
    """The one place where bytes are counted. Read once, written once:

    flatten  gradient read, bucket written
    reduce   each slice read, shard written
    norm     shard read
    adam     parameter and master read and written, gradient read, two moments read and written:
             fp32              4+4 + 4 + 8+8 = 28
             bf16 + remainder  2+2 + 2+2 + 2 + 8+8 = 26
             16 bits + fp32    2+2 + 4+4 + 2 + 8+8 = 30
             with bf16 moments 8 less, with 8 bits and a scale a block 12 - 1/16 less
    sgd      the same without moments; sgd momentum and lion with one
    """
    grad = kind.dtype.itemsize
    if op in UPDATES:
        rule, specs = UPDATES[op].rule, UPDATES[op].specs(kind)
        kept = [rule.kept(spec, STATES[kind.state]).nbytes(BLOCK_NUMEL, on_host=True) for spec in specs]
        return 2 * kind.dtype.itemsize + grad + 2 * sum(kept) / BLOCK_NUMEL
    return {"flatten": 2 * grad, "reduce": (num_slices + 1) * grad, "norm": grad}[op]


@dataclass(frozen=True)
class Job:
    """One op on one kind at one size. ``params``: how many elements each parameter has."""

    op: str
    kind: Kind
    size: str
    params: tuple[int, ...]
    num_slices: int = 1

    @property
    def numel(self) -> int:
        return sum(self.params)

    @property
    def nbytes(self) -> int:
        return int(self.numel * bytes_an_element(self.op, self.kind, self.num_slices))

    @property
    def wide(self) -> Job:
        """The same with states in float32."""
        return replace(self, kind=replace(self.kind, state="fp32"))

    @property
    def title(self) -> str:
        return f"{self.op} of {self.num_slices}" if self.op == "reduce" else self.op

    @property
    def name(self) -> str:
        """Its key in kernel_work.json."""
        return ", ".join([self.title, self.kind.name, *([self.kind.state] if self.op in UPDATES else [])])


# ---- buffers


def sources_of(params: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(numel, device=device).to(dtype) for numel in params]


def pieces_of(params: Sequence[int]) -> Tensor:
    """One source behind the other."""
    starts = torch.tensor(params).cumsum(0) - torch.tensor(params)
    return torch.stack([torch.arange(len(params)), torch.zeros_like(starts), starts, torch.tensor(params)], dim=1)


def zero_words(device: torch.device) -> Tensor:
    return torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=device)


# ---- other people's updates, of the same values: those that are installed, and run on the device


@dataclass(frozen=True)
class Peer:
    """An optimizer, ``kind`` of ``module``, for jobs of ``op``; ``state``: how it stores states of fp32 parameters.

    ``options``: beside HYPER.
    """

    name: str
    module: str
    kind: str
    state: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    op: str = "adam"


FUSED = {"fused": True}
PEERS = (
    Peer("torch AdamW(fused)", "torch.optim", "AdamW", options=FUSED),
    Peer("DeepSpeed CPUAdam", "deepspeed.ops.adam", "DeepSpeedCPUAdam", "fp32", {"adamw_mode": True}, ("cpu",)),
    Peer("DeepSpeed FusedAdam", "deepspeed.ops.adam", "FusedAdam", "fp32", {"adam_w_mode": True}, ("cuda",)),
    Peer("torchao AdamW8bit", "torchao.optim", "AdamW8bit", "8bit"),
    Peer("bitsandbytes 8-bit", "bitsandbytes.optim", "AdamW8bit", "8bit"),
    Peer("torch SGD(fused)", "torch.optim", "SGD", options=FUSED, op="sgd"),
    Peer("torch SGD(fused)", "torch.optim", "SGD", options={**FUSED, "momentum": 0.9}, op="sgd momentum"),
)


class Skipped(Exception):
    """Why a peer can't take part."""


def optimizer_of(peer: Peer, values: Tensor, grad: Tensor, params: Sequence[int]) -> torch.optim.Optimizer:
    """On copies of ``values`` and ``grad``, a leaf for each of ``params``. Has made a step. Raises Skipped."""
    if values.device.type not in peer.devices:
        raise Skipped(f"not for {values.device.type}")
    leaves: list[Tensor] = [torch.nn.Parameter(each) for each in values.clone().split(list(params))]
    for leaf, part in zip(leaves, grad.clone().split(list(params)), strict=True):
        leaf.grad = part
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what they print of their builds belongs in no table
            kind = getattr(importlib.import_module(peer.module), peer.kind)
            optimizer: torch.optim.Optimizer = kind(leaves, **{**HYPER, **peer.options})
            optimizer.step()
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed") from None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of builds at first use, of devices: each has its own
        raise Skipped(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from None
    if all(torch.equal(leaf, part) for leaf, part in zip(leaves, values.split(list(params)), strict=True)):
        raise Skipped("its step changes nothing")
    return optimizer


# ---- jobs to calls: ours and torch's, each on the set of buffers whose number it is given


def flatten_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    sets = [sources_of(job.params, job.kind.dtype, device) for _ in range(num_sets)]
    flats = [torch.empty(job.numel, dtype=job.kind.dtype, device=device) for _ in range(num_sets)]
    views = [list(flat.split(list(job.params))) for flat in flats]
    pieces, no_flags = pieces_of(job.params), torch.empty(0, dtype=torch.int64)
    return {
        OURS: lambda i: ops.flatten_(flats[i], sets[i], pieces, no_flags),
        "torch.cat": lambda i: torch.cat(sets[i], out=flats[i]),
        "torch._foreach_copy_": lambda i: torch._foreach_copy_(views[i], sets[i]),
    }


def reduce_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    sets = [sources_of([job.numel] * job.num_slices, job.kind.dtype, device) for _ in range(num_sets)]
    shards = [torch.empty_like(each[0]) for each in sets]
    segments, limbs = segments_of(job.params, device), zero_words(device)
    replaced = torch.zeros(len(job.params), dtype=torch.uint8, device=device)
    return {OURS: lambda i: ops.reduce_(shards[i], limbs, sets[i], segments, replaced, job.num_slices, False)}


def norm_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    shards = sources_of([job.numel] * num_sets, job.kind.dtype, device)
    segments, limbs = segments_of(job.params, device), zero_words(device)
    return {
        OURS: lambda i: ops.norm_(limbs, shards[i], segments, 2.0),
        "torch vector_norm": lambda i: torch.linalg.vector_norm(shards[i], dtype=torch.float32),
    }


def update_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    shards = [Shard(job.params, job.kind, device, job.op) for _ in range(num_sets)]
    calls: dict[str, Call] = {OURS: lambda i: shards[i].update(), MASKED: lambda i: shards[i].update(masked=True)}
    if job.kind.state != "fp32":
        wide = [Shard(job.params, job.wide.kind, device, job.op) for _ in range(num_sets)]
        calls[WIDE] = lambda i: wide[i].update()
    if device.type == "cpu":
        streams = [Stream(job.nbytes, in_place=1 + len(shards[0].moments)) for _ in range(num_sets)]
        calls[CEILING] = lambda i: streams[i]()
    if job.kind.dtype is torch.float32:  # peers keep no masters: at 16 bits they do another job
        for peer in PEERS:
            with contextlib.suppress(Skipped):  # missing_peers() says why
                if (peer.op, peer.state) == (job.op, job.kind.state):
                    calls[peer.name] = peer_call(peer, shards, job.params)
    return calls


def peer_call(peer: Peer, shards: list[Shard], params: Sequence[int]) -> Call:
    numel = sum(params)
    optimizers = [optimizer_of(peer, shard.exact[:numel], shard.grad[:numel], params) for shard in shards]
    return lambda i: optimizers[i].step()


def missing_peers(device: torch.device) -> list[str]:
    """A line for each peer of the update that can't take part, with the reason."""
    values = torch.randn(BLOCK_NUMEL * 64, device=device)
    found = []
    for peer in PEERS:
        try:
            optimizer_of(peer, values, torch.ones_like(values), [values.numel()])
        except Skipped as reason:
            found.append(f"{peer.name}: {reason}")
    return found


# ---- checks: whether a kernel's result is what its reference says


class WrongResult(Exception):
    """Its speed says nothing then."""


def is_flatten_right(job: Job, device: torch.device) -> bool:
    sources = sources_of(job.params, job.kind.dtype, device)
    flat = torch.full((job.numel + 3,), torch.nan, dtype=job.kind.dtype, device=device)
    ops.flatten_(flat, sources, pieces_of(job.params), torch.tensor([job.numel + 1]))
    return torch.equal(flat[:-3], torch.cat(sources)) and flat[-3:].tolist() == [0.0, 1.0, 0.0]


def is_reduce_right(job: Job, device: torch.device) -> bool:
    slices = sources_of([job.numel] * job.num_slices, job.kind.dtype, device)
    shard, limbs = torch.full_like(slices[0], torch.nan), zero_words(device)
    replaced = torch.zeros(len(job.params), dtype=torch.uint8, device=device)
    ops.reduce_(shard, limbs, slices, segments_of(job.params, device), replaced, job.num_slices, False)
    total = slices[0].float()
    for each in slices[1:]:
        total = total + each.float()
    return torch.equal(shard, (total / job.num_slices).to(job.kind.dtype)) and are_words_right(limbs, shard)


def is_norm_right(job: Job, device: torch.device) -> bool:
    shard, limbs = sources_of([job.numel], job.kind.dtype, device)[0], zero_words(device)
    ops.norm_(limbs, shard, segments_of(job.params, device), 2.0)
    return are_words_right(limbs, shard)


def are_words_right(limbs: Tensor, shard: Tensor) -> bool:
    value, finite = ops.norm_value(limbs, 2.0).tolist()
    expected = float(torch.linalg.vector_norm(shard.double()))
    return bool(finite == 1.0 and abs(value - expected) <= 1e-12 * expected)


def stepped(op: str, param: Tensor, states: Sequence[Tensor], grad: Tensor) -> Tensor:
    """``param`` after one step of the rule in plain torch."""
    options = {key: value for key, value in UPDATES[op].group.items() if key != "amsgrad"}
    if op == "adam":
        exp_avg, exp_avg_sq = states
        adam_step(AdamState(param, exp_avg, exp_avg_sq, step=10), grad, **options)
    elif op == "lion":
        lion_step(LionState(param, *states), grad, **options)
    else:
        sgd_step(SgdState(param, *states), grad, **options)
    return param


def is_update_right(job: Job, device: torch.device) -> bool:
    """Against the rule in float64, within 8 roundings of fp32 arithmetic."""
    shard = Shard(job.params, job.kind, device, job.op)
    before = shard.param if job.kind.master is None else shard.exact  # a master holds the exact value
    # In 8 bits they are 0 at first, and so are their codes.
    states = [stored.values.double() for stored in shard.moments]
    grad = shard.grad.double()
    # Lion's sign is anybody's where its average is nearly 0.
    steep = (0.9 * states[0] + 0.1 * grad).abs() > 1e-6 if job.op == "lion" else torch.ones_like(grad)
    size = before.double().abs() + 1e-3
    expected = stepped(job.op, before.double(), states, grad)
    shard.update()
    if job.kind.master == REMAINDER:
        after = master_of(shard.param, shard.master)  # type: ignore[arg-type]
    else:
        after = shard.param if shard.master is None else shard.master
    error = (after.double() - expected).abs() / (size + (expected - before.double()).abs()) * steep
    error = torch.cat([error[start:stop] for start, stop in shard.segments[:, :2].tolist()])
    count = 10 if job.op == "sgd" else 11  # which has no step to count
    return bool((error.max() <= 8 * torch.finfo(torch.float32).eps) & (shard.steps == count).all())


@dataclass(frozen=True)
class Op:
    calls: Callable[[Job, int, torch.device], dict[str, Call]]
    is_right: Callable[[Job, torch.device], bool]


OPS = {
    "flatten": Op(flatten_calls, is_flatten_right),
    "reduce": Op(reduce_calls, is_reduce_right),
    "norm": Op(norm_calls, is_norm_right),
    **dict.fromkeys(UPDATES, Op(update_calls, is_update_right)),
}
