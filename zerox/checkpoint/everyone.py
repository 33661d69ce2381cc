"""The ranks that save or load together."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from zerox.checkpoint.manifest import CheckpointError


class Everyone:
    """The ranks that save or load together."""

    def __init__(self, group: dist.ProcessGroup | None, alone: bool = False) -> None:
        self.group = group
        self.alone = alone or not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @contextmanager
    def dcp_options(self) -> Iterator[dict[str, Any]]:
        """Who takes part. That there is one process only is no reason for DCP to warn."""
        with warnings.catch_warnings():
            if self.alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield {"no_dist": True} if self.alone else {"process_group": self.group}

    def gather(self, value: Any) -> list[Any]:
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """An exception inside, on any rank, becomes one on all, at the end."""
        error: BaseException | None = None
        try:
            yield
        except (Exception, CheckpointException) as raised:  # DCP's is no Exception
            error = raised
        told = self.gather(None if error is None else said(error))
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if not failed:
            return
        if isinstance(error, CheckpointError):
            raise error
        where = "" if self.alone else f" on rank {failed[0]}"
        raise CheckpointError(f"{what}{where}: {told[failed[0]]}") from error


def said(error: BaseException) -> str:
    """In one line; of DCP's, which has tracebacks of all ranks, what the first rank raised."""
    if isinstance(error, CheckpointException) and error.failures:
        error = next(iter(error.failures.values()))[0]
    return f"{type(error).__name__}: {error}"
