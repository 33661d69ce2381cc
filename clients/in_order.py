"""torch's wrapper with zerox's mean: summed in rank order in float32, divided once. Three numbers have several sums,
and a training with batch norms of few pictures makes much of a last bit."""

import functools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel


def average() -> None:
    """From now on, in wrappers that are built."""
    init = DistributedDataParallel.__init__

    @functools.wraps(init)
    def wrapped(self: Any, *args: Any, **kwargs: Any) -> None:
        init(self, *args, **kwargs)
        self.register_comm_hook(None, _mean)

    DistributedDataParallel.__init__ = wrapped


def _mean(_: object, bucket: dist.GradBucket) -> torch.futures.Future[Tensor]:
    own = bucket.buffer()
    parts = [torch.empty_like(own) for _ in range(dist.get_world_size())]
    dist.all_gather(parts, own)
    total = functools.reduce(torch.add, (part.float() for part in parts))
    found: torch.futures.Future[Tensor] = torch.futures.Future()
    found.set_result(own.copy_(total / len(parts)))
    return found
