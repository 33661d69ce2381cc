"""Trainings with a pair of options, on any device, beside torch."""

from __future__ import annotations

import ast
import contextlib
import hashlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.kernels.stored import decode
from tests.optimizer.masters import exact_values, parts_of, rounded
from tests.optimizer.models import mean_over_ranks, memory_order, watch_gradients
from tests.optimizer.test_parity import MOMENTS, torch_step
from tests.optimizer.ways import Way, is_inner, plain_twin
from tests.tolerances import assert_one_step_bound, assert_stored_bound
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.flow.residency import Residency
from zerox.memory.grad_dtype import NARROW
from zerox.plan.combinations import CHOICES
from zerox.rules.adam import ADAM
from zerox.rules.known import KNOWN

ON_MESH = "a 2-D mesh"
STEPS = 2
RATE = 2.0**-7  # the same number in float32
NUMELS = (5000, 70, 4500)  # with 8-bit moments, and too small for them
WORDS: dict[str, dict[str, Any]] = {  # values that are not written as Python has them
    "process_group": {"a group": None, ON_MESH: None},  # a mesh is made where there are ranks
    "bucket_cap_mb": {"a number": 0.004},
    "resident_mb": {"a number": 1.0},
    "lr": {"a number": RATE, "a tensor": RATE},
    "gradient_divisor": {"a number": 4.0},
}
COUNT = 2  # of each rank, for mean_over()
# No argument of the constructor says these.
ELSEWHERE = (
    "optimizer",
    "parameters",
    "device",
    "backend",
    "ZEROX_EXCHANGE",
    "overlap_gather",
    "mean_over",
    "join",
    "rule",
)
MOMENTUM = {"momentum": 0.75}  # of SGD, which keeps no state without


def arguments(way: Way) -> dict[str, Any]:
    """The constructor's. KeyError or ValueError for a value that nobody has said how to make."""
    found = {name: _made(name, value) for name, value in way.items() if name not in ELSEWHERE}
    if way["process_group"] == ON_MESH and dist.is_initialized():
        found["process_group"] = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    if way["lr"] == "a tensor":
        found["lr"] = torch.tensor(RATE)
    return found


def _made(option: str, value: str) -> Any:
    if value in WORDS.get(option, {}):
        return WORDS[option][value]
    return getattr(torch, value[6:]) if value.startswith("torch.") else ast.literal_eval(value)


def build(params: Any, way: Way, **options: Any) -> FusedShardedAdam | ShardedOptimizer:
    """``options``: the constructor's. With a rule of its own, the group has those that belong into one."""
    rule = ast.literal_eval(way["rule"])
    group: dict[str, Any] = {"params": params}
    if rule != ADAM.name:
        own = {name: value for name, value in options.items() if name in ADAM.defaults}
        mute = ADAM.defaults.keys() - KNOWN[rule].defaults.keys()
        unsaid = {name for name in mute & own.keys() if own[name] == ADAM.defaults[name]}
        group |= {name: value for name, value in own.items() if name not in unsaid} | {"rule": rule}
        group |= MOMENTUM if rule == "sgd" else {}
        options = {name: value for name, value in options.items() if name not in own}
    made: FusedShardedAdam | ShardedOptimizer
    made = (ShardedOptimizer if is_inner(way) else FusedShardedAdam)([group], **of_optimizer(way, options))
    return made


def of_optimizer(way: Way, options: Mapping[str, Any]) -> dict[str, Any]:
    """Torch's class has no options that only the fused optimizers have: where they are at their defaults."""
    if not is_inner(way):
        return dict(options)
    of_fused = ("state_dtype", "accumulate_dtype", "capturable")
    left_out = [name for name in of_fused if name in options and way[name] == CHOICES[name].values[0]]
    others = {name: value for name, value in options.items() if name not in left_out}
    return {"optimizer_class": torch.optim.Adam, **others}


MASTERS = {  # by what is asked for and the parameters; others keep none
    '"auto"': {"bfloat16": "remainder", "float16": "master"},
    '"remainder"': {"bfloat16": "remainder"},
    '"fp32"': {"bfloat16": "master", "float16": "master"},
    "None": {},
}


class Scales(nn.Module):
    """Products of elements: their gradients have the same bits on every device."""

    def __init__(self, numels: Sequence[int], seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ModuleList(Scale(torch.randn(numel, generator=generator)) for numel in numels)

    def forward(self, xs: Sequence[Tensor]) -> Tensor:
        return torch.stack([part(x).float().sum() for part, x in zip(self.parts, xs, strict=True)]).sum()


class Scale(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.weight * self.weight


class Training:
    """One rank's. ``device`` stands for the way's where it is another."""

    def __init__(self, rank: int, way: Way, device: torch.device | None = None) -> None:
        self.rank, self.way, self.steps_made = rank, way, 0
        self.dtype: torch.dtype = getattr(torch, way["parameters"])
        self.device = torch.device(way["device"]) if device is None else device
        self.model = Scales(NUMELS, seed=0).to(self.device, self.dtype)
        options = {"weight_decay": 0.125, **arguments(way)}
        if isinstance(options["lr"], Tensor):
            options["lr"] = options["lr"].to(self.device)
        self.optimizer = build(self.model.named_parameters(), way, **options)
        if way["overlap_gather"] == "called":
            self.optimizer.overlap_gather(self.model)
        self.block = self.optimizer.join() if way["join"] == "inside" else contextlib.nullcontext()
        self.check_in_effect()

    def check_in_effect(self) -> None:
        """What shows in no bits: a twin of an option that is ignored would be the same."""
        way, inside = self.way, self.optimizer.inside
        first = inside.buckets[0]
        assert inside.grads.sharded is (way["stage"] != "1")
        residency = isinstance(inside.gather, Residency)
        assert residency is (way["stage"] == "3" and inside.ranks.size > 1)
        forms = {bucket.plan.state_form for bucket in inside.buckets}
        assert (len(inside.buckets) > len(forms)) is (way["bucket_cap_mb"] == "a number")
        moments = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, '"8bit"': torch.uint8}
        expected = torch.float64 if self.dtype is torch.float64 else moments[way["state_dtype"]]
        if is_inner(way) and way["master_weights"] == "None":
            expected = self.dtype
        rule = KNOWN[ast.literal_eval(way["rule"])]
        kept = {key: stored.values.dtype for key, stored in first.state.items() if key not in ("master", "remainder")}
        assert set(kept) == {spec.key for spec in rule.states if spec.when != "amsgrad" or way["amsgrad"] == "True"}
        assert set(kept.values()) == {expected}
        if not is_inner(way):
            assert {bucket.rule.name for bucket in inside.buckets} == {rule.name}
        master = None if first.master is None else first.master.spec.key
        expected_master = MASTERS[way["master_weights"]].get(way["parameters"])
        assert master == ("master" if expected_master and is_inner(way) else expected_master)
        widened = self.dtype in NARROW and way["accumulate_dtype"] == "torch.float32"
        assert first.grad_dtype is (torch.float32 if widened else self.dtype)

    def backwards(self, step: int) -> None:
        with self.optimizer.no_sync():
            self.model(self.batch(step, 0)).backward()
        self.model(self.batch(step, 1)).backward()
        if self.way["mean_over"] == "called":
            self.optimizer.mean_over(COUNT)

    def batch(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro)
        return [torch.randn(numel, generator=generator).to(self.device, self.dtype) for numel in NUMELS]

    def run(self, step: Callable[[Training], None] | None = None) -> None:
        with self.block:
            for number in range(STEPS):
                self.backwards(number)
                self.optimizer.step() if step is None else step(self)
                self.optimizer.zero_grad()
                self.steps_made += 1
        self.optimizer.synchronize()

    def digests(self) -> tuple[str, str]:
        """Of all bits of the parameters, and on rank 0 of the whole state."""
        state = self.optimizer.full_state_dict(to=0).get("state", {})
        kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
        return self.digest_of_params(), digest(kept)

    def digest_of_params(self) -> str:
        return digest(list(self.model.parameters()))


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def trained(rank: int, world_size: int, many: Sequence[Way]) -> list[Any]:
    """The digests of each training, or what it raised. Plain twins are compared with torch on the way."""
    return [outcome(lambda way=way: train(rank, world_size, way)) for way in many]


def train(rank: int, world_size: int, way: Way) -> tuple[str, str]:
    with exchange_of(way):
        training = Training(rank, way)
        in_16_bits = is_inner(way) and way["master_weights"] == "None" and training.dtype in NARROW
        if way == plain_twin(way) and not in_16_bits:  # the bound is for the rule in float32
            compare_with_torch(rank, world_size, training)
        else:
            training.run()
        return training.digests()


def outcome(call: Callable[[], Any]) -> Any:
    try:
        return call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


@contextmanager
def exchange_of(way: Way) -> Iterator[None]:
    """Inside, ZEROX_EXCHANGE is that of the way."""
    before = os.environ.get("ZEROX_EXCHANGE")
    os.environ["ZEROX_EXCHANGE"] = way["ZEROX_EXCHANGE"]
    try:
        yield
    finally:
        del os.environ["ZEROX_EXCHANGE"]
        if before is not None:
            os.environ["ZEROX_EXCHANGE"] = before


# ---- beside torch


def compare_with_torch(rank: int, world_size: int, training: Training) -> None:
    """Runs it beside torch.optim, step by step from the same state and the mean gradient."""
    way = training.way
    asked = arguments(way)
    rule = ast.literal_eval(way["rule"])
    names = ("lr", "maximize") if rule != ADAM.name else ("lr", "amsgrad", "maximize", "decoupled_weight_decay")
    config = {"weight_decay": 0.125, **{name: asked[name] for name in names}}
    if rule != ADAM.name:
        config |= {"rule": rule, "lr": float(asked["lr"]), **(MOMENTUM if rule == "sgd" else {})}
    num_ranks = 1 if way["process_group"] == '"alone"' else world_size
    divisor = asked["gradient_divisor"] or num_ranks
    by_count = divisor / (num_ranks * COUNT) if way["mean_over"] == "called" else 1.0
    wire = asked["reduce_dtype"] or training.dtype
    grads = watch_gradients(training.model)
    for step in range(STEPS):
        training.backwards(step)
        sent = {param: grad.to(wire) for param, grad in grads.items()}
        mean_of = mean_over_mesh if way["process_group"] == ON_MESH else mean_over_ranks
        means = {param: mean_of(grad, grad, num_ranks) for param, grad in sent.items()}
        before = [(exact_values(bucket, shard), wide(state)) for _, _, bucket, shard, state in snapshot(training)]
        training.optimizer.step()
        training.optimizer.zero_grad()
        for (values, old), (param, elements, bucket, shard, new) in zip(before, snapshot(training), strict=True):
            after = exact_values(bucket, shard)
            assert torch.equal(memory_order(param)[elements], rounded(bucket, after)), "parameters are masters, rounded"
            mean = means[param]
            assert mean is not None
            mean = mean * (num_ranks / divisor)  # powers of two: exact
            grad = memory_order(mean)[elements].to(values.dtype) * by_count
            expected, moments = torch_step(values, grad, old, config)
            for name in [name for name in MOMENTS if name in new]:
                scales = new.get(f"{name}_scale")
                assert_stored_bound(name, new[name].dtype, wide(new)[name], moments[name], scales)
            if bucket.master is None:  # the result of the arithmetic, rounded to what the parameter can hold
                values, after, expected = (t.to(param.dtype) for t in (values, after, expected))
            assert_one_step_bound(values, after, expected, {})
            assert not torch.equal(values, after)


def mean_over_mesh(grad: Tensor, like: Tensor, world_size: int) -> Tensor:
    """As mean_over_ranks, for a mesh of 2 x 2."""
    everyones = [torch.empty_like(grad) for _ in range(world_size)]
    dist.all_gather(everyones, grad.contiguous())
    a, b, c, d = (each.to(torch.promote_types(grad.dtype, torch.float32)) for each in everyones)
    return (((a + b) + (c + d)) / world_size).to(like.dtype)


def snapshot(training: Training) -> Iterator[tuple[Tensor, slice, Any, slice, dict[str, Tensor]]]:
    for param, elements, bucket, shard, state in parts_of(training.optimizer):
        if elements.start < elements.stop:
            yield param, elements, bucket, shard, {key: each.clone() for key, each in state.items()}


def wide(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments as they are computed with."""
    found = {}
    for key, value in state.items():
        if value.dtype is torch.uint8:
            found[key] = decode(value, state[f"{key}_scale"], signed=key in ("exp_avg", "momentum_buffer"))
        elif not key.endswith("_scale"):
            found[key] = value.float() if value.dtype is torch.bfloat16 else value
    return found
