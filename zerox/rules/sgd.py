"""SGD: its state, and the options of its param groups."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerox.rules.rule import Column, Rule, StateSpec, check_flags, check_switches, holds, is_not_negative


def check_hyper_parameters(lr: Any, momentum: Any, dampening: Any, weight_decay: Any, nesterov: Any) -> None:
    """ValueError, in torch's words, for values that torch.optim.SGD refuses; TypeError for anything but numbers."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not holds("lr", lr, is_not_negative):
        raise ValueError(f"Invalid learning rate: {lr}")
    if not holds("momentum", momentum, is_not_negative):
        raise ValueError(f"Invalid momentum value: {momentum}")
    if not holds("weight_decay", weight_decay, is_not_negative):
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")
    holds("dampening", dampening, is_not_negative)  # torch takes any number
    if nesterov and (momentum <= 0 or dampening != 0):
        raise ValueError("Nesterov momentum requires a momentum and zero dampening")


def check_group(group: Mapping[str, Any]) -> None:
    check_flags(group)
    check_switches(group, "nesterov", "maximize")
    check_hyper_parameters(group["lr"], group["momentum"], group["dampening"], group["weight_decay"], group["nesterov"])


SGD = Rule(
    name="sgd",
    states=(StateSpec("momentum_buffer", signed=True, when="momentum"),),
    defaults={
        "lr": 1e-3,
        "momentum": 0.0,
        "dampening": 0.0,
        "weight_decay": 0.0,
        "nesterov": False,
        "maximize": False,
    },
    needed_options=("lr", "momentum", "dampening", "weight_decay", "nesterov"),
    columns=(  # Sgd::Options in csrc/math/sgd.h
        Column("lr"),
        Column("momentum"),
        Column("dampening"),
        Column("weight_decay"),
        Column("nesterov"),
        Column("maximize"),
    ),
    check=check_group,
    torch_class=lambda group: "SGD",
    keeps_step=False,
)


def defaults(
    lr: Any,
    momentum: Any,
    dampening: Any,
    weight_decay: Any,
    nesterov: bool,
    maximize: bool,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """The defaults of param groups. Raises as check_hyper_parameters() and check_flags().

    ``flags`` that are set are kept: torch.optim.SGD finds them in a state_dict().
    """
    check_hyper_parameters(lr, momentum, dampening, weight_decay, nesterov)
    check_flags(flags)
    return {
        "lr": lr,
        "momentum": momentum,
        "dampening": dampening,
        "weight_decay": weight_decay,
        "nesterov": nesterov,
        "maximize": maximize,
        **{name: value for name, value in flags.items() if value},
    }
