"""The face of csrc/grads: gradients on their way from backward to the shards that step() reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
import torch.distributed as dist
from torch import Tensor

from zerox import _C as C
from zerox.flow.other_reducers import find_reduced
from zerox.flow.placeholder import ShardedGrad
from zerox.memory.bucket import Bucket, GradPart
from zerox.plan.stage import SHARDED, Stage
from zerox.ranks.group import Ranks

C.set_find_reduced(find_reduced)


class Grads:
    """Installs the hooks of each bucket that is added, and hands out this rank's shard of the mean gradient."""

    def __init__(
        self,
        ranks: Ranks,
        stage: Stage,
        reduce_dtype: torch.dtype | None,
        keeps_shards: bool = False,
        divides: bool = False,
    ) -> None:
        """``keeps_shards``: shards stay at one address, for CUDA graphs. ``divides``: see ManagerOptions."""
        self.no_sync_depth = 0
        self.segments: list[Tensor] = []  # of each bucket
        self.pieces_of: list[list[tuple[int, int, int, Tensor]]] = []
        self.ranks = ranks
        self.sharded = stage.grads is SHARDED
        self.reduce_dtype = reduce_dtype
        self.manager = C.BucketManager(
            axes=ranks.axes_for_manager(),
            control=ranks.control,
            whereabouts=ranks.whereabouts,
            options=C.ManagerOptions(
                route=[getattr(C.Move, move.name) for move in stage.grad_route],
                keeps_shards=keeps_shards,
                device=torch.device(ranks.device),
                sharded_params=stage.params is SHARDED and ranks.size > 1,
                divides=divides,
            ),
        )

    def wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self.reduce_dtype or bucket.buffer.flat.dtype

    def add_bucket(self, bucket: Bucket, divisor: float | None = None) -> int:
        """Returns the bucket's index. Gradients of its parameters are taken from now on, and the ranks' sum is divided
        by ``divisor`` (None: their number)."""
        layout = bucket.plan.layout
        index = self.manager.num_buckets
        placeholders = None
        if self.sharded:
            to_manager = weakref.ref(self.manager)
            placeholders = [
                ShardedGrad(member.param, member.name, partial(_mark_zeroed, to_manager, index, slot))
                for slot, member in enumerate(bucket.members)
            ]
        made = self.manager.add_bucket(
            names=[member.name for member in bucket.members],
            params=bucket.buffer.params,
            homes=[bucket.buffer.home(slot) for slot in range(len(bucket.members))],
            flat=bucket.buffer.flat,
            placeholders=placeholders,
            offsets=list(layout.offsets),
            wire_dtype=self.wire_dtype(bucket),
            grad_dtype=bucket.grad_dtype,
            shard_numel=layout.shard_numel,
            trailer_numel=layout.trailer_numel,
            segments=bucket.segments,
            divisor=self.ranks.size if divisor is None else divisor,
            num_straight=bucket.plan.num_straight if self.wire_dtype(bucket) == bucket.grad_dtype else 0,
        )
        assert made == index
        self.segments.append(bucket.segments)
        self.pieces_of.append(list(map(_less_padding, self.manager.parts(index))))
        return made

    def settle(
        self,
        meeting: C.Meeting,
        arguments: Sequence[float] = (),
        options: float = 0.0,
        adoptions: int = 0,
        refusal: str = "",
    ) -> C.Outcome:
        """Collective. Waits until everything launched has landed on all ranks, unless a rank has to adopt first.

        RuntimeError on all ranks if they ran different numbers of backwards, one of them raised, or one passes a
        ``refusal`` (why it can't go on); on those that wait, naming buckets and parameters, if a rank died or stalls
        past the group's timeout.
        """
        padded = [*arguments, *[0.0] * (C.NUM_ARGUMENTS - len(arguments))]
        return self.manager.settlement.settle(meeting, padded, options, adoptions, refusal)

    def shard(self, index: int) -> Tensor | None:
        """The mean gradient's shard ``[shard_numel]`` after settle(), or None while no parameter has a gradient.

        If gradients are whole, each call packs it from p.grad.
        """
        return self.manager.grads.shard(index)

    def parts(self, index: int) -> list[GradPart]:
        """The shard as it lies, read-only; elements without a gradient may be left out.

        Large gradients are where autograd left them (one rank), or where the mean was gathered (whole gradients).
        """
        pieces = self.manager.grads.pieces(index)
        if pieces:
            places = zip(pieces, self.pieces_of[index], strict=True)
            return [
                GradPart(grad[padding:] if padding else grad, start, first_row, segments)
                for grad, (padding, start, first_row, segments) in places
                if grad is not None and segments.shape[0] > 0
            ]
        shard = self.shard(index)
        return [] if shard is None else [GradPart(shard, 0, 0, self.segments[index])]

    def landed(self) -> list[Tensor]:
        """The tensors that all buckets' shards lie in."""
        return [tensor for index in range(self.manager.num_buckets) for tensor in self.manager.grads.landed(index)]

    def present(self, index: int) -> Tensor:
        """uint8, one for each own segment: whether its parameter has a gradient on any rank."""
        return self.manager.grads.present(index)

    def words(self, index: int) -> Tensor | None:
        """The exact sum of squares over the shard, if the reduction left one that still holds."""
        return self.manager.grads.words(index)

    def moved(self) -> list[tuple[int, int]]:
        """(bucket, slot) of each parameter that lies elsewhere: after .to(), param.data = ... or share_memory_()."""
        return self.manager.params.moved()

    def all_reduce(self, values: Tensor, combine: C.Combine) -> None:
        """A few integers, combined over the ranks in place. Collective. Waits for the device under gloo only."""
        if values.device.type == "cpu":
            self.manager.settlement.all_reduce(values, combine)
        elif self.ranks.via_host:
            host = values.cpu()
            self.manager.settlement.all_reduce(host, combine)
            values.copy_(host)
        else:
            self.ranks.all_reduce(values, dist.ReduceOp.SUM if combine == C.Combine.SUM else dist.ReduceOp.MAX)

    def zero(self, set_to_none: bool) -> None:
        self.manager.settlement.zero(set_to_none)

    @contextmanager
    def inner_sync(self) -> Iterator[None]:
        """Inside, what backward sends stays on the inner axis of a mesh."""
        self.manager.backward.set_stays_inner(True)
        try:
            yield
        finally:
            self.manager.backward.set_stays_inner(False)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.no_sync_depth += 1
        self.manager.backward.set_sync(False)
        try:
            yield
        finally:
            self.no_sync_depth -= 1
            self.manager.backward.set_sync(self.no_sync_depth == 0)


def _less_padding(part: tuple[int, int, Tensor]) -> tuple[int, int, int, Tensor]:
    """Without the padding in front: with 8-bit moments a part must start with a block."""
    start, first_row, segments = part
    padding = int(segments[0, 0]) if len(segments) > 0 else 0
    shifted = segments.clone()
    shifted[:, :2] -= padding
    return padding, start + padding, first_row, shifted


def _mark_zeroed(to_manager: weakref.ref[C.BucketManager], bucket: int, slot: int) -> None:
    manager = to_manager()
    if manager is not None:
        manager.grads.mark_zeroed(bucket, slot)
