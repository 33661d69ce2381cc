"""One bucket's optimizer of torch's kind: its parameters are this rank's segments, its state lies in the bucket."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from zerox import _torch
from zerox.memory.bucket import Bucket, GradPart
from zerox.memory.forms import follow_
from zerox.plan.layout import Segment
from zerox.rules.local_optimizer import LocalOptimizerRule, options_of
from zerox.rules.probe import Kinds, step_without_global_hooks
from zerox.rules.rule import STEP
from zerox.update.update import Groups

State = dict[str, Any]


class LocalParam(NamedTuple):
    """A view of a segment, or of its master: elements ``[start, stop)`` of the shard, in the engine's ``group``.

    ``strides``: of a parameter that lies whole here because it is never cut, and has its own shape. Others are 1-D."""

    param: nn.Parameter
    group: int
    start: int
    stop: int
    strides: tuple[int, ...] | None

    def view(self, values: Tensor) -> Tensor:
        """Its elements, 1-D, as it has them."""
        if self.strides is None:
            return values
        return values.as_strided(self.param.shape, self.strides, values.storage_offset())


class LocalOptimizerBucket:
    """The optimizer has a param group for each of the engine's that has a parameter here, in their order.

    If the class counts something in its groups, all groups are there, each with a parameter of one element in addition:
    so the counts go on alike on all ranks, also where a rank has no segment or no gradient of a group.
    """

    def __init__(self, rule: LocalOptimizerRule, bucket: Bucket, groups: Groups) -> None:
        self.rule = rule
        self.bucket = bucket
        self.master = bucket.master
        self.values = bucket.param_shard if self.master is None else self.master.values
        self.params = [self._local_param(each) for each in bucket.own_segments]
        self.counting: dict[int, nn.Parameter] = {}  # by group
        self._make(groups)
        self.bound: list[State] = [{} for _ in self.params]  # what of each state lies in the bucket, or is known there
        # By start, elements and first row of a part: the sizes that it is cut into, and which of these are rows.
        self.cuts: dict[tuple[int, int, int], tuple[list[int], list[int]]] = {}
        self.seen: dict[str, int] = {}  # versions of the bucket's numbers that the optimizer has copies of
        self._take_state()
        self._note_numbers()

    def _local_param(self, own: Segment) -> LocalParam:
        values, buffer = self.values[own.span.start : own.span.stop], self.bucket.buffer
        strides = None if buffer.layout.owners is None else buffer.strides[own.slot]
        if strides is not None:
            values = values.as_strided(buffer.shapes[own.slot], strides, values.storage_offset())
        group = self.bucket.members[own.slot].group
        return LocalParam(nn.Parameter(values), group, own.span.start, own.span.stop, strides)

    def _make(self, groups: Groups) -> None:
        local = self.rule.optimizer_class
        if any(local.kinds(group).counters for group in groups):
            shapes = [(1,) * local.least_dims(group) for group in groups]
            self.counting = {index: nn.Parameter(self.values.new_zeros(shape)) for index, shape in enumerate(shapes)}
        self.groups = sorted({*(param.group for param in self.params), *self.counting})
        self.kinds = [local.kinds(groups[index]) for index in self.groups]
        self.optimizer = self._make_optimizer([options_of(groups[index]) for index in self.groups])

    def regroup(self, groups: Groups) -> None:
        """There are other groups, or the bucket's parameters are in others: another optimizer, with the same state."""
        slots = [segment.slot for segment in self.bucket.own_segments]
        self.params = [
            each._replace(group=self.bucket.members[slot].group) for each, slot in zip(self.params, slots, strict=True)
        ]
        self._make(groups)
        if self.optimizer is not None:
            self.restore()

    def prepare(self, options: Sequence[Mapping[str, Any]], kinds: Sequence[Kinds]) -> None:
        """Before a step: masters that still stand for their parameters, options (of all groups) and state as they are.

        ``kinds``: what the class keeps under each group's options.
        """
        if self.master is not None:
            follow_(self.master.values, self.bucket.param_shard)
        if self.optimizer is None:
            return
        for group, index in zip(self.optimizer.param_groups, self.groups, strict=True):
            group.update(options[index])
        before, self.kinds = self.kinds, [kinds[index] for index in self.groups]
        # Whatever loads state writes the numbers, also if it says nothing, as DCP into a checkpoint's entries.
        if any(_torch.version_of(self.bucket.numbers[key]) != then for key, then in self.seen.items()):
            self.restore()
        elif any(now is not then for now, then in zip(self.kinds, before, strict=True)):
            self._complete()

    def take_gradients(
        self, parts: Sequence[GradPart], present: Sequence[int], counted: Sequence[bool], scale: Tensor | None
    ) -> list[bool]:
        """Gives the optimizer the gradients that are ``present``; returns which rows have got one."""
        given = [False] * len(self.params)
        writes = any(kinds.writes_grads for kinds in self.kinds)
        for part in parts:
            grad = part.grad
            if grad.dtype != self.values.dtype:
                grad = grad.to(self.values.dtype)
            if scale is not None:
                grad = grad * scale
            elif writes and grad is part.grad:
                grad = grad.clone()  # gradients are the user's until zero_grad()
            rows = range(part.first_row, part.first_row + part.segments.shape[0])
            for index, own in zip(rows, self._cut(grad, part.start, rows), strict=True):
                if present[index]:
                    self.params[index].param.grad = self.params[index].view(own)
                    given[index] = True
        for index, param in self.counting.items():
            param.grad = torch.zeros_like(param) if counted[index] else None
        return given

    def _cut(self, grad: Tensor, start: int, rows: range) -> Sequence[Tensor]:
        """Each row's elements of a part of the shard: all views in one call, since one for each takes a microsecond."""
        if len(rows) == 1 and self.params[rows[0]].stop - self.params[rows[0]].start == grad.numel():
            return [grad]
        place = (start, grad.numel(), rows.start)
        if place not in self.cuts:
            sizes: list[int] = []
            taken, end = [], start
            for each in self.params[rows.start : rows.stop]:
                if each.start > end:  # padding
                    sizes.append(each.start - end)
                taken.append(len(sizes))
                sizes.append(each.stop - each.start)
                end = each.stop
            self.cuts[place] = [*sizes, start + grad.numel() - end], taken
        sizes, taken = self.cuts[place]
        pieces = grad.split_with_sizes(sizes)
        return [pieces[index] for index in taken]

    def drop_gradients(self) -> None:
        for each in self.params:
            each.param.grad = None
        for param in self.counting.values():
            param.grad = None

    def step(self, options: Sequence[Mapping[str, Any]], step_options: Mapping[str, Any]) -> dict[int, State]:
        """Returns, by the engine's group, the ``options`` that the class has changed."""
        if self.optimizer is None:
            return {}
        step_without_global_hooks(self.optimizer, **step_options)
        self._take_state()
        changed = {}
        for index, group in zip(self.groups, self.optimizer.param_groups, strict=True):
            then = options[index]
            found = {key: value for key, value in group.items() if value is not then.get(key, then) and key != "params"}
            if found and not self.counting:
                raise RuntimeError(
                    f"{self.rule.name} changed {', '.join(found)} of its param groups, and did not when it was tried"
                )
            if found:
                changed[index] = found
        return changed

    def finish(self, updated: Sequence[bool]) -> None:
        """After all ranks' steps: new parameters from their masters, and counts of the rows that were ``updated``."""
        if self.master is not None:
            self.bucket.param_shard.copy_(self.master.values)
        self.bucket.steps.add_(1 if all(updated) else torch.tensor(updated, dtype=torch.int64, device="cpu"))
        self._note_numbers()

    def restore(self) -> None:
        """Gives the optimizer the bucket's state. A parameter that was never updated begins as the class has it."""
        assert self.optimizer is not None
        options = [options_of(group) for group in self.optimizer.param_groups]
        fresh = self._make_optimizer(options) if any(kinds.full_at_start for kinds in self.kinds) else None
        self.optimizer.state.clear()
        for index, each in enumerate(self.params):
            self.bound[index] = {}
            if self.bucket.steps[index] > 0:
                self.optimizer.state[each.param] = self._state_of(index)
            elif fresh is not None and each.param in fresh.state:
                self.optimizer.state[each.param] = fresh.state[each.param]
        self._take_state()
        self._note_numbers()

    # ---- inside ------------------------------------------------------------------------------------------------------

    def _make_optimizer(self, options: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer | None:
        """``options`` of each of ``self.groups``; None without any: this rank has no part of the bucket."""
        made = []
        for index, own in zip(self.groups, options, strict=True):
            params = [each.param for each in self.params if each.group == index]
            more = [self.counting[index]] if index in self.counting else []
            made.append({**own, "params": params + more})
        return self.rule.optimizer_class.make(made) if made else None

    def _take_state(self) -> None:
        """Moves new state into the bucket, and lets the optimizer use it there."""
        states = {} if self.optimizer is None else self.optimizer.state
        # Looked up only where the optimizer has them in another order, or lacks some: tensors are slow keys.
        in_order = len(states) == len(self.params) and all(
            each.param is param for each, param in zip(self.params, states, strict=True)
        )
        found = list(states.values()) if in_order else [states.get(each.param) or {} for each in self.params]
        for index, (state, bound) in enumerate(zip(found, self.bound, strict=True)):
            for key, value in state.items():
                if value is not bound.get(key):
                    bound[key] = state[key] = self._take_value(index, key, value)

    def _note_numbers(self) -> None:
        copied = [STEP.key, *(spec.key for spec in self.rule.numbers if spec.python is not None)]
        self.seen = {key: _torch.version_of(self.bucket.numbers[key]) for key in copied}

    def _take_value(self, row: int, key: str, value: Any) -> Any:
        """What stands for the value in the optimizer's state from now on."""
        if value is None or key == STEP.key:  # the bucket counts by itself
            return value
        if key in self.bucket.state:
            place = self._place(row, key) if self._has(row, key) else None
            if place is None:
                raise RuntimeError(
                    f"{self.rule.name} began to keep {key!r} for a parameter of {tuple(self.params[row].param.shape)}, "
                    "and kept none for such parameters when it was tried"
                )
            if value.shape != place.shape or value.dtype != place.dtype:
                raise RuntimeError(
                    f"{self.rule.name} made {key!r} of {tuple(value.shape)} and {value.dtype} for a parameter of "
                    f"{tuple(self.params[row].param.shape)}, and by what was tried it is {tuple(place.shape)} and "
                    f"{place.dtype}"
                )
            place.copy_(value)
            self.bucket.absent.discard((row, key))
            return place
        if key in self.bucket.numbers:
            self.bucket.numbers[key][row] = value
            return self._number(row, key) if isinstance(value, Tensor) else value
        raise RuntimeError(f"{self.rule.name} began to keep {key!r}, which it did not when it was tried")

    def _complete(self) -> None:
        """After options were changed: state that the class expects beside other state, or that it begins itself."""
        assert self.optimizer is not None
        for index, each in enumerate(self.params):
            state: State = self.optimizer.state.get(each.param) or {}
            kinds = self._kinds_of(index)
            for spec in kinds.states if self.bucket.steps[index] > 0 else ():
                if not self._has(index, spec.key):
                    continue
                if spec.key not in state and state and spec.key in kinds.expected:
                    self.bound[index][spec.key] = state[spec.key] = self._place(index, spec.key)
                elif spec.key not in state:
                    self.bucket.absent.add((index, spec.key))

    def _state_of(self, row: int) -> State:
        """From the bucket, each thing as the class keeps it."""
        kinds = self._kinds_of(row)
        found: State = {}
        for state in kinds.states:
            if (row, state.key) not in self.bucket.absent and self._has(row, state.key):
                found[state.key] = self._place(row, state.key)
        for number in kinds.numbers:
            value = self._number(row, number.key)
            found[number.key] = value if number.python is None else number.show(value)
        self.bound[row] = dict(found)
        if kinds.step is not None:
            step = kinds.step.show(self.bucket.steps[row].clone())
            found[STEP.key] = step.to(self.values.device) if kinds.step.on_device and isinstance(step, Tensor) else step
        return found

    def _kinds_of(self, row: int) -> Kinds:
        return self.kinds[self.groups.index(self.params[row].group)]

    def _has(self, row: int, key: str) -> bool:
        """Whether the class keeps this for a parameter of so many dimensions."""
        layout = self.bucket.state[key].layout
        return layout is None or layout.shapes[self.bucket.own_segments[row].slot] is not None

    def _place(self, row: int, key: str) -> Tensor:
        stored, each = self.bucket.state[key], self.params[row]
        if stored.layout is None:
            return each.view(stored.values[each.start : each.stop])
        return stored.layout.view(self.bucket.own_segments[row].slot, self.bucket.part_of(stored, row).values)

    def _number(self, row: int, key: str) -> Tensor:
        """A view."""
        shape = next(spec.shape for spec in self.rule.numbers if spec.key == key)
        return self.bucket.numbers[key][row : row + 1].reshape(shape)
