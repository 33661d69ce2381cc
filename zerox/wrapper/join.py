"""Ranks with unequal numbers of batches, around a wrapper: zerox.join() of its optimizers, and what it hands out."""

from __future__ import annotations

import weakref
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
import torch.distributed as dist

from zerox.flow.join import ACTIVE, ALL
from zerox.flow.join import Join as OfOptimizers
from zerox.wrapper.averaging import Averaging
from zerox.wrapper.first_values import engines_of


class Joined(Protocol):
    """What is asked of a wrapper."""

    process_group: dist.ProcessGroup | None
    device: torch.device
    forward_sync_buffers: bool
    require_forward_param_sync: bool
    _averaging: Averaging

    def _hand_out_buffers(self, root: int) -> None: ...


class Join(AbstractContextManager[None]):
    """``with ddp.join():``. Forwards inside hand out no buffers, since a rank that has run out calls none; at the end
    all ranks have those of a rank that had most batches, as with torch's."""

    def __init__(self, wrapper: Joined, divide: str) -> None:
        averaging = wrapper._averaging
        self.to_wrapper = weakref.ref(wrapper)
        engines = engines_of(averaging.wrapped.params)
        for engine in engines:
            engine.join(divide)  # raises if it can't be
        averaging.before_forward()
        if averaging.left_over.grads is not None:
            name, _ = next(each for each in averaging.left_over.seen.apart if each[1].requires_grad)
            raise NotImplementedError(
                "zerox.DistributedDataParallel: join() follows optimizers of zerox, and none holds parameter "
                f"'{name}': give it to one, as zerox.ShardedOptimizer(params, torch.optim.SGD, lr=0.1), or freeze it"
            )
        self.inside = OfOptimizers(engines, divide)

    def __enter__(self) -> None:
        self.inside.__enter__()
        self._averaging.num_joined = 0

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: Any) -> None:
        num_batches, self._averaging.num_joined = self._averaging.num_joined, None
        self.inside.__exit__(kind, error, trace)
        wrapper = self.to_wrapper()
        if error is None and wrapper is not None:
            wrapper.require_forward_param_sync = True  # ranks may have ended in other forwards
            if wrapper.forward_sync_buffers:
                wrapper._hand_out_buffers(_last(num_batches or 0, wrapper))

    @property
    def _averaging(self) -> Averaging:
        wrapper = self.to_wrapper()
        assert wrapper is not None
        return wrapper._averaging


def _last(num_batches: int, wrapper: Joined) -> int:
    """A rank that had most batches: of several the last one. Collective."""
    group = wrapper.process_group
    assert group is not None
    most = torch.tensor([num_batches * group.size() + group.rank()], device=wrapper.device)
    dist.all_reduce(most, dist.ReduceOp.MAX, group)
    return int(most) % group.size()


def divided_by(divide_by_initial_world_size: bool) -> str:
    return ALL if divide_by_initial_world_size else ACTIVE
