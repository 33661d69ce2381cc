"""What becomes of parameters: the plan that an optimizer is built from, and whose bytes ``zerox.estimate()`` adds up.

zerox/optimizer/planning.py makes it of tensors and options.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from zerox.plan.buckets import BucketPlan
from zerox.plan.kept import Kept
from zerox.plan.layout import Layout

BLOCK_ROWS = 64  # of a table, which one rank owns together: see zerox/memory/row_owners.py


@dataclass(frozen=True)
class Wire:
    """Bytes an element of a bucket's gradients: as backward leaves them, on the wire, and of sums over a mesh's axis.

    ``is_grads``: the wire has the gradients' dtype. ``is_wider``: the wire's holds values that theirs does not.
    """

    grad_itemsize: int
    itemsize: int
    sum_itemsize: int
    is_grads: bool
    is_wider: bool


@dataclass(frozen=True)
class TrainedPlan:
    """A bucket, what is kept for each element of its shards, and how its gradients travel.

    ``subgroup``: which ranks have it, 0 for all of them. ``divisor``: of the ranks' sum of gradients, None for the
    number of the optimizer's ranks. ``layouts``: by key, of state that lies by itself.
    """

    bucket: BucketPlan
    kept: tuple[Kept, ...]
    wire: Wire
    subgroup: int = 0
    divisor: float | None = None
    layouts: Mapping[str, Layout | None] = field(default_factory=dict)

    def layout_of(self, kept: Kept) -> Layout:
        return self.layouts.get(kept.key) or self.bucket.layout


@dataclass(frozen=True)
class TablePlan:
    """A parameter whose gradients are rows: the ``place`` of it in the plan, and what its owners keep of each row."""

    place: int
    num_rows: int
    width: int
    itemsize: int
    kept: tuple[Kept, ...]

    @property
    def nbytes(self) -> int:
        return self.num_rows * self.width * self.itemsize

    def most_rows(self, world_size: int) -> int:
        """That a rank owns: so many, or fewer."""
        return most_rows(self.num_rows, world_size)


@dataclass(frozen=True)
class Plan:
    """``names``: of all parameters, which buckets and tables know by their places in it.

    ``trained``: buckets in the order in which they are made, the last parameters first. ``frozen``: those of parameters
    that are not trained, where these are sharded; else they stay where they are, and have ``loose_bytes``.
    """

    names: tuple[str, ...]
    trained: tuple[TrainedPlan, ...] = ()
    frozen: tuple[BucketPlan, ...] = ()
    tables: tuple[TablePlan, ...] = ()
    loose_bytes: int = 0

    def __post_init__(self) -> None:
        places = [place for bucket in self.buckets for place in bucket.params] + [table.place for table in self.tables]
        assert len({*places}) == len(places), f"a parameter is planned twice: {sorted(places)}"
        assert {*places} <= {*range(len(self.names))}, f"{len(self.names)} parameters, and plans of {sorted(places)}"

    @property
    def buckets(self) -> Iterator[BucketPlan]:
        """Of all parameters that are in one."""
        yield from self.frozen
        yield from (each.bucket for each in self.trained)


def most_rows(num_rows: int, world_size: int) -> int:
    """That a rank owns of a table of which ranks own blocks: so many, or fewer."""
    num_blocks = -(-num_rows // BLOCK_ROWS)
    return min(num_rows, -(-num_blocks // world_size) * BLOCK_ROWS)
