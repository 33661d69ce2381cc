"""An update rule as data: the numbers it keeps for each element, and the options it reads of a param group."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox.plan import combinations
from zerox.plan.form import BOOL, FLOAT32, LOW_16_BITS, Form
from zerox.plan.kept import Kept


@dataclass(frozen=True)
class StateSpec:
    """A number that is kept for each element, under ``key`` in the optimizer's state.

    ``signed``: it may be negative, which decides on its 8-bit map. ``when``: the option of a param group that asks for
    it; empty: always. ``form``: how it is always stored; None: as the constructor's ``state_dtype`` says.
    ``summed``: dimensions, counted from the last as -1, over which there is one number only: of a matrix (-1,) has one
    for each row. ``keeps_dims``: they stay, as dimensions of 1.
    """

    key: str
    signed: bool = False
    when: str = ""
    form: Form | None = None
    summed: tuple[int, ...] = ()
    keeps_dims: bool = True

    def shape_of(self, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of what is kept for a parameter of this shape. None: it lacks a dimension that is summed over."""
        if any(-axis > len(shape) for axis in self.summed):
            return None
        axes = [axis % len(shape) for axis in self.summed]
        sizes = [1 if dim in axes else size for dim, size in enumerate(shape)]
        return tuple(size for dim, size in enumerate(sizes) if self.keeps_dims or dim not in axes)

    def is_wanted(self, group: Mapping[str, Any]) -> bool:
        return not self.when or bool(group[self.when])


# The exact value of a 16-bit parameter, under any rule: in full, or only the bits that the parameter lacks.
MASTER = StateSpec("master", form=FLOAT32)
REMAINDER = StateSpec("remainder", form=LOW_16_BITS)
MASTERS = (MASTER, REMAINDER)
# Which elements a mask keeps, as checkpoints have it. A bucket has bits: see zerox/memory/mask.py.
MASK = StateSpec("mask", form=BOOL)


@dataclass(frozen=True)
class NumberSpec:
    """A number that is kept for each parameter, under ``key`` in the optimizer's state.

    ``dtype``: torch's name of the dtype that it is stored in. ``python``: the type of a Python number, as which torch's
    class keeps it; None: a tensor of ``shape``, whose one element is the number, ``on_device`` of the parameter or else
    on the CPU.
    """

    key: str
    dtype: str
    python: type | None = None
    shape: tuple[int, ...] = ()
    on_device: bool = False

    def show(self, number: Tensor) -> Any:
        """As torch's class keeps it: a copy, unless ``number`` is such a tensor."""
        if self.python is not None:
            return self.python(number.item())
        return number.reshape(self.shape).to(getattr(torch, self.dtype))


FLAGS = ("foreach", "fused", "differentiable")  # options of torch's classes that choose an implementation
STEP = NumberSpec("step", "float32")  # as in torch, whose foreach and fused paths take no other dtype


@dataclass(frozen=True)
class Column:
    """A number that kernels read of a param group: its ``option``, or the ``index``-th number of that."""

    option: str
    index: int | None = None


@dataclass(frozen=True)
class Rule:
    """``defaults``: its options, with their values in param groups that say nothing else.

    ``needed_options``: those that a param group of its torch.optim class always has. ``columns``: a param group as the
    kernels read it. ``check(group)`` raises for groups that torch refuses. ``torch_class``: the name of the torch.optim
    class whose groups are like this one. ``lasting``: options that say which formula it is: a state that is loaded does
    not change them. ``keeps_step``: whether that class keeps a step count for each parameter. If not, state that comes
    from there counts as one update. ``numbers``: what is kept for each parameter, beside the count of its updates.
    ``of_rows(group, step)``: with these options the dense rule does in update number ``step`` what the rule of a
    table's rows does.
    """

    name: str
    states: Sequence[StateSpec]
    defaults: Mapping[str, Any]
    needed_options: tuple[str, ...]
    columns: tuple[Column, ...]
    check: Callable[[Mapping[str, Any]], None]
    torch_class: Callable[[Mapping[str, Any]], str]
    lasting: tuple[str, ...] = ()
    keeps_step: bool = True
    numbers: Sequence[NumberSpec] = ()
    of_rows: Callable[[Mapping[str, Any], int], Mapping[str, Any]] = lambda group, step: group

    @property
    def flags(self) -> tuple[str, ...]:
        """Options of the torch.optim class that choose an implementation."""
        return FLAGS

    @property
    def has_owners(self) -> bool:
        """Whether it may have parameters with a cost()."""
        return False

    def cost(self, shape: Sequence[int], group: Mapping[str, Any]) -> int | None:
        """Of the update of a parameter of this ``group``, beside that of others, if it needs the whole parameter, which
        then lies on one rank. None: ranks update parts of it.
        """
        return None

    def slices(self, shape: Sequence[int], strides: Sequence[int]) -> int:
        """Of a parameter with a cost(): how many equal ones it has, one behind the other in memory, that may lie on
        several ranks. 1: it lies on one."""
        return 1

    @property
    def on_host(self) -> bool:
        """Whether the ``numbers`` and the count of updates are read on the host in every step, and lie there."""
        return False

    @property
    def step(self) -> NumberSpec:
        """How the torch.optim class keeps the count of a parameter's updates."""
        return STEP

    def row(self, group: Mapping[str, Any]) -> list[Any]:
        """The ``columns`` of a param group: numbers, or tensors of one."""
        return [group[of.option] if of.index is None else group[of.option][of.index] for of in self.columns]

    def is_wanted(self, spec: StateSpec | NumberSpec, group: Mapping[str, Any]) -> bool:
        """Whether a param group has it."""
        return isinstance(spec, NumberSpec) or spec.is_wanted(group)

    def shape_of(self, spec: StateSpec, shape: Sequence[int]) -> tuple[int, ...] | None:
        """Of this state of a parameter of this shape. None: it has none."""
        return spec.shape_of(shape)

    def wanted_states(self, groups: Sequence[Mapping[str, Any]]) -> list[StateSpec]:
        """The state of a bucket whose parameters are in these groups."""
        return [spec for spec in self.states if any(self.is_wanted(spec, group) for group in groups)]

    def kept(self, spec: StateSpec, form: Form) -> Kept:
        """How it is kept. ``form``: if it has none of its own."""
        if spec in MASTERS:
            return Kept(spec.key, spec.form or form, 1, is_master=True)
        return Kept(spec.key, spec.form or form, 2 + self.states.index(spec))

    def spec_of(self, key: str) -> StateSpec:
        """What is kept under this key."""
        return next(spec for spec in (*self.states, *MASTERS) if spec.key == key)

    def late(self, group: Mapping[str, Any]) -> list[StateSpec]:
        """State that buckets made before may lack, since an option of the group may have been changed."""
        return [spec for spec in self.states if spec.when and group.get(spec.when)]

    def knows(self, group: Mapping[str, Any]) -> bool:
        """Whether is_wanted() of these options has been found out."""
        return True

    def starts_itself(self, key: str) -> bool:
        """Whether state that has not begun is absent, and not zero."""
        return False

    def has_torch_class(self, group: Mapping[str, Any]) -> bool:
        return hasattr(torch.optim, self.torch_class(group))

    def torch_optimizer(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        """One of that class, which is there."""
        made: torch.optim.Optimizer = getattr(torch.optim, self.torch_class(group))([{"params": list(params)}])
        return made

    def check_loaded(self, group: Mapping[str, Any]) -> None:
        """Raises for a saved param group whose flags can't hold here."""
        check_flags(group)


def check_flags(flags: Mapping[str, Any]) -> None:
    """foreach and fused choose between torch's implementations, and mean nothing here. Raises as torch, and for
    differentiable=True ValueError."""
    if flags.get("fused") and flags.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    combinations.check({name: {str(bool(flags.get(name)))} for name in ("foreach", "fused")})
    if flags.get("differentiable"):
        raise ValueError("differentiable=True: zerox updates below autograd; use an optimizer of torch.optim for that")


def check_switches(options: Mapping[str, Any], *names: str) -> None:
    """ValueError for one of these options that is neither True nor False: torch takes "no" for True."""
    for name in names:
        if (value := options.get(name, False)) not in (True, False):
            raise ValueError(f"{name} must be True or False, got {value!r}")


def holds(name: str, value: Any, condition: Callable[[Any], Any]) -> bool:
    """Whether a hyper-parameter is as it must be. TypeError with its name, and with Python's words, which torch leaves
    alone, for what is no number."""
    try:
        return bool(condition(value))
    except TypeError as error:
        raise TypeError(f"{name} must be a number, got {value!r}: {error}") from None


def beta_of(betas: Any, index: int) -> Any:
    """TypeError, as holds(), for betas that are no pair."""
    try:
        return betas[index]
    except TypeError as error:
        raise TypeError(f"betas must be two numbers, got {betas!r}: {error}") from None


def is_not_negative(value: Any) -> Any:
    return value >= 0.0


def is_below_one(value: Any) -> Any:
    return 0.0 <= value < 1.0
