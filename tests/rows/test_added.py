"""What is added to gradients of tables after ranks have exchanged them, and inside no_sync()."""

from __future__ import annotations

import torch

from tests.ranks import run_ranks
from tests.rows.tables import Model, backward, build, ids_of
from tests.rows.test_sparse_adam import sparse
from zerox import FusedShardedAdam

Pair = tuple[Model, FusedShardedAdam]


def exchanged(rank: int) -> tuple[Pair, Pair]:
    """Two of a kind after the same backward; the first has exchanged its gradients."""
    model, twin = Model(), Model()
    pair = (model, build(model)), (twin, build(twin))
    for each in (model, twin):
        backward(each, rank, 0)
    pair[0][1].synchronize()
    return pair


def assert_same_step(ours: Pair, theirs: Pair) -> None:
    for _, optimizer in (ours, theirs):
        optimizer.step()
    assert torch.equal(ours[0].words.weight, theirs[0].words.weight)
    assert torch.equal(ours[0].bags.weight, theirs[0].bags.weight)


def add(each: Model, rows: list[int]) -> None:
    assert each.words.weight.grad is not None
    each.words.weight.grad.add_(sparse(rows, [1.0, -2.0]))


def changed_between(rank: int, world_size: int) -> None:
    (model, optimizer), (twin, theirs) = exchanged(rank)  # what is exchanged is not sent again
    sent = optimizer.inside.calls.row_grads.messages.traffic[1]
    optimizer.synchronize()
    assert optimizer.inside.calls.row_grads.messages.traffic[1] == sent
    if rank == 0:  # one rank's rows change: all send theirs again
        for each in (model, twin):
            add(each, [9, 40])
    elif rank == 1:  # a rank takes its gradients away
        for each in (model, twin):
            each.words.weight.grad = None
    assert_same_step((model, optimizer), (twin, theirs))


def test_what_changes_after_an_exchange_counts() -> None:
    run_ranks(changed_between, 3)


def added_in_place(rank: int, world_size: int) -> None:
    ours, theirs = exchanged(rank)
    for model, _ in (ours, theirs):
        add(model, [9, 40 + rank])
    assert_same_step(ours, theirs)


def test_what_all_ranks_add_after_an_exchange_counts() -> None:
    run_ranks(added_in_place, 2)


def accumulate(rank: int, world_size: int) -> None:
    model, twin = Model(), Model()
    optimizer, theirs = build(model), build(twin)
    with optimizer.no_sync():
        model(ids_of(rank, 0)).backward()
        assert optimizer.inside.calls.row_grads.messages.traffic[1] == 0
    model(ids_of(rank, 1)).backward()
    for step in (0, 1):
        twin(ids_of(rank, step)).backward()
    optimizer.step()
    theirs.step()
    assert torch.equal(model.words.weight, twin.words.weight)


def test_rows_add_up_inside_no_sync() -> None:
    run_ranks(accumulate, 2)
