"""Parameters of an optimizer that no DistributedDataParallel has, where one has others of them: each rank's own.

Note [Each rank's own]
torch's wrapper leaves alone what it does not wrap, such as embedding tables that are spread over the ranks, or what it
was told to ignore. Such parameters may be in one optimizer with those that it wraps; ranks may have other ones, and
other numbers of them. So they are neither averaged nor handed out, sharded or compared, and step() has the class of
torch.optim that the param group's rule is named after update them, as it would under torch's wrapper. Its state stands
in ``optimizer.state``, as torch has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerox import _torch
from zerox._C import Combine
from zerox.memory.bucket import Member
from zerox.memory.row_table import is_sparse
from zerox.model_names import name_or_shape
from zerox.options import DIVISOR, OptimizerOptions, tensors_in
from zerox.ranks.group import Ranks
from zerox.ranks.subgroups import OF_GROUP
from zerox.ranks.wrapped import find_unwrapped, find_unwrapped_beside_wrapped, has_wrapped
from zerox.rules.of_groups import Rules
from zerox.rules.rule import Rule

BESIDE = "parameters that no DistributedDataParallel has, as {}, beside others that one has"
APART = "give them an optimizer of torch.optim of their own"
STEP_OPTIONS = "step() with options"
NOT_OF_OWN = {
    "mean_over()": "divide the loss, or " + APART,
    "GradScaler.unscale_()": "use torch.amp.GradScaler, or " + APART,
    STEP_OPTIONS: "set them in param groups, or " + APART,
    "zerox.clip_grad_norm_()": "call optimizer.clip_grad_norm_(), or " + APART,
}


AllReduce = Callable[[Tensor, Combine], object]  # over the optimizer's ranks, in place


class Shown(Protocol):
    """``optimizer.state``, and what is to be called once that was written."""

    state: Any

    def note_seen(self) -> None: ...


class OwnParams:
    """``params``: this rank's, by id. ``of_subgroups``: by id, those of param groups with a process_group.
    ``are_some``: whether any rank has some, once ranks have told each other. ``rests``: this rank follows others inside
    join(), with no gradients."""

    def __init__(self, given: Sequence[Any]) -> None:
        """``given``: what the optimizer was: a param group with a process_group says itself whose it is."""
        self.params = find_unwrapped_beside_wrapped(
            tensors_in([each for each in given if not _has_subgroup(each)]), tensors_in(given)
        )
        self.of_subgroups = {id(param) for param in tensors_in([each for each in given if _has_subgroup(each)])}
        self.are_some = False
        self.rests = False
        self._updates: dict[tuple[str, str], torch.optim.Optimizer] = {}  # by rule and class
        self._state: dict[int, Mapping[str, Any]] = {}  # by id, since the last step()

    # ---- which they are

    def note(self, groups: Sequence[Mapping[str, Any]], known: Sequence[Tensor]) -> None:
        """Those of ``groups`` beside what the optimizer has, ``known``, which ranks share."""
        before = {id(param) for param in known}
        self.of_subgroups |= {id(param) for group in groups if _has_subgroup(group) for param in group["params"]}
        added = [p for group in groups if not _has_subgroup(group) for p in group["params"] if id(p) not in before]
        self.params |= (
            find_unwrapped(added) if self.are_some else find_unwrapped_beside_wrapped(added, [*added, *known])
        )

    def keep(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Those that are in these param groups."""
        self.params = {id(param): param for param in self.of(groups)}

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        return [param for group in groups for param in group["params"] if id(param) in self.params]

    @property
    def first(self) -> str:
        """What an error calls one of them."""
        if not self.params:
            return "another rank's"
        return name_or_shape(next(iter(self.params.values())))

    def check(
        self, groups: Sequence[Mapping[str, Any]], rules: Rules, options: OptimizerOptions, has_axes: bool
    ) -> None:
        """ValueError for what torch's class can't do for them. ``has_axes``: ranks have other parts of a model."""
        for index, group in enumerate(groups):
            if self.of([group]):
                refuse_group(f"param group {index}", group, rules.of(group), options, has_axes, lambda: self.first)

    def refusal(self, call: str) -> str:
        """Why a call can't be made; empty if it can."""
        if not self.are_some or call not in NOT_OF_OWN:
            return ""
        return f"{call} does not go with {BESIDE.format(self.first)}: {NOT_OF_OWN[call]}"

    def agree(self, ranks: Ranks, members: Iterable[Member]) -> None:
        """Ranks tell each other whether they have some, if ``members``, which they share, are wrapped. Collective."""
        if has_wrapped(member.param for member in members):
            self.are_some = self.are_some or any(map(int, ranks.all_gather_text(str(len(self.params)))))

    # ---- in step() and before it

    def update(self, groups: Sequence[dict[str, Any]], rules: Rules, shows: Shown) -> None:
        """Those that have a gradient, as the class of torch does."""
        for group in groups if self.params else ():
            params = [param for param in self.of([group]) if param.grad is not None]
            if not params:
                continue
            rule = rules.of(group)
            key = rule.name, rule.torch_class(group)
            optimizer = self._updates[key] = self._updates.get(key) or rule.torch_optimizer(group, params)
            [live] = optimizer.param_groups
            live.update({option: group[option] for option in live if option in group}, params=params)
            optimizer.state.clear()
            optimizer.state.update({param: shows.state[param] for param in params if param in shows.state})
            _step_of(optimizer)()
            shows.state.update(optimizer.state)
            self._state |= {id(param): state for param, state in optimizer.state.items()}
        if self.params:
            shows.note_seen()

    def tensors_of_state(self) -> list[Tensor]:
        """What torch's classes keep of them, since the last step()."""
        kept = [state for number, state in self._state.items() if number in self.params]
        return [value for state in kept for value in state.values() if isinstance(value, Tensor)]

    # ---- their gradients

    def values(self) -> list[Tensor]:
        """Views of them; of sparse ones, of what they have, an element perhaps in parts."""
        grads = [param.grad for param in self.params.values() if param.grad is not None and not self.rests]
        return [_torch.values_of(grad) if grad.is_sparse else grad.detach() for grad in grads]

    def zero(self, set_to_none: bool) -> None:
        for param in self.params.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def multiply(self, factor: Tensor) -> None:
        for values in self.values():
            values.mul_(factor.to(values.device, values.dtype))

    def limit(self, most: float) -> None:
        self._add_up()
        for values in self.values():
            values.clamp_(-most, most)

    def norm_beside(self, norm: Tensor, finite: Tensor, p: float, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, each rank's own ones once, from that of those which ranks share, and whether all
        elements are finite, as float64 scalars. Collective."""
        self._add_up()
        own = [torch.linalg.vector_norm(each.double(), p).to(norm.device) for each in self.values() if each.numel()]
        every = torch.stack(own) if own else torch.zeros(1, dtype=torch.float64, device=norm.device)
        is_max = math.isinf(p)
        total = (every.amax() if is_max else every.pow(p).sum()).reshape(1)
        all_reduce(total, Combine.MAX if is_max else Combine.SUM)
        norm = torch.maximum(norm, total[0]) if is_max else (norm.pow(p) + total[0]).pow(1.0 / p)
        return norm, finite * norm.isfinite()

    def are_finite(self, like: Tensor, all_reduce: AllReduce) -> Tensor:
        """Whether all elements are, of all ranks, as a scalar like that. Collective if any rank has some."""
        found = torch.ones_like(like).reshape(1)
        if self.are_some:
            for values in self.values():
                found *= values.isfinite().all().to(found)
            all_reduce(found.neg_(), Combine.MAX)
            found.neg_()
        return found.reshape(like.shape)

    def has_values(self, given: Sequence[Tensor]) -> bool:
        """Whether these are gradients of this rank's own parameters."""
        return {grad.data_ptr() for grad in given} <= {values.data_ptr() for values in self.values()}

    def _add_up(self) -> None:
        """Each element of a sparse gradient is there once."""
        for param in self.params.values():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()


def refuse_group(
    where: str,
    group: Mapping[str, Any],
    rule: Rule,
    options: OptimizerOptions,
    has_axes: bool,
    first: Callable[[], str],
) -> None:
    """ValueError for a group with own parameters, if torch's class can't do it. ``first``: names one of them, for the
    error alone."""
    refusals = {
        "capturable=True": options.capturable,
        f"the rule {rule.name!r}": not rule.has_torch_class(group),
        DIVISOR: options.divisor_of(group) is not None,
        "sparse=True": is_sparse(group),
        "norm_group, or another parameter's DTensor": has_axes,
    }
    if why := next((each for each, holds in refusals.items() if holds), ""):
        raise ValueError(f"{where}: {why} does not go with {BESIDE.format(first())}: {APART}")


def _has_subgroup(given: Any) -> bool:
    return isinstance(given, Mapping) and given.get(OF_GROUP) is not None


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Without the hooks around step(), which are about the optimizer that the user has."""
    step = type(optimizer).step
    found: Callable[[], Any] = getattr(step, "__wrapped__", step).__get__(optimizer)
    return found
