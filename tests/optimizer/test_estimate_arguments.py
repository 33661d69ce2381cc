"""estimate() refuses what the constructors refuse: a typing error must not give another training's bytes."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import fields
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from zerox.engine import Engine
from zerox.optimizer.given import OF_ALL
from zerox.options import OptimizerOptions
from zerox.rules.known import KNOWN, options_of

CLASSES: dict[str, Callable[..., Engine]] = {
    "adam": zerox.FusedShardedAdam,
    "sgd": zerox.FusedShardedSGD,
    "lion": zerox.FusedShardedLion,
    "muon": zerox.FusedShardedMuon,
}


def params() -> list[nn.Parameter]:
    return [nn.Parameter(torch.ones(8, 4)), nn.Parameter(torch.ones(2, 2), requires_grad=False)]


def raised(call: Callable[[], object]) -> Exception:
    with pytest.raises((TypeError, ValueError, RuntimeError)) as error:
        call()
    return error.value


@pytest.mark.parametrize("rule", KNOWN)
def test_it_knows_the_arguments_of_each_class(rule: str) -> None:
    taken = {*inspect.signature(CLASSES[rule]).parameters} - {"params"}
    known = {*options_of(rule), *(field.name for field in fields(OptimizerOptions)), *OF_ALL} - {"optimizer_class"}
    known -= {"capturable"} if rule == "muon" else set()  # which only refuses it
    assert known == taken
    defaults = {name: each.default for name, each in inspect.signature(CLASSES[rule]).parameters.items()}
    del defaults["params"]
    assert zerox.estimate(params(), 2, rule=rule, **defaults) == zerox.estimate(params(), 2, rule=rule)


@pytest.mark.parametrize("rule", KNOWN)
def test_an_unknown_name_is_refused_as_by_the_constructor(rule: str) -> None:
    said = raised(lambda: zerox.estimate(params(), 8, rule=rule, stgae=3))  # type: ignore[arg-type]
    assert isinstance(said, type(raised(lambda: CLASSES[rule](params(), stgae=3))))
    assert str(said) == (
        "zerox.estimate() got an unexpected keyword argument 'stgae', which the optimizer of "
        f"rule=\"{rule}\" does not take: did you mean 'stage'?"
    )


def test_an_option_of_another_rule_is_an_unknown_name() -> None:
    said = raised(lambda: zerox.estimate(params(), 8, rule="sgd", betas=(0.9, 0.99)))
    assert "'betas', which the optimizer of rule=\"sgd\" does not take" in str(said)


OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "lr": ("adam", {"lr": -1.0}),
    "a tensor lr": ("adam", {"lr": torch.ones(2)}),
    "lr of text": ("adam", {"lr": "1e-3"}),
    "betas": ("lion", {"betas": (0.9, 1.0)}),
    "mixed betas": ("adam", {"betas": (0, 0.9)}),
    "nesterov": ("sgd", {"nesterov": True}),
    "differentiable": ("adam", {"differentiable": True}),
    "foreach and fused": ("sgd", {"foreach": True, "fused": True}),
    "norm_group": ("adam", {"norm_group": 3}),
    "stage of text": ("adam", {"stage": "3"}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_values_are_refused_as_by_the_constructor(name: str) -> None:
    rule, options = OPTIONS[name]
    said, expected = (
        raised(call)
        for call in (
            lambda: zerox.estimate(params(), 2, rule=rule, **options),
            lambda: CLASSES[rule](params(), **options),
        )
    )
    assert (type(said), str(said)) == (type(expected), str(expected))


GROUPS: dict[str, dict[str, Any]] = {
    "lr": {"lr": -1.0},
    "stage": {"stage": 1},
    "gradient_divisor": {"gradient_divisor": "8"},
    "betas of another rule": {"rule": "lion", "betas": (2.0, 0.9)},
    "a table of one dimension": {"sparse": True, "weight_decay": 0.0},
}


@pytest.mark.parametrize("frozen", [False, True])
@pytest.mark.parametrize("name", GROUPS)
def test_values_in_param_groups_are_refused_as_by_the_constructor(name: str, frozen: bool) -> None:
    groups = [{"params": params()[:1]}, {"params": [nn.Parameter(torch.ones(4), not frozen)], **GROUPS[name]}]
    said, expected = (
        raised(call)
        for call in (
            lambda: zerox.estimate(groups, 2),
            lambda: zerox.FusedShardedAdam([dict(group) for group in groups]),
        )
    )
    assert (type(said), str(said)) == (type(expected), str(expected))


MODEL = nn.Linear(4, 4)
ARGUMENTS: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "backend": (
        lambda: zerox.estimate(params(), 8, backend="ncll"),
        ValueError,
        r"backend must be one of \('gloo', 'nccl'\), got 'ncll'",
    ),
    "a model": (
        lambda: zerox.estimate(MODEL, 8),
        TypeError,
        r"zerox.estimate\(\) takes what the optimizer takes, got a model \(Linear\): pass model.parameters\(\) or .*",
    ),
    "a tensor": (lambda: zerox.estimate(MODEL.weight, 8), TypeError, "zerox.estimate.* iterable .*got a Parameter"),
    "numbers": (lambda: zerox.estimate([3], 8), TypeError, "optimizer can only optimize Tensors, .* is int"),
    "nothing": (lambda: zerox.estimate(iter([]), 8), ValueError, "optimizer got an empty parameter list"),
    "ranks of text": (
        lambda: zerox.estimate(params(), "8"),  # type: ignore[arg-type]
        ValueError,
        "world_size must be a positive integer, got '8'",
    ),
    "no ranks": (lambda: zerox.estimate(params(), 0), ValueError, "world_size must be a positive integer, got 0"),
    "half a rank": (
        lambda: zerox.estimate(params(), 0.5),  # type: ignore[arg-type]
        ValueError,
        "world_size must be a positive integer, got 0.5",
    ),
    "no neighbours": (
        lambda: zerox.estimate(params(), 8, local_world_size=0),
        ValueError,
        "local_world_size must be a positive integer, got 0",
    ),
    "more neighbours than ranks": (
        lambda: zerox.estimate(params(), 8, local_world_size=9),
        ValueError,
        r"local_world_size must be in \[1, 8\], got 9",
    ),
    "a mesh of one number": (
        lambda: zerox.estimate(params(), 8, mesh_shape=8),  # type: ignore[arg-type]
        ValueError,
        r"mesh_shape must be two positive integers \(replicate, shard\), got 8",
    ),
    "a name that a class lacks": (
        lambda: zerox.estimate(params(), 8, optimizer_class=torch.optim.SGD, stgae=3),  # type: ignore[arg-type]
        TypeError,
        "SGD.* unexpected keyword argument 'stgae'",
    ),
}


@pytest.mark.parametrize("name", ARGUMENTS)
def test_its_own_arguments_have_a_line_of_their_own(name: str) -> None:
    call, error, message = ARGUMENTS[name]
    said = raised(call)
    assert type(said) is error
    with pytest.raises(AssertionError, match=f"^{message}$"):
        raise AssertionError(str(said))


def test_a_norm_group_changes_nothing_beside_a_class_of_torch() -> None:
    options: dict[str, Any] = {"optimizer_class": torch.optim.SGD, "lr": 0.1}
    assert zerox.estimate(params(), 2, norm_group=None, **options) == zerox.estimate(params(), 2, **options)
