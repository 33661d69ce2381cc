"""Ops as torch sees them: schemas and fakes, refusals, threads and instruction sets."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.kernels.rule import VARIANTS
from tests.kernels.shards import Shard, options_table, same_bits, segments_of
from tests.kernels.update_arguments import REFUSED_UPDATES, byte, coded, update_arguments
from zerox import _C, ops
from zerox.rules.lion import LION
from zerox.rules.sgd import SGD


def limbs() -> Tensor:
    return torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64)


PIECES = torch.tensor([[0, 0, 0, 8]])
CALLS: dict[str, Callable[[], tuple[Any, ...]]] = {
    "flatten_": lambda: (torch.empty(16), [torch.ones(8)], PIECES, torch.tensor([15])),
    "read_flags_": lambda: (byte(), byte(), [torch.zeros(10)], 8),
    "reduce_": lambda: (torch.empty(8), limbs(), [torch.ones(10)], segments_of(8), byte(), 1, False),
    "norm_": lambda: (limbs(), torch.ones(8), segments_of(8), 2.0),
    "norm_ under a mask": lambda: (limbs(), torch.ones(8), segments_of(8), 2.0, byte(5)),
    "norm_value": lambda: (limbs(), 2.0),
    "update_": update_arguments,
    "update_ in 8 bits": coded,
    "update_ of two": lambda: update_arguments(2),
    "update_ under masks": lambda: update_arguments(2, masks=[byte(12), byte(0)]),
    "update_ by sgd": lambda: update_arguments(rule=SGD),
    "update_ by sgd without a state": lambda: update_arguments(
        rule=SGD, state=[], options=options_table(SGD, momentum=0.0)
    ),
    "update_ by lion": lambda: update_arguments(rule=LION),
}


@pytest.mark.parametrize("name", CALLS)
def test_torch_s_own_check_of_schema_and_fake_passes(name: str) -> None:
    op = getattr(torch.ops.zerox, name.split()[0]).default
    torch.library.opcheck(op, CALLS[name](), test_utils=("test_schema", "test_faketensor"))


REFUSED: dict[str, tuple[str, Callable[[], tuple[Any, ...]], str]] = {
    "flat of integers": ("flatten_", lambda: (torch.zeros(8).int(), [], PIECES[:0], limbs()[:0]), "`flat` must be"),
    "pieces that overlap": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[0, 0, 0, 8], [0, 0, 7, 2]]), limbs()[:0]),
        "`pieces` row 1",
    ),
    "pieces past the source": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[0, 1, 0, 8]]), limbs()[:0]),
        "`pieces` row 0",
    ),
    "pieces before the source": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[0, -1, 0, 8]]), limbs()[:0]),
        "`pieces` row 0",
    ),
    "pieces of a source that is not there": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[1, 0, 0, 8]]), limbs()[:0]),
        "`pieces` row 0",
    ),
    "pieces of less than nothing": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[0, 0, 4, -3]]), limbs()[:0]),
        "`pieces` row 0",
    ),
    "pieces past flat": (
        "flatten_",
        lambda: (torch.empty(16), [torch.ones(8)], torch.tensor([[0, 0, 9, 8]]), limbs()[:0]),
        "`pieces` row 0",
    ),
    "pieces of three columns": (
        "flatten_",
        lambda: (torch.empty(16), [], PIECES[:, :3], limbs()[:0]),
        "`pieces` must be",
    ),
    "flat with gaps": (
        "flatten_",
        lambda: (torch.empty(16)[::2], [], PIECES[:0], limbs()[:0]),
        "`flat` must be contig",
    ),
    "flags with gaps": ("flatten_", lambda: (torch.empty(16), [], PIECES[:0], limbs()[::2]), "`flags` must be contig"),
    "a flag outside": (
        "flatten_",
        lambda: (torch.empty(16), [], PIECES[:0], torch.tensor([16])),
        "`flags` must lie",
    ),
    "short slices": (
        "read_flags_",
        lambda: (byte(2), byte(2), [torch.zeros(9)], 8),
        "`slices` must have 12 elements, got 9",
    ),
    "slices with gaps": (
        "read_flags_",
        lambda: (byte(), byte(), [torch.zeros(20)[::2]], 8),
        "`slices` must be contiguous",
    ),
    "a negative shard": ("read_flags_", lambda: (byte(), byte(), [torch.zeros(10)], -1), "`shard_numel` must not be"),
    "flags of floats": ("read_flags_", lambda: (torch.ones(1), byte(), [torch.zeros(10)], 8), "`present` must be Byte"),
    "fewer replaced than present": ("read_flags_", lambda: (byte(2), byte(), [], 8), "`replaced` must have 2"),
    "no slices": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [], segments_of(8), byte(), 1, False),
        "`slices` must not be empty",
    ),
    "short slices to add": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [torch.ones(7)], segments_of(8), byte(), 1, False),
        "`slices` must have 8 elements, got 7",
    ),
    "slices with gaps to add": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [torch.ones(16)[::2]], segments_of(8), byte(), 1, False),
        "`slices` must be contiguous",
    ),
    "replaced flags with gaps": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [torch.ones(8)], segments_of(4, 4), byte(4)[::2], 1, False),
        "`replaced` must be contiguous",
    ),
    "slices of another dtype": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [torch.ones(8).half()], segments_of(8), byte(), 1, False),
        "`slices` must be Float, got Half",
    ),
    "no divisor": (
        "reduce_",
        lambda: (torch.empty(8), limbs(), [torch.ones(8)], segments_of(8), byte(), 0, False),
        "`divisor` must be positive, got 0",
    ),
    "segments past the shard": ("norm_", lambda: (limbs(), torch.ones(8), segments_of(9), 2.0), "`segments` row 0"),
    "segments that overlap": (
        "norm_",
        lambda: (limbs(), torch.ones(8), torch.tensor([[0, 5, 0, 0, 0], [4, 8, 0, 1, 0]]), 2.0),
        "`segments` row 1 is [4, 8), which does not lie in [5, 8)",
    ),
    "segments of two columns": ("norm_", lambda: (limbs(), torch.ones(8), PIECES[:, :2], 2.0), "`segments` must be"),
    "a shard with gaps": (
        "norm_",
        lambda: (limbs(), torch.ones(16)[::2], segments_of(8), 2.0),
        "`shard` must be contig",
    ),
    "limbs with gaps": (
        "norm_",
        lambda: (torch.zeros(2 * ops.EXACT_LIMBS, dtype=torch.int64)[::2], torch.ones(8), segments_of(8), 2.0),
        "`limbs` must be contiguous",
    ),
    "the value of order 0": ("norm_value", lambda: (limbs(), 0.0), "`p` must be positive, got 0"),
    "norm of order 0": ("norm_", lambda: (limbs(), torch.ones(8), segments_of(8), 0.0), "`p` must be positive, got 0"),
    "few limbs": ("norm_value", lambda: (limbs()[:5], 2.0), "`limbs` must have"),
    **REFUSED_UPDATES,
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_wrong_argument_is_a_value_error_that_names_op_and_argument(case: str) -> None:
    name, arguments, message = REFUSED[case]
    with pytest.raises(ValueError, match=re.escape(message)) as error:
        getattr(torch.ops.zerox, name)(*arguments())
    assert str(error.value).startswith(f"zerox::{name}: `")


def test_a_refused_update_counts_no_step() -> None:
    steps = torch.zeros(2, dtype=torch.int64)
    arguments = update_arguments(
        segments=torch.tensor([[0, 32, 0, 0, 0], [32, 64, 7, 1, 0]]), present=byte(2), steps=steps
    )
    with pytest.raises(ValueError, match="names options 7 of 1"):
        torch.ops.zerox.update_(*arguments)
    assert steps.tolist() == [0, 0]


def test_a_refused_packing_writes_nothing() -> None:
    flat = torch.full((16,), 3.0)
    with pytest.raises(ValueError, match="`flags` must lie"):
        ops.flatten_(flat, [torch.ones(8)], PIECES, torch.tensor([0, 16]))
    assert torch.equal(flat, torch.full((16,), 3.0))


def everything(dtype: torch.dtype) -> list[Tensor]:
    """The results of all kernels on shards large enough for several threads."""
    segments = segments_of(100_000, 17, 70_001, gap=5)
    numel = int(segments[-1, 1])
    shards = [Shard(numel, dtype, segments=segments, rule=rule, config=config) for rule, config in VARIANTS]
    shard = shards[0]
    flat = torch.empty(numel + 100, dtype=torch.bfloat16)
    ops.flatten_(flat, [shard.grad], torch.tensor([[0, 0, 50, numel]]), torch.tensor([3]))
    reduced, sums, norm = torch.empty_like(shard.grad), limbs(), limbs()
    ops.reduce_(reduced, sums, [shard.grad, shard.grad * 2], segments, byte(3) * 0, 2, False)
    ops.norm_(norm, shard.grad, segments, 1.0)
    for each in shards:
        each.update(grad_scale=0.5)
    return [flat, reduced, sums, norm, *(tensor for each in shards for tensor in each.tensors())]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_threads_and_instruction_sets_change_no_bit(dtype: torch.dtype) -> None:
    threads = torch.get_num_threads()
    expected = everything(dtype)
    try:
        for isa in _C.supported_isas():
            for count in (1, 2, 5):
                _C.select_isa(isa)
                torch.set_num_threads(count)
                for got, want in zip(everything(dtype), expected, strict=True):
                    assert same_bits(got, want), (isa, count)
    finally:
        _C.select_isa("")
        torch.set_num_threads(threads)


def test_an_unknown_instruction_set_is_refused_and_changes_nothing() -> None:
    before = _C.isa()
    with pytest.raises(ValueError, match="ZEROX_ISA=sse9"):
        _C.select_isa("sse9")
    assert _C.isa() == before
