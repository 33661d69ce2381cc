"""Collectives of our own group are given no tensor that Python knows: see Note [Tensors that Python does not know]."""

from __future__ import annotations

import ast
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

import zerox
from tests.ranks import run_ranks
from zerox.ranks.group import Ranks

ZEROX = Path(zerox.__file__).parent
COLLECTIVES = {"allreduce", "broadcast", "gather", "allgather", "reduce", "scatter", "reduce_scatter", "alltoall_base"}


class Given(TorchDispatchMode):
    """Notes the tensors that collectives are given, as objects. Those that Python knows are the ones that it has."""

    def __init__(self) -> None:
        super().__init__()
        self.tensors: list[Tensor] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function.namespace == "c10d":
            self.tensors += [each for each in tree_leaves(args) if isinstance(each, Tensor)]
        return function(*args, **(kwargs or {}))


def texts(ranks: Ranks, _: Tensor) -> None:
    assert ranks.all_gather_text("x" * ranks.rank) == ["x" * rank for rank in range(ranks.size)]
    assert ranks.all_gather_bytes(b"") == [b""] * ranks.size


CALLS: dict[str, tuple[int, Callable[[Ranks, Tensor], Any]]] = {
    "all_reduce": (1, lambda ranks, values: ranks.all_reduce(values, dist.ReduceOp.MAX)),
    "broadcast": (1, lambda ranks, values: ranks.broadcast(values, "values")),
    "gather": (0, lambda ranks, values: ranks.gather(values)),
    "all_gather": (3, lambda ranks, values: ranks.gather(values, None)),
    "all_to_all": (2, lambda ranks, values: ranks.all_to_all(values, [2, 2], [2, 2])),
    "texts": (8, texts),
    "meet": (1, lambda ranks, _: ranks.barrier("all meet")),
}


def call(rank: int, world_size: int) -> dict[str, tuple[int, bool, list[bool]]]:
    """Of each call how many tensors were given, whether they are the caller's, and whether they keep other objects: as
    views do, and what lies in a buffer of Python's, which can't be resized."""
    ranks = zerox.FusedShardedAdam([torch.nn.Parameter(torch.ones(4))]).inside.ranks
    found = {}
    for name, (_, function) in CALLS.items():
        values = torch.full((4,), float(rank))
        with Given() as given:
            function(ranks, values)
        theirs = any(each is values for each in given.tensors)
        found[name] = (len(given.tensors), theirs, [each._is_view() for each in given.tensors])
        assert all(each.untyped_storage().resizable() for each in given.tensors)
        if name == "all_reduce":
            assert values.tolist() == [world_size - 1.0] * 4
        if name == "broadcast":
            assert values.tolist() == [0.0] * 4
    return found


def test_they_are_given_other_tensors_over_the_same_memory() -> None:
    for rank, found in enumerate(run_ranks(call, 2)):
        for name, (count, theirs, views) in found.items():
            expected = 1 + 2 * (rank == 0) if name == "gather" else CALLS[name][0]
            assert (count, theirs, any(views)) == (expected, False, False), name


@pytest.mark.parametrize("path", sorted((ZEROX / "ranks").glob("*.py")), ids=lambda path: path.name)
def test_nothing_else_calls_them(path: Path) -> None:
    """Of the groups that are made here. What the user gave is called through torch.distributed, and ends with it."""
    called = {
        node.func.attr
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) != "self"
    }
    assert not called & COLLECTIVES
