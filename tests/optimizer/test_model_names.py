"""Errors call parameters as the model does, also where the optimizer was given bare tensors."""

from __future__ import annotations

import copy
import gc
import re
from unittest.mock import Mock

import pytest
import torch
from torch import nn

from zerox import FusedShardedAdam
from zerox.model_names import all_quoted, quoted


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


def test_many_are_looked_up_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    model, alone = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    look = Mock(side_effect=gc.get_objects)
    monkeypatch.setattr(gc, "get_objects", look)
    named = [("param 0", model.weight), ("param 1", model.bias), ("mine", model.bias), ("param 2", alone)]
    found = all_quoted([*named, ("param 3", None)])
    assert found[:2] == ["'param 0' ('weight' in the model)", "'param 1' ('bias' in the model)"]
    assert found[2:] == ["'mine'", "'param 2'", "'param 3'"]
    look.assert_called_once()
    assert all_quoted([("mine", model.bias)]) == ["'mine'"]
    look.assert_called_once()


def test_a_model_that_is_half_built_is_passed_over() -> None:
    broken = nn.Module.__new__(nn.Module)  # without __init__()
    model = nn.Linear(2, 2)
    assert quoted("param 0", model.weight) == "'param 0' ('weight' in the model)"
    del broken
