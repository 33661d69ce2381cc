"""An update rule as data: what it keeps for each element, and what a param group says to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from zerox.plan import combinations
from zerox.plan.form import FLOAT32, LOW_16_BITS, Form


@dataclass(frozen=True)
class StateSpec:
    """A number that is kept for each element, under ``key`` in the optimizer's state.

    ``signed``: it may be negative, which decides on its map in 8 bits. ``when``: the option of a param group that asks
    for it; empty: always. ``form``: how it is stored in any case; None: as the constructor's ``state_dtype`` says.
    """

    key: str
    signed: bool = False
    when: str = ""
    form: Form | None = None

    def is_wanted(self, group: Mapping[str, Any]) -> bool:
        return not self.when or bool(group[self.when])


# The exact value of a 16-bit parameter, under any rule: in full, or what the parameter lacks of it.
MASTER = StateSpec("master", form=FLOAT32)
REMAINDER = StateSpec("remainder", form=LOW_16_BITS)
MASTERS = (MASTER, REMAINDER)


@dataclass(frozen=True)
class Column:
    """A number that kernels read of a param group: its ``option``, or one of several."""

    option: str
    index: int | None = None

    def of(self, group: Mapping[str, Any]) -> Any:
        return group[self.option] if self.index is None else group[self.option][self.index]


@dataclass(frozen=True)
class Rule:
    """``needed_options``: what a param group of its torch.optim class always has.

    ``columns``: a param group as the kernels read it. ``check(group)`` raises as torch would refuse a group.
    ``lasting``: options that say which formula it is: a state that is loaded does not change them. ``torch_class``:
    the name of the torch.optim class whose groups are like this one.
    """

    name: str
    states: tuple[StateSpec, ...]
    needed_options: tuple[str, ...]
    columns: tuple[Column, ...]
    check: Callable[[Mapping[str, Any]], None]
    lasting: tuple[str, ...]
    torch_class: Callable[[Mapping[str, Any]], str]

    def wanted(self, groups: Sequence[Mapping[str, Any]]) -> list[StateSpec]:
        """What a bucket keeps whose parameters are in these groups."""
        return [spec for spec in self.states if any(map(spec.is_wanted, groups))]


def check_flags(flags: Mapping[str, Any]) -> None:
    """foreach and fused say how torch computes the same, and mean nothing here. Raises as torch, and for
    differentiable=True ValueError."""
    if flags.get("fused") and flags.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    combinations.check({name: {str(bool(flags.get(name)))} for name in ("foreach", "fused")})
    if flags.get("differentiable"):
        raise ValueError("differentiable=True: zerox updates parameters below autograd; use torch.optim.AdamW for that")
