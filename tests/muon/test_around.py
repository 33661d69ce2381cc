"""What else is done with Muon's matrices: saved, loaded, given to torch and taken from it, added to, accumulated."""

from __future__ import annotations

import time
import warnings
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.meshes import mesh_once
from tests.muon.rig import CAP_MB, OF_ADAM, OPTIONS, PARTS, SHAPES, Model, Twin, build, groups_of, matrices, train
from tests.optimizer.combined import digest
from tests.ranks import run_ranks
from tests.tolerances import assert_stored_bound
from zerox import FusedShardedAdam, FusedShardedMuon
from zerox.memory.forms import decode
from zerox.optimizer import owned
from zerox.optimizer.planning import loads_of
from zerox.plan.owners import slowest_over_mean


def digests(model: nn.Module, optimizer: Any) -> tuple[str, str]:
    """Of parameters, and on rank 0 of the state."""
    state = optimizer.full_state_dict().get("state", {})
    kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    with optimizer.whole():
        return digest(list(model.parameters())), digest(kept)


def ahead(model: Model, optimizer: Any, steps: range) -> None:
    """All ranks have rank 0's gradients, so that their number shows nowhere."""
    for number in steps:
        model.backward(0, number)
        optimizer.step()
        optimizer.zero_grad()


# ---- files and state


def saved(_: int, __: int, stage: int, path: str, device: str = "cpu") -> tuple[str, str]:
    model = Model(torch.bfloat16).to(device)
    optimizer = build(model, False, OPTIONS, stage=stage)
    ahead(model, optimizer, range(2))
    zerox.save(path, model, optimizer)
    ahead(model, optimizer, range(2, 4))
    return digests(model, optimizer)


def resumed(_: int, __: int, stage: int, path: str, device: str = "cpu") -> tuple[str, str]:
    model = Model(torch.bfloat16).to(device)
    optimizer = build(model, False, OPTIONS, stage=stage)
    zerox.load(path, model, optimizer)
    ahead(model, optimizer, range(2, 4))
    return digests(model, optimizer)


@pytest.mark.parametrize(("by", "to"), [((3, 2), (2, 3)), ((1, 1), (4, 2)), ((4, 3), (1, 2))])
def test_other_ranks_go_on_with_the_same_bits(tmp_path: Path, by: tuple[int, int], to: tuple[int, int]) -> None:
    before = run_ranks(saved, by[0], by[1], str(tmp_path / "x"))[0]
    assert run_ranks(resumed, to[0], to[1], str(tmp_path / "x"))[0] == before


def numbered(model: Model) -> list[tuple[str, nn.Parameter]]:
    """Those that torch's class takes as they are."""
    return [(name, param) for name, param in model.named_parameters() if param.dim() == 2 and name not in PARTS]


def exchanged(rank: int, world_size: int, stage: int) -> bool:
    """Ours to torch, and torch's to ours: both go on as the one that it came from."""
    model, other = Model(), Model()
    ours = FusedShardedMuon(numbered(model), stage=stage, bucket_cap_mb=CAP_MB, **OPTIONS)
    theirs = torch.optim.Muon([param for _, param in numbered(other)], **OPTIONS)
    for number in (0, 2):
        for each, optimizer in ((model, ours), (other, theirs)):
            each.backward(0, number)
            optimizer.step()
            optimizer.zero_grad()
    state = ours.full_state_dict()
    if rank == 0:
        for number, entry in theirs.state_dict()["state"].items():
            assert torch.equal(state["state"][number]["momentum_buffer"], entry["momentum_buffer"]), number
        theirs.load_state_dict(state)
    model, again = Model(), None
    again = FusedShardedMuon(numbered(model), stage=stage, bucket_cap_mb=CAP_MB)
    again.load_state_dict(theirs.state_dict())
    with torch.no_grad():
        for param, other_param in zip(model.parameters(), other.parameters(), strict=True):
            param.copy_(other_param)
    for each, optimizer in ((model, again), (other, theirs)):
        each.backward(0, 4)
        optimizer.step()
    with again.whole():
        return all(
            torch.equal(param, theirs_)
            for (_, param), (_, theirs_) in zip(numbered(model), numbered(other), strict=True)
        )


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (4, 1), (2, 2), (2, 3)])
def test_state_goes_to_torchs_class_and_comes_from_it(world_size: int, stage: int) -> None:
    assert run_ranks(exchanged, world_size, stage) == [True] * world_size


def cycled(_: int, __: int, path: str) -> bool:
    """A scheduler that writes momentum into all groups, also AdamW's."""
    made = []
    for number in range(2):
        model = Model()
        optimizer = build(model, False, OPTIONS)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=0.1, total_steps=8)
        if number == 1:
            zerox.load(path, model, optimizer)
        for step in range(2 * number, 2 + 2 * number):
            ahead(model, optimizer, range(step, step + 1))
            schedule.step()
        if number == 0:
            zerox.save(path, model, optimizer)
        made.append("momentum" in optimizer.param_groups[-1])
    return all(made)


def test_a_schedulers_momentum_in_adams_groups_keeps_no_file_from_being_loaded(tmp_path: Path) -> None:
    assert run_ranks(cycled, 2, str(tmp_path / "x")) == [True, True]


# ---- stored momenta


def stored(rank: int, world_size: int, dtype: Any, device: str = "cpu") -> None:
    """Each step from the same state, beside the average of what was stored before it."""
    model = Model().to(device)
    options = {**OPTIONS, "lr": 1e-3}
    optimizer = build(model, False, options, state_dtype=dtype)
    names = {id(param): name for name, param in model.named_parameters()}
    seen = set()
    for number in range(3):
        before = momenta(optimizer)
        grads = model.backward(0, number)
        optimizer.step()
        optimizer.zero_grad()
        for key, (own, values, scales, kind) in momenta(optimizer).items():
            old, name = before[key][1], names[key]
            wide = torch.lerp(old, memory(name, grads[name])[own], 1 - 0.95) if name in grads else old
            assert_stored_bound("momentum_buffer", kind, values, wide, scales)
            seen.add(kind)
    assert dtype == "8bit" or seen <= {torch.bfloat16}
    assert dtype != "8bit" or seen <= {torch.uint8, torch.float32}
    kinds = run_kinds(seen, world_size)
    assert (torch.uint8 if dtype == "8bit" else torch.bfloat16) in kinds


def run_kinds(seen: set[Any], world_size: int) -> set[Any]:
    if world_size == 1:
        return seen
    found: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(found, seen)
    return set().union(*found)


def memory(name: str, tensor: Tensor) -> Tensor:
    """In the order of the parameter's elements."""
    return tensor.t().reshape(-1) if name == "transposed" else tensor.reshape(-1)


def momenta(optimizer: Any) -> dict[int, tuple[slice, Tensor, Tensor | None, torch.dtype]]:
    """By the parameter's id: of which of its elements, as numbers, their scales, and how they are stored. Of what this
    rank owns."""
    found = {}
    for bucket in optimizer.inside.buckets:
        for segment in bucket.own_segments if bucket.rule.name == "muon" else ():
            part = bucket.state["momentum_buffer"].part(slice(segment.span.start, segment.span.stop))
            param = bucket.members[segment.slot].param
            scales = None if part.scales is None else part.scales.clone()
            own = slice(segment.of_param.start, segment.of_param.stop)
            found[id(param)] = own, decode(part).float().clone(), scales, part.values.dtype
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, "8bit"], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_momentum_in_fewer_bits_is_the_average_rounded_once(dtype: Any, world_size: int) -> None:
    run_ranks(stored, world_size, dtype)


# ---- owners


def owner_of(optimizer: Any) -> dict[str, int]:
    found = {}
    for bucket in optimizer.inside.buckets:
        for owner, member in zip(bucket.plan.layout.owners or (), bucket.members, strict=False):
            found[member.name] = owner
    return found


def grown(rank: int, world_size: int) -> tuple[dict[str, int], dict[str, int]]:
    model = Model()
    model.large.requires_grad_(False)
    twin = Twin(model, OPTIONS)
    named = [(name, param) for name, param in model.named_parameters() if name not in (*PARTS, *OF_ADAM)]
    optimizer = FusedShardedMuon(named, bucket_cap_mb=CAP_MB, **OPTIONS)
    first = owner_of(optimizer)
    model.requires_grad_(True)
    for name, own in PARTS.items():
        optimizer.add_param_group({"params": [(name, model.get_parameter(name))], **own})
    train(rank, world_size, model, twin, optimizer, range(3))
    return first, owner_of(optimizer)


def test_owners_stay_where_groups_are_added_and_parameters_unfrozen() -> None:
    """And what came is trained as all else."""
    by_rank = run_ranks(grown, 3)
    first, second = by_rank[0]
    assert all(each == (first, second) for each in by_rank)
    assert second.keys() - first.keys() == {"large", *PARTS}
    assert all(second[name] == owner for name, owner in first.items())
    assert len({second[name] for name in second}) == 3


def on_mesh(rank: int, world_size: int) -> str:
    model = Model()
    optimizer = build(model, True, OPTIONS, process_group=mesh_once((2, 2), ("replicate", "shard")), stage=3)
    ahead(model, optimizer, range(3))
    return digests(model, optimizer)[0]


def alone(_: int, __: int) -> str:
    model = Model()
    optimizer = build(model, True, OPTIONS)
    ahead(model, optimizer, range(3))
    return digests(model, optimizer)[0]


def test_a_mesh_of_two_axes_has_the_bits_of_one_rank() -> None:
    assert {*run_ranks(on_mesh, 4)} == {*run_ranks(alone, 1)}


def counted(rank: int, world_size: int) -> tuple[int, int]:
    """Bytes of momentum on this rank, and of all."""
    model = Model()
    optimizer = build(model, False, OPTIONS)
    own = sum(
        each.span.numel * 4
        for bucket in optimizer.inside.buckets
        for each in bucket.own_segments
        if bucket.rule.name == "muon"
    )
    return own, sum(param.nbytes for name, param in model.named_parameters() if name not in OF_ADAM)


def test_a_momentum_is_on_one_rank_alone() -> None:
    by_rank = run_ranks(counted, 3)
    assert sum(own for own, _ in by_rank) == by_rank[0][1]


# ---- gradients


def accumulated(rank: int, world_size: int) -> bool:
    """Inside no_sync(), by a scaler that finds an infinite gradient, clipped by value, and joined."""
    model, twin = Model(), Model()
    ours, theirs = build(model, True, OPTIONS), build(twin, True, OPTIONS)
    scaler = zerox.GradScaler("cpu", init_scale=8.0)
    for number in range(2):
        with ours.no_sync():
            model.backward(rank, number)
        model.backward(rank, number)  # twice as much: exact
        ours.mean_over(2)
        ours.step()
        ours.zero_grad()
        loss = sum((param * grad).float().sum() for param, grad in of_step(twin, rank, number))
        scaler.scale(loss).backward()
        scaler.unscale_(theirs)
        scaler.step(theirs)
        scaler.update()
        theirs.zero_grad()
    before = [param.detach().clone() for param in twin.parameters()]
    (scaler.scale(sum(param.float().sum() for param in twin.parameters())) * float("inf")).backward()
    scaler.step(theirs)
    assert all(torch.equal(param, old) for param, old in zip(twin.parameters(), before, strict=True)), "skipped"
    return all(torch.equal(one, other) for one, other in zip(model.parameters(), twin.parameters(), strict=True))


def of_step(model: Model, rank: int, number: int) -> list[tuple[Tensor, Tensor]]:
    grads = Model().backward(rank, number)
    return [(param, grads[name]) for name, param in model.named_parameters() if name in grads]


def scheduled(rank: int, _: int, as_tensor: bool) -> str:
    model = Model()
    optimizer = build(model, False, {**OPTIONS, "lr": torch.tensor(0.3) if as_tensor else float(torch.tensor(0.3))})
    ahead(model, optimizer, range(3))
    return digests(model, optimizer)[0]


def test_a_tensor_as_lr_counts_as_its_number() -> None:
    """torch.optim.Muon computes with it in the tensor's dtype."""
    assert run_ranks(scheduled, 2, True) == run_ranks(scheduled, 2, False)


@pytest.mark.parametrize("world_size", [1, 2])
def test_accumulation_and_scalers(world_size: int) -> None:
    assert run_ranks(accumulated, world_size) == [True] * world_size


def poisoned(rank: int, world_size: int, device: str = "cpu") -> set[str]:
    model = Model().to(device)
    optimizer = build(model, False, OPTIONS)
    for number in range(2):
        model.backward(rank, number)
        (model.experts[1, 3, 4] * float("nan")).backward()
        optimizer.step()
        optimizer.zero_grad()
    assert not model.experts[0].isnan().any()
    assert model.experts[1].isnan().all()
    return {name for name, param in model.named_parameters() if param.isnan().any()}


def test_a_nan_stays_in_its_matrix() -> None:
    assert run_ranks(poisoned, 2) == [{"experts"}] * 2


# ---- what is refused, and said


@pytest.mark.parametrize(
    ("shape", "options", "message"),
    [
        ((7,), {}, r"Muon only supports 2D parameters whereas we found a parameter with size: torch.Size\(\[7\]\)"),
        ((2, 3, 4, 5), {}, "Muon only supports 2D"),
        ((6, 4), {"split_sizes": (2, 3)}, r"split_sizes=\(2, 3\) are 5 rows, and a parameter of its group is \(6, 4\)"),
        ((6, 4), {"num_heads": 4}, "num_heads=4 does not divide the 6 rows"),
        ((6, 4), {"num_heads": 2, "split_sizes": (3, 3)}, "both cut a matrix by rows"),
        ((6, 4), {"num_heads": 0}, "num_heads must be a whole number of 1 or more, got 0"),
        ((6, 4), {"split_sizes": (6, 0)}, "split_sizes must be numbers of rows"),
        ((6, 4), {"momentum": -1.0}, "momentum should be >= 0 but is: -1.0"),
        ((6, 4), {"weight_decay": -1.0}, "weight decay should be >= 0 but is: -1.0"),
        ((6, 4), {"lr": -1.0}, "Learning rate should be >= 0 but is: -1.0"),
        ((6, 4), {"adjust_lr_fn": "other"}, "Adjust learning rate function other is not supported"),
        ((6, 4), {"ns_steps": 100}, "Number of steps must be less than 100"),
        ((6, 4), {"ns_coefficients": (1.0, 2.0)}, "exactly 3 values"),
    ],
)
@pytest.mark.parametrize("by_rule", [False, True])
def test_what_torch_refuses_is_refused_in_its_words(
    shape: tuple[int, ...], options: dict[str, Any], message: str, by_rule: bool
) -> None:
    group = {"params": [nn.Parameter(torch.ones(shape))], **options}
    make = partial(FusedShardedAdam, [{"rule": "muon", **group}]) if by_rule else partial(FusedShardedMuon, **group)
    with pytest.raises(ValueError, match=message):
        make()


def test_coefficients_that_are_no_numbers_are_refused() -> None:
    """torch raises in step(), as its products do."""
    with pytest.raises(TypeError, match=r"ns_coefficients\[1\] must be a number, got 'b'"):
        FusedShardedMuon([nn.Parameter(torch.ones(2, 2))], ns_coefficients=(1.0, "b", -1.0))  # type: ignore[arg-type]


def emptied(_: int, __: int, stage: int) -> bool:
    """Beside torch's class, which divides by zero where there are no columns."""
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(shape)) for shape in [(0, 3, 4), (0, 4), (4, 0), (2, 0, 4), (0, 0), (6, 5)]]
    twin = nn.Parameter(params[-1].detach().clone())
    ours, theirs = FusedShardedMuon(params, stage=stage, **OPTIONS), torch.optim.Muon([twin], **OPTIONS)
    for _ in range(2):
        for own, optimizer in ((params, ours), ([twin], theirs)):
            torch.stack([param.square().sum() for param in own]).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    ours.load_state_dict(ours.state_dict())
    with ours.whole():
        return torch.equal(params[-1], twin)


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (3, 3)])
def test_empty_matrices_and_stacks_are_left_alone(world_size: int, stage: int) -> None:
    assert run_ranks(emptied, world_size, stage) == [True] * world_size


def test_options_that_torchs_class_lacks_are_unknown() -> None:
    for name in ("foreach", "fused", "capturable", "maximize", "differentiable"):
        with pytest.raises(TypeError, match=name):
            FusedShardedMuon([nn.Parameter(torch.ones(2, 2))], **{name: True})


def test_a_tall_matrix_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(owned, "_said", set())
    with pytest.warns(UserWarning, match=r"zerox: 'wte' has 65 rows and 8 columns, and Muon is for the matrices"):
        FusedShardedMuon([("wte", nn.Parameter(torch.ones(65, 8)))])
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        FusedShardedMuon([("wte", nn.Parameter(torch.ones(65, 8))), ("fc", nn.Parameter(torch.ones(64, 8)))])


def unequal(rank: int, _: int, sides: list[int]) -> list[str]:
    owned._said.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        FusedShardedMuon([nn.Parameter(torch.ones(side, side)) for side in sides])
    return [str(each.message) for each in said]


def test_unequal_ranks_are_said_once_by_one() -> None:
    assert run_ranks(unequal, 2, [20, 20, 10, 10]) == [[], []]
    [[said], none] = run_ranks(unequal, 2, [20, 10])
    assert "of 2 ranks one has 1.78 times the mean of the work" in said
    assert not none


def test_matrices_of_a_parameter() -> None:
    value = torch.arange(24.0).view(2, 6, 2)
    assert [m.tolist() for m in matrices("experts", value)] == value.tolist()
    assert SHAPES["qkv"][0] == sum(PARTS["qkv"]["split_sizes"])


def estimated(rank: int, _: int) -> bool:
    """Beside what is built."""
    optimizer = build(Model(), False, OPTIONS)
    groups = groups_of(list(Model().named_parameters()), OPTIONS)
    said = zerox.estimate(groups, 3, rule="muon", bucket_cap_mb=CAP_MB)
    loads = loads_of(optimizer.inside.buckets, optimizer.inside.grads.subgroups)[0]
    assert said.slowest_over_mean == slowest_over_mean(loads) > 1
    return said.fullest_rank == rank and said.moments == optimizer.memory_bytes().moments


def test_the_estimate_has_the_slowest_and_the_fullest_rank() -> None:
    assert sum(run_ranks(estimated, 3)) == 1


@pytest.mark.parametrize(
    ("layers", "shapes", "world_size", "most"),
    [
        (12, [(2304, 768), (768, 768), (3072, 768), (768, 3072)], 16, 1.15),
        (32, [(4096, 4096), (1024, 4096), (1024, 4096), (4096, 4096), *[(14336, 4096)] * 2, (4096, 14336)], 64, 1.10),
    ],
    ids=["GPT-2", "Llama 8B"],
)
def test_large_models_are_dealt_evenly_and_at_once(
    layers: int, shapes: list[tuple[int, int]], world_size: int, most: float
) -> None:
    params = [nn.Parameter(torch.empty(shape, device="meta")) for _ in range(layers) for shape in shapes]
    start = time.perf_counter()
    said = zerox.estimate(params, world_size, rule="muon", backend="nccl")
    assert said.slowest_over_mean is not None
    assert 1 < said.slowest_over_mean < most
    assert time.perf_counter() - start < 5, "a second on an idle machine"


@pytest.mark.parametrize(
    ("option", "value", "message"),
    [
        ("num_heads", 5, "num_heads=5 does not divide the 24 rows"),
        ("ns_steps", 2.5, "ns_steps must be a whole number"),
        ("adjust_lr_fn", "other", "Adjust learning rate function other is not supported"),
        ("maximize", True, "maximize=True in a param group of Muon would have no effect"),
    ],
)
def test_an_option_that_is_changed_later_is_checked_before_anything_is_updated(
    option: str, value: Any, message: str
) -> None:
    model = Model()
    optimizer = build(model, False, OPTIONS)
    ahead(model, optimizer, range(1))
    before = digests(model, optimizer)
    optimizer.param_groups[2][option] = value
    model.backward(0, 1)
    with pytest.raises(ValueError, match=message):
        optimizer.step()
    assert digests(model, optimizer) == before
