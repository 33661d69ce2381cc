"""Rules as data: the options of a param group are torch's, and so are the words in which they are refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.shards import RULES, group_of
from zerox.rules import adam, lion, sgd
from zerox.rules.lion import LION
from zerox.rules.rule import Rule
from zerox.rules.sgd import SGD

SGD_REFUSES: list[dict[str, Any]] = [
    {"lr": -1.0},
    {"lr": torch.ones(2)},
    {"momentum": -0.1},
    {"weight_decay": -1.0},
    {"nesterov": True},
    {"nesterov": True, "momentum": 0.9, "dampening": 0.1},
    {"nesterov": True, "dampening": 0.1},
]

MODULES: dict[str, Any] = {"adam": adam, "lion": lion, "sgd": sgd}


def make(**options: Any) -> torch.optim.SGD:
    return torch.optim.SGD([torch.nn.Parameter(torch.ones(1))], **options)


@pytest.mark.parametrize("bad", SGD_REFUSES, ids=str)
def test_sgd_refuses_what_torch_does_in_torch_s_words(bad: dict[str, Any]) -> None:
    with pytest.raises(ValueError) as theirs:  # noqa: PT011 (its words are what is compared)
        make(**bad)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        SGD.check({**SGD.defaults, **bad})
    assert str(ours.value) == str(theirs.value)
    with pytest.raises(ValueError) as ours:  # noqa: PT011
        sgd.defaults(**{**SGD.defaults, **bad}, flags={})
    assert str(ours.value) == str(theirs.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ({"lr": -1.0}, "Invalid learning rate: -1.0"),
        ({"lr": float("nan")}, "Invalid learning rate: nan"),
        ({"betas": (1.0, 0.9)}, "Invalid beta parameter at index 0: 1.0"),
        ({"betas": (0.9, -0.1)}, "Invalid beta parameter at index 1: -0.1"),
        ({"weight_decay": -1.0}, "Invalid weight_decay value: -1.0"),
    ],
    ids=str,
)
def test_lion_refuses_what_is_out_of_range(bad: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        LION.check({**LION.defaults, **bad})
    with pytest.raises(ValueError, match=message):
        lion.defaults(**{**LION.defaults, **bad}, flags={})


def test_sgd_has_torch_s_defaults() -> None:
    theirs = make().defaults
    assert {name: theirs[name] for name in SGD.defaults} == SGD.defaults
    assert sgd.defaults(**SGD.defaults, flags={"foreach": True, "fused": None}) == {**SGD.defaults, "foreach": True}
    assert set(SGD.needed_options) <= set(make().param_groups[0])
    assert getattr(torch.optim, SGD.torch_class(SGD.defaults)) is torch.optim.SGD


def test_the_buffer_is_kept_with_momentum_only() -> None:
    assert SGD.wanted_states([group_of(SGD, momentum=0.0)]) == []
    assert [spec.key for spec in SGD.wanted_states([group_of(SGD, momentum=0.0), group_of(SGD)])] == ["momentum_buffer"]
    assert [spec.key for spec in LION.wanted_states([LION.defaults])] == ["exp_avg"]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_what_a_constructor_is_given_is_what_groups_have(rule: Rule) -> None:
    """Values that are no defaults, or one that is not handed on would not show."""
    given: dict[str, Any] = {name: not value for name, value in rule.defaults.items() if isinstance(value, bool)}
    given |= {name: 0.5 for name, value in rule.defaults.items() if isinstance(value, float)}
    given |= {"betas": (0.25, 0.75)} if "betas" in rule.defaults else {}
    given |= {"dampening": 0.0} if rule is SGD else {}  # beside Nesterov's momentum it must be 0
    assert given.keys() == rule.defaults.keys()
    assert MODULES[rule.name].defaults(**given, flags={}) == given


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_every_option_is_a_column_and_has_a_default(rule: Rule) -> None:
    indices = {name: range(2) if name == "betas" else [None] for name in rule.defaults}
    expected = {(name, index) for name, each in indices.items() for index in each}
    assert {(column.option, column.index) for column in rule.columns} >= expected
    assert {column.option for column in rule.columns} == set(rule.defaults)
    assert set(rule.needed_options) <= set(rule.defaults)
    rule.check(rule.defaults)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_flags_that_choose_torch_s_implementation_are_checked(rule: Rule) -> None:
    with pytest.raises(ValueError, match="differentiable=True"):
        rule.check({**rule.defaults, "differentiable": True})
    with pytest.raises(ValueError, match="differentiable=True"):
        MODULES[rule.name].defaults(**rule.defaults, flags={"differentiable": True})
    with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
        rule.check({**rule.defaults, "fused": True, "foreach": True})
