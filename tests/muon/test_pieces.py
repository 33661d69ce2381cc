"""Arithmetic on elements takes a matrix piece by piece, and a parameter matrix by matrix: no bit shows it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from zerox import FusedShardedMuon, _torch
from zerox.plan.form import BLOCK_NUMEL
from zerox.plan.span import Span
from zerox.rules.muon import Matrix, in_runs, matrices_of
from zerox.update import matrices

# Of 8 bits where they have 4,096 elements or more.
SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (20, 36),
    "tall": (110, 40),
    "transposed": (48, 30),
    "row": (1, 1300),
    "long_rows": (2, 700),
    "blocks": (9, 16, 32),
    "no_blocks": (7, 20, 36),
    "transposed_stack": (3, 16, 16),
    "stack_inside": (4, 16, 8),
}
HEADS: dict[str, tuple[int, ...]] = {"heads": (64, 80), "transposed_heads": (32, 24), "heads_of_stack": (2, 32, 32)}
SIZES = (12, 16, 8)
KINDS: list[tuple[torch.dtype, dict[str, Any]]] = [
    (torch.float32, {}),
    (torch.float64, {}),
    (torch.float16, {"state_dtype": torch.bfloat16}),
    (torch.bfloat16, {"state_dtype": "8bit"}),
    (torch.bfloat16, {"master_weights": "fp32", "stage": 1}),
    (torch.bfloat16, {"master_weights": None}),
]


def made(name: str, shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    value = torch.randn(*shape, generator=torch.Generator().manual_seed(len(name))).to(dtype)
    if "transposed" in name:
        return value.mT.contiguous().mT
    return value.permute(1, 2, 0).contiguous().permute(2, 0, 1) if name == "stack_inside" else value


def train(dtype: torch.dtype, options: Mapping[str, Any]) -> list[Tensor]:
    """Three steps; the parameters and their state."""
    named = {
        name: nn.Parameter(made(name, shape, dtype)) for name, shape in {**SHAPES, **HEADS, "qkv": (36, 12)}.items()
    }
    groups: list[dict[str, Any]] = [
        {"params": [(name, named[name]) for name in SHAPES]},
        {"params": [(name, named[name]) for name in HEADS], "num_heads": 4},
        {"params": [("qkv", named["qkv"])], "split_sizes": SIZES},
    ]
    optimizer = FusedShardedMuon(groups, lr=0.03, **options)
    for number in range(3):
        for index, param in enumerate(named.values()):
            drawn = torch.randn(param.shape, generator=torch.Generator().manual_seed(100 * number + index))
            (param * drawn.to(dtype)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        if number == 1:
            optimizer.clip_grad_value_(0.01)
        optimizer.step()
        optimizer.zero_grad()
    state = [stored.tensors() for bucket in optimizer.inside.buckets for stored in bucket.state.values()]
    return [*(param.detach() for param in named.values()), *(each for tensors in state for each in tensors.values())]


def at_once(
    shape: Sequence[int], strides: Sequence[int], group: Mapping[str, Any]
) -> Iterator[tuple[Span, list[Matrix]]]:
    yield Span(0, torch.Size(shape).numel()), matrices_of(shape, group)


@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
def test_pieces_have_the_bits_of_whole_parameters(dtype: torch.dtype, options: dict[str, Any]) -> None:
    with patch.object(matrices, "PIECE", BLOCK_NUMEL):
        by_piece = train(dtype, options)
    with patch.object(matrices, "in_runs", at_once):
        whole = train(dtype, options)
    for ours, theirs in zip(by_piece, whole, strict=True):
        assert same_bits(ours.contiguous(), theirs.contiguous())


@pytest.mark.parametrize(("dtype", "options"), KINDS, ids=str)
@pytest.mark.parametrize("most", [6 * BLOCK_NUMEL, 2**22])
def test_lists_of_matrices_have_the_bits_of_each_by_itself(
    most: int, dtype: torch.dtype, options: dict[str, Any]
) -> None:
    """As on an accelerator, where the matrices of many parameters go through one operator, in one piece or in some."""
    alone = train(dtype, options)
    with (
        patch.object(matrices, "_numel_at_once", lambda _: matrices.AT_ONCE),
        patch.object(matrices, "_piece_numel", lambda _: most),
        patch.object(_torch, "for_each", wraps=_torch.for_each) as for_each,
    ):
        together = train(dtype, options)
    assert max(len(call.args[1]) for call in for_each.call_args_list) > 3
    for ours, theirs in zip(together, alone, strict=True):
        assert same_bits(ours.contiguous(), theirs.contiguous())


@pytest.mark.parametrize(
    ("name", "count"), [("blocks", 9), ("no_blocks", 1), ("transposed_stack", 3), ("stack_inside", 1)]
)
def test_a_run_has_blocks_of_its_own(name: str, count: int) -> None:
    shape = SHAPES[name]
    runs = list(in_runs(shape, made(name, shape, torch.float32).stride(), {}))
    assert len(runs) == count
    assert [each for _, own in runs for each in own] == matrices_of(shape, {})
    assert (runs[0][0].start, runs[-1][0].stop) == (0, torch.Size(shape).numel())
    for (one, _), (other, _) in pairwise(runs):
        assert (one.stop, other.start % BLOCK_NUMEL) == (other.start, 0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, "8bit"], ids=str)
def test_momentum_of_few_bits_makes_no_tables_after_the_first_step(dtype: Any) -> None:
    """A list that becomes a tensor of an accelerator makes the host wait for it."""
    counts = []
    for state_dtype in (torch.float32, dtype):
        param = nn.Parameter(torch.ones(64, 64))  # 8 bits are for 4,096 elements or more
        optimizer = FusedShardedMuon([param], lr=0.1, state_dtype=state_dtype)
        for _ in range(2):
            param.grad = torch.ones_like(param)
            with patch.object(torch, "tensor", wraps=torch.tensor) as tables:
                optimizer.step()
        counts.append(tables.call_count)
    assert counts[0] == counts[1]


def test_a_matrix_is_cut_as_its_group_says_when_step_is_called() -> None:
    """An option that was changed between steps counts from the next one on."""
    found = []
    for late in (False, True):
        param = nn.Parameter(torch.linspace(-1, 1, 32 * 20).view(32, 20).clone())
        optimizer = FusedShardedMuon([{"params": [param], "num_heads": None if late else 4}], lr=0.1, momentum=0.0)
        for number in range(2):
            if late and number == 1:
                optimizer.param_groups[0]["num_heads"] = 4
                with torch.no_grad():
                    param.copy_(found[0])
            param.grad = torch.randn(32, 20, generator=torch.Generator().manual_seed(number))
            optimizer.step()
            found += [] if late else [param.detach().clone()]
    assert same_bits(param.detach(), found[1])
