"""Parameters, state and norms are the same bits however buckets, stages and overlap are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.optimizer.models import train
from tests.ranks import run_ranks
from zerox import _C

DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
TINY, SMALL, WHOLE = 1e-6, 0.03, 64.0


def train_rank(rank: int, world_size: int, options: dict[str, Any], isa: str = "") -> Any:
    _C.select_isa(isa)
    try:
        params, state, norms = train(rank, **options)
    finally:
        _C.select_isa("")
    return params, _state_by_element(state), norms


def _state_by_element(state: list[dict[str, torch.Tensor]]) -> dict[str, torch.Tensor]:
    """A sum over this rank's state that doesn't depend on how it is cut: the multiset of its values, as bits."""
    out: dict[str, torch.Tensor] = {}
    for key in sorted({key for each in state for key in each}):
        out[key] = torch.cat([each[key].reshape(-1) for each in state if key in each])
    return out


def everyones_state(results: list[Any]) -> dict[str, torch.Tensor]:
    """The ranks' state as one sorted list of values for each kind."""
    keys = results[0][1].keys()
    return {key: torch.cat([result[1][key] for result in results]).sort().values for key in keys if key != "step"}


def assert_same(results: list[Any], reference: list[Any]) -> None:
    for result in results:
        for got, expected in zip(result[0], reference[0][0], strict=True):
            assert torch.equal(got, expected)
        assert result[2] == reference[0][2]
    states, expected_states = everyones_state(results), everyones_state(reference)
    assert states.keys() == expected_states.keys()
    for key in states:
        assert torch.equal(states[key], expected_states[key]), key


@pytest.mark.parametrize("reduce_dtype", [None, torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_bucket_sizes_and_stages_don_t_show(world_size: int, dtype: torch.dtype, reduce_dtype: Any) -> None:
    common = {"dtype": dtype, "reduce_dtype": reduce_dtype, "clip": 0.1, "accumulate": 2}
    reference = run_ranks(train_rank, world_size, {**common, "stage": 2, "bucket_cap_mb": WHOLE})
    for stage, cap in ((2, TINY), (2, SMALL), (1, TINY), (1, WHOLE)):
        assert_same(run_ranks(train_rank, world_size, {**common, "stage": stage, "bucket_cap_mb": cap}), reference)


def test_overlap_and_repetition_don_t_show() -> None:
    options = {"clip": 0.1, "bucket_cap_mb": SMALL}
    reference = run_ranks(train_rank, 2, options)
    assert_same(run_ranks(train_rank, 2, {**options, "hold": True}), reference)
    assert_same(run_ranks(train_rank, 2, options), reference)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_instruction_sets_don_t_show(dtype: torch.dtype) -> None:
    options = {"clip": 0.1, "dtype": dtype, "bucket_cap_mb": SMALL}
    reference = run_ranks(train_rank, 2, options, "scalar")
    for isa in _C.supported_isas():
        assert_same(run_ranks(train_rank, 2, options, isa), reference)


def test_the_comparison_can_fail() -> None:
    reference = run_ranks(train_rank, 2, {"clip": 0.1})
    with pytest.raises(AssertionError):
        assert_same(run_ranks(train_rank, 2, {"clip": 0.1000001}), reference)
