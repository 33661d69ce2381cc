"""Errors call parameters as the model does, also where the optimizer was given bare tensors."""

from __future__ import annotations

import copy
import re

import pytest
import torch
from torch import nn

from zerox import FusedShardedAdam
from zerox.model_names import quoted


def test_an_error_calls_an_unnamed_parameter_as_its_model_does() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))})
    part = nn.Sequential(model["body"][1])  # type: ignore[index]
    optimizer = FusedShardedAdam([{"params": list(model.parameters())}])
    model["body"](torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=re.escape("parameter 'param 2' ('body.1.weight' in the model) was sent")):
        model["body"][1].weight.grad.norm()  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match=re.escape("parameter 'param 0' ('body.0.weight' in the model) was sent")):
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    given = copy.deepcopy(optimizer.state_dict())
    given["state"][3]["exp_avg"] = torch.zeros(7)
    with pytest.raises(ValueError, match=re.escape("parameter 'param 3' ('body.1.bias' in the model) has 7 elements")):
        optimizer.load_state_dict(given)
    model["body"][0].bias.data = torch.zeros(3, dtype=torch.float64)  # type: ignore[index]
    with pytest.raises(RuntimeError, match=re.escape("parameter 'param 1' ('body.0.bias' in the model) is (3,) of")):
        optimizer.step()
    del part


def test_what_no_model_has_and_what_was_named_is_called_as_given() -> None:
    model = nn.Linear(2, 2)
    assert quoted("param 4", nn.Parameter(torch.ones(2))) == "'param 4'"
    assert quoted("mine", model.bias) == "'mine'"
    assert quoted("param 4", None) == "'param 4'"


def test_a_model_that_is_half_built_is_passed_over() -> None:
    broken = nn.Module.__new__(nn.Module)  # without __init__()
    model = nn.Linear(2, 2)
    assert quoted("param 0", model.weight) == "'param 0' ('weight' in the model)"
    del broken
