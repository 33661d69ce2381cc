"""Note [Buckets launch in one order]: learned from rank 0, the same on all ranks, absent gradients last."""

from __future__ import annotations

from torch import Tensor, nn

from tests.bucket_manager.rig import LAYER_CAP, Chain, GradsOfModel, gradients_of, input_of, mean_of
from tests.ranks import run_ranks
from zerox.ranks.group import find_ranks

NUM_LAYERS = 5


def orders_of_three_backwards(rank: int, _: int, registered_backwards: bool) -> list[list[int]]:
    model = Chain(NUM_LAYERS, registered_backwards=registered_backwards)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP)
    orders = [ours.manager.backward.launch_order]
    for index in range(3):
        model(input_of(rank, index)).square().sum().backward()
        ours.sync()
        ours.grads.zero(set_to_none=True)
        orders.append(ours.manager.backward.launch_order)
    return orders


def test_a_model_registered_in_execution_order_keeps_the_planned_order() -> None:
    planned = list(range(NUM_LAYERS))
    assert run_ranks(orders_of_three_backwards, 2, False) == [[planned] * 4] * 2


def test_the_order_is_learned_from_the_first_backward_and_stays() -> None:
    planned = list(range(NUM_LAYERS))
    assert run_ranks(orders_of_three_backwards, 3, True) == [[planned] + [planned[::-1]] * 3] * 3


class Branches(nn.Module):
    """Four layers side by side; forward adds up those it is told to use, so their gradients come in reverse order."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = Chain(4).layers

    def forward(self, x: Tensor, use: list[int]) -> Tensor:
        for index in use:
            x = self.layers[index](x).tanh()
        return x


def train_branches(
    rank: int, world_size: int, stage: int, uses: list[list[list[int]]]
) -> list[tuple[list[int], list[bool]]]:
    """``uses[step][rank]``: the layers in the order in which they run. Returns order and presence after each step."""
    model = Branches()
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP, stage)
    found = []
    for index, use in enumerate(uses):
        expected = mean_of(
            [gradients_of(model, model(input_of(r, index), use[r]).square().sum()) for r in range(world_size)]
        )
        model(input_of(rank, index), use[rank]).square().sum().backward()
        ours.sync()
        ours.expect(expected)
        found.append(ours.manager.backward.launch_order)
        ours.grads.zero(set_to_none=True)
    return found


# Buckets are planned in reverse registration order: layer i is bucket 3 - i.
def test_buckets_with_absent_gradients_are_learned_to_be_last() -> None:
    uses = [[[3, 0]] * 2, [[0, 1, 2, 3]] * 2]
    assert run_ranks(train_branches, 2, 2, uses) == [[[3, 0, 1, 2]] * 2] * 2


def test_rank_0s_arrivals_are_everybodys_order() -> None:
    uses = [[[3, 2, 1, 0], [0, 1, 2, 3], [1, 0, 3, 2]]]
    assert run_ranks(train_branches, 3, 2, uses) == [[[3, 2, 1, 0]]] * 3


def test_ranks_whose_branches_differ_get_the_right_mean_and_never_hang() -> None:
    uses = [
        [[0, 1], [2, 3], [1, 3]],
        [[3], [0, 1, 2, 3], [2, 1]],
        [[0, 1, 2, 3], [3, 2, 1, 0], [0]],
        [[2], [2], [2]],
    ]
    for stage in (1, 2):
        orders = run_ranks(train_branches, 3, stage, uses)
        assert orders[0] == orders[1] == orders[2]


def order_with_an_idle_rank_0(rank: int, _: int) -> list[list[int]]:
    """Rank 0 runs no backward in the first step: there is nothing to learn from yet."""
    model = Chain(NUM_LAYERS, registered_backwards=True)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP)
    orders = []
    for index in range(2):
        if rank > 0 or index > 0:
            model(input_of(rank, index)).square().sum().backward()
        ours.sync()
        ours.grads.zero(set_to_none=True)
        orders.append(ours.manager.backward.launch_order)
    return orders


def test_no_order_is_learned_from_a_rank_0_without_a_backward() -> None:
    planned = list(range(NUM_LAYERS))
    assert run_ranks(order_with_an_idle_rank_0, 2) == [[planned, planned[::-1]]] * 2


def test_every_bucket_launches_exactly_once_a_backward() -> None:
    assert run_ranks(launches_of_partial_backwards, 2) == [[4, 8, 12]] * 2


def launches_of_partial_backwards(rank: int, _: int) -> list[int]:
    model = Branches()
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP)
    launched = []
    for use in ([0], [1, 2, 3], [3, 0] if rank else [2]):
        model(input_of(rank), use).square().sum().backward()
        launched.append(ours.manager.flights.num_launched)
        ours.sync()
        assert ours.manager.flights.num_reduced == launched[-1]
    return launched
