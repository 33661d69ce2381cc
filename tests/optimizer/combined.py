"""Trainings with a pair of options, drawn from the table of which go together, on any device."""

from __future__ import annotations

import ast
import hashlib
import itertools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from tests.kernels.stored import decode
from tests.optimizer.masters import exact_values, parts_of, rounded
from tests.optimizer.models import mean_over_ranks, memory_order, watch_gradients
from tests.optimizer.test_parity import MOMENTS, torch_step
from tests.tolerances import assert_one_step_bound, assert_stored_bound
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.grad_dtype import NARROW
from zerox.plan import combinations
from zerox.plan.combinations import CHOICES, But, Refused, Setting, pairs, some, verdict

Way = Mapping[str, str]  # a value of every option
Pair = tuple[Setting, Setting]

STEPS = 2
RATE = 2.0**-7  # the same number in float32
NUMELS = (5000, 70, 4500)  # with 8-bit moments, and too small for them
WORDS: dict[str, dict[str, Any]] = {  # values that are not written as Python has them
    "process_group": {"a group": None},
    "bucket_cap_mb": {"a number": 0.004},
    "lr": {"a number": RATE, "a tensor": RATE},
}
ELSEWHERE = (
    "optimizer",
    "parameters",
    "device",
    "backend",
    "ZEROX_EXCHANGE",
    "overlap_gather",
)  # no argument says these
# What must not change a bit. (An optimizer alone has gradients of its own rank: that is another training.)
NEUTRAL = (
    "stage", "device", "backend", "ZEROX_EXCHANGE", "bucket_cap_mb", "capturable", "overlap_gather", "lr", "foreach",
    "fused",
)  # fmt: skip
# But torch's own classes have a path, and other last bits, for each of these.
OF_CLASS = ("lr", "foreach", "fused")
# What has an effect on 16-bit parameters only is tried with these.
FOR_16_BITS = {
    *some("accumulate_dtype", "torch.float32"),
    *some("reduce_dtype", "torch.float32"),
    *some("master_weights", '"auto"', '"fp32"', "None"),
}


def way_of(*chosen: Setting) -> Way | None:
    """A value of every option with these among them: defaults where they go with the others. None: nothing goes."""
    way = {each.option: each.value for each in chosen}
    if "parameters" not in way and FOR_16_BITS & set(chosen):
        way["parameters"] = "bfloat16"
    verdicts = {frozenset(pair): row.verdict for row in combinations.ROWS for pair in row.pairs()}
    for choice in CHOICES.values():
        if choice.option not in way:
            known = [Setting(*item) for item in way.items()]
            costs = [_cost(verdicts, value, known) for value in some(choice.option, *choice.values)]
            way[choice.option] = choice.values[costs.index(min(costs))]
    settings = [Setting(*item) for item in way.items()]
    if any(isinstance(verdicts.get(frozenset(pair)), Refused) for pair in itertools.combinations(settings, 2)):
        return None
    return {name: way[name] for name in CHOICES}


def _cost(verdicts: Mapping[frozenset[Setting], object], value: Setting, known: Sequence[Setting]) -> int:
    found = [verdicts.get(frozenset((value, other))) for other in known]
    return sum(1000 * isinstance(each, Refused) + isinstance(each, But) for each in found)


def pairs_with(kind: type | None) -> list[Pair]:
    """Those that are Refused, that have a But, or that (None) simply work."""
    return [pair for pair in pairs() if isinstance(verdict(*pair), kind or type(None))]


def not_refused() -> list[Pair]:
    return [*pairs_with(None), *pairs_with(But)]


def needs_accelerator(way: Way) -> bool:
    return way["device"] != "cpu"


def is_inner(way: Way) -> bool:
    """Whether torch's own class updates. The fake accelerator does not know its operators: tests/gpu has such ways."""
    return way["optimizer"] == combinations.SHARDED


def ways(accelerator: bool, asked: Sequence[Pair] | None = None) -> list[Way]:
    """A training for each of these pairs, or for each that is not refused, none twice, with its plain twin.

    Those on the CPU, or the others.
    """
    found: dict[tuple[str, ...], Way] = {}
    for pair in asked or not_refused():
        way = way_of(*pair)
        assert way is not None, f"{pair[0]} and {pair[1]} are not refused, and go with no values of the others"
        for each in (way, plain_twin(way)):
            if needs_accelerator(each) is accelerator and not (accelerator and is_inner(each)):
                found[tuple(each.values())] = each
    return list(found.values())


def plain_twin(way: Way) -> Way:
    """The training whose bits it has to have."""
    neutral = [name for name in NEUTRAL if not (is_inner(way) and name in OF_CLASS)]
    kept = [Setting(*item) for item in way.items() if item[0] not in neutral]
    defaults = [Setting(name, CHOICES[name].values[0]) for name in neutral]
    twin = way_of(*kept, *defaults)
    assert twin is not None
    return twin


def arguments(way: Way) -> dict[str, Any]:
    """The constructor's. KeyError or ValueError for a value that nobody has said how to make."""
    found = {name: _made(name, value) for name, value in way.items() if name not in ELSEWHERE}
    if way["lr"] == "a tensor":
        found["lr"] = torch.tensor(RATE)
    return found


def _made(option: str, value: str) -> Any:
    if value in WORDS.get(option, {}):
        return WORDS[option][value]
    return getattr(torch, value[6:]) if value.startswith("torch.") else ast.literal_eval(value)


def build(params: Any, way: Way, **options: Any) -> FusedShardedAdam | ShardedOptimizer:
    made: FusedShardedAdam | ShardedOptimizer
    made = (ShardedOptimizer if is_inner(way) else FusedShardedAdam)(params, **of_optimizer(way, options))
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
        self.check_in_effect()

    def check_in_effect(self) -> None:
        """What shows in no bits: a twin of an option that is ignored would be the same."""
        way, inside = self.way, self.optimizer.inside
        first = inside.buckets[0]
        assert inside.grads.sharded is (way["stage"] == "2")
        forms = {bucket.plan.state_form for bucket in inside.buckets}
        assert (len(inside.buckets) > len(forms)) is (way["bucket_cap_mb"] == "a number")
        moments = {"torch.float32": torch.float32, "torch.bfloat16": torch.bfloat16, '"8bit"': torch.uint8}
        expected = torch.float64 if self.dtype is torch.float64 else moments[way["state_dtype"]]
        if is_inner(way) and way["master_weights"] == "None":
            expected = self.dtype
        assert first.state["exp_avg"].values.dtype is first.state["exp_avg_sq"].values.dtype is expected
        assert ("max_exp_avg_sq" in first.state) is (way["amsgrad"] == "True")
        master = None if first.master is None else first.master.spec.key
        expected_master = MASTERS[way["master_weights"]].get(way["parameters"])
        assert master == ("master" if expected_master and is_inner(way) else expected_master)
        widened = self.dtype in NARROW and way["accumulate_dtype"] == "torch.float32"
        assert first.grad_dtype is (torch.float32 if widened else self.dtype)

    def backwards(self, step: int) -> None:
        with self.optimizer.no_sync():
            self.model(self.batch(step, 0)).backward()
        self.model(self.batch(step, 1)).backward()

    def batch(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro)
        return [torch.randn(numel, generator=generator).to(self.device, self.dtype) for numel in NUMELS]

    def run(self, step: Callable[[Training], None] | None = None) -> None:
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
    config = {name: asked[name] for name in ("lr", "amsgrad", "maximize", "decoupled_weight_decay")}
    config["weight_decay"] = 0.125
    num_ranks = 1 if way["process_group"] == '"alone"' else world_size
    wire = asked["reduce_dtype"] or training.dtype
    grads = watch_gradients(training.model)
    for step in range(STEPS):
        training.backwards(step)
        sent = {param: grad.to(wire) for param, grad in grads.items()}
        means = {param: mean_over_ranks(grad, grad, num_ranks) for param, grad in sent.items()}
        before = [(exact_values(bucket, shard), wide(state)) for _, _, bucket, shard, state in snapshot(training)]
        training.optimizer.step()
        training.optimizer.zero_grad()
        for (values, old), (param, elements, bucket, shard, new) in zip(before, snapshot(training), strict=True):
            after = exact_values(bucket, shard)
            assert torch.equal(memory_order(param)[elements], rounded(bucket, after)), "parameters are masters, rounded"
            mean = means[param]
            assert mean is not None
            expected, moments = torch_step(values, memory_order(mean)[elements].to(values.dtype), old, config)
            for name in [name for name in MOMENTS if name in new]:
                scales = new.get(f"{name}_scale")
                assert_stored_bound(name, new[name].dtype, wide(new)[name], moments[name], scales)
            if bucket.master is None:  # the result of the arithmetic, rounded to what the parameter can hold
                values, after, expected = (t.to(param.dtype) for t in (values, after, expected))
            assert_one_step_bound(values, after, expected, {})
            assert not torch.equal(values, after)


def snapshot(training: Training) -> Iterator[tuple[Tensor, slice, Any, slice, dict[str, Tensor]]]:
    for param, elements, bucket, shard, state in parts_of(training.optimizer):
        if elements.start < elements.stop:
            yield param, elements, bucket, shard, {key: each.clone() for key, each in state.items()}


def wide(state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Moments as they are computed with."""
    found = {}
    for key, value in state.items():
        if value.dtype is torch.uint8:
            found[key] = decode(value, state[f"{key}_scale"], signed=key == "exp_avg")
        elif not key.endswith("_scale"):
            found[key] = value.float() if value.dtype is torch.bfloat16 else value
    return found
