"""Flights are reduced while backward is still computing."""

from __future__ import annotations

import time

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import LAYER_CAP, Chain, GradsOfModel, input_of, same_bits
from tests.ranks import run_ranks
from zerox.ranks.group import find_ranks

NUM_LAYERS = 6


class SlowBackward:
    """Hooks that compute, layer by layer, until what left earlier has been reduced: for 5 ms at least, ``most_s`` at
    most.
    """

    def __init__(self, model: Chain, ours: GradsOfModel, most_s: float) -> None:
        self.manager, self.most_s = ours.manager, most_s
        for layer in model.in_execution_order:
            layer.register_forward_hook(self.slow_down)

    def slow_down(self, _: nn.Module, __: object, output: Tensor) -> None:
        output.register_hook(self.compute)

    def compute(self, grad: Tensor) -> Tensor:
        start = time.monotonic()
        matrix = torch.eye(64)
        while True:
            matrix = matrix @ matrix
            passed_s = time.monotonic() - start
            reduced = self.manager.flights.num_reduced == self.manager.flights.num_launched
            if passed_s > self.most_s or (reduced and passed_s > 0.005):
                return grad


def reduced_when_backward_ends(
    rank: int, _: int, hold: bool, most_s: float, device: str = "cpu"
) -> tuple[int, int, list[Tensor]]:
    model = Chain(NUM_LAYERS).to(device)
    ours = GradsOfModel(find_ranks(None, torch.device(device)), list(model.parameters()), LAYER_CAP)
    SlowBackward(model, ours, most_s)
    ours.manager.flights.hold_back(hold)
    loss = model(input_of(rank).to(device)).square().sum()
    dist.barrier()
    loss.backward()
    reduced, launched = ours.manager.flights.num_reduced, ours.manager.flights.num_launched
    ours.sync()
    means = ours.reduced()
    return reduced, launched, [means[key].cpu() for key in sorted(means)]


def test_all_flights_but_the_last_have_reduced_when_backward_ends() -> None:
    for reduced, launched, _ in run_ranks(reduced_when_backward_ends, 2, False, 3.0):
        assert launched == NUM_LAYERS
        assert reduced >= NUM_LAYERS - 1


def test_flights_held_back_land_only_when_they_are_waited_for() -> None:
    """The test above measures overlap: without it the same assertion fails."""
    for reduced, launched, _ in run_ranks(reduced_when_backward_ends, 2, True, 0.01):
        assert launched == NUM_LAYERS
        assert reduced == 0


def test_overlap_changes_no_bit() -> None:
    overlapped = run_ranks(reduced_when_backward_ends, 2, False, 3.0)
    held = run_ranks(reduced_when_backward_ends, 2, True, 0.0)
    for (_, _, one), (_, _, other) in zip(overlapped, held, strict=True):
        assert len(one) > 0
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def backward_alone(rank: int, _: int) -> tuple[bool, int]:
    """Rank 0's backward, while rank 1 does nothing until rank 0's has ended."""
    model = Chain(NUM_LAYERS)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP)
    loss = model(input_of(rank)).square().sum()
    if rank == 0:
        loss.backward()
    ended_with = ours.manager.flights.num_reduced
    dist.barrier()
    if rank == 1:
        loss.backward()
    ours.sync()
    return ended_with == 0, ours.manager.flights.num_reduced


def test_backward_never_waits_for_the_wire() -> None:
    assert run_ranks(backward_alone, 2) == [(True, NUM_LAYERS)] * 2
