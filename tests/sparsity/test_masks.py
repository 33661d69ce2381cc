"""Masked trainings: the bits of one process that masks gradients, parameters and state, and masks by kthvalue."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.sparsity.trained import Case, train, twin
from tests.thinned import thinned

CUBIC = ("cubic", 1, 7, 3)
CASES = {
    "fp32": Case(schedule=CUBIC),
    "global": Case(schedule=CUBIC, scope="global", targets={"0.*": 0.5, "2.weight": 0.9, "4.bias": 0.5}),
    "bf16 and remainders": Case(dtype=torch.bfloat16, schedule=CUBIC),
    "bf16 and masters": Case(dtype=torch.bfloat16, schedule=CUBIC, options={"master_weights": "fp32"}),
    "bf16 alone": Case(dtype=torch.bfloat16, schedule=CUBIC, options={"master_weights": None}),
    "8 bits": Case(schedule=CUBIC, options={"state_dtype": "8bit"}),
    "bf16 state": Case(schedule=CUBIC, options={"state_dtype": torch.bfloat16}),
    "amsgrad": Case(schedule=CUBIC, options={"amsgrad": True}),
    "sgd": Case("sgd", schedule=CUBIC, options={"momentum": 0.9, "weight_decay": 0.1}),
    "lion": Case("lion", schedule=CUBIC, options={"weight_decay": 0.1}),
    "rigl": Case(schedule=("rigl", 0.3, 2, 8)),
    "set": Case(schedule=("set_", 0.3, 2, 8)),
    "2:4": Case(targets={"0.weight": 0.5, "4.weight": 0.5}, pattern=(2, 4)),
}


def same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert torch.equal(found[name], value), name


WORLDS = [(1, 2), (2, 1), (2, 2), (3, 3), (4, 2)]
FEW = ("global", "rigl")  # what is chosen over all parameters, and what grows again: ranks choose together


@pytest.mark.parametrize(("name", "ranks"), thinned(CASES, FEW, WORLDS, [(3, 3)]))
def test_it_trains_as_one_process_that_masks_by_itself(name: str, ranks: tuple[int, int]) -> None:
    world, stage = ranks
    case = CASES[name]
    found = run_ranks(train, world, case, stage)[0]
    expected = twin(case, found)
    assert found.norms == expected.norms
    for step, params in enumerate(expected.params):
        same(found.params[step], params)
    for name, state in expected.state.items():
        kept = found.state[name].pop("mask", None)
        assert (kept is not None) == (name in found.masks[-1])
        same(found.state[name], state)
