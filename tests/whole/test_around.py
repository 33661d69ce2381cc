"""What else is done with parameters that lie whole on one rank: saved, loaded, read by one rank, counted, refused."""

from __future__ import annotations

import gc
import io
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.local_optimizers.test_failures import fail
from tests.meshes import mesh_once
from tests.optimizer.combined import digest
from tests.ranks import run_ranks
from tests.whole.rig import cost, unequal_buckets, whole
from tests.whole.test_bits import BFLOAT16, EIGHT_BITS, SHAPES, Awkward, Case, loss_of, make
from zerox import FusedShardedAdam
from zerox.optimizer.planning import loads_of
from zerox.plan.owners import Load, owners
from zerox.rules.adam import ADAM


def digests(model: nn.Module, optimizer: FusedShardedAdam) -> tuple[str, str]:
    """Of parameters, and on rank 0 of the state."""
    state = optimizer.full_state_dict().get("state", {})
    kept = [value for _, entry in sorted(state.items()) for _, value in sorted(entry.items())]
    with optimizer.whole():
        return digest(list(model.parameters())), digest(kept)


def train(model: Awkward, optimizer: FusedShardedAdam, rank: int, steps: range) -> None:
    for step in steps:
        loss_of(model, rank, step, 0).backward()
        optimizer.step()
        optimizer.zero_grad()


# ---- files


def saved(rank: int, _: int, case: Case, is_whole: bool, path: str) -> tuple[str, str]:
    model = Awkward(case.dtype)
    with whole(is_whole):
        optimizer = make(case, model, None)
    train(model, optimizer, rank, range(2))
    assert (unequal_buckets(optimizer) > 0) == is_whole
    zerox.save(path, model, optimizer)
    zerox.save_weights(optimizer, path + "-weights")
    return digests(model, optimizer)


def loaded(_: int, __: int, case: Case, is_whole: bool, path: str) -> tuple[tuple[str, str], str]:
    """And of weights alone."""
    model, other = Awkward(case.dtype), Awkward(case.dtype)
    with torch.no_grad():
        for param in (*model.parameters(), *other.parameters()):
            param.fill_(3)
    with whole(is_whole):
        optimizer, of_weights = make(case, model, None), make(case, other, None)
    zerox.load(path, model, optimizer)
    zerox.load_weights(of_weights, path + "-weights")
    return digests(model, optimizer), digests(other, of_weights)[0]


NARROW: dict[str, Any] = {"dtype": BFLOAT16, "options": EIGHT_BITS}


@pytest.mark.parametrize(
    ("by", "to"),
    [
        ((3, True, Case()), (2, False, Case(stage=1))),
        ((2, False, Case(stage=3)), (3, True, Case(stage=3, cap_mb=0.03))),
        ((4, True, Case(stage=3, **NARROW)), (2, True, Case(stage=2, **NARROW))),
        ((2, True, Case(stage=1, **NARROW)), (4, True, Case(stage=3, cap_mb=10.0, **NARROW))),
        ((3, True, Case(**NARROW)), (1, False, Case(**NARROW))),
    ],
    ids=str,
)
def test_files_are_loaded_by_other_ranks_whose_parameters_lie_otherwise(
    tmp_path: Path, by: tuple[int, bool, Case], to: tuple[int, bool, Case]
) -> None:
    before = run_ranks(saved, by[0], by[2], by[1], str(tmp_path / "x"))[0]
    after = run_ranks(loaded, to[0], to[2], to[1], str(tmp_path / "x"))
    assert after[0] == (before, before[0])
    assert all(params == before[0] and weights == before[0] for (params, _), weights in after)


# ---- state


def state_of_all(rank: int, _: int, stage: int) -> bool:
    """Rank 0 reads the whole state with no partner; a cut optimizer takes it."""
    model, other = Awkward(), Awkward()
    with whole():
        optimizer = make(Case(stage=stage), model, None)
    cut = make(Case(stage=stage, cap_mb=10.0), other, None)
    train(model, optimizer, rank, range(2))
    expected = optimizer.full_state_dict()
    file = io.BytesIO()
    if rank == 0:
        torch.save(optimizer.state_dict(), file)
    told = [file.getvalue()]
    torch.distributed.broadcast_object_list(told)
    shown = torch.load(io.BytesIO(told[0]))
    cut.load_state_dict(shown)
    again = cut.full_state_dict()
    if rank > 0:
        return True
    for number, entry in expected["state"].items():
        for found in (shown["state"][number], again["state"][number]):
            assert all(torch.equal(found[key].cpu(), value.cpu()) for key, value in entry.items()), number
    return len(expected["state"]) == len(list(model.parameters()))


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_one_rank_reads_the_state_and_others_take_it(stage: int) -> None:
    assert run_ranks(state_of_all, 3, stage) == [True] * 3


# ---- owners


class Squares(nn.Module):
    def __init__(self, sides: list[int]) -> None:
        super().__init__()
        self.weights = nn.ParameterList(nn.Parameter(torch.ones(side, side)) for side in sides)


def owned(rank: int, _: int) -> tuple[list[Load], list[Load], set[int]]:
    """Loads after the first group and after a second one; and the ranks that have elements of each parameter."""
    model = Squares([80, 70, 60, 50, 40, 30, 20])
    params = list(model.parameters())
    with whole():
        optimizer = FusedShardedAdam(params[:4], bucket_cap_mb=0.03)
        first = loads_of(optimizer.inside.buckets, optimizer.inside.grads.subgroups)[0]
        optimizer.add_param_group({"params": params[4:]})
        second = loads_of(optimizer.inside.buckets, optimizer.inside.grads.subgroups)[0]
    segments = [each for bucket in optimizer.inside.buckets for each in bucket.own_segments]
    assert all(each.param_start == 0 for each in segments)
    mine = {bucket.members[own.slot].number for bucket in optimizer.inside.buckets for own in bucket.own_segments}
    return first, second, mine


def test_a_group_that_is_added_goes_to_those_who_have_least() -> None:
    by_rank = run_ranks(owned, 3)
    first, second, _ = by_rank[0]
    costs = {side: cost(ADAM, (side, side), {}) or 0 for side in (80, 70, 60, 50, 40, 30, 20)}
    assert all(each[:2] == (first, second) for each in by_rank)
    assert sum(load.cost for load in first) == sum(costs[side] for side in (80, 70, 60, 50))
    assert sum(load.numel for load in second) == sum(side**2 for side in costs)
    assert sorted(number for each in by_rank for number in each[2]) == list(range(7)), "each has one owner"
    added = [costs[side] for side in (40, 30, 20)], [side**2 for side in (40, 30, 20)]
    for cost_of, numel, rank in zip(*added, owners(*added, 3, first), strict=True):
        first[rank] = Load(first[rank].cost + cost_of, first[rank].numel + numel)
    assert first == second


# ---- bytes


def weighed(rank: int, _: int, stage: int, sides: list[int]) -> tuple[Any, Any]:
    model = Squares(sides)
    named = list(model.named_parameters())
    with whole():
        said = zerox.estimate(named, 3, stage=stage, bucket_cap_mb=0.03)
        optimizer = FusedShardedAdam(named, stage=stage, bucket_cap_mb=0.03)
    torch.stack([weight.sum() for weight in model.weights]).sum().backward()
    counted = optimizer.memory_bytes()
    return said, counted


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_estimate_is_of_the_rank_that_owns_most(stage: int) -> None:
    by_rank = run_ranks(weighed, 3, stage, [100, 70, 60, 50, 40, 30, 90])
    said = by_rank[0][0]
    counted = [each for _, each in by_rank]
    assert said.moments == max(each.moments for each in counted) > min(each.moments for each in counted)
    assert said.gradients == max(each.gradients for each in counted)
    sizes = [each.parameters for each in counted]
    assert said.parameters >= max(sizes)
    if stage < 3:
        assert sizes == [said.parameters] * 3


# ---- what does not go


def refused(_: int, __: int, exchange: str) -> list[str]:
    said = []
    for stage in (1, 2, 3):
        with whole(), pytest.raises(ValueError, match="must each lie whole on one rank") as raised:
            make(Case(stage=stage, exchange=exchange), Awkward(), None)
        said.append(str(raised.value))
    optimizer = make(Case(exchange=exchange), Awkward(), None)  # which goes on as ever
    assert unequal_buckets(optimizer) == 0
    return said


def test_collectives_of_the_backend_are_refused_with_the_way_out() -> None:
    for said in run_ranks(refused, 2, "native"):
        assert said[0] == said[1] == said[2]
        assert said[0] == (
            "zerox: parameter 'param 9' and others of its bucket must each lie whole on one rank, so the ranks' shards "
            'differ in length, and the backend\'s own collectives move equal ones: pass exchange="direct", without '
            "ZEROX_EXCHANGE=native"
        )


# ---- stage 3


def handed_on(rank: int, _: int, layouts: list[bool]) -> list[str]:
    """Optimizers of one model after another. The next one has what the last left."""
    model, told = Awkward(), []
    for is_whole in layouts:
        with whole(is_whole):
            optimizer = make(Case(stage=3), model, None)
        train(model, optimizer, rank, range(1))
        with optimizer.whole():
            told.append(digest(list(model.parameters())))
        del optimizer
        gc.collect()
    return told


def test_a_new_optimizer_goes_on_with_shards_that_lay_otherwise() -> None:
    """Cut, whole, whole again, and cut."""
    cut = run_ranks(handed_on, 3, [False] * 4)
    assert len(set(cut[0])) == 4, "each trains"
    assert run_ranks(handed_on, 3, [False, True, True, False]) == cut


# ---- subgroups


def of_experts(rank: int, _: int, is_whole: bool) -> list[Tensor]:
    """Two ranks have each expert, in stages 1 and 2."""
    mesh = mesh_once((2, 2), ("edp", "ep"))
    found = []
    for stage in (1, 2):
        model, experts = Awkward(), Awkward()
        with torch.no_grad():
            for param in experts.parameters():
                param.add_(rank % 2)
        groups: list[dict[str, Any]] = [{"params": list(model.parameters())}]
        groups += [{"params": list(experts.parameters()), "process_group": mesh["edp"].get_group()}]
        with whole(is_whole):
            optimizer = FusedShardedAdam(groups, lr=0.01, stage=stage, bucket_cap_mb=0.1)
        assert (unequal_buckets(optimizer) > 2) == is_whole
        for step in range(2):
            (loss_of(model, rank, step, 0) + loss_of(experts, rank, step, 1)).backward()
            optimizer.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
        found += [param.detach() for param in (*model.parameters(), *experts.parameters())]
    return found


def test_experts_lie_whole_on_one_of_their_ranks() -> None:
    for ours, theirs in zip(run_ranks(of_experts, 4, True), run_ranks(of_experts, 4, False), strict=True):
        assert all(torch.equal(one, other) for one, other in zip(ours, theirs, strict=True))


# ---- the first look at what ranks have


def looked_at(rank: int, _: int) -> list[tuple[str, str]]:
    """Of each parameter that has elements, its name and what step() says if rank 1 has written it."""
    said = []
    for place in range(len(SHAPES)):
        model = Awkward()
        with whole():
            optimizer = FusedShardedAdam(model.named_parameters(), bucket_cap_mb=10)
        param = model.weights[place]
        if param.numel() == 0:
            continue
        if rank == 1:
            with torch.no_grad():
                param.add_(1)
        loss_of(model, rank, 0, 0).backward()
        with pytest.raises(RuntimeError, match="ranks have different parameters") as raised:
            optimizer.step()
        said.append((f"weights.{place}", str(raised.value)))
    return said


def test_the_parameter_that_differs_is_named() -> None:
    for said in run_ranks(looked_at, 2):
        assert len(said) == len(SHAPES) - 1
        assert all(f"parameter '{name}' with values" in text for name, text in said)


# ---- a class of torch's kind


def failing(rank: int, world_size: int, *args: Any) -> tuple[list[str], list[bool]]:
    with whole():
        return fail(rank, world_size, *args)


@pytest.mark.parametrize(("who", "dtype"), [(0, torch.float32), (2, torch.float32), (2, BFLOAT16)], ids=str)
def test_all_parameters_are_as_before_where_a_class_raises_on_one_rank(
    tmp_path: Path, who: int, dtype: torch.dtype
) -> None:
    for said, as_before in run_ranks(failing, 3, who, dtype, "auto", str(tmp_path)):
        assert said[0].endswith("all parameters are as before")
        assert as_before == [True, True, True]
