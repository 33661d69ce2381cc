"""Gradients that no backward of ours brought: put into p.grad by hand, as after torch.func.grad. Both stages take their
mean, and stage 1 takes what a backward has reached as it stands."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.own_state import own_state
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

NUMELS = [65536, 70, 5]
SIGNS = {0: 1.0, 1: -0.25, 2: -0.45}  # of the ranks' gradients: the first alone pulls the other way


class Case:
    def __init__(self, rank: int, stage: int) -> None:
        self.rank = rank
        self.params = [nn.Parameter(torch.zeros(numel)) for numel in NUMELS]
        self.optimizer = FusedShardedAdam(self.params, lr=0.1, weight_decay=0.0, stage=stage)

    def assign(self, factor: float = 1.0) -> None:
        for param in self.params:
            param.grad = torch.full_like(param, factor * SIGNS[self.rank])

    def backward(self, factor: float = 1.0, count: int = len(NUMELS)) -> None:
        sum(param.sum() * (factor * SIGNS[self.rank]) for param in self.params[:count]).backward()

    def exp_avg(self) -> list[set[float]]:
        """The distinct values of this rank's first moments after one step: a tenth of the gradient."""
        found = []
        for param in self.params:
            state = own_state(self.optimizer).get(param, {})
            found.append({round(10 * value, 5) for value in state["exp_avg"].unique().tolist()} if state else set())
        return found


def mean(world_size: int) -> float:
    return round(sum(SIGNS[rank] for rank in range(world_size)) / world_size, 5)


def _assigned(case: Case, _: int) -> None:
    case.assign()


def _func_grad(case: Case, _: int) -> None:
    def loss(params: list[Tensor]) -> Tensor:
        return sum((SIGNS[case.rank] * param).sum() for param in params)

    for param, grad in zip(case.params, torch.func.grad(loss)(list(case.params)), strict=True):
        param.grad = grad


def _clipped(case: Case, world_size: int) -> None:
    case.assign()
    norm = case.optimizer.clip_grad_norm_(1e9)
    torch.testing.assert_close(norm, torch.tensor(abs(mean(world_size)) * sum(NUMELS) ** 0.5))


def _unscaled(case: Case, _: int) -> None:
    scaler = zerox.GradScaler("cpu", init_scale=4.0)
    scaler.scale(torch.ones(()))
    case.assign(4.0)
    scaler.unscale_(case.optimizer)


def _then_backwarded(case: Case, _: int) -> None:
    case.assign(0.75)
    case.backward(0.25)


def _by_one_backward_of_some(case: Case, _: int) -> None:
    case.assign()
    case.params[0].grad = None
    case.backward(count=1)


def _inside_no_sync(case: Case, _: int) -> None:
    with case.optimizer.no_sync():
        case.backward(2.0)
    case.assign()


def _on_some_ranks(case: Case, world_size: int) -> None:
    if case.rank == 0:
        for param in case.params:
            param.grad = torch.full_like(param, world_size * mean(world_size))


WAYS = [_assigned, _func_grad, _clipped, _unscaled, _then_backwarded, _by_one_backward_of_some, _inside_no_sync]


def _run(rank: int, world_size: int, stage: int, way: Callable[[Case, int], None]) -> list[set[float]]:
    case = Case(rank, stage)
    way(case, world_size)
    case.optimizer.step()
    for param in case.params:
        assert torch.all(param.detach() < 0) if mean(world_size) > 0 else torch.all(param.detach() > 0)
    return case.exp_avg()


@pytest.mark.parametrize("way", [*WAYS, _on_some_ranks], ids=lambda way: way.__name__.strip("_"))
@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_assigned_by_hand_are_averaged(stage: int, world_size: int, way: Callable[[Case, int], None]) -> None:
    for found in run_ranks(_run, world_size, stage, way):
        assert all(values in (set(), {mean(world_size)}) for values in found), found


def _after_a_step(rank: int, world_size: int, how: str) -> list[set[float]]:
    """Two steps; what the second one gets is put there by hand, into p.grad as the first one left it."""
    case = Case(rank, stage=1)
    case.optimizer.param_groups[0]["betas"] = (0.0, 0.0)  # so that exp_avg is the last gradient
    case.assign(0.5) if how == "assigned" else case.backward(0.5)
    case.optimizer.step()
    if how == "zeroed":
        case.optimizer.zero_grad(set_to_none=False)
    for param in case.params:
        assert param.grad is not None
        param.grad.copy_(torch.full_like(param, SIGNS[rank]))
    case.optimizer.step()
    return [{round(value / 10, 5) for value in values} for values in case.exp_avg()]


@pytest.mark.parametrize("how", ["assigned", "backwarded", "zeroed"])
def test_gradients_written_into_those_of_the_last_step_are_averaged(how: str) -> None:
    for found in run_ranks(_after_a_step, 2, how):
        assert all(values in (set(), {mean(2)}) for values in found), found


def _reached(rank: int, world_size: int, how: str) -> list[set[float]]:
    """What is done to gradients that a backward has reached is what step() uses, unaveraged."""
    case = Case(rank, stage=1)
    case.backward() if rank == 0 or how != "reached by rank 0" else sum(
        p.sum() * 0.0 for p in case.params[:1]
    ).backward()
    if how == "replaced and synchronized":
        case.optimizer.clip_grad_norm_(1e9)
    for param in case.params:
        param.grad = torch.full_like(param, SIGNS[rank])
    launched = case.optimizer.inside.manager.flights.num_launched
    case.optimizer.step()
    assert case.optimizer.inside.manager.flights.num_launched == launched, "nothing is sent again"
    return case.exp_avg()


@pytest.mark.parametrize("how", ["replaced", "replaced and synchronized", "reached by rank 0"])
def test_what_a_backward_has_reached_is_used_as_it_stands(how: str) -> None:
    for rank, found in enumerate(run_ranks(_reached, 2, how)):
        assert all(values in (set(), {SIGNS[rank]}) for values in found), found


def _again(rank: int, world_size: int) -> tuple[int, int]:
    case = Case(rank, stage=1)
    case.assign()
    case.optimizer.clip_grad_norm_(1e9)
    first = case.optimizer.inside.manager.flights.num_launched
    case.optimizer.step()
    case.optimizer.step()
    return first, case.optimizer.inside.manager.flights.num_launched


def test_the_mean_itself_is_not_averaged_again() -> None:
    for first, last in run_ranks(_again, 3):
        assert first == last > 0
