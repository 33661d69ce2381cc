"""What save_weights() takes in memory, by torch's allocator: a chunk, whatever the order in which parameters lie."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import pytest
from torch import nn

from bench.allocator import Allocator, build
from tests.ranks import run_ranks
from tests.residency.rig import by_way
from zerox import FusedShardedAdam, save_weights
from zerox.checkpoint.weight_writer import CHUNK_BYTES
from zerox.residency.residency import Residency

WIDTH, LAYERS = 1024, 4  # a layer has 4 MiB


def saves(rank: int, _: int, library: Path, folder: Path, turned: bool, way: str, stage: int) -> list[int]:
    """The peaks of torch's bytes and of Python's."""
    with by_way(way, rank):
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
        for layer in model if turned else ():
            layer.weight = nn.Parameter(layer.weight.detach().t().contiguous().t())
        optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
        if isinstance(optimizer.inside.gather, Residency):
            optimizer.inside.gather.residents.release_all()
        save_weights(optimizer, folder / "warm")
        allocator = Allocator(library)
        before = allocator.now
        tracemalloc.start()
        try:
            peak = allocator.peak_of(lambda: save_weights(optimizer, folder / "x")) - before
            return [peak, tracemalloc.get_traced_memory()[1]]
        finally:
            tracemalloc.stop()


CASES: list[Any] = [
    (world_size, way, stage, turned)
    for world_size, way, stage in [(1, "memory", 3), (2, "memory", 2), (2, "memory", 3), (2, "messages", 3)]
    for turned in (False, True)
]


@pytest.mark.parametrize(("world_size", "way", "stage", "turned"), CASES, ids=str)
def test_no_rank_has_a_copy_of_a_weight(tmp_path: Path, world_size: int, way: str, stage: int, turned: bool) -> None:
    for of_torch, of_python in run_ranks(saves, world_size, build(), tmp_path, turned, way, stage):
        assert of_torch <= 1.05 * CHUNK_BYTES, "a quarter of a layer"
        assert of_python <= CHUNK_BYTES
