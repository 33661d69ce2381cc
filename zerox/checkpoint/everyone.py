"""The ranks that save or load together."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zerox import _torch
from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine
from zerox.ranks.calls import waiting
from zerox.ranks.group import Ranks
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.process_group import GroupArgument, choose_group

LOST = "a rank did not answer; it died, or was late"
NO_AXES = ModelAxes()


class Everyone:
    """The ranks that save or load together: those of ``group``; None for one rank alone.

    They communicate over ``own``, which names a rank that is gone, and along ``model``'s axes, where other ranks have
    other parts of the model; or over ``group`` if that is not an optimizer's. ``number``: this rank's in errors.
    ``subgroups``: which it is in of those that experts cut the ranks into.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        own: Ranks | None = None,
        model: ModelAxes = NO_AXES,
        subgroups: tuple[int, ...] = (),
    ) -> None:
        self.group = group
        self.own = own
        self.model = model
        self.subgroups = subgroups
        self.alone = group is None and not model.axes
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)
        self.number = dist.get_rank() if model.axes else self.rank
        for axis in model.axes:
            self.rank += self.size * axis.coordinate
            self.size *= len(axis.ranks)

    @staticmethod
    def of(optimizer: Engine, process_group: GroupArgument) -> Everyone:
        """The ranks of ``process_group``, else the optimizer's, with all of its model axes.

        ValueError if one with part of its state, or of its parameters, is missing.
        """
        own, model = optimizer.inside.ranks, optimizer.inside.grads.model
        subgroups = optimizer.inside.grads.subgroups.numbers
        if process_group is None:
            return Everyone(own.given, own, model, subgroups)
        group = choose_group(process_group)
        if group is not None and group not in _torch.listed_groups():
            raise ValueError("process_group: zerox.save() and zerox.load() need one that torch.distributed made")
        of_params = [axis for axis in model.axes if axis.is_of_params]
        if group is own.given and not of_params:
            return Everyone(group, own, subgroups=subgroups)
        asked = [] if group is None else dist.get_process_group_ranks(group)
        needed = set(dist.get_process_group_ranks(own.given) if own.given else [])
        if missing := sorted(needed.union(*(axis.ranks for axis in of_params)) - set(asked)):
            raise ValueError(f"process_group: ranks {missing} have a part of the optimizer's state and are not in it")
        return Everyone(group, subgroups=subgroups)

    @property
    def has_own_params(self) -> bool:
        """Whether some ranks have parameters of their own, as pipeline stages, or experts."""
        return bool(self.subgroups) or any(not axis.is_of_params for axis in self.model.axes)

    @property
    def pipeline_stage(self) -> tuple[int, ...]:
        """Which parameters this rank has of those."""
        return tuple(axis.coordinate for axis in self.model.axes if not axis.is_of_params)

    @property
    def may_be_others(self) -> bool:
        """Whether there may be ranks of other optimizers among them, which know nothing of this one's."""
        return self.own is None and not self.alone

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by rank. CheckpointError, beginning with ``what``, if one does not answer."""
        if self.alone:
            return [value]
        found, failure = [value], ""
        try:
            if self.own is None:
                found = [None] * self.size
                assert self.group is not None
                with waiting(self.group):
                    dist.all_gather_object(found, value, group=self.group)
            elif self.group is not None:
                found = [pickle.loads(each) for each in self.own.all_gather_bytes(pickle.dumps(value))]
        except RuntimeError as error:  # texts of gloo and NCCL end in a trace
            failure = str(error).partition("\n")[0]
            if not self.model.axes:
                raise CheckpointError(f"{what}: {LOST}: {failure}") from error
        return self._gather_along_axes(found, failure, what)

    def _gather_along_axes(self, found: list[Any], failure: str, what: str) -> list[Any]:
        """A rank whose own group failed says so here: ranks of other groups would wait for it."""
        try:
            for axis in self.model.axes:
                everyones = axis.gather_objects((found, failure))
                found = [each for part, _ in everyones for each in part]
                failure = next((failed for _, failed in everyones if failed), "")
        except RuntimeError as error:
            failure = failure or str(error).partition("\n")[0]
        if failure:
            raise CheckpointError(f"{what}: {LOST}: {failure}")
        return found

    def failing_together(self, what: str) -> FailingTogether:
        """An exception inside, on any rank, becomes CheckpointError on all, at the end; it begins with ``what``."""
        return FailingTogether(self, what)


# Classes, no generators: in Python 3.13 a generator that raises another exception stays in a cycle with it, which keeps
# the optimizer and all its state until the garbage collector runs.


@dataclass
class FailingTogether:
    ranks: Everyone
    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if error is not None and not isinstance(error, (Exception, CheckpointException)):  # DCP's is no Exception
            return
        told = self.ranks.gather((self.ranks.number, None if error is None else text_of(error)), self.what)
        for number, text in told:
            if text is not None:
                where = "" if self.ranks.alone else f" on rank {number}"
                raise CheckpointError(f"{self.what}{where}: {text}") from error


@dataclass
class FailingAs:
    """Around a collective that tells all ranks by itself: its RuntimeError becomes CheckpointError."""

    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"{self.what}: {error}") from error


def text_of(error: BaseException) -> str:
    """The error's text, without the tracebacks of all ranks that DCP's exceptions have."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
