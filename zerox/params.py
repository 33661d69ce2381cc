"""Parameters made whole again: each rank's updated shard goes to all others."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from zerox import _C as C
from zerox.bucket import Bucket


class ParamGather:
    """Gathers run in the background from start() to wait(); the flat buffers' views see the new values in place."""

    def __init__(self, manager: C.BucketManager, world_size: int) -> None:
        self.manager = manager
        self.world_size = world_size
        self.under_way: list[tuple[str, C.Pending]] = []

    def start(self, index: int, bucket: Bucket) -> None:
        """RuntimeError as wait(), where a rank is known to be gone."""
        if self.world_size > 1:
            with _naming(bucket.describe(index)):
                self.under_way.append((bucket.describe(index), self.manager.gather(index)))

    def wait(self) -> None:
        """RuntimeError naming the parameters if a rank's shard doesn't arrive within the group's timeout."""
        under_way, self.under_way = self.under_way, []
        for bucket, pending in under_way:
            with _naming(bucket):
                pending.wait()


@contextmanager
def _naming(bucket: str) -> Iterator[None]:
    try:
        yield
    except RuntimeError as error:
        raise RuntimeError(
            f"zerox: the updated parameters of {bucket} did not arrive from all ranks: {error}"
        ) from error
