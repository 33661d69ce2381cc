"""How much of sharded parameters may be whole on a rank at a time (ZeRO stage 3)."""

from __future__ import annotations

from collections.abc import Sequence

from zerox.plan.buckets import MIB

SHARE = 8  # of all parameters, one part in so many


def resident_limit(buckets: Sequence[tuple[str, int]], resident_mb: float | None, tables: int = 0) -> float:
    """Bytes. ``buckets``: the name and the bytes of each. ``tables``: the bytes of all tables, which are read by rows.

    None: room for the two largest buckets and a third, and for an eighth of the parameters. ValueError below the
    largest bucket, which must be whole to be read.
    """
    sizes = sorted((nbytes for _, nbytes in buckets), reverse=True)
    if resident_mb is None:
        return max(sum(sizes[:3]), (sum(sizes) + tables) / SHARE)
    limit = resident_mb * MIB
    name, largest = max(buckets, key=lambda bucket: bucket[1], default=("", 0))
    if limit < largest:
        raise ValueError(
            f"resident_mb={resident_mb} is less than {name}, which is whole while it is read: it takes at least "
            f"{-(-largest * 1000 // MIB) / 1000} MiB, or a smaller bucket_cap_mb if more than one parameter is in it"
        )
    return limit
