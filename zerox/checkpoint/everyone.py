"""The ranks that save or load together."""

from __future__ import annotations

import pickle
from dataclasses import dataclass
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine
from zerox.ranks.group import Ranks
from zerox.ranks.process_group import GroupArgument, chosen_group


class Everyone:
    """The ranks that save or load together: those of ``group``; None for one rank alone.

    They communicate over ``own``, which names a rank that is gone, or over ``group`` if that is not an optimizer's.
    """

    def __init__(self, group: dist.ProcessGroup | None = None, own: Ranks | None = None) -> None:
        self.group = group
        self.own = own
        self.alone = group is None
        self.rank = 0 if group is None else dist.get_rank(group)
        self.size = 1 if group is None else dist.get_world_size(group)

    @staticmethod
    def of(optimizer: Engine, process_group: GroupArgument) -> Everyone:
        """The ranks of ``process_group``, else the optimizer's. ValueError if one with part of its state is missing."""
        own = optimizer.inside.ranks
        group = own.given if process_group is None else chosen_group(process_group)
        if group is not None and group not in dist.distributed_c10d._world.pg_map:
            raise ValueError("process_group: zerox.save() and zerox.load() need one that torch.distributed made")
        if group is own.given:
            return Everyone(group, own)
        asked = [] if group is None else dist.get_process_group_ranks(group)
        if missing := sorted(set(dist.get_process_group_ranks(own.given) if own.given else []) - set(asked)):
            raise ValueError(f"process_group: ranks {missing} have a part of the optimizer's state and are not in it")
        return Everyone(group)

    def gather(self, value: Any, what: str) -> list[Any]:
        """Every rank's value, by rank. CheckpointError, beginning with ``what``, if one does not answer."""
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        try:
            if self.own is not None:
                return [pickle.loads(each) for each in self.own.all_gather_bytes(pickle.dumps(value))]
            dist.all_gather_object(found, value, group=self.group)
        except RuntimeError as error:  # texts of gloo and NCCL end in a trace
            said_first = str(error).partition("\n")[0]
            raise CheckpointError(f"{what}: a rank did not answer; it died, or was late: {said_first}") from error
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
        told = self.ranks.gather(None if error is None else said(error), self.what)
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if failed:
            where = "" if self.ranks.alone else f" on rank {failed[0]}"
            raise CheckpointError(f"{self.what}{where}: {told[failed[0]]}") from error


@dataclass
class FailingAs:
    """Around a collective that tells all ranks by itself: its RuntimeError becomes CheckpointError."""

    what: str

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        if isinstance(error, RuntimeError):
            raise CheckpointError(f"{self.what}: {error}") from error


def said(error: BaseException) -> str:
    """The error's text, without the tracebacks of all ranks that DCP's exceptions have."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"
