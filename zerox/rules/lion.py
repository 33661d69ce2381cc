"""Lion: its state, and the options of its param groups. torch.optim has no such class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerox.rules.rule import (
    Column,
    Rule,
    StateSpec,
    beta_of,
    check_flags,
    check_switches,
    holds,
    is_below_one,
    is_not_negative,
)


def check_hyper_parameters(lr: Any, betas: Any, weight_decay: Any) -> None:
    """ValueError, in the words of torch.optim.AdamW, for values out of range; TypeError for anything but numbers."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not holds("lr", lr, is_not_negative):
        raise ValueError(f"Invalid learning rate: {lr}")
    for index in (0, 1):
        beta = beta_of(betas, index)
        if not holds(f"betas[{index}]", beta, is_below_one):
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not holds("weight_decay", weight_decay, is_not_negative):
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def check_group(group: Mapping[str, Any]) -> None:
    check_flags(group)
    check_switches(group, "maximize")
    check_hyper_parameters(group["lr"], group["betas"], group["weight_decay"])


LION = Rule(
    name="lion",
    states=(StateSpec("exp_avg", signed=True),),
    defaults={
        "lr": 1e-4,
        "betas": (0.9, 0.99),
        "weight_decay": 0.0,
        "maximize": False,
    },
    needed_options=("lr", "betas", "weight_decay"),
    columns=(  # Lion::Options in csrc/math/lion.h
        Column("lr"),
        Column("betas", 0),
        Column("betas", 1),
        Column("weight_decay"),
        Column("maximize"),
    ),
    check=check_group,
    torch_class=lambda group: "Lion",
    keeps_step=False,  # as in most implementations: its formula has no step
)


def defaults(lr: Any, betas: Any, weight_decay: Any, maximize: bool, flags: Mapping[str, Any]) -> dict[str, Any]:
    """The defaults of param groups. Raises as check_hyper_parameters() and check_flags()."""
    check_hyper_parameters(lr, betas, weight_decay)
    check_flags(flags)
    return {
        "lr": lr,
        "betas": tuple(betas),
        "weight_decay": weight_decay,
        "maximize": maximize,
        **{name: value for name, value in flags.items() if value},
    }
