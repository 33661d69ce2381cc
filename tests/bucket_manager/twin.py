"""What the bucket manager and its exchange compute, in torch and torch.distributed alone.

No overlap, no placeholders, no flights, no shards: where backward ends, all gradients of all ranks are gathered in one
message, and the mean is summed in rank order. The bucket manager gives the same bits.
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
        self.mean: Tensor | None = None  # [world * shard_numel]
        self.present = [False] * len(params)  # of every parameter: the twin knows them on all ranks

    def shard(self, rank: int) -> Tensor:
        assert self.mean is not None
        span = self.layout.shard_span(rank)
        return self.mean[span.start : span.stop]

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

    def backward(self, loss: Tensor) -> None:
        loss.backward()
        if not self.sync:
            return
        packed = [bucket.pack(take=self.puts_back or not self.whole_grads) for bucket in self.buckets]
        together = torch.cat([each.view(torch.uint8) for each in packed])
        of_ranks = [torch.empty_like(together) for _ in range(self.world_size)]
        if self.world_size > 1:
            dist.all_gather(of_ranks, together)
        else:
            of_ranks = [together]
        sizes = [each.nbytes for each in packed]
        for bucket, *from_all in zip(self.buckets, *(each.split(sizes) for each in of_ranks), strict=True):
            self._reduce(bucket, [each.view(bucket.wire_dtype) for each in from_all])
            if self.puts_back:
                self._put_back(bucket)

    @contextmanager
    def no_sync(self) -> Iterator[None]:
        self.sync = False
        try:
            yield
        finally:
            self.sync = True

    def zero_grad(self) -> None:
        for bucket in self.buckets:
            bucket.mean = None
            bucket.present = [False] * len(bucket.params)
            for param in bucket.params:
                param.grad = None

    def _reduce(self, bucket: TwinBucket, from_all: Sequence[Tensor]) -> None:
        """The sum in rank order, divided once, the old mean added, rounded once to the wire's dtype."""
        numel = bucket.layout.numel
        flags = torch.stack([each[numel:] for each in from_all]).amax(dim=0)
        bucket.present = [old or bool(new) for old, new in zip(bucket.present, flags, strict=True)]
        wide = torch.float64 if bucket.wire_dtype is torch.float64 else torch.float32
        total = from_all[0][:numel].to(wide)
        for each in from_all[1:]:
            total = total + each[:numel].to(wide)
        mean = total / torch.full_like(total, self.world_size)
        if bucket.mean is not None and not self.whole_grads:  # a whole gradient in p.grad holds the old sum already
            mean = mean + bucket.mean.to(wide)
        bucket.mean = mean.to(bucket.wire_dtype)

    def _put_back(self, bucket: TwinBucket) -> None:
        assert bucket.mean is not None
        for slot, param in enumerate(bucket.params):
            if bucket.present[slot]:
                span = bucket.layout.span(slot)
                in_order = bucket.mean[span.start : span.stop].to(param.dtype)
                arranged = torch.empty_like(param, requires_grad=False)
                param.grad = arranged.copy_(in_order.as_strided(arranged.shape, arranged.stride()))
