"""update_rows_ says which argument does not fit. What it computes: tests/gpu/test_kernel_rows.py."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from zerox import ops

ADAM = [0.1, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0, 0.0]


def arguments() -> dict[str, Any]:
    return {
        "rule": "adam",
        "values": torch.ones(5, 4),
        "master": None,
        "grads": torch.ones(2, 4),
        "states": [torch.zeros(5, 4), torch.zeros(5, 4)],
        "step": torch.tensor(0),
        "rows": torch.tensor([0, 1]),
        "places": torch.tensor([1, 0]),
        "options": ADAM,
    }


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rule": "muon"}, "`rule` must be adam, sgd, lion, got muon"),
        ({"values": torch.ones(5, 4).double()}, "`values` must not be float64"),
        ({"values": torch.ones(4, 5).t()}, "`values` must be contiguous"),
        ({"values": torch.ones(20)}, "`values` must have 2 dimensions, got 1"),
        ({"master": torch.zeros(5, 4)}, "`master` must be float32 beside a 16-bit parameter"),
        (
            {"values": torch.ones(5, 4).bfloat16(), "master": torch.zeros(5, 3, dtype=torch.int16)},
            "`master` must have rows of 4, got shape [5, 3]",
        ),
        ({"grads": torch.ones(1, 4)}, "`grads` must have 8 elements, got 4"),
        ({"states": [torch.zeros(5, 4)]}, "`states` must be 2 under these options of adam, got 1"),
        ({"states": [torch.zeros(5, 4), torch.zeros(5, 4).double()]}, "`states` must be Float, got Double"),
        ({"step": torch.tensor(0, dtype=torch.int32)}, "`step` must be Long"),
        ({"rows": torch.tensor([0, 1], dtype=torch.int32)}, "`rows` must be Long"),
        ({"places": torch.tensor([0])}, "`places` must have 2 elements, got 1"),
        ({"options": ADAM[:3]}, "`options` must be 8 for adam, got 3"),
    ],
)
def test_arguments_that_do_not_fit_are_named(wrong: dict[str, Any], message: str) -> None:
    given = {**arguments(), **wrong}
    before = given["values"].clone()
    with pytest.raises(ValueError, match=re.escape(f"zerox::update_rows_: {message}")):
        ops.update_rows_(**given)
    assert torch.equal(given["values"], before)
    assert int(given["step"]) == 0


def test_arguments_that_fit_are_taken() -> None:
    given = arguments()
    ops.update_rows_(**given)
    assert int(given["step"]) == 1
    assert (given["values"] != 1.0).any(1).tolist() == [True, True, False, False, False]
