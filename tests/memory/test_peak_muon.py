"""What Muon's update allocates beside all that stays, from the allocator of a rank, beside zerox.estimate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zerox
from bench.allocator import Allocator, build
from tests.lingering import await_lingering
from tests.ranks import run_ranks
from zerox import FusedShardedMuon
from zerox.update import matrices
from zerox.update.matrices import PIECE_BYTES

PIECE = 2**14  # a sixteenth of what it is, and so are matrices: a CPU without instructions for bfloat16 takes its time
NUMEL = 16 * PIECE
WITHIN = 0.1
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (64, NUMEL // 64),
    "square": (512, NUMEL // 512),
    "tall": (NUMEL // 128, 128),
    "stack": (16, 64, NUMEL // 1024),
}


def measure(
    _: int,
    world_size: int,
    library: Path,
    shape: Sequence[int],
    dtype: torch.dtype,
    clip: bool,
    options: dict[str, Any],
) -> tuple[int, int, int, int]:
    """The most bytes in step(), beside what was there before it, and in a whole step: each beside what is said."""
    allocator = Allocator(library)
    await_lingering()
    base = allocator.now
    param = nn.Parameter(torch.full(shape, 0.01, dtype=dtype))
    group = {"params": [("x", param)], "ns_steps": 2}
    optimizer = FusedShardedMuon([group], lr=0.1, **options)

    def step() -> int:
        param.sum().backward()
        if clip:
            optimizer.clip_grad_value_(0.5)
        before = allocator.now
        most = allocator.peak_of(optimizer.step) - before
        optimizer.zero_grad()
        return most

    with patch.object(matrices, "PIECE", PIECE):
        step()
        in_step = step()
        param.sum().backward()
        before = allocator.now
        formula = zerox.estimate([group], world_size, rule="muon", **options)
        return (
            in_step,
            matrices.most_bytes([(shape, param.stride(), group)], True),
            before + in_step - base,
            formula.peak,
        )


BFLOAT16, FLOAT = torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("shape", "dtype", "clip", "options"),
    [
        ("wide", BFLOAT16, False, {}),
        ("square", BFLOAT16, False, {}),
        ("tall", BFLOAT16, False, {"state_dtype": "8bit"}),
        ("wide", BFLOAT16, True, {"master_weights": "fp32", "state_dtype": BFLOAT16}),
        ("tall", FLOAT, True, {}),
    ],
    ids=str,
)
def test_step_allocates_what_newton_schulz_needs(
    shape: str, dtype: torch.dtype, clip: bool, options: dict[str, Any]
) -> None:
    """The matrix, its next value and a product; nothing of 4 bytes an element."""
    [(in_step, update, peak, said)] = run_ranks(measure, 1, build(), SHAPES[shape], dtype, clip, options)
    rows, columns = SHAPES[shape]
    assert update == 2 * (2 * NUMEL + min(rows, columns) ** 2)
    assert abs(in_step - update) <= WITHIN * update, f"{in_step:,} and not {update:,} bytes"
    assert abs(peak - said) <= WITHIN * said, f"{peak:,} and not {said:,} bytes"


def test_a_stack_takes_what_one_of_its_matrices_takes() -> None:
    [(in_step, update, _, _)] = run_ranks(measure, 1, build(), SHAPES["stack"], BFLOAT16, False, {})
    assert update == (2 + PIECE_BYTES) * NUMEL // 16
    assert 0.5 * update < in_step <= (1 + WITHIN) * update
