"""What the bucket manager and its exchange compute, in torch and torch.distributed alone.

No overlap, no placeholders, no flights: gradients are taken by torch's own hook, every bucket is gathered whole from
every rank, and this rank's shard of the mean is summed in rank order. The bucket manager gives the same bits.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox.plan.buckets import BucketPlan, ParamSpec, plan_buckets


def in_memory_order(tensor: Tensor, like: Tensor) -> Tensor:
    """The elements of ``tensor`` as 1-D, in the order in which those of ``like`` lie in memory."""
    arranged = torch.empty_like(like, dtype=tensor.dtype).copy_(tensor)
    return arranged.as_strided((arranged.numel(),), (1,))


class TwinBucket:
    def __init__(self, plan: BucketPlan, params: Sequence[nn.Parameter], wire_dtype: torch.dtype) -> None:
        self.layout = plan.layout
        self.params = list(params)
        self.wire_dtype = wire_dtype
        self.shard: Tensor | None = None
        self.present = [False] * len(params)  # of every parameter: the twin knows them on all ranks

    def pack(self, take: bool) -> Tensor:
        """Every gradient there is: ``[world * shard_numel | a flag for each parameter]``, in the wire's dtype."""
        packed = torch.zeros(self.layout.numel + len(self.params), dtype=self.wire_dtype)
        for slot, param in enumerate(self.params):
            if param.grad is not None:
                span = self.layout.span(slot)
                packed[span.start : span.stop] = in_memory_order(param.grad.detach(), param).to(self.wire_dtype)
                packed[self.layout.numel + slot] = 1
                if take:
                    param.grad = None
        return packed


class Twin:
    """``whole_grads``: the mean is put back into ``p.grad`` on all ranks where backward ends (ZeRO stage 1). Alone it
    is there already, as autograd left it, and rounded to the wire's dtype in the shard only."""

    def __init__(
        self,
        params: Sequence[nn.Parameter],
        cap_bytes: int,
        reduce_dtype: torch.dtype | None = None,
        whole_grads: bool = False,
    ) -> None:
        self.rank, self.world_size = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self.whole_grads = whole_grads
        self.puts_back = whole_grads and self.world_size > 1
        self.sync = True
        specs = [ParamSpec("", p.numel(), str(p.dtype), p.element_size()) for p in params]
        self.buckets = []
        for plan in plan_buckets(specs, self.world_size, cap_bytes):
            members = [params[index] for index in plan.params]
            self.buckets.append(TwinBucket(plan, members, reduce_dtype or members[0].dtype))
        self.waits_for: list[set[Tensor]] = []
        self.next_bucket = 0
        for index, bucket in enumerate(self.buckets):
            for param in bucket.params:
                param.register_post_accumulate_grad_hook(lambda p, index=index: self._gradient_ready(p, index))
        self._begin()

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if not self.sync:
            return
        while self.next_bucket < len(self.buckets):  # incomplete: some parameter got no gradient on this rank
            self._exchange_next()
        for bucket in self.buckets:
            if self.puts_back:
                self._gather_whole(bucket)
        self._begin()

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.shard = None
            bucket.present = [False] * len(bucket.params)
            for param in bucket.params:
                param.grad = None

    def _begin(self) -> None:
        self.waits_for = [set(bucket.params) for bucket in self.buckets]
        self.next_bucket = 0

    def _gradient_ready(self, param: Tensor, index: int) -> None:
        """Buckets leave in the order in which they were planned, each once its last gradient is there."""
        if self.sync:
            self.waits_for[index].discard(param)
            while self.next_bucket < len(self.buckets) and not self.waits_for[self.next_bucket]:
                self._exchange_next()

    def _exchange_next(self) -> None:
        bucket = self.buckets[self.next_bucket]
        self.next_bucket += 1
        packed = bucket.pack(take=self.puts_back or not self.whole_grads)
        from_all = [torch.empty_like(packed) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(from_all, packed)
        else:
            from_all = [packed]
        own = bucket.layout.shard_span(self.rank)
        self._reduce(bucket, [each[own.start : own.stop] for each in from_all])
        flags = torch.stack([each[bucket.layout.numel :] for each in from_all]).amax(dim=0)
        bucket.present = [old or bool(new) for old, new in zip(bucket.present, flags, strict=True)]

    def _reduce(self, bucket: TwinBucket, slices: Sequence[Tensor]) -> None:
        """The sum in rank order, divided once, the old shard added, rounded once to the wire's dtype."""
        wide = torch.float64 if bucket.wire_dtype is torch.float64 else torch.float32
        total = slices[0].to(wide)
        for each in slices[1:]:
            total = total + each.to(wide)
        mean = total / torch.full_like(total, self.world_size)
        if bucket.shard is not None and not self.whole_grads:  # a whole gradient in p.grad holds the old sum already
            mean = mean + bucket.shard.to(wide)
        bucket.shard = mean.to(bucket.wire_dtype)

    def _gather_whole(self, bucket: TwinBucket) -> None:
        assert bucket.shard is not None
        shards = [torch.empty_like(bucket.shard) for _ in range(self.world_size)]
        dist.all_gather(shards, bucket.shard)
        whole = torch.cat(shards)
        for slot, param in enumerate(bucket.params):
            if bucket.present[slot]:
                span = bucket.layout.span(slot)
                in_order = whole[span.start : span.stop].to(param.dtype)
                arranged = torch.empty_like(param, requires_grad=False)
                param.grad = arranged.copy_(in_order.as_strided(arranged.shape, arranged.stride()))
