"""What the kernel benchmark runs: every op on what users train, torch's way to do the same, and a check of results."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from bench.limits import stream_call
from bench.peers import PEERS, Peer, Skipped, optimizer_of
from bench.plots import CEILING, OURS
from bench.timing import Call
from zerox import ops
from zerox.memory.pages import zeros
from zerox.memory.stored import Stored, stored_bytes
from zerox.plan.form import BFLOAT16, BLOCK_NUMEL, EIGHT_BIT, FLOAT32
from zerox.rules.adam import ADAM
from zerox.rules.reference import AdamState, adam_step
from zerox.rules.rule import MASTER, REMAINDER, StateSpec


@dataclass(frozen=True)
class Kind:
    """What is trained: parameters, and the gradients that come with them, of ``dtype``, with or without a master.

    ``state``: what moments are stored in, a key of STATES.
    """

    name: str
    dtype: torch.dtype
    master: StateSpec | None = None
    state: str = "fp32"

    @property
    def specs(self) -> list[StateSpec]:
        """What is kept for each element, without amsgrad."""
        return [spec for spec in ADAM.states if not spec.when] + ([self.master] if self.master else [])


STATES = {"fp32": FLOAT32, "bf16": BFLOAT16, "8bit": EIGHT_BIT}
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
    """
    grad = kind.dtype.itemsize
    if op == "adam":
        kept = [stored_bytes(ADAM, spec, STATES[kind.state], BLOCK_NUMEL, on_host=True) for spec in kind.specs]
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
    def title(self) -> str:
        return f"{self.op} of {self.num_slices}" if self.op == "reduce" else self.op

    @property
    def name(self) -> str:
        """Its key in kernel_work.json."""
        return ", ".join([self.title, self.kind.name, *([self.kind.state] if self.op == "adam" else [])])


# ---- buffers


class Shard:
    """Random parameters, gradients and state, as an optimizer in full swing has them. Moments in 8 bits begin at 0."""

    def __init__(self, params: Sequence[int], kind: Kind, device: torch.device) -> None:
        self.segments = segments_of(params, device, BLOCK_NUMEL if kind.state == "8bit" else 1)
        numel = int(self.segments[-1, 1])
        if kind.state == "8bit":
            numel = -(-numel // BLOCK_NUMEL) * BLOCK_NUMEL
        self.exact = torch.randn(numel, device=device)
        # They lie as the optimizer has them lie.
        self.param = zeros(numel, kind.dtype, device).copy_(self.exact)
        form = STATES[kind.state]
        self.state = {spec.key: Stored.zeros(ADAM, spec, form, numel, device) for spec in kind.specs}
        self.moments = [stored for stored in self.state.values() if stored.spec in ADAM.states]
        self.master = self.state[kind.master.key].values if kind.master else None
        if kind.master == MASTER:
            self.state[MASTER.key].values.copy_(self.exact)
        if kind.master == REMAINDER:
            param, remainder = split(self.exact)
            self.param.copy_(param)
            self.state[REMAINDER.key].values.copy_(remainder)
        self.grad = torch.randn(numel, device=device).to(kind.dtype)
        for stored in self.moments if not form.scaled else ():
            if stored.spec.signed:
                stored.values.normal_(std=0.1)
            else:
                stored.values.uniform_(0, 0.1)
        self.present = torch.ones(len(params), dtype=torch.uint8, device=device)
        self.steps = torch.full((len(params),), 10, dtype=torch.int64, device=device)
        row = [1e-3, 0.9, 0.999, 1e-8, 0.01, 0.0, 1.0, 0.0]
        self.options = torch.tensor([row], dtype=torch.float64, device=device)

    def adam(self) -> None:
        state = [stored.values for stored in self.moments]
        scales = [stored.scales for stored in self.moments if stored.scales is not None]
        tables = (self.segments, self.present, self.steps)
        ops.update_(ADAM.name, [ops.Shard(self.param, self.master, self.grad, state, scales, *tables)], self.options)


def split(exact: Tensor) -> tuple[Tensor, Tensor]:
    """bf16, rounded half away from zero, and the 16 bits that it lost."""
    bits = exact.view(torch.int32)
    return ((bits + 0x8000) >> 16).to(torch.int16).view(torch.bfloat16), (bits & 0xFFFF).to(torch.int16)


def join(param: Tensor, remainder: Tensor) -> Tensor:
    high = param.view(torch.int16).to(torch.int32) - (remainder < 0).to(torch.int32)
    return ((high << 16) | (remainder.to(torch.int32) & 0xFFFF)).view(torch.float32)


def segments_of(params: Sequence[int], device: torch.device, align: int = 1) -> Tensor:
    """One parameter behind the other, each at a multiple of ``align``."""
    numels = torch.tensor(params)
    room = -(-numels // align) * align
    starts = room.cumsum(0) - room
    zeros = torch.zeros_like(starts)
    return torch.stack([starts, starts + numels, zeros, torch.arange(len(params)), zeros], dim=1).to(device)


def sources_of(params: Sequence[int], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
    return [torch.randn(numel, device=device).to(dtype) for numel in params]


def pieces_of(params: Sequence[int]) -> Tensor:
    """One source behind the other."""
    starts = torch.tensor(params).cumsum(0) - torch.tensor(params)
    return torch.stack([torch.arange(len(params)), torch.zeros_like(starts), starts, torch.tensor(params)], dim=1)


def zero_words(device: torch.device) -> Tensor:
    return torch.zeros(ops.EXACT_WORDS, dtype=torch.int64, device=device)


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
    segments, words = segments_of(job.params, device), zero_words(device)
    replaced = torch.zeros(len(job.params), dtype=torch.uint8, device=device)
    return {OURS: lambda i: ops.reduce_(shards[i], words, sets[i], segments, replaced, job.num_slices, False)}


def norm_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    shards = sources_of([job.numel] * num_sets, job.kind.dtype, device)
    segments, words = segments_of(job.params, device), zero_words(device)
    return {
        OURS: lambda i: ops.norm_(words, shards[i], segments, 2.0),
        "torch vector_norm": lambda i: torch.linalg.vector_norm(shards[i], dtype=torch.float32),
    }


def adam_calls(job: Job, num_sets: int, device: torch.device) -> dict[str, Call]:
    shards = [Shard(job.params, job.kind, device) for _ in range(num_sets)]
    calls: dict[str, Call] = {OURS: lambda i: shards[i].adam()}
    if device.type == "cpu":
        calls[CEILING] = stream_call(job.nbytes, num_sets)
    if job.kind.dtype is torch.float32:  # peers keep no masters: at 16 bits they do another job
        for peer in PEERS:
            with contextlib.suppress(Skipped):  # missing_peers() says why
                if peer.state == job.kind.state:
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


CALLS: dict[str, Callable[[Job, int, torch.device], dict[str, Call]]] = {
    "flatten": flatten_calls,
    "reduce": reduce_calls,
    "norm": norm_calls,
    "adam": adam_calls,
}


# ---- checks


class WrongResult(Exception):
    """A kernel's result is not what its reference says: its speed says nothing then."""


def expect(condition: bool | Tensor, job: Job) -> None:
    if not bool(condition):
        raise WrongResult(f"{job.title}, {job.kind.name}: the result is wrong")


def check_flatten(job: Job, device: torch.device) -> None:
    sources = sources_of(job.params, job.kind.dtype, device)
    flat = torch.full((job.numel + 3,), torch.nan, dtype=job.kind.dtype, device=device)
    ops.flatten_(flat, sources, pieces_of(job.params), torch.tensor([job.numel + 1]))
    expect(torch.equal(flat[:-3], torch.cat(sources)) and flat[-3:].tolist() == [0.0, 1.0, 0.0], job)


def check_reduce(job: Job, device: torch.device) -> None:
    slices = sources_of([job.numel] * job.num_slices, job.kind.dtype, device)
    shard, words = torch.full_like(slices[0], torch.nan), zero_words(device)
    replaced = torch.zeros(len(job.params), dtype=torch.uint8, device=device)
    ops.reduce_(shard, words, slices, segments_of(job.params, device), replaced, job.num_slices, False)
    total = slices[0].float()
    for each in slices[1:]:
        total = total + each.float()
    expect(torch.equal(shard, (total / job.num_slices).to(job.kind.dtype)), job)
    check_words(words, shard, job)


def check_norm(job: Job, device: torch.device) -> None:
    shard, words = sources_of([job.numel], job.kind.dtype, device)[0], zero_words(device)
    ops.norm_(words, shard, segments_of(job.params, device), 2.0)
    check_words(words, shard, job)


def check_words(words: Tensor, shard: Tensor, job: Job) -> None:
    value, finite = ops.norm_value(words, 2.0).tolist()
    expected = float(torch.linalg.vector_norm(shard.double()))
    expect(finite == 1.0 and abs(value - expected) <= 1e-12 * expected, job)


def check_adam(job: Job, device: torch.device) -> None:
    """Against the rule in float64, within 8 roundings of fp32 arithmetic."""
    shard = Shard(job.params, job.kind, device)
    before = shard.param if job.kind.master is None else shard.exact  # a master holds the exact value
    # In 8 bits both are 0 at first, and so are their codes.
    exp_avg, exp_avg_sq = (stored.values.double() for stored in shard.moments)
    state = AdamState(before.double(), exp_avg, exp_avg_sq, step=10)
    size = before.double().abs() + 1e-3
    shard.adam()
    adam_step(state, shard.grad.double(), lr=1e-3, weight_decay=0.01)
    if job.kind.master == REMAINDER:
        after = join(shard.param, shard.master)  # type: ignore[arg-type]
    else:
        after = shard.param if shard.master is None else shard.master
    error = (after.double() - state.param).abs() / (size + (state.param - before.double()).abs())
    error = torch.cat([error[start:stop] for start, stop in shard.segments[:, :2].tolist()])
    expect((error.max() <= 8 * torch.finfo(torch.float32).eps) & (shard.steps == 11).all(), job)


CHECKS: dict[str, Callable[[Job, torch.device], None]] = {
    "flatten": check_flatten,
    "reduce": check_reduce,
    "norm": check_norm,
    "adam": check_adam,
}
