"""One parameter's whole state on every rank, and back, by the keys of its rule's torch class."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from zerox._C import SyncPoint
from zerox.memory.forms import same_values, split_param
from zerox.memory.one_param import OneParam, agree_on_param, agree_on_table, in_memory_order, one_param
from zerox.optimizer.core import Core, Face
from zerox.ranks.calls import named
from zerox.rules.rule import MASTER, MASTERS, REMAINDER, STEP, NumberSpec, StateSpec
from zerox.state.fill import fill_row
from zerox.state.full_state import full_state_of, show_in_group
from zerox.state.optimizer_state import OptimizerState
from zerox.state.row_state import whole_state
from zerox.state.sliced_state import is_shown
from zerox.state.state_dict import say_rounded


class OneState:
    """Each call is as the optimizer's own, and collective. What it sends is of that parameter alone."""

    def __init__(self, core: Core, state: OptimizerState) -> None:
        self.core = core
        self.state = state

    def full_state(self, p: Tensor) -> dict[str, Any]:
        """Collective."""
        self.core.sync(SyncPoint.FULL_GRAD)
        self.state.learn_kinds()
        if (table := agree_on_table(self.core.tables, self.core.grads.subgroups, p, "full_state()")) is not None:
            return whole_state(table, self.core.ranks, None)
        one = agree_on_param(
            self.core.buckets, self.core.grads.subgroups, self.core.calls.own.params, p, "full_state()"
        )
        return show_in_group(one.bucket.rule, self.core.groups.param_groups[one.member.group], full_state_of(one))

    def set_full_state_(self, p: Tensor, values: Mapping[str, Any]) -> None:
        """Collective."""
        call = "set_full_state_()"
        self.core.sync(SyncPoint.FULL_GRAD)
        ranks = self.core.ranks
        with ranks.refusals_told():
            with self.state.pulls.of_all:
                self.state.start_states()
            one = one_param(self.core.buckets, self.core.grads.subgroups, self.core.calls.own.params, p, call)
            given = self._to_tensors(one, values)
        one.agree(call, given)
        if not given:
            return
        with self.state.pulls.of_all:
            rounded = self._write(one, given)
        self.state.note_changes()
        say_rounded(rounded)

    # ---- inside

    def _write(self, one: OneParam, given: dict[str, Tensor]) -> dict[str, None]:
        """Returns what had to be rounded."""
        rounded: dict[str, None] = {}
        if MASTER.key in given:
            master = given[MASTER.key].to(torch.float32)
            if not bool(same_values(master, given[MASTER.key]).all()):
                rounded["master to torch.float32"] = None
            given[MASTER.key] = master
            self.core.gather.write(one.index, one.bucket, one.slot, _round_master(one, master))
            torch.autograd.graph.increment_version(one.member.param)
        if one.own_row is not None:
            parts = {key: self._own_part(one, key, value) for key, value in given.items()}
            # Also a count that stays: an optimizer of torch's kind takes its state anew when numbers were written.
            parts.setdefault(STEP.key, self._steps_with(one, given))
            rounded |= dict.fromkeys(fill_row(one.bucket, one.own_row, parts, rest_anew=False))
        return rounded

    def _own_part(self, one: OneParam, key: str, value: Tensor) -> Tensor:
        if key in one.bucket.numbers:
            return value
        is_by_itself = key in one.bucket.state and one.bucket.state[key].layout is not None
        return in_memory_order(value) if is_by_itself else one.own_part(value)

    def _to_tensors(self, one: OneParam, values: Mapping[str, Any]) -> dict[str, Tensor]:
        """As tensors: whole ones in the parameter's order in memory, numbers of one element. ValueError for others."""
        bucket, group = one.bucket, self.core.groups.param_groups[one.member.group]
        numbers = {STEP.key: bucket.rule.step} | {spec.key: spec for spec in bucket.rule.numbers}
        stored = {key: each for key, each in bucket.state.items() if each.spec not in MASTERS}
        states = {key: each.spec for key, each in stored.items() if is_shown(bucket, each, one.slot)}
        known: dict[str, NumberSpec | StateSpec] = {**numbers, **states}
        kept = [key for key, spec in known.items() if key == STEP.key or _is_shown(one, spec, group)]
        kept += [MASTER.key] if bucket.master is not None else []
        if unknown := [key for key in values if key not in kept]:
            raise ValueError(
                f"set_full_state_(): no {unknown[0]!r} is kept for parameter {one.member.quoted}: pass some of "
                f"{', '.join(kept)}"
            )
        given = {
            key: _number(one, key, value)
            if key in numbers
            else one.take_value(key, value, stored[key].layout if key in stored else None)
            for key, value in values.items()
        }
        begins = not bucket.rule.keeps_step and STEP.key in given and not given[STEP.key]
        if begins and (lost := [key for key in states if key in given and bool(given[key].any())]):
            raise ValueError(
                f"set_full_state_(): {lost[0]} of parameter {one.member.quoted} would begin anew, since step=0 says "
                "that it was never updated: pass a step of 1 or more, or none"
            )
        return given

    def _steps_with(self, one: OneParam, given: Mapping[str, Tensor]) -> Tensor:
        """This rank's count of the parameter's updates, once it has been given this."""
        assert one.own_row is not None
        steps = one.bucket.steps[one.own_row].clone()
        has_state = any(key in one.bucket.state for key in given.keys() - {MASTER.key})
        return steps.clamp(min=1) if has_state and not one.bucket.rule.keeps_step else steps


def _is_shown(one: OneParam, spec: NumberSpec | StateSpec, group: Mapping[str, Any]) -> bool:
    """As in full_state(): a bucket may keep more than a group of torch's class would."""
    return not one.bucket.rule.on_host or one.bucket.rule.is_wanted(spec, group)


def _number(one: OneParam, key: str, value: Any) -> Tensor:
    if not isinstance(value, Tensor | bool | int | float) or (isinstance(value, Tensor) and value.numel() != 1):
        raise ValueError(f"set_full_state_(): {key} of parameter {one.member.quoted} must be one number, got {value!r}")
    number = torch.as_tensor(value, device="cpu").detach().reshape(1)
    if key == STEP.key and not (float(number) >= 0 and float(number).is_integer()):
        raise ValueError(f"set_full_state_(): step must be a whole number, 0 or more, got {float(number)}")
    return number


def _round_master(one: OneParam, master: Tensor) -> Tensor:
    """The parameter's value, as the update would round it, in its shape."""
    rounded = master.to(one.bucket.buffer.flat.dtype)
    stored = one.bucket.master
    if stored is not None and stored.spec == REMAINDER:
        in_memory_order(rounded).copy_(split_param(in_memory_order(master)))
    return rounded


class OneStateFace(Face):
    _one_state: OneState

    @named("full_state()")
    @torch.no_grad()
    def full_state(self, p: Tensor) -> dict[str, Any]:
        """The whole state of one parameter, on every rank, as ``full_state_dict()`` has it on one.

        New tensors on the parameter's device (numbers are on the CPU, as there), float32 (float64 beside float64
        parameters) in whatever form the state is stored, and "master" where one is kept. Collective: all ranks ask for
        the same parameter. Raises ValueError on all ranks if they don't, or for a tensor that this optimizer does not
        train: a frozen parameter is none.
        """
        return self._one_state.full_state(p)

    @named("set_full_state_()")
    @torch.no_grad()
    def set_full_state_(self, p: Tensor, /, **values: Any) -> None:
        """Sets some of what :meth:`full_state` returns of one parameter: ``set_full_state_(p, master=..., step=9)``.

        Each rank keeps its part in the form in which its state is stored, with a warning where that is rounded, as in
        ``load_state_dict()``. "master" sets the parameter too, in place, rounded to its dtype. Under SGD, Lion and
        classes of torch's kind a parameter that was never updated counts as updated once if it is given state.

        Collective: all ranks pass the same parameter and equal values. Raises ValueError on all ranks, with nothing
        changed, if they don't, as :meth:`full_state`, for keys that are not kept, and for other shapes.
        """
        self._one_state.set_full_state_(p, values)
