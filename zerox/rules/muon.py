"""Muon: its state, the options of its param groups, and which matrices a parameter of such a group has.

Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024). Options and their defaults are
those of torch.optim.Muon. ``split_sizes`` and ``num_heads`` are zerox's own.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

from torch import Tensor

from zerox.plan.form import BLOCK_NUMEL
from zerox.plan.owners import newton_schulz_cost
from zerox.plan.span import Span
from zerox.rules.rule import Rule, StateSpec, check_flags, check_switches, holds, is_not_negative

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
ADJUSTMENTS = (None, "original", "match_rms_adamw")
MOST_STEPS = 99  # of Newton-Schulz, as in torch


class Matrix(NamedTuple):
    """One matrix of a parameter that is updated by itself: ``rows`` of its ``stack``-th slice (None: it has 2-D)."""

    stack: int | None
    rows: Span
    columns: int

    @property
    def numel(self) -> int:
        return self.rows.numel * self.columns

    @property
    def cost(self) -> int:
        return newton_schulz_cost(self.rows.numel, self.columns)

    def start(self, strides: Sequence[int]) -> int:
        """Its first element in the parameter's memory."""
        return (self.stack or 0) * strides[0] + self.rows.start * strides[-2]


def matrices_of(shape: Sequence[int], group: Mapping[str, Any]) -> list[Matrix]:
    """Of a parameter of this shape, ``[rows, columns]`` or ``[stack, rows, columns]``."""
    rows, columns = shape[-2:]
    sizes = group.get("split_sizes") or [rows // (group.get("num_heads") or 1)] * (group.get("num_heads") or 1)
    spans, end = [], 0
    for size in sizes:
        spans.append(Span(end, end + size))
        end += size
    stacks = range(shape[0]) if len(shape) == 3 else (None,)
    return [Matrix(stack, span, columns) for stack in stacks for span in spans]


def in_runs(
    shape: Sequence[int], strides: Sequence[int], group: Mapping[str, Any]
) -> Iterator[tuple[Span, list[Matrix]]]:
    """The matrices of a parameter, as few at a time as share no block of its memory with others: one, where its
    elements are a multiple of a block's; all of them, where they don't lie one behind the other."""
    matrices = matrices_of(shape, group)
    ends = list(accumulate(each.numel for each in matrices))
    are_in_order = [each.start(strides) for each in matrices] == [0, *ends[:-1]]
    first = start = 0
    for number, end in enumerate(ends, 1):
        if number == len(ends) or (are_in_order and end % BLOCK_NUMEL == 0):
            yield Span(start, end), matrices[first:number]
            first, start = number, end


def rate(lr: float, adjust_lr_fn: str | None, rows: int, columns: int) -> float:
    """The factor of an orthogonal update. "match_rms_adamw" is of Liu et al., "Muon is Scalable for LLM Training"."""
    if adjust_lr_fn == "match_rms_adamw":
        return lr * (0.2 * math.sqrt(max(rows, columns)))
    return lr * math.sqrt(max(1, rows / columns))


def check_hyper_parameters(group: Mapping[str, Any]) -> None:
    """ValueError, in torch's words where torch refuses them, for values out of range; TypeError for other types."""
    lr = group["lr"]
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not holds("lr", lr, is_not_negative):
        raise ValueError(f"Learning rate should be >= 0 but is: {lr}")
    for option, words in (("momentum", "momentum"), ("weight_decay", "weight decay")):
        if not holds(option, group[option], is_not_negative):
            raise ValueError(f"{words} should be >= 0 but is: {group[option]}")
    if group["adjust_lr_fn"] not in ADJUSTMENTS:
        raise ValueError(f"Adjust learning rate function {group['adjust_lr_fn']} is not supported")
    holds("eps", group["eps"], is_not_negative)  # torch takes any number
    steps, coefficients = group["ns_steps"], group["ns_coefficients"]
    if not isinstance(steps, int) or steps < 0:
        raise ValueError(f"ns_steps must be a whole number of 0 or more, got {steps!r}")
    if steps > MOST_STEPS:
        raise ValueError("Number of steps must be less than 100 for computational efficiency")
    if not isinstance(coefficients, tuple | list) or len(coefficients) != 3:
        raise ValueError("Coefficients must be a tuple of exactly 3 values")
    for index, coefficient in enumerate(coefficients):
        holds(f"ns_coefficients[{index}]", coefficient, is_not_negative)  # any number
    _check_parts(group["split_sizes"], group["num_heads"])


def _check_parts(split_sizes: Any, num_heads: Any) -> None:
    if split_sizes is not None and num_heads is not None:
        raise ValueError("split_sizes and num_heads both cut a matrix by rows: pass one of them")
    if num_heads is not None and (not isinstance(num_heads, int) or num_heads < 1):
        raise ValueError(f"num_heads must be a whole number of 1 or more, got {num_heads!r}")
    if split_sizes is not None and (
        not isinstance(split_sizes, tuple | list)
        or not split_sizes
        or not all(isinstance(size, int) and size > 0 for size in split_sizes)
    ):
        raise ValueError(f"split_sizes must be numbers of rows, such as (768, 768, 768), got {split_sizes!r}")


def check_param(param: Tensor, group: Mapping[str, Any]) -> None:
    """ValueError for a parameter that has no matrices, or can't be cut as the group says."""
    shape = tuple(param.shape)
    if param.is_complex():
        raise ValueError("Muon does not support complex parameters")
    if len(shape) not in (2, 3):
        raise ValueError(
            f"Muon only supports 2D parameters whereas we found a parameter with size: {param.size()}. zerox takes "
            "stacks of matrices too, which have 3 dimensions. Put others into a group with another rule: see "
            "zerox.muon_groups()"
        )
    rows, sizes, heads = shape[-2], group["split_sizes"], group["num_heads"]
    if sizes is not None and sum(sizes) != rows:
        raise ValueError(f"split_sizes={sizes!r} are {sum(sizes)} rows, and a parameter of its group is {shape}")
    if heads is not None and rows % heads:
        raise ValueError(f"num_heads={heads} does not divide the {rows} rows of a parameter of its group, {shape}")


def check_group(group: Mapping[str, Any]) -> None:
    check_flags(group)
    check_switches(group, "nesterov")
    if group.get("maximize"):
        raise ValueError("maximize=True in a param group of Muon would have no effect: negate the loss")
    check_hyper_parameters(group)
    for param in group.get("params", ()):
        check_param(param, group)


@dataclass(frozen=True, kw_only=True)
class MuonRule(Rule):
    """Its matrices lie whole on one rank, which updates them: zerox/update/matrices.py."""

    @property
    def flags(self) -> tuple[str, ...]:
        return ()

    @property
    def has_owners(self) -> bool:
        return True

    def cost(self, shape: Sequence[int], group: Mapping[str, Any]) -> int | None:
        return sum(matrix.cost for matrix in matrices_of(shape, group))

    def slices(self, shape: Sequence[int], strides: Sequence[int]) -> int:
        is_in_order = len(shape) == 3 and strides[0] == shape[1] * shape[2]
        return shape[0] if is_in_order else 1


MUON = MuonRule(
    name="muon",
    states=(StateSpec("momentum_buffer", signed=True),),
    defaults={
        "lr": 1e-3,
        "weight_decay": 0.1,
        "momentum": 0.95,
        "nesterov": True,
        "ns_coefficients": COEFFICIENTS,
        "eps": 1e-7,
        "ns_steps": 5,
        "adjust_lr_fn": None,
        "split_sizes": None,
        "num_heads": None,
    },
    needed_options=("lr", "weight_decay", "momentum", "nesterov", "ns_coefficients", "eps", "ns_steps"),
    columns=(),  # no kernel reads them
    check=check_group,
    torch_class=lambda group: "Muon",
    lasting=("split_sizes", "num_heads"),
    keeps_step=False,
)


def defaults(
    lr: Any,
    weight_decay: Any,
    momentum: Any,
    nesterov: bool,
    ns_coefficients: Any,
    eps: Any,
    ns_steps: Any,
    adjust_lr_fn: Any,
    split_sizes: Any,
    num_heads: Any,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """The defaults of param groups. Raises as check_hyper_parameters() and check_flags()."""
    check_flags(flags)
    found = {
        "lr": lr,
        "weight_decay": weight_decay,
        "momentum": momentum,
        "nesterov": nesterov,
        "ns_coefficients": ns_coefficients,
        "eps": eps,
        "ns_steps": ns_steps,
        "adjust_lr_fn": adjust_lr_fn,
        "split_sizes": split_sizes,
        "num_heads": num_heads,
    }
    check_hyper_parameters(found)
    return {**found, **{name: value for name, value in flags.items() if value}}
