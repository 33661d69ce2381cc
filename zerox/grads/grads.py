"""The face of csrc/grads: gradients on their way from backward to the shards that step() reads."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from zerox import _C as C
from zerox import _torch
from zerox.grads.grad_operators import ALL_FINITE, GradOperators
from zerox.grads.other_reducers import find_reduced
from zerox.grads.partial_grads import PartialGrads
from zerox.grads.placeholder import ShardedGrad
from zerox.memory.bucket import Bucket, GradPart, named_params
from zerox.model_names import in_text, naming, quote
from zerox.plan.stage import SHARDED, Stage
from zerox.ranks.dtensors import is_dtensor
from zerox.ranks.group import Ranks
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.subgroups import Subgroup, Subgroups

C.set_backward_functions(find_reduced, lambda text, names, params: in_text(text, list(zip(names, params, strict=True))))


class Grads:
    """Installs the hooks of each bucket that is added, and hands out this rank's shard of the mean gradient."""

    def __init__(
        self,
        ranks: Ranks,
        stage: Stage,
        reduce_dtype: torch.dtype | None,
        keeps_shards: bool = False,
        divides: bool = False,
        model: ModelAxes | None = None,
    ) -> None:
        """``keeps_shards``: shards stay at one address, for CUDA graphs. ``divides``: see ManagerOptions."""
        self.model = model or ModelAxes()
        self.counts: list[bool] = []  # of each bucket: whether norms count it on this rank
        self.dtensors: list[tuple[Any, Tensor, str]] = []  # with the local tensor that lies in a bucket, and the name
        self.no_sync_depth = 0
        self.buckets: list[Bucket] = []
        self.parts_of: list[list[tuple[int, int, int, Tensor] | None]] = []
        self.sharded = stage.grads is SHARDED
        self.reduce_dtype = reduce_dtype
        self.manager = C.BucketManager(
            axes=ranks.axes_for_manager(),
            control=ranks.control,
            failure_detector=ranks.failure_detector,
            options=C.ManagerOptions(
                route=[getattr(C.Move, move.name) for move in stage.grad_route],
                keeps_shards=keeps_shards,
                device=torch.device(ranks.device),
                sharded_params=stage.params is SHARDED and ranks.size > 1,
                divides=divides,
            ),
        )
        self.subgroups = Subgroups(ranks, self.manager)
        self.partial = PartialGrads(self.manager, self.model, lasts=self.sharded)
        # Not with CUDA graphs: a replay of step() would not ask.
        self.operators = GradOperators() if self.sharded and not keeps_shards else None

    @property
    def ranks(self) -> Ranks:
        return self.subgroups.ranks

    @property
    def placeholders(self) -> list[ShardedGrad]:
        """Of all buckets, if they are more than that."""
        return [] if self.operators is None else self.operators.placeholders

    def wire_dtype(self, bucket: Bucket) -> torch.dtype:
        return self.reduce_dtype or bucket.buffer.flat.dtype

    def add_bucket(self, bucket: Bucket, divisor: float | None = None, subgroup: Subgroup | None = None) -> int:
        """Returns the bucket's index. Gradients of its parameters are taken from now on, and the ranks' sum is divided
        by ``divisor`` (None: the number of the optimizer's). ``subgroup``: of the bucket; None: all ranks."""
        layout = bucket.plan.layout
        index = self.manager.num_buckets
        placeholders = None
        if self.sharded:
            to_manager, is_sent = weakref.ref(self.manager), (subgroup or self.subgroups.all).ranks.size > 1
            placeholders = [
                ShardedGrad(member.param, member.name, partial(_mark_zeroed, to_manager, index, slot), is_sent)
                for slot, member in enumerate(bucket.members)
            ]
            if self.operators is not None:
                self.operators.add(placeholders)
        num_zero_copy = bucket.plan.num_zero_copy if self.wire_dtype(bucket) == bucket.grad_dtype else 0
        made = self.manager.add_bucket(
            names=[member.name for member in bucket.members],
            params=[member.param for member in bucket.members],
            locals=bucket.buffer.params,
            homes=[bucket.buffer.home(slot) for slot in range(len(bucket.members))],
            flat=bucket.buffer.flat,
            placeholders=placeholders,
            offsets=list(layout.offsets),
            wire_dtype=self.wire_dtype(bucket),
            grad_dtype=bucket.grad_dtype,
            shard_starts=list(layout.shard_starts),
            trailer_numel=layout.trailer_numel,
            segments=bucket.segments,
            divisor=self.ranks.size if divisor is None else divisor,
            subgroup=(subgroup or self.subgroups.all).for_manager(),
            num_zero_copy=num_zero_copy,
            zero_copy_numels=layout.numels_in_front(num_zero_copy),
        )
        assert made == index
        replicated = self.model.replicated_over(bucket.members[0].param)
        self.counts.append(self.model.counts(replicated))
        for member, local in zip(bucket.members, bucket.buffer.params, strict=True):
            if is_dtensor(member.param):
                self.dtensors.append((member.param, local, member.name))
                if replicated:
                    self.partial.buckets[index] = bucket
        self.buckets.append(bucket)
        self.parts_of.append(list(map(_less_padding, self.manager.parts(index))))
        return made

    def let_decide(self, deciding: Mapping[int, C.Decision]) -> None:
        """Has wrappers' forwards decide when the gradients of their parameters leave. ``deciding``: by id of these."""
        for index, bucket in enumerate(self.buckets) if deciding else ():
            for slot, member in enumerate(bucket.members):
                if (decision := deciding.get(id(member.param))) is not None:
                    self.manager.backward.set_decision(index, slot, decision)

    def refresh_segments(self, index: int) -> None:
        """A bucket's segments are of other groups or numbers now."""
        self.parts_of[index] = list(map(_less_padding, self.manager.parts(index)))

    def sync(
        self,
        sync_point: C.SyncPoint,
        arguments: Sequence[float] = (),
        options: float = 0.0,
        params: float = 0.0,
        adoptions: int = 0,
        refusal: str = "",
    ) -> C.SyncResult:
        """Collective. Waits until everything launched has been reduced on all ranks, unless a rank has to adopt first.

        RuntimeError on all ranks if they ran different numbers of backwards, one of them raised, or one passes a
        ``refusal`` (why it can't go on), or if they did different things to gradients that had left; on those that
        wait, naming buckets and parameters, if a rank died or stalls past the group's timeout.
        """
        padded = [*arguments, *[0.0] * (C.NUM_ARGUMENTS - len(arguments))]
        done = 0.0 if self.operators is None else self.operators.tell(_asks_each(sync_point, arguments))
        with naming(lambda: named_params(self.buckets)):
            result = self.manager.synchronizer.sync(sync_point, padded, [options, done, params], adoptions, refusal)
        if not result.has_same_operators:
            assert self.operators is not None
            asks_each = _asks_each(result.sync_point, result.arguments)
            self.operators.refuse(self.ranks, follows=sync_point is C.SyncPoint.FOLLOW, with_set=asks_each)
        return result

    def shard(self, index: int) -> Tensor | None:
        """The mean gradient's shard, 1-D, after sync(), or None while no parameter has a gradient.

        If gradients are whole, each call packs it from p.grad.
        """
        summed = self.partial.shard(index)
        return self.manager.grads.shard(index) if summed is None else summed

    def parts(self, index: int) -> list[GradPart]:
        """The shard as it lies, read-only; elements without a gradient may be left out.

        Large gradients are where autograd left them (one rank), or where the mean was gathered (whole gradients).
        """
        bucket = self.buckets[index]
        by_part = self.manager.grads.shard_by_part(index) if self.partial.shard(index) is None else []
        if by_part:
            found = []
            for grad, place in zip(by_part, self.parts_of[index], strict=True):
                if grad is not None and place is not None:
                    padding, start, first_row, segments = place
                    grad = grad[padding:] if padding else grad
                    found.append(GradPart(grad, start, first_row, segments, bucket.mask_of(start, grad.numel())))
            return found
        shard = self.shard(index)
        return [] if shard is None else [GradPart(shard, 0, 0, bucket.segments, bucket.mask_of(0, shard.numel()))]

    def reduced_tensors(self) -> list[Tensor]:
        """The tensors that all buckets' shards lie in."""
        reduced = [tensor for index in range(self.manager.num_buckets) for tensor in self.manager.grads.reduced(index)]
        return [*reduced, *(summed.shard for summed in self.partial.summed.values())]

    def present(self, index: int) -> Tensor:
        """uint8, one for each own segment: whether its parameter has a gradient on any rank."""
        return self.manager.grads.present(index)

    def limbs(self, index: int) -> Tensor | None:
        """The exact sum of squares over the shard, if the reduction left one that still holds: it knows of no mask."""
        stands = self.partial.shard(index) is None and self.buckets[index].mask is None
        return self.manager.grads.limbs(index) if stands else None

    def forget_limbs(self, index: int) -> None:
        """To be called when the parts() of a bucket were written."""
        if self.partial.shard(index) is None:
            self.manager.grads.forget_limbs(index)

    def find_replaced(self) -> str:
        """Why step() must not go on: a DTensor has another local tensor than it had; empty if none has."""
        for param, local, name in self.dtensors:
            if _torch.local_tensor_of(param) is not local:
                return (
                    f"parameter {quote(name, param)} has another local tensor than when the optimizer was built "
                    "(after .to() or param.data = ...); build the optimizer after such a change"
                )
        return ""

    def find_moved(self) -> list[tuple[int, int]]:
        """(bucket, slot) of each parameter that lies elsewhere: after .to(), param.data = ... or share_memory_()."""
        return self.manager.params.moved()

    def all_reduce(self, values: Tensor, combine: C.Combine) -> None:
        """A few integers, combined over the ranks in place. Collective. Waits for the device under gloo only."""
        if values.device.type == "cpu":
            self.manager.synchronizer.all_reduce(values, combine)
        elif self.ranks.via_host:
            host = values.cpu()
            self.manager.synchronizer.all_reduce(host, combine)
            values.copy_(host)
        else:
            self.ranks.all_reduce(values, dist.ReduceOp.SUM if combine == C.Combine.SUM else dist.ReduceOp.MAX)

    def zero(self, set_to_none: bool) -> None:
        if self.operators is not None:
            self.operators.forget()
        self.manager.synchronizer.zero(set_to_none)

    def inner_sync(self, joins: bool) -> AbstractContextManager[None]:
        """Inside, what backward sends stays on the inner axis of a mesh. ``joins``: whether inside join()."""
        if not self.ranks.on_mesh:
            raise ValueError("no_sync(outer=True) needs a mesh (replicate, shard) as process_group: call no_sync()")
        if not self.sharded:
            raise ValueError("no_sync(outer=True) needs stage=2: gradients stay whole in stage 1, call no_sync()")
        if joins:
            raise RuntimeError("no_sync(outer=True) does not go with join(): call no_sync()")
        return self._stay_inner()

    @contextmanager
    def _stay_inner(self) -> Iterator[None]:
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


def _asks_each(sync_point: C.SyncPoint, arguments: Sequence[float]) -> bool:
    """Whether the answer is one for each gradient: see grad_answers.py."""
    return sync_point == C.SyncPoint.GRAD_NORM and arguments[0] != ALL_FINITE


def _less_padding(part: tuple[int, int, Tensor]) -> tuple[int, int, int, Tensor] | None:
    """Without the padding in front: with 8-bit moments a part must start with a block. None: it is nothing else."""
    start, first_row, segments = part
    if len(segments) == 0:
        return None
    padding = int(segments[0, 0])
    shifted = segments.clone()
    shifted[:, :2] -= padding
    return padding, start + padding, first_row, shifted


def _mark_zeroed(to_manager: weakref.ref[C.BucketManager], bucket: int, slot: int) -> None:
    manager = to_manager()
    if manager is not None:
        manager.grads.mark_zeroed(bucket, slot)
