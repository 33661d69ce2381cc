"""The probe of a class at construction: what it refuses, by name, and what it leaves as it was."""

from __future__ import annotations

import functools
import random
import re
import warnings
from contextlib import nullcontext
from typing import Any

import numpy
import pytest
import torch
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

import zerox
from tests.local_optimizers import classes
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer, estimate
from zerox.rules import local_optimizer

DIFFERS = r"is not elementwise: after \d+ steps its .* differ"
# The class, its options, and what the error says beside its name.
REFUSED: dict[str, tuple[Any, dict[str, Any], str]] = {
    "LAMB": (classes.Lamb, {}, DIFFERS),
    "LARS": (classes.Lars, {}, DIFFERS),
    "Adafactor": (torch.optim.Adafactor, {}, DIFFERS),
    "Prodigy": (classes.Prodigy, {}, DIFFERS),
    "Muon": (torch.optim.Muon, {}, "raised ValueError for small tensors.*2D"),
    "LBFGS": (torch.optim.LBFGS, {}, "searches along one direction"),
    "SparseAdam": (torch.optim.SparseAdam, {}, "for sparse gradients"),
    "AdamW that clips": (classes.ClippingAdamW, {}, DIFFERS),
    "random rounding": (classes.RandomRounding, {}, DIFFERS),
    "one draw a step": (classes.OneDrawAStep, {}, DIFFERS),
    "decay of matrices": (classes.DecayOfMatrices, {}, DIFFERS),
    "clips on request": (classes.ClippingOnRequest, {"clip": 1.0}, DIFFERS),
    "a sum in the group": (classes.SumInGroup, {}, DIFFERS),
    "sums of rows": (classes.RowSums, {}, r"keeps 'rows' of shape .*can be sharded"),
    "a list": (classes.History, {}, "keeps 'history', a list: only tensors and numbers"),
    "global state": (classes.GlobalState, {}, "keeps state under 'everything', which is no parameter"),
    "another step": (classes.NoCount, {}, "keeps 'step', which is 2 after 1 updates"),
    "a key of zerox's": (classes.OwnMaster, {}, "keeps state under the key 'master'"),
    "needs a closure": (classes.NeedsClosure, {}, "raised TypeError for small tensors"),
    "capturable": (torch.optim.Adam, {"capturable": True}, "ShardedOptimizer does not go with capturable=True"),
    "differentiable": (torch.optim.SGD, {"differentiable": True}, "differentiable=True: zerox updates"),
    "an option of zerox's": (torch.optim.SGD, {"state_dtype": "8bit"}, "ShardedOptimizer does not go with state_dtype"),
    "elementwise=False": (torch.optim.SGD, {"elementwise": False}, "elementwise must be None"),
    "zerox's own": (FusedShardedAdam, {}, "must not be FusedShardedAdam, which shards by itself"),
}
UNNAMED = ("capturable", "differentiable", "an option of zerox's", "elementwise=False")


def params_of(dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(300, 20, dtype=dtype)), nn.Parameter(torch.ones(7, dtype=dtype))]


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_not_elementwise_is_refused_by_name_and_nothing_has_changed(case: str) -> None:
    cls, options, says = REFUSED[case]
    params = params_of()
    before = [param.data_ptr() for param in params]
    states = torch.get_rng_state(), random.getstate(), numpy.random.get_state()[1].tolist()  # type: ignore[index]
    with pytest.raises(ValueError, match=rf"(?s){says}") as raised:
        ShardedOptimizer(params, cls, **options)
    assert cls.__name__ in str(raised.value) or case in UNNAMED
    assert [param.data_ptr() for param in params] == before
    assert torch.equal(torch.get_rng_state(), states[0])
    assert (random.getstate(), numpy.random.get_state()[1].tolist()) == states[1:]  # type: ignore[index]
    if case != "zerox's own":
        with pytest.raises(ValueError, match=rf"(?s){says}"):
            estimate(params, 2, optimizer_class=cls, **options)


def test_the_error_of_the_class_is_the_cause() -> None:
    with pytest.raises(ValueError, match="Muon") as raised:
        ShardedOptimizer(params_of(), torch.optim.Muon)
    assert isinstance(raised.value.__cause__, ValueError)


@pytest.mark.parametrize(
    "given",
    ["SGD", torch.optim.SGD([nn.Parameter(torch.ones(1))]), functools.partial(torch.optim.SGD, lr=0.1), nn.Linear],
)
def test_what_is_no_optimizer_class_is_a_type_error(given: Any) -> None:
    with pytest.raises(TypeError, match="optimizer_class must be a class of torch"):
        ShardedOptimizer(params_of(), given)


@pytest.mark.parametrize(
    ("options", "error", "says"),
    [
        ({"lr": -1.0}, ValueError, "Invalid learning rate: -1"),
        ({"momentum": -1.0}, ValueError, "Invalid momentum value"),
        ({"nesterov": True}, ValueError, "Nesterov momentum requires"),
        ({"betas": (0.9, 0.9)}, TypeError, "unexpected keyword argument 'betas'"),
        ({"fused": True, "foreach": True}, RuntimeError, "cannot be `True` together"),
    ],
)
def test_what_the_class_says_of_its_options_comes_through(options: Any, error: Any, says: str) -> None:
    with pytest.raises(error, match=says):
        ShardedOptimizer(params_of(), torch.optim.SGD, **options)


@pytest.mark.parametrize("name", ["LAMB", "random rounding", "AdamW that clips"])
def test_elementwise_true_takes_what_the_user_answers_for(name: str) -> None:
    params = params_of()
    ours = ShardedOptimizer(params, REFUSED[name][0], elementwise=True)
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()
    assert all((param != 1).any() for param in params)
    with pytest.raises(ValueError, match="keeps 'rows' of shape"):
        ShardedOptimizer(params_of(), classes.RowSums, elementwise=True)


def test_elementwise_true_warns_once_of_a_class_that_differs() -> None:
    local_optimizer._warned.clear()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for cls in (classes.Lamb, classes.Lamb, torch.optim.SGD):
            ShardedOptimizer(params_of(), cls, elementwise=True)
    found = [str(each.message) for each in said if "elementwise" in str(each.message)]
    assert len(found) == 1
    assert re.search(rf"Lamb {DIFFERS}.*depend on the number of ranks and on bucket_cap_mb", found[0])


def test_options_may_come_by_position() -> None:
    """As moco-v3 makes its LARS."""
    [group] = ShardedOptimizer(params_of(), torch.optim.SGD, 0.5, 0.9, weight_decay=0.1).param_groups
    assert (group["lr"], group["momentum"], group["weight_decay"]) == (0.5, 0.9, 0.1)
    [twin] = ShardedOptimizer(params_of(), torch.optim.SGD, lr=0.5, momentum=0.9, weight_decay=0.1).param_groups
    assert {**group, "params": 0} == {**twin, "params": 0}
    with pytest.raises(TypeError, match=r"SGD got multiple values for argument 'momentum'"):
        ShardedOptimizer(params_of(), torch.optim.SGD, 0.5, 0.9, momentum=0.1)
    with pytest.raises(TypeError, match="takes lr, momentum, dampening, weight_decay, nesterov by position"):
        ShardedOptimizer(params_of(), torch.optim.SGD, *range(6))
    with pytest.raises(ValueError, match="Invalid learning rate"):
        ShardedOptimizer(params_of(), torch.optim.SGD, -1.0)
    with pytest.raises(TypeError, match="optimizer_class must be a class"):
        ShardedOptimizer(params_of(), torch.optim.SGD(params_of()), 0.1)  # type: ignore[arg-type]


def a_tensor(value: float) -> Tensor:
    return torch.tensor(value)


@pytest.mark.parametrize("lr", [0.0, 1e-30, a_tensor(0.0)], ids=str)
def test_a_rate_of_zero_blinds_nobody(lr: Any) -> None:
    """Many schedules begin with it."""
    with pytest.raises(ValueError, match=DIFFERS):
        ShardedOptimizer(params_of(), classes.Lamb, lr=lr)  # whose state alone is elementwise
    ours = ShardedOptimizer(params_of(), torch.optim.SGD, lr=lr, momentum=0.9)
    assert float(ours.param_groups[0]["lr"]) == float(lr)


def test_it_is_tried_in_the_dtype_in_which_it_will_work() -> None:
    ShardedOptimizer(params_of(torch.bfloat16), classes.NormIn16Bits)  # on float32 masters
    with pytest.raises(ValueError, match=DIFFERS):
        ShardedOptimizer(params_of(torch.bfloat16), classes.NormIn16Bits, master_weights=None)


@pytest.mark.parametrize("cls", [torch.optim.SGD, torch.optim.AdamW, classes.Lamb])
def test_it_takes_few_steps_of_few_elements(cls: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of models of any size: 50 steps of a class that it takes, and 72 of one whose refusal says what would help."""
    step, taken = cls.step, []

    def counted(optimizer: Any, *given: Any, **named: Any) -> Any:
        taken.append(sum(param.numel() for group in optimizer.param_groups for param in group["params"]))
        return step(optimizer, *given, **named)

    monkeypatch.setattr(cls, "step", counted)
    params = [nn.Parameter(torch.ones(3000, 200)), nn.Parameter(torch.ones(70))]
    with nullcontext() if cls is not classes.Lamb else pytest.raises(ValueError, match=DIFFERS):
        ShardedOptimizer(params, cls)
    assert 10 < len(taken) < 80
    assert max(taken) < 2000


# ---- options that decide, also later


def test_an_option_is_tried_where_a_group_has_it() -> None:
    first, second = params_of()
    with pytest.raises(ValueError, match=DIFFERS):
        ShardedOptimizer(
            [{"params": [first], "clip": 0.0}, {"params": [second], "clip": 1.0}], classes.ClippingOnRequest
        )
    ours = ShardedOptimizer([first], classes.ClippingOnRequest)
    with pytest.raises(ValueError, match=DIFFERS):
        ours.add_param_group({"params": [second], "clip": 1.0})
    assert len(ours.param_groups) == 1
    with pytest.raises(ValueError, match="rule must be one of"):
        ours.add_param_group({"params": [second], "rule": "adam"})
    for name, value in (("capturable", True), ("differentiable", True)):
        with pytest.raises(ValueError, match=name):
            ours.add_param_group({"params": [second], name: value})


def turned_on_later(rank: int, world_size: int) -> tuple[str, bool]:
    params = params_of()
    ours = ShardedOptimizer(params, classes.ClippingOnRequest)
    before = [param.detach().clone() for param in params]
    ours.param_groups[0]["clip"] = 1.0
    try:
        ours.step()
    except ValueError as error:
        return str(error), all(map(torch.equal, before, params))
    return "", False


def test_an_option_that_is_turned_on_later_is_tried_then() -> None:
    for said, unchanged in run_ranks(turned_on_later, 2):
        assert "ClippingOnRequest can't be sharded: it is not elementwise" in said
        assert unchanged


def other_classes(rank: int, world_size: int) -> str:
    cls: Any = torch.optim.AdamW if rank else torch.optim.Adam
    try:
        ShardedOptimizer(params_of(), cls)
    except ValueError as error:
        return str(error)
    return ""


def test_ranks_with_other_classes_are_told() -> None:
    for said in run_ranks(other_classes, 2):
        assert "rank 0 has optimizer_class='torch.optim.adam.Adam'" in said
        assert "rank 1 has optimizer_class='torch.optim.adamw.AdamW'" in said


# ---- hooks


def test_hooks_on_all_optimizers_run_once_around_the_step_and_never_in_a_probe() -> None:
    seen: list[Any] = []
    handle = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer))
    try:
        params = params_of()
        ours = ShardedOptimizer(params, torch.optim.AdamW, bucket_cap_mb=1e-6)
        assert len(ours.inside.buckets) == 2
        assert seen == []
        for param in params:
            param.grad = torch.ones_like(param)
        ours.step()
        assert seen == [ours]
    finally:
        handle.remove()


def test_a_class_that_changes_its_ways_is_named() -> None:
    param = nn.Parameter(torch.ones(300))
    ours = ShardedOptimizer([param], classes.LateKey)
    param.grad = torch.ones(300)
    for _ in range(14):
        ours.step()
    with pytest.raises(RuntimeError, match="LateKey began to keep 'late'"):
        ours.step()


def test_the_estimate_is_what_the_class_takes() -> None:
    for cls, options, moments in (
        (torch.optim.SGD, {"lr": 0.1}, 0),
        (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}, 4),
        (torch.optim.RMSprop, {"centered": True, "momentum": 0.9}, 12),
        (classes.NarrowState, {}, 2),
    ):
        params = [nn.Parameter(torch.ones(2**16))]
        said = estimate(params, 1, optimizer_class=cls, **options)
        ours = ShardedOptimizer(params, cls, **options)
        assert said.moments == ours.memory_bytes().moments == moments * 2**16
    said = estimate(
        [nn.Parameter(torch.ones(2**16, dtype=torch.bfloat16, device="meta"))], 4, optimizer_class=zerox_sgd()
    )
    assert (said.master, said.moments) == (2**16, 0)


def zerox_sgd() -> Any:
    assert "ShardedOptimizer" in zerox.__all__
    return torch.optim.SGD
