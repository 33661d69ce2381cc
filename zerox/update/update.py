"""The update of buckets: kernel calls on parts of their shards, with several small buckets in one launch.

matrices.py has the update of a rule that takes whole matrices, and local_optimizer_update.py that by an optimizer of
torch's kind.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack
from itertools import groupby
from typing import Any, Protocol

import torch
from torch import Tensor

from zerox import ops
from zerox._C import Range
from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket, GradPart, Part
from zerox.memory.stored import Stored
from zerox.ops import Shard
from zerox.ranks.roll_call import summary_of
from zerox.rules.muon import MuonRule
from zerox.rules.of_groups import Rules
from zerox.rules.options_table import OptionsTables
from zerox.rules.rule import Rule
from zerox.update.matrices import MatrixUpdate

Groups = Sequence[dict[str, Any]]


class Update(Protocol):
    """How an optimizer updates its buckets. ``has_step_options``: its next step() was given options for a class of
    torch's kind. ``failure``: why parameters or state are not of one step, and what helps, until state is loaded."""

    failure: str

    def __init__(
        self, rules: Rules, buckets: Sequence[Bucket], grads: Grads, grad_scale: GradScale, keeps_place: bool
    ) -> None: ...

    @property
    def has_step_options(self) -> bool: ...
    def add_bucket(self, bucket: Bucket, groups: Groups) -> None:
        """Each new bucket, once it has its values."""

    def refresh(self, groups: Groups) -> None:
        """Takes the groups' options for a step that a CUDA graph will replay."""

    def runs(self, groups: Groups, capturing: bool) -> Iterator[Sequence[int]]:
        """Updates all buckets; yields those whose parameters are new, in runs, to be gathered."""

    def note_loaded(self, groups: Groups) -> None:
        """The buckets' state was loaded, and the options of their groups."""

    def regroup(self, groups: Groups) -> None:
        """There are other groups, or the buckets' parameters are in others of them."""


BROKEN_OFF = (
    "in step(), which had updated a part of the parameters. Build the optimizer anew on all ranks, and give it the "
    "last state that was saved: zerox.load()"
)


class FusedUpdate:
    """By kernels. ``buckets``: the core's own list, which grows."""

    has_step_options = False

    def __init__(
        self, rules: Rules, buckets: Sequence[Bucket], grads: Grads, grad_scale: GradScale, keeps_place: bool
    ) -> None:
        self.buckets = buckets
        self.grads = grads
        self.grad_scale = grad_scale
        self.matrices = MatrixUpdate(rules, buckets, grads, grad_scale)
        self.options_tables = OptionsTables(rules, torch.device(grads.ranks.device), keeps_place)
        # By bucket, start, number of elements and first row, beside the state that they are views of. To make the views
        # of every part at every step would take longer than the update of a small one.
        self.made: dict[tuple[int, int, int, int], tuple[dict[str, Stored], Part]] = {}
        self.failure = ""
        self.order: list[int] = []  # of the buckets, as it was when ``launches`` were cut
        self.launches: list[list[int]] = []

    def add_bucket(self, bucket: Bucket, groups: Groups) -> None:
        pass

    def note_loaded(self, groups: Groups) -> None:
        self.failure = ""

    def regroup(self, groups: Groups) -> None:
        self.options_tables.names = []
        self.matrices.regroup()

    def refresh(self, groups: Groups) -> None:
        self.options_tables.refresh(groups)

    def runs(self, groups: Groups, capturing: bool) -> Iterator[Sequence[int]]:
        tables = self.options_tables.refresh(groups, capturing)
        self.matrices.check(groups)
        order = self.grads.manager.params.order
        if order != self.order:  # what else launches depend on never changes
            self.order, self.launches = order, list(launches(order, self.buckets, self.grad_scale.divisors))
        for run in self.launches:
            rule = self.buckets[run[0]].rule
            try:
                with ranges(run):
                    if isinstance(rule, MuonRule):
                        self.matrices.update(run, groups)
                    else:
                        scale = self.grad_scale.remaining_factor(run[0])
                        update(rule, list(self._shards(run)), tables[rule.name], scale)
            except BaseException as error:  # of matrices an owner may fail alone: it has no memory for its largest
                if not capturing:  # else nothing was updated
                    self._give_up(error)
                raise
            yield run

    def _give_up(self, error: BaseException) -> None:
        """The others wait for this rank's parameters. Alone one may go on after Ctrl-C, as with torch."""
        failure = f"rank {self.grads.ranks.rank} raised {summary_of(error)} {BROKEN_OFF}"
        if isinstance(error, Exception):
            self.failure = failure
        self.grads.ranks.tell_failure(failure)

    def _shards(self, run: Sequence[int]) -> Iterator[Shard]:
        for index in run:
            if parts := self.grads.parts(index):
                present = self.grad_scale.present(self.grads.present(index))
                if self.grad_scale.requested.limit is not None:
                    parts = [of._replace(grad=self.grad_scale.clamp(of.grad, index)) for of in parts]
                yield from (shard_of(self._part(index, of), of, present) for of in parts)

    def _part(self, index: int, of: GradPart) -> Part:
        place = (index, of.start, of.grad.numel(), of.first_row)
        bucket = self.buckets[index]
        state, part = self.made.get(place, (None, None))
        if part is None or state is not bucket.state:
            part = bucket.part(of)
            self.made[place] = (bucket.state, part)
        return part


def shard_of(part: Part, of: GradPart, present: Tensor) -> Shard:
    """A part of a bucket's shard as the kernels take it. ``present``: of all the bucket's rows."""
    param, master, state, scales, rows, steps = part
    own = present if rows is None else present[rows]
    return Shard(param, master, of.grad, state, scales, of.segments, own, steps, of.mask)


def update(rule: Rule, shards: Sequence[Shard], options: Tensor, grad_scale: Tensor | None) -> None:
    """One step: state, master and parameters in place, in one pass."""
    for _, alike in groupby(shards, key=_kind):
        ops.update_(rule.name, list(alike), options, grad_scale)


def _kind(shard: Shard) -> tuple[object, ...]:
    """Shards of one kind can be updated by one launch."""
    master = None if shard.master is None else shard.master.dtype
    return (shard.param.dtype, shard.grad.dtype, master, *(values.dtype for values in shard.state))


# A launch takes about as long as a GPU needs for the bytes of a few hundred thousand elements.
LEAST_IN_A_LAUNCH = 4 * 2**20


def launches(order: Sequence[int], buckets: Sequence[Bucket], divisors: Sequence[object]) -> Iterator[list[int]]:
    """``order`` cut into runs of buckets that are updated together, before the gather of any of them begins.

    A run has one rule and one divisor. On a GPU it has enough elements for a launch, or all matrices, of which equal
    ones go together. The CPU has no launches: there a run is one bucket.
    """
    for _, alike in groupby(order, key=lambda index: (buckets[index].rule.name, divisors[index])):
        run: list[int] = []
        numel = 0
        for index in alike:
            shard = buckets[index].param_shard
            run.append(index)
            numel += shard.numel()
            is_full = numel >= LEAST_IN_A_LAUNCH and not isinstance(buckets[index].rule, MuonRule)
            if is_full or shard.is_cpu:
                yield run
                run, numel = [], 0
        if run:
            yield run


def ranges(run: Sequence[int]) -> AbstractContextManager[object]:
    """For profilers: one range for each bucket of the run."""
    if len(run) == 1:
        return Range("update", run[0])
    together = ExitStack()
    for index in run:
        together.enter_context(Range("update", index))
    return together
