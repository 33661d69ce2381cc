"""Parameters made whole again: each rank's updated shard goes to all others."""

from __future__ import annotations

from zerox import _C as C
from zerox.bucket import Bucket


class ParamGather:
    """Gathers run in the background from start() to wait(); the flat buffers' views see the new values in place."""

    def __init__(self, manager: C.BucketManager, world_size: int) -> None:
        self.manager = manager
        self.world_size = world_size
        self.under_way: list[tuple[Bucket, C.Pending]] = []

    def start(self, index: int, bucket: Bucket) -> None:
        if self.world_size > 1:
            self.under_way.append((bucket, self.manager.gather(index)))

    def wait(self) -> None:
        """RuntimeError naming the parameters if a rank's shard doesn't arrive within the group's timeout."""
        under_way, self.under_way = self.under_way, []
        for bucket, pending in under_way:
            try:
                pending.wait()
            except RuntimeError as error:
                names = ", ".join(member.name for member in bucket.members[:8])
                more = ", ..." if len(bucket.members) > 8 else ""
                raise RuntimeError(
                    f"zerox: the updated parameters of a bucket ({names}{more}) did not arrive from all ranks: {error}"
                ) from error
