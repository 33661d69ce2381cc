"""Parameters made whole again: each rank's updated shard goes to all others."""

from __future__ import annotations

from collections.abc import Generator, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext

from torch import Tensor

from zerox import _C as C
from zerox.memory.bucket import Bucket, FrozenBucket, named_params
from zerox.memory.flat import BufferSlot, FlatBuffer, Materialize, Unfilled, give_out, take_in, values_of
from zerox.memory.pages import zeros
from zerox.memory.row_table import RowTable
from zerox.model_names import naming
from zerox.plan.layout import Layout
from zerox.ranks.group import Ranks
from zerox.sliced_tensor import SlicedTensor


class ParamGather:
    """Gathers run from start() to wait(); the flat buffers' views see the new values in place.

    ``hidden``: the last step left its gathers to the next forward. residency.py has the other way: sharded parameters.
    """

    shards_params = False

    def __init__(self, manager: C.BucketManager, ranks: Ranks) -> None:
        self.manager = manager
        self.ranks = ranks
        self.hidden = False
        self.buckets: list[Bucket] = []
        self.elsewhere: Sequence[BufferSlot] = ()  # what the last step() found moved
        self.num_ordered = 0  # buckets at the time when the order of their use was learned

    def make_buffer(self, params: Sequence[Tensor], layout: Layout) -> FlatBuffer:
        on_meta = params[0].is_meta
        flat = zeros(layout.numel, params[0].dtype, self.ranks.device) if on_meta else None
        return FlatBuffer(params, layout, flat)

    def add_buckets(
        self,
        trained: Iterable[Bucket],
        frozen: Iterable[FrozenBucket],
        tables: Sequence[RowTable],
        materialize: Materialize | None = None,
    ) -> Generator[Bucket | FrozenBucket, None, None]:
        """Takes new ones, and yields each with this rank's values: the caller then makes them the same on all ranks.
        Parameters that are not trained have buckets only where they are sharded; ``tables`` may have been added
        before. With ``materialize`` some have parameters on meta, which it gives values. Collective."""
        if materialize is not None:
            trained = list(trained)
            on_meta = [bucket.buffer for bucket in trained if bucket.buffer.is_on_meta]
            materialize(Unfilled(on_meta, lambda _: None, lambda _: None, lambda: None))
        for bucket in trained:
            yield bucket
            self.buckets.append(bucket)

    def publish_tables(self, written: Iterable[tuple[RowTable, Tensor]]) -> None:
        """This rank has written these of its rows, by place."""

    def failure(self, forget: bool = True) -> str:
        """Why step() must not go on; empty if it may."""
        return ""

    def segment_of(self, param: Tensor) -> SlicedTensor | None:
        """What lasts of a parameter on this rank, where that is not all of it. None: it is whole."""
        return None

    def mark_written(self) -> None:
        """Inside updating(): shards are written now."""

    def updating(self) -> AbstractContextManager[None]:
        """Around the part of step() in which ranks synchronize and write their shards."""
        return nullcontext()

    def whole(self) -> AbstractContextManager[None]:
        """Inside, all parameters are whole."""
        self.wait_for(range(self.manager.num_buckets))
        return nullcontext()

    def find_left(self, planned: Sequence[tuple[Sequence[Tensor], Layout]]) -> None:
        """Of buckets that are planned, those whose shards are there. Collective."""

    def unshard(self) -> None:
        """All parameters are whole from now on, without shards. Collective."""
        self.wait()

    def find_elsewhere(self, slots: Sequence[BufferSlot]) -> list[Tensor]:
        """Before ranks synchronize: the values of parameters that were found elsewhere."""
        return values_of(slots)

    def take_in(self, slots: Sequence[BufferSlot], values: Sequence[Tensor]) -> None:
        """Afterwards: they come home."""
        take_in(slots, values)

    def prepare_checkpoint(self) -> None:
        """Before segment_of(): what was written and moved so far counts. Collective inside whole()."""

    def write(self, index: int, bucket: Bucket, slot: int, value: Tensor) -> None:
        """All ranks write the same value into a parameter, outside step(), where all have synchronized. Collective."""
        bucket.buffer.put(slot, value)
        give_out([(bucket.buffer, slot)])

    def check_room(self, added: Sequence[tuple[str, int]]) -> float:
        """How many bytes may be whole with new buckets of these names and bytes. ValueError if the largest may not."""
        return float("inf")

    def start(self, index: int, background: bool = False) -> None:
        """``background``: no caller waits right away. RuntimeError if a rank is known to be gone."""
        self.hidden = self.hidden or background  # also if step() does not come to its end
        self.manager.params.start(index, background)

    def end_step(self, hidden: bool) -> None:
        """wait(), unless parameters in flight are left to their readers: Note [Reads wait for what they read]."""
        if hidden:
            self.manager.params.guard_reads()
        else:
            self.wait()

    def wait_for(self, buckets: Sequence[int]) -> None:
        """Waits until these are whole. RuntimeError naming the parameters if a rank's shard doesn't arrive in time."""
        if self.hidden:
            with naming(lambda: named_params(self.buckets)):
                self.manager.params.wait(buckets)

    def wait(self) -> None:
        """Waits until all are whole and no rank reads this one's. RuntimeError as in wait_for(), at every call."""
        with naming(lambda: named_params(self.buckets)):
            self.manager.params.finish()
        was_hidden, self.hidden = self.hidden, False
        if not was_hidden or self.num_ordered == self.manager.num_buckets:
            return
        if used := self.manager.params.order_of_use:
            self.num_ordered = self.manager.num_buckets
            self.manager.params.propose_order(list(dict.fromkeys([*used, *range(self.num_ordered)])))
