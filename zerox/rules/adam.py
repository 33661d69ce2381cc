"""Adam and AdamW: their state, and the options of their param groups."""

from __future__ import annotations

import math
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

KIND = "decoupled_weight_decay"  # AdamW, or Adam with L2


def check_hyper_parameters(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """ValueError, in torch's words, for values that torch.optim.AdamW refuses; TypeError for anything but numbers."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not holds("lr", lr, is_not_negative):
        raise ValueError(f"Invalid learning rate: {lr}")
    if not holds("eps", eps, is_not_negative):
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index in (0, 1):
        beta = beta_of(betas, index)
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element")
        if not holds(f"betas[{index}]", beta, is_below_one):
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not holds("weight_decay", weight_decay, is_not_negative):
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def check_group(group: Mapping[str, Any]) -> None:
    check_flags(group)
    check_switches(group, "amsgrad", "maximize", KIND)
    check_hyper_parameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])


def of_rows(group: Mapping[str, Any], step: int) -> Mapping[str, Any]:
    """torch.optim.SparseAdam adds eps to a root that is not corrected for its bias, and corrects the size of the step
    (torch/optim/_functional.py): the same as an eps that is divided by the correction."""
    return {**group, "eps": group["eps"] / math.sqrt(1.0 - group["betas"][1] ** step)}


ADAM = Rule(
    name="adam",
    states=(
        StateSpec("exp_avg", signed=True),
        StateSpec("exp_avg_sq"),
        StateSpec("max_exp_avg_sq", when="amsgrad"),
    ),
    defaults={
        "lr": 1e-3,
        "betas": (0.9, 0.999),
        "eps": 1e-8,
        "weight_decay": 1e-2,
        "amsgrad": False,
        "maximize": False,
        KIND: True,
    },
    needed_options=("lr", "betas", "eps", "weight_decay"),
    columns=(  # Adam::Options in csrc/math/adam.h
        Column("lr"),
        Column("betas", 0),
        Column("betas", 1),
        Column("eps"),
        Column("weight_decay"),
        Column("maximize"),
        Column(KIND),
        Column("amsgrad"),
    ),
    check=check_group,
    torch_class=lambda group: "AdamW" if group[KIND] else "Adam",
    lasting=(KIND,),
    of_rows=of_rows,
)


def kept_betas(betas: Any) -> tuple[Any, ...]:
    """As torch.optim.AdamW keeps them: two floats, or two tensors without dimensions. ValueError for a mixture."""
    if not any(all(isinstance(beta, kind) for beta in betas[:2]) for kind in (float, Tensor)):
        raise ValueError("betas must be either both floats or both Tensors")
    return tuple(beta.reshape(()) if isinstance(beta, Tensor) else beta for beta in betas)


def defaults(
    lr: Any,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """The defaults of param groups. Raises as check_hyper_parameters() and check_flags().

    ``flags`` that are set are kept: torch.optim.AdamW finds them in a state_dict().
    """
    check_hyper_parameters(lr, betas, eps, weight_decay)
    check_flags(flags)
    return {
        "lr": lr,
        "betas": kept_betas(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
        KIND: decoupled_weight_decay,
        **{name: value for name, value in flags.items() if value},
    }
