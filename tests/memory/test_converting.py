"""What converting takes in memory, by torch's allocator, beside the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from bench.allocator import Allocator, build
from tests.ranks import run_ranks
from zerox.checkpoint.convert import convert_file

KEYS = ("model", "optimizer")
LAYERS, WIDTH = 12, 512  # a layer, decoded, is less than the tenth that is allowed


def convert(rank: int, world_size: int, library: Path, folder: Path, dtype: torch.dtype, options: Any) -> list[float]:
    """The peaks of converting to a file of torch's and back, in sizes of that file."""
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, dtype=dtype) for _ in range(LAYERS)))
    optimizer = zerox.FusedShardedAdam(model.named_parameters(), lr=1e-3, process_group="alone", **options)
    model(torch.randn(2, WIDTH, dtype=dtype)).sum().backward()
    optimizer.step()
    zerox.save(folder / "saved", model, optimizer)
    allocator = Allocator(library)
    peaks = []
    for source, target in (("saved", "file.pt"), ("file.pt", "back")):
        before = allocator.now
        peak = allocator.peak_of(lambda a=source, b=target: convert_file(folder / a, folder / b, False, False, KEYS))
        peaks.append((peak - before) / (folder / "file.pt").stat().st_size)
    return peaks


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.bfloat16, {"state_dtype": "8bit"}), (torch.bfloat16, {"state_dtype": torch.bfloat16})],
    ids=str,
)
def test_converting_holds_the_file_and_little_more(dtype: torch.dtype, options: Any, tmp_path: Path) -> None:
    [peaks] = run_ranks(convert, 1, build(), tmp_path, dtype, options)
    assert max(peaks) < 1.1, peaks
