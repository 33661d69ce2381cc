"""Errors call parameters as the model does, also where the optimizer was given bare tensors."""

from __future__ import annotations

import copy
import gc
import re
from collections.abc import Callable
from contextlib import nullcontext
from unittest.mock import Mock, patch

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.model_names import all_quoted, in_text, quote


def test_an_error_calls_an_unnamed_parameter_as_its_model_does() -> None:
    model = nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))})
    part = nn.Sequential(model["body"][1])  # type: ignore[index]
    optimizer = FusedShardedAdam([{"params": list(model.parameters())}])
    model["body"](torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match=re.escape("parameter 'param 2' ('body.1.weight' in the model) is kept")):
        model["body"][1].weight.grad.clone()  # type: ignore[index, union-attr]
    with pytest.raises(RuntimeError, match=re.escape("parameter 'param 0' ('body.0.weight' in the model) is kept")):
        torch._foreach_abs([param.grad for param in model.parameters()])
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
    assert quote("param 4", nn.Parameter(torch.ones(2))) == "'param 4'"
    assert quote("mine", model.bias) == "'mine'"
    assert quote("param 4", None) == "'param 4'"


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
    assert quote("param 0", model.weight) == "'param 0' ('weight' in the model)"
    del broken


def test_a_text_gets_the_model_s_names_once() -> None:
    model, alone = nn.Linear(2, 2), nn.Parameter(torch.ones(2))
    named = [("param 0", model.weight), ("param 1", alone), ("mine", model.bias)]
    text = "bucket 0 (param 0, param 1, mine) in param group 0: 'param 0', 'param 1', param 10"
    said = "bucket 0 (weight, param 1, mine) in param group 0: 'param 0' ('weight' in the model), 'param 1', param 10"
    assert in_text(text, named) == said
    assert in_text(said, named) == said


def model_of(rank: int, width: int = 2) -> nn.Module:
    return nn.ModuleDict({"body": nn.Sequential(nn.Linear(3, 3), nn.Linear(3, width))})


def disagrees(rank: int, stage: int) -> None:
    model = model_of(rank) if rank == 0 else nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 4))
    FusedShardedAdam(model.parameters(), stage=stage)


def wrapped(rank: int, stage: int) -> None:
    model = model_of(rank)
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    wrapper = DistributedDataParallel(model["body"])
    wrapper(torch.ones(1, 3)).sum().backward()
    optimizer.step()


def shared(rank: int, stage: int) -> None:
    model = model_of(rank)
    one, _ = FusedShardedAdam(model.parameters(), stage=stage), FusedShardedAdam(model.parameters(), stage=stage)
    model["body"](torch.ones(1, 3)).sum().backward()
    one.step()


def sparse(rank: int, stage: int) -> None:
    model = nn.ModuleDict({"table": nn.Embedding(4, 3, sparse=True)})
    optimizer = FusedShardedAdam(model.parameters(), stage=stage)
    model["table"](torch.tensor([1])).sum().backward()
    optimizer.step()


def sums(rank: int, stage: int) -> None:
    model = model_of(rank)
    _optimizer = FusedShardedAdam(model.parameters(), stage=2)
    model["body"](torch.ones(1, 3)).sum().backward()
    sum(param.grad.sum() for param in model.parameters() if param.grad is not None)


def asks_alone(rank: int, stage: int) -> None:
    model = model_of(rank)
    optimizer = FusedShardedAdam(model.parameters(), stage=2)
    model["body"](torch.ones(1, 3)).sum().backward()
    if rank == 0:
        model["body"][0].weight.grad.norm()
    optimizer.step()


# What a rank does wrong, and how the error has the parameter's name.
MISTAKES: list[tuple[Callable[[int, int], None], str]] = [
    (disagrees, r"ranks must agree: rank 0 has .*'body.1.weight' in the model.*; rank 1 has .*'1.weight' in the model"),
    (wrapped, r"parameter 'param 3' \('([a-z]+\.)*1.bias' in the model\) is reduced twice"),
    (shared, r"parameter 'param 3' \('body.1.bias' in the model\) is reduced twice"),
    (sparse, r"parameter 'param 0' \('table.weight' in the model\) got a sparse gradient"),
    (sums, r"'param 0' \('body.0.weight' in the model\) was sent .*clip_grad_value_\(\) to cut"),
    (asks_alone, r"norm\(\) of the gradient of parameter 'param 0'( \('body.0.weight' in the model\))?"),
]


def mistaken(rank: int, _: int, stage: int) -> list[str]:
    said = []
    for mistake, _ in MISTAKES:
        try:
            mistake(rank, stage)
            said.append("taken")
        except (ValueError, RuntimeError) as error:
            said.append(str(error))
        gc.collect()  # hooks of wrappers and optimizers go
    return said


@pytest.mark.parametrize("stage", [1, 2])
def test_an_error_on_ranks_says_zerox_and_the_model_s_names(stage: int) -> None:
    for found in run_ranks(mistaken, 2, stage):
        for said, (_, message) in zip(found, MISTAKES, strict=True):
            assert said.startswith("zerox: ")
            with pytest.raises(AssertionError, match=message):
                raise AssertionError(said)


def write_state(rank: int, world_size: int) -> None:
    params = [nn.Parameter(torch.ones(40)) for _ in range(3)]
    optimizer = FusedShardedAdam(params, lr=0.1)
    for step in range(3):
        for state in optimizer.state.values():
            state["exp_avg"] = state["exp_avg"] * 0.5
        torch.autograd.backward([p.sum() for p in params])
        with patch("zerox.model_names.gc.get_objects", side_effect=AssertionError) if step else nullcontext():
            optimizer.step()


def test_who_writes_state_waits_for_no_search_of_names() -> None:
    """They are for errors: with a thousand parameters it was a minute in each step."""
    run_ranks(write_state, 2)
