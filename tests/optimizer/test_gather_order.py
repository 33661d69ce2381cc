"""overlap_gather(): which buckets a forward waits for, and when; in which order they come."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from tests.optimizer.overlap_models import (
    Backwards,
    Compiling,
    Outside,
    batch,
    blocks_compiled,
    blocks_compiled_in_place,
    build,
    train_step,
    under_way,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def names_in(optimizer: FusedShardedAdam, buckets: list[int]) -> list[str]:
    return [member.name for index in buckets for member in optimizer.inside.buckets[index].members]


def arrivals(rank: int, _: int, make: Callable[[], nn.Module]) -> tuple[list[str], dict[str, set[str]]]:
    """Parameters in the agreed order of their gathers; and which were missing when a module's forward began."""
    model, optimizer = build(make, overlap=True)
    missing: dict[str, set[str]] = {}
    for step in range(3):
        train_step(model, optimizer, rank, step)
    for name, module in model.named_modules():

        def note(*_: Any, name: str = name) -> None:
            missing.setdefault(name, set(names_in(optimizer, optimizer.inside.manager.params.missing)))

        module.register_forward_pre_hook(note)
    model(batch(rank, 3), 0)
    return names_in(optimizer, optimizer.inside.manager.params.order), missing


def both_of(name: str) -> set[str]:
    return {f"{name}.weight", f"{name}.bias"}


def test_each_layer_waits_for_its_own_bucket_in_the_order_in_which_they_run() -> None:
    layers = [both_of(f"layers.{i}") for i in range(4)]
    for order, missing in run_ranks(arrivals, 2, Backwards):
        assert [set(order[i : i + 2]) for i in range(0, 8, 2)] == layers[::-1]
        assert missing == {
            "": set().union(*layers),
            "layers.3": set().union(*layers[:3]),
            "layers.2": set().union(*layers[:2]),
            "layers.1": layers[0],
            "layers.0": set(),
        }


def test_what_is_read_outside_its_owner_arrives_when_it_is_read() -> None:
    for order, missing in run_ranks(arrivals, 2, Outside):
        assert order[0] == "second.weight" or order[1] == "second.weight"
        assert "second.weight" in missing[""]
        assert "second.weight" not in missing["first"]
        assert missing["first"] >= {"unused.weight", "third.weight"}
        assert missing["last"] == set()


def missing_after_blocks(rank: int, _: int, make: Callable[[], nn.Module]) -> tuple[list[str], list[set[str]]]:
    """Weights in the agreed order of their gathers; those missing before any block ran, and after each."""
    model, optimizer = build(make, overlap=True)
    for step in range(3):
        train_step(model, optimizer, rank, step)
    missing = [weights_in(optimizer, optimizer.inside.manager.params.missing)]
    x = batch(rank, 3)
    for block in model.blocks:  # type: ignore[union-attr]
        x = block(x)
        missing.append(weights_in(optimizer, optimizer.inside.manager.params.missing))
    return weights_in(optimizer, optimizer.inside.manager.params.order), list(map(set, missing))


def weights_in(optimizer: FusedShardedAdam, buckets: list[int]) -> list[str]:
    names = names_in(optimizer, buckets)
    return [name.replace("_orig_mod.", "") for name in names if name.endswith("weight")]


@pytest.mark.parametrize("make", [blocks_compiled, blocks_compiled_in_place])
def test_a_compiled_block_waits_for_what_it_reads(make: Callable[[], nn.Module]) -> None:
    weights = [f"blocks.{i}.inner.weight" for i in range(4)]
    for order, missing in run_ranks(missing_after_blocks, 2, make):
        assert order == weights
        assert missing == [set(weights[ran:]) for ran in range(5)]


def left_by_compiled_functions(rank: int, _: int) -> list[int]:
    """Buckets that the forward's first compiled function left stale, when it is new, later, and in evaluation."""
    model, optimizer = build(Compiling, overlap=True)
    memory = [bucket.buffer.flat.numpy() for bucket in optimizer.inside.buckets]  # read without operators
    left = []
    for step in range(4):
        train_step(model, optimizer, rank, 0)
        assert under_way(optimizer) == 4
        with torch.set_grad_enabled(step < 3):
            model.mixed(batch(rank, 0))  # type: ignore[operator]
        before = [each.copy() for each in memory]
        optimizer.synchronize()
        left.append(sum(bool((a != b).any()) for a, b in zip(before, memory, strict=True)))
    return left


def test_a_compiled_function_waits_for_everything_until_it_is_known_to_show_what_it_reads() -> None:
    assert run_ranks(left_by_compiled_functions, 2) == [[0, 2, 2, 0]] * 2


def missing_after_unfreezing(rank: int, _: int) -> set[str]:
    """When the forward of a layer begins that was unfrozen after overlap_gather()."""
    model, optimizer = build(FrozenFirst, overlap=True)
    model.layers[3].requires_grad_(True)  # type: ignore[index]
    for step in range(2):
        train_step(model, optimizer, rank, step)
    missing: set[str] = set()
    model.layers[3].register_forward_pre_hook(  # type: ignore[index]
        lambda *_: missing.update(names_in(optimizer, optimizer.inside.manager.params.missing))
    )
    model(batch(rank, 2), 0)
    return missing


class FrozenFirst(Backwards):
    def __init__(self) -> None:
        super().__init__()
        self.layers[3].requires_grad_(False)


def test_a_layer_that_is_unfrozen_later_waits_for_its_bucket() -> None:
    for missing in run_ranks(missing_after_unfreezing, 2):
        assert missing == set().union(*(both_of(f"layers.{i}") for i in range(3)))


def orders_that_differ(rank: int, _: int) -> tuple[list[str], list[str]]:
    """The agreed order, and that in which this rank runs its layers."""
    model, optimizer = build(Backwards, overlap=True)
    names = {id(p): name for name, p in model.named_parameters()}
    if rank == 1:
        model.layers = nn.ModuleList(reversed(model.layers))  # type: ignore[arg-type]
    for step in range(3):
        train_step(model, optimizer, rank, step)
    own = [names[id(each.weight)] for each in reversed(model.layers)]  # type: ignore[call-overload]
    agreed = names_in(optimizer, optimizer.inside.manager.params.order)
    return [name for name in agreed if name.endswith("weight")], own


def test_where_ranks_run_modules_in_other_orders_that_of_rank_0_holds() -> None:
    (order, own), (other_order, other_own) = run_ranks(orders_that_differ, 2)
    assert order == other_order == own
    assert other_own == own[::-1]


def on_one_rank_only(rank: int, _: int) -> tuple[int, list[int]]:
    model, optimizer = build(Backwards, overlap=rank == 1)
    for step in range(4):
        train_step(model, optimizer, rank, step)
    left = under_way(optimizer)
    optimizer.synchronize()
    return left, optimizer.inside.manager.params.order


def test_ranks_need_not_all_overlap() -> None:
    assert run_ranks(on_one_rank_only, 2) == [(0, [3, 2, 1, 0]), (4, [3, 2, 1, 0])]
