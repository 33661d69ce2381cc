"""Masks under an optimizer: what is masked is exactly 0 after every step, on every rank and in every checkpoint."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerox._C import Combine, SyncPoint
from zerox.engine import Engine
from zerox.memory.bucket import GradPart, Member
from zerox.memory.flat import dense_strides, give_out
from zerox.memory.mask import DTYPES, Mask
from zerox.memory.one_param import OneParam
from zerox.optimizer.terms import check_pairs, words_of_calls
from zerox.ranks.calls import named
from zerox.ranks.group import Ranks
from zerox.sparsity.choose import Pool, by_magnitude, by_pattern, by_renewal
from zerox.sparsity.schedules import Schedule, at_once
from zerox.sparsity.select import Keys, keys_of
from zerox.sparsity.shards import chances_of, find_owned, keep_flags_of, values_of
from zerox.sparsity.targets import match

SCOPES = ("tensor", "global")
AN_EXPERT = "an expert's parameter"  # its name differs on ranks


class Sparsity:
    """Masks for parameters of an optimizer, one bit an element beside its state. Collective.

    A masked element is 0 in parameter, master and state after every ``step()``, whatever its gradient, and does not
    count in the gradient's norm. (What somebody writes into one stays until its parameter has a gradient in a step.)
    Call :meth:`step` after each ``optimizer.step()``, on all ranks, and before
    ``zero_grad()``: it changes the masks when the schedule says so.

    Args:
        optimizer: built from ``model.named_parameters()``. One that has a Sparsity can't have another.
        targets: the part of their elements that is masked in the end, 0 to 1, for names of parameters as ``fnmatch``
            reads them: ``{"blocks.*.weight": 0.8}``. A pattern stands for parameters of two dimensions and more; biases
            and norms are taken by their full names only. :attr:`matched` has what was found.
        schedule: :func:`zerox.cubic`, :func:`zerox.rigl` or :func:`zerox.set_`; None: all is masked right now.
        scope: "tensor": each parameter by itself has the sparsity that is asked for; "global": all that one name
            stands for have it together.
        pattern: ``(2, 4)``: of each four neighbours in the last dimension two are kept, the largest.

    Which elements are masked depends on values alone: those with the smallest magnitudes (of masters, where there are
    some), ``round(sparsity * numel)`` of them, and with the last one all that are equal to it. It is the same at any
    number of ranks, in any stage and bucket sizes.

    Raises:
        ValueError: a name stands for nothing, two for the same parameter, a value is not in [0, 1), a pattern does not
            fit a parameter, the optimizer has ``capturable=True``, or ranks differ in any of this.
        NotImplementedError: for :class:`zerox.ShardedOptimizer`, DTensors, and inside ``join()``.
    """

    @named("Sparsity()")
    def __init__(
        self,
        optimizer: Engine,
        targets: Mapping[str, float],
        schedule: Schedule | None = None,
        scope: str = "tensor",
        pattern: tuple[int, int] | None = None,
    ) -> None:
        ranks = optimizer.inside.ranks
        self._optimizer = weakref.ref(optimizer)  # which holds this one
        self.targets: dict[str, float | None] = dict(targets)  # None: the zeros that there were
        self.schedule = at_once() if schedule is None else schedule
        self.scope = scope
        self.pattern = pattern
        with ranks.refusals_told():
            _check_optimizer(optimizer)
            if scope not in SCOPES:
                raise ValueError(f"Sparsity: scope must be one of {SCOPES}, got {scope!r}")
            of_globs = match(optimizer, targets)
            self._check_pattern([member for members in of_globs.values() for member in members])
            members = [m for members in of_globs.values() for m in members]
            self._owns = find_owned(optimizer.inside.buckets, optimizer.inside.grads.subgroups, members)
            self._check_experts()
        self.matched = {glob: [member.name for member in members] for glob, members in of_globs.items()}
        names = [AN_EXPERT if own.is_expert else own.member.name for own in self._owns]
        ranks.check_same([f"Sparsity of {names}, {self.settings()}, schedule {self.schedule.name}"])
        self.count = 0  # of calls of step()
        self._put([torch.ones_like(keep_flags_of(own)) for own in self._owns])
        optimizer.inside.sparsity = self
        if self.schedule.changes(0):
            self._change()

    @classmethod
    @named("Sparsity.from_zeros()")
    def from_zeros(cls, optimizer: Engine, names: Sequence[str]) -> Sparsity:
        """With the zeros that these parameters have now as masks, as of a model that was pruned elsewhere. They stay.

        Raises as the constructor. Collective.
        """
        never = Schedule("from zeros", lambda step: False, lambda step: 1.0)
        found = cls(optimizer, dict.fromkeys(names, 0.0), never)
        found._take(lambda: [values_of(own) != 0 for own in found._owns])
        found.targets = dict.fromkeys(names)
        return found

    @torch.no_grad()
    @named("Sparsity.step()")
    def step(self) -> None:
        """After ``optimizer.step()``: counts it, and changes the masks if the schedule says so. Collective then.

        Parameters that become masked are 0 on all ranks when it returns (with hidden gathers: when they are read).
        RuntimeError on all ranks if one has made more calls than another, or if elements are to grow by gradients that
        are gone: call it before ``zero_grad()``.
        """
        self.count += 1
        if self.schedule.changes(self.count):
            self._change()

    @torch.no_grad()
    @named("Sparsity.masks()")
    def masks(self) -> dict[str, Tensor]:
        """bool, of each parameter's shape, by name: True where an element is kept. Collective."""
        self.optimizer.inside.sync(SyncPoint.FULL_STATE)
        found = {}
        for own in self._owns:
            part = keep_flags_of(own).to(torch.uint8) if own.own_row is not None else None
            found[own.member.name] = own.all_gather(part, torch.uint8, "mask").bool()
        return found

    @named("Sparsity.sparsity()")
    def sparsity(self) -> dict[str, float]:
        """By name the part of a parameter's elements that is masked: ties may make it more than asked. Collective."""
        self.optimizer.inside.sync(SyncPoint.SYNCHRONIZE)
        pairs = zip(self._owns, self._num_masked(), strict=True)
        return {own.member.name: count / max(own.member.param.numel(), 1) for own, count in pairs}

    @torch.no_grad()
    @named("Sparsity.remove()")
    def remove(self) -> None:
        """Ends it: everything trains again, from the zeros that there are. Collective."""
        self.optimizer.inside.sync(SyncPoint.MASKS, [-1.0])
        with self.optimizer.inside.loading.pulls.of_all:
            for own in self._owns:
                own.bucket.mask = None
        self.optimizer.inside.sparsity = None
        self.optimizer.inside.loading.note_changes()

    def state_dict(self) -> dict[str, Any]:
        """What :meth:`load_state_dict` takes. The masks are in the optimizer's; zerox.save() and load() have both."""
        return {**self.settings(), "count": self.count}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on with the schedule where it was. ValueError, naming both, if this was saved of another Sparsity."""
        if why := self.misfit(state):
            raise ValueError(f"Sparsity: {why}")
        self.count = int(state["count"])

    # ---- for checkpoints

    def settings(self) -> dict[str, Any]:
        """What has to be the same on all ranks, and where training goes on."""
        return {"targets": self.targets, "scope": self.scope, "pattern": self.pattern}

    def misfit(self, saved: Mapping[str, Any]) -> str:
        """Why masks that were saved with these settings are not for this one; empty if they are."""
        for key, own in self.settings().items():
            if saved.get(key) != own:
                return f"masks were saved with {key}={saved.get(key)}, and here it is {own}"
        return ""

    # ---- inside

    @property
    def optimizer(self) -> Engine:
        """RuntimeError if it is gone."""
        optimizer = self._optimizer()
        if optimizer is None:
            raise RuntimeError("Sparsity: its optimizer was deleted")
        return optimizer

    def _change(self) -> None:
        self._take(self._choose)

    def _take(self, choose: Callable[[], list[Tensor]]) -> None:
        """Masks of ``choose()``, once all ranks have synchronized. Parameters that they change go to all ranks."""
        inside = self.optimizer.inside
        with inside.gather.updating():
            inside.sync(SyncPoint.MASKS, [float(self.count)])
            overlap = inside.overlap is not None
            for index in self._put(choose()):
                inside.gather.start(index, background=overlap)
            inside.manager.synchronizer.bump_versions()
            inside.gather.end_step(hidden=overlap)
        give_out(inside.gather.elsewhere)
        inside.loading.note_changes()

    def _put(self, chosen: Sequence[Tensor]) -> list[int]:
        """What is kept of each of the parts, into their buckets, whose indices it returns: the same on all ranks."""
        whole: dict[int, Tensor] = {}
        slots: dict[int, list[int]] = {}
        for own, kept in zip(self._owns, chosen, strict=True):
            if own.index not in whole:
                whole[own.index] = torch.ones_like(own.bucket.param_shard, dtype=torch.bool)
            whole[own.index][own.own_elements] = kept
            slots.setdefault(own.index, []).append(own.slot)
        with self.optimizer.inside.loading.pulls.of_all:
            for index, kept in whole.items():
                self.optimizer.inside.buckets[index].take_mask(Mask.of(kept, slots[index]))
        return list(whole)

    def _choose(self) -> list[Tensor]:
        kept = [keep_flags_of(own) for own in self._owns]
        if self.pattern is not None:
            return [by_pattern(own, *self.pattern) for own in self._owns]
        pools = self._pools(self.schedule.part(self.count))
        fraction = self.schedule.renewed(self.count)
        if fraction == 0.0:
            return by_magnitude(self._owns, kept, pools, self._add_up)
        return by_renewal(self._owns, kept, pools, self._scores(), fraction, self._add_up)

    def _pools(self, part: float) -> list[Pool]:
        num_masked = self._num_masked()
        places = {own.member.name: place for place, own in enumerate(self._owns)}
        pools = []
        for glob, names in self.matched.items():
            of_glob = [places[name] for name in names]
            for owns in [of_glob] if self.scope == "global" else [[place] for place in of_glob]:
                numel = sum(self._owns[place].member.param.numel() for place in owns)
                masked = sum(num_masked[place] for place in owns)
                pools.append(Pool(owns, numel, masked, round((self.targets[glob] or 0.0) * part * numel)))
        return pools

    def _scores(self) -> list[Keys]:
        """What decides on growth, as keys: 0 for none."""
        if self.schedule.grows_by == "chance":
            return [partial(chances_of, own, self.count) for own in self._owns]
        grads = self.optimizer.inside.grads
        parts = {index: grads.parts(index) for index in {own.index for own in self._owns}}
        has_any = torch.tensor([sum(map(bool, parts.values()))], device="cpu")
        self.optimizer.inside.grads.all_reduce(has_any, Combine.SUM)
        if not int(has_any):
            raise RuntimeError(
                "zerox: masked elements are to grow where gradients are large, and there are none: call "
                "sparsity.step() after optimizer.step() and before zero_grad()"
            )
        return [partial(_gradient_keys, own, parts[own.index]) for own in self._owns]

    def _num_masked(self) -> list[int]:
        """Of each parameter, on all ranks together. Collective."""
        counts = torch.tensor([int((~keep_flags_of(own)).sum()) for own in self._owns], device="cpu")
        self._add_up(counts)
        return list(counts.tolist())

    def _add_up(self, counts: Tensor) -> None:
        """A row for each parameter, over the ranks that have it; without experts also one for several together."""
        apart: dict[int, tuple[Ranks, list[int]]] = {}
        for row, own in enumerate(self._owns):
            if own.is_expert:
                apart.setdefault(id(own.ranks), (own.ranks, []))[1].append(row)
        of_experts = [(ranks, rows, counts[rows]) for ranks, rows in apart.values()]
        self.optimizer.inside.grads.all_reduce(counts, Combine.SUM)
        for ranks, rows, sums in of_experts:
            ranks.all_reduce(sums, dist.ReduceOp.SUM)
            counts[rows] = sums

    def _check_experts(self) -> None:
        if self.scope != "global":
            return
        for own in self._owns:
            if own.is_expert:
                raise ValueError(
                    f'Sparsity: scope="global" ranks all that one name stands for together, and parameter '
                    f'{own.member.quoted} is an expert\'s, which not all ranks have: use scope="tensor"'
                )

    def _check_pattern(self, members: Sequence[Member]) -> None:
        if self.pattern is None:
            return
        keeps, of = self.pattern
        if not 0 < keeps < of:
            raise ValueError(f"Sparsity: pattern must be (kept, of how many), as (2, 4), got {self.pattern}")
        if self.schedule.name != at_once().name:
            raise ValueError(f"Sparsity: a pattern holds from the start, and has no {self.schedule.name}")
        for glob, value in self.targets.items():
            if value != 1 - keeps / of:
                raise ValueError(
                    f"Sparsity: pattern={self.pattern} masks {1 - keeps / of:g}, {glob!r} asks for {value}"
                )
        for member in members:
            row_major = dense_strides(member.param) == torch.empty(member.param.shape, device="meta").stride()
            if member.param.shape[-1] % of or not row_major:
                raise ValueError(
                    f"Sparsity: parameter {member.quoted} of shape {tuple(member.param.shape)} has no groups of {of} "
                    "neighbours in its last dimension: its length must be a multiple, and its memory in order of rows"
                )


def _gradient_keys(own: OneParam, parts: Sequence[GradPart]) -> Tensor:
    """Of the mean gradient's elements, as zerox/sparsity/select.py has them; 0 for those that are not finite."""
    grad = torch.zeros(own.own_numel, device=own.bucket.device)
    for part in parts:
        first = max(own.own_elements.start, part.start)
        last = min(own.own_elements.stop, part.start + part.grad.numel())
        if first < last:
            to = slice(first - own.own_elements.start, last - own.own_elements.start)
            grad[to] = part.grad[first - part.start : last - part.start]
    return keys_of(torch.where(grad - grad == 0, grad, 0.0))


def _check_optimizer(optimizer: Engine) -> None:
    inside = optimizer.inside
    known = [m for bucket in inside.buckets for m in bucket.members if m.param.dtype in DTYPES]
    calls = words_of_calls(inside.overlap is not None, inside.joining.divide is not None, masks=True)
    rule = inside.rules.default.name
    check_pairs(inside.options, inside.grads.subgroups, optimizer.param_groups, (known, []), calls, rule)
    if inside.sparsity is not None:
        raise ValueError("Sparsity: the optimizer has one already, call its remove() first")
