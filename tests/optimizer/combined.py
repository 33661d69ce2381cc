"""Trainings with a pair of options, on any device, beside torch."""

from __future__ import annotations

import ast
import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

from tests.kernels.stored import decode
from tests.optimizer.made import ALONE, MOMENTUM, ON_MESH, arguments, build, mesh_of
from tests.optimizer.masters import exact_values, parts_of, rounded
from tests.optimizer.models import mean_in_rank_order, memory_order, watch_gradients
from tests.optimizer.test_parity import MOMENTS, torch_step
from tests.optimizer.ways import Way, first_of, is_inner, plain_twin
from tests.tolerances import assert_one_step_bound, assert_stored_bound
from zerox import Sparsity
from zerox.memory.grad_dtype import NARROW
from zerox.plan.choices import A_SUBGROUP, DTENSORS, FIRST_VALUES, LIE_AS, MASKS, ON_META, SPARSITY, SUBGROUP, TABLES
from zerox.ranks.dtensors import local_of
from zerox.residency.residency import Residency
from zerox.rules.adam import ADAM
from zerox.rules.known import KNOWN

STEPS = 2
NUMELS = (5000, 70, 4500)  # with 8-bit moments, and too small for them
MATRICES = (-1, 10)  # the shape of parameters that are to be matrices
COUNT = 2  # of each rank, for mean_over()
SPARSE = {"parts.0.weight": 0.5, "parts.1.weight": 0.25}


MASTERS = {  # by what is asked for and the parameters; others keep none
    '"auto"': {"bfloat16": "remainder", "float16": "master"},
    '"remainder"': {"bfloat16": "remainder"},
    '"fp32"': {"bfloat16": "master", "float16": "master"},
    "None": {},
}


class Scales(nn.Module):
    """Products of elements: their gradients have the same bits on every device, and are not 0 where a parameter is."""

    def __init__(self, numels: Sequence[int], seed: int, shape: Sequence[int] = (-1,)) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.parts = nn.ModuleList(Scale(torch.randn(numel, generator=generator).view(*shape)) for numel in numels)

    def add_table(self) -> None:
        """float32 beside float64, which no table is."""
        values = torch.randn(130, 8, generator=torch.Generator().manual_seed(1))
        dtype = self.parts[0].weight.dtype
        values = values.to(self.parts[0].weight.device, dtype if dtype in NARROW else values.dtype)
        self.table = nn.Embedding(130, 8, sparse=True, _weight=values)

    def forward(self, xs: Sequence[Tensor], ids: Tensor | None = None) -> Tensor:
        loss = torch.stack([part(x).float().sum() for part, x in zip(self.parts, xs, strict=True)]).sum()
        if hasattr(self, "table") and ids is not None:
            loss = loss + self.table(ids).square().sum()
        return loss

    def to_meta(self) -> Callable[[nn.Module], object]:
        """Returns what gives each part the values that it had."""
        had = {
            (part, name): param.detach() for part in self.modules() for name, param in part.named_parameters("", False)
        }
        self.to("meta")
        return lambda part: [param.copy_(had[part, name]) for name, param in part.named_parameters("", False)]


class Scale(nn.Module):
    def __init__(self, values: Tensor) -> None:
        super().__init__()
        self.weight = nn.Parameter(values)

    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight.to_local() if isinstance(self.weight, DTensor) else self.weight
        x = x.reshape(weight.shape)
        return x * weight * weight + x * weight

    def cut(self, mesh: DeviceMesh) -> None:
        self.weight = nn.Parameter(distribute_tensor(self.weight.detach(), mesh, [Shard(0)]))


class Training:
    """One rank's. ``device`` stands for the way's where it is another."""

    def __init__(self, rank: int, way: Way, device: torch.device | None = None) -> None:
        self.rank, self.way, self.steps_made = rank, way, 0
        self.dtype: torch.dtype = getattr(torch, way["parameters"])
        self.device = torch.device(way["device"]) if device is None else device
        mesh = mesh_of(way)
        cuts = 1 if mesh is None else mesh["tp"].size()  # each rank has as many elements as without
        self.averaged = rank if mesh is None or way[LIE_AS] != DTENSORS else mesh["shard"].get_local_rank()
        self.shape = MATRICES if way["rule"] == '"muon"' else (-1,)
        self.model = Scales([numel * cuts for numel in NUMELS], 0, self.shape).to(self.device, self.dtype)
        if way[LIE_AS] == DTENSORS:
            assert mesh is not None
            for part in self.model.parts:
                part.cut(mesh["tp"])
        if way[TABLES] == "True":
            self.model.add_table()
        if way["whole"] != first_of("whole"):  # a matrix, with the same elements
            self.model.parts[2].weight = nn.Parameter(self.model.parts[2].weight.detach().reshape(50, -1))
        options = {"weight_decay": 0.125, **arguments(way, mesh)}
        if isinstance(options["lr"], Tensor):
            options["lr"] = options["lr"].to(self.device)
        if way[FIRST_VALUES] == ON_META:
            options |= {"init": self.model.to_meta(), "model": self.model}
        with self.device:  # that of parameters which are on none
            self.optimizer = build(self.model.named_parameters(), way, **options)
        if way["overlap_gather"] == "called":
            self.optimizer.overlap_gather(self.model)
        self.sparsity = Sparsity(self.optimizer, SPARSE) if way[MASKS] == SPARSITY else None
        self.block = self.optimizer.join() if way["join"] == "inside" else contextlib.nullcontext()
        self.check_in_effect()

    def check_in_effect(self) -> None:
        """What shows in no bits: a twin of an option that is ignored would be the same."""
        way, inside = self.way, self.optimizer.inside
        first = inside.buckets[0]
        assert inside.grads.sharded is (way["stage"] != "1")
        residency = isinstance(inside.gather, Residency)
        assert residency is (way["stage"] == "3" and inside.ranks.size > 1)
        kinds = {(bucket.plan.state_form, bucket.plan.layout.owners is None) for bucket in inside.buckets}
        assert (len(inside.buckets) > len(kinds)) is (way["bucket_cap_mb"] == "a number")
        of_cut = {'"none"': {way["rule"] != '"muon"'}, '"matrices"': {True, False}}
        assert {is_cut for _, is_cut in kinds} == of_cut.get(way["whole"], {False})
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
        assert any(bucket.mask for bucket in inside.buckets) is (way[MASKS] == SPARSITY)
        assert bool(inside.tables) is (way[TABLES] == "True")
        assert not any(param.is_meta for param in self.model.parameters())
        exchange = ast.literal_eval(way["exchange"]) or "direct"
        assert inside.ranks.size == 1 or self.device.type != "cpu" or inside.ranks.exchange == exchange
        assert inside.grads.subgroups.are_many is (way[SUBGROUP] == A_SUBGROUP and inside.ranks.size > 1)

    def backwards(self, step: int) -> None:
        adds_no_rows = self.dtype is torch.float16 and self.way["accumulate_dtype"] == "None"  # a But of tables
        with self.optimizer.no_sync():
            self.model(self.batch(step, 0), None if adds_no_rows else self.ids(step, 0)).backward()
        self.model(self.batch(step, 1), self.ids(step, 1)).backward()
        if self.way["mean_over"] == "called":
            self.optimizer.mean_over(COUNT)

    def batch(self, step: int, micro: int) -> list[Tensor]:
        generator = torch.Generator().manual_seed(1000 * self.rank + 10 * step + micro)
        drawn = [torch.randn(numel, generator=generator).view(*self.shape) for numel in NUMELS]
        return [each.to(self.device, self.dtype) for each in drawn]

    def ids(self, step: int, micro: int) -> Tensor:
        """Of rows: the same on ranks that have the same table and average its gradients with others."""
        generator = torch.Generator().manual_seed(1000 * self.averaged + 10 * step + micro)
        return torch.randint(0, 130, (40,), generator=generator).to(self.device)

    def run(self, step: Callable[[Training], None] | None = None) -> None:
        with self.block:
            for number in range(STEPS):
                self.backwards(number)
                self.optimizer.step() if step is None else step(self)
                self.optimizer.zero_grad()
                self.steps_made += 1
        self.optimizer.synchronize()

    def digests(self) -> tuple[str, str]:
        """Of all bits of the parameters, and on rank 0 of the whole state, of which sub-groups have none."""
        if self.way[SUBGROUP] == A_SUBGROUP:
            return self.digest_of_params(), ""
        state = self.optimizer.full_state_dict(to=0).get("state", {})
        kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
        return self.digest_of_params(), digest(kept)

    def digest_of_params(self) -> str:
        """The same on all ranks."""
        with self.optimizer.whole():
            params = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.model.parameters()]
            found = digest(params)
        if self.way[SUBGROUP] != A_SUBGROUP or self.way["process_group"] == ALONE:
            return found
        of_ranks = [""] * dist.get_world_size()
        dist.all_gather_object(of_ranks, found)
        assert all(each == of_ranks[rank % 2] for rank, each in enumerate(of_ranks)), "ranks of a sub-group differ"
        return " ".join(of_ranks)


def digest(tensors: Sequence[Tensor]) -> str:
    found = hashlib.sha256()
    for tensor in tensors:
        found.update(tensor.detach().cpu().reshape(-1).contiguous().view(torch.uint8).numpy().tobytes())
    return found.hexdigest()[:16]


def trained(rank: int, world_size: int, many: Sequence[Way]) -> list[Any]:
    """The digests of each training, or what it raised. Plain twins are compared with torch on the way."""
    return [outcome(lambda way=way: train(rank, world_size, way)) for way in many]


def train(rank: int, world_size: int, way: Way) -> tuple[str, str]:
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


# ---- beside torch


def compare_with_torch(rank: int, world_size: int, training: Training) -> None:
    """Runs it beside torch.optim, step by step from the same state and the mean gradient."""
    way = training.way
    asked = arguments(way)
    rule = ast.literal_eval(way["rule"])
    names = [name for name in ("lr", "amsgrad", "maximize", "decoupled_weight_decay") if name in KNOWN[rule].defaults]
    config = {"weight_decay": 0.125, **{name: asked[name] for name in names}}
    if rule != ADAM.name:
        config |= {"rule": rule, "lr": float(asked["lr"]), **(MOMENTUM if rule == "sgd" else {})}
    ranks = averaging(rank, world_size, training)
    num_ranks = training.optimizer.inside.ranks.size
    divisor = asked["gradient_divisor"] or num_ranks
    by_count = divisor / (num_ranks * COUNT) if way["mean_over"] == "called" else 1.0
    wire = asked["reduce_dtype"] or training.dtype
    grads = watch_gradients(training.model.parts)
    wrong: list[AssertionError] = []  # it is raised when no other rank waits for this one
    for step in range(STEPS):
        training.backwards(step)
        sent = {param: local_of(grad).to(wire) for param, grad in grads.items()}
        mean_of = mean_over_mesh if way["process_group"] == ON_MESH else mean_in_rank_order
        means = {param: mean_of(given_by(ranks, grad), grad, divisor) for param, grad in sent.items()}
        before = [(exact_values(bucket, shard), wide(state)) for _, _, bucket, shard, state in snapshot(training)]
        training.optimizer.step()
        training.optimizer.zero_grad()
        try:
            compare_a_step(training, before, means, by_count, config)
        except AssertionError as error:
            wrong.append(error)
    if wrong:
        raise wrong[0]


def compare_a_step(
    training: Training,
    before: Sequence[tuple[Tensor, dict[str, Tensor]]],
    means: Mapping[Tensor, Tensor | None],
    by_count: float,
    config: Mapping[str, Any],
) -> None:
    for (values, old), (param, elements, bucket, shard, new) in zip(before, snapshot(training), strict=True):
        after = exact_values(bucket, shard)
        own = memory_order(local_of(param))[elements]
        assert torch.equal(own, rounded(bucket, after)), "parameters are masters, rounded"
        mean = means[param]
        assert mean is not None
        grad = memory_order(mean)[elements].to(values.dtype) * by_count
        shape = local_of(param).shape if config.get("rule") == "muon" else (-1,)
        expected, moments = torch_step(values.view(shape), grad.view(shape), old, config)
        expected = expected.view(-1)
        if bucket.mask is not None:
            masked = ~bucket.mask.kept()[shard]
            expected = expected.masked_fill(masked, 0)
            moments = {name: each.masked_fill(masked, 0) for name, each in moments.items()}
            values = values.masked_fill(masked, 0)
        for name in [name for name in MOMENTS if name in new]:
            scales = new.get(f"{name}_scale")
            assert_stored_bound(name, new[name].dtype, wide(new)[name], moments[name], scales)
        if bucket.master is None:  # the result of the arithmetic, rounded to what the parameter can hold
            values, after, expected = (t.to(param.dtype) for t in (values, after, expected))
        assert_one_step_bound(values, after, expected, {})
        assert not torch.equal(values, after)


def averaging(rank: int, world_size: int, training: Training) -> list[int]:
    """The ranks whose gradients are added up."""
    way, size = training.way, training.optimizer.inside.ranks.size
    if size == 1:
        return [rank]
    if way[SUBGROUP] == A_SUBGROUP:
        return list(range(rank % 2, world_size, 2))
    cuts = world_size // size
    return list(range(rank % cuts, world_size, cuts))


def given_by(ranks: Sequence[int], grad: Tensor) -> list[Tensor]:
    """Of all ranks' gradients, those of some. Collective over all, unless a rank is alone."""
    if len(ranks) == 1:
        return [grad]
    parts = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, grad.contiguous())
    return [parts[rank] for rank in ranks]


def mean_over_mesh(parts: Sequence[Tensor], like: Tensor, divisor: float) -> Tensor:
    """As mean_in_rank_order, for a mesh of 2 x 2."""
    a, b, c, d = (each.to(torch.promote_types(like.dtype, torch.float32)) for each in parts)
    return (((a + b) + (c + d)) / divisor).to(like.dtype)


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
