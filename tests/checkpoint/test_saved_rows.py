"""The table of how state comes from a checkpoint: what was saved as it is stored is read into its place."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from zerox.checkpoint.entries import entries
from zerox.checkpoint.saved_param import SavedParam
from zerox.checkpoint.saved_rows import Move, SavedRows
from zerox.engine import Engine


def build(dtype: torch.dtype, options: dict[str, Any]) -> Engine:
    # more than the 4,096 elements under which 8 bits are not worth it
    return zerox.FusedShardedAdam([("w", nn.Parameter(torch.ones(70, 100, dtype=dtype)))], **options)


def saved_of(optimizer: Engine, without: tuple[str, ...] = (), order: tuple[int, ...] = ()) -> SavedParam:
    """As the metadata of its checkpoint say."""
    found = entries(optimizer, {0: "w"})
    saved: Any = {
        name: SimpleNamespace(size=tensor.shape, properties=SimpleNamespace(dtype=tensor.dtype))
        for name, tensor in found.items()
        if name.rpartition(".")[2] not in without
    }
    return SavedParam("w", saved, optimizer.param_groups[0], list(order))


def moves(then: SavedParam, now: Engine) -> dict[str, Move]:
    [bucket] = now.inside.buckets
    [row] = SavedRows(bucket, {0: then}).rows
    return dict(row.moves)


MOMENTS = ("exp_avg", "exp_avg_sq")
SCALES = ("exp_avg_scale", "exp_avg_sq_scale")
BITS = {"state_dtype": "8bit"}
FP32 = {"master_weights": "fp32"}
NONE = {"master_weights": None}


@pytest.mark.parametrize("options", [{}, BITS, {"state_dtype": torch.bfloat16}, {"amsgrad": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_all_is_read_into_its_place_if_it_was_saved_alike(dtype: torch.dtype, options: dict[str, Any]) -> None:
    optimizer = build(dtype, options)
    found = moves(saved_of(optimizer), optimizer)
    assert set(found.values()) == {Move.IN_PLACE}
    assert saved_of(optimizer).has("exp_avg_scale") == (options is BITS)
    assert {saved_of(optimizer).key(key) for key in found} == {*saved_of(optimizer).saved}


def test_another_form_is_converted_with_its_scales() -> None:
    coded, wide = build(torch.float32, BITS), build(torch.float32, {})
    assert moves(saved_of(coded), wide) == {
        "step": Move.IN_PLACE,
        **dict.fromkeys((*MOMENTS, *SCALES), Move.CONVERTED),
    }
    assert moves(saved_of(wide), coded) == {
        "step": Move.IN_PLACE,
        **dict.fromkeys(MOMENTS, Move.CONVERTED),
    }


def test_codes_in_other_blocks_are_converted() -> None:
    coded = build(torch.float32, BITS)
    found = moves(saved_of(coded, order=(1, 0)), coded)
    assert {key for key, move in found.items() if move is Move.CONVERTED} == {*MOMENTS, *SCALES}
    wide = build(torch.float32, {})
    assert set(moves(saved_of(wide, order=(1, 0)), wide).values()) == {Move.IN_PLACE}, "numbers have no blocks"


def test_state_of_an_option_begins_anew_and_other_state_stays() -> None:
    now = build(torch.float32, {"amsgrad": True})
    found = moves(saved_of(build(torch.float32, {}), without=("exp_avg",)), now)
    assert found["max_exp_avg_sq"] is Move.ANEW
    assert "exp_avg" not in found, "which is refused where it is needed"


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({}, {}, {"remainder": Move.IN_PLACE}),
        (FP32, {}, {"master": Move.CONVERTED}),
        ({}, FP32, {"remainder": Move.CONVERTED}),
        (NONE, {}, {"remainder": Move.FROM_PARAM}),
        (NONE, FP32, {"master": Move.FROM_PARAM}),
        ({}, NONE, {"remainder": Move.DROPPED}),
        (NONE, NONE, {}),
    ],
    ids=str,
)
def test_masters_come_in_any_form_or_from_the_parameter(
    then: dict[str, Any], now: dict[str, Any], expected: dict[str, Move]
) -> None:
    found = moves(saved_of(build(torch.bfloat16, then)), build(torch.bfloat16, now))
    assert {key: move for key, move in found.items() if key in ("master", "remainder")} == expected
