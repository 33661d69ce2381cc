"""Rank 0's buffers on all ranks, as DistributedDataParallel gives them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox import _C as C
from zerox.ranks.calls import waiting

MOST_BYTES = 25 << 20  # of a message


def buffers_of(module: nn.Module) -> list[Tensor]:
    """Those that DistributedDataParallel would give out."""
    ignored = set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))
    return [buffer for name, buffer in module.named_buffers() if name not in ignored]


def broadcast(tensors: Sequence[Tensor]) -> None:
    """Gives all ranks of the default group rank 0's values, in few messages. Collective; alone it does nothing."""
    if dist.is_initialized() and dist.get_world_size() > 1:
        assert dist.group.WORLD is not None
        with C.Doing("the broadcast of rank 0's values of the model"), waiting(dist.group.WORLD):
            give_out(tensors, lambda values: dist.broadcast(values, 0))


@torch.no_grad()
def give_out(tensors: Sequence[Tensor], send: Callable[[Tensor], object]) -> None:
    """``send``: gives all ranks rank 0's values of a 1-D tensor, in place."""
    for run in _runs(tensors):
        flat = torch.cat([tensor.reshape(-1) for tensor in run])
        send(flat)
        for tensor, values in zip(run, flat.split([tensor.numel() for tensor in run]), strict=True):
            tensor.copy_(values.view(tensor.shape))


def _runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Of one dtype and device, in order, each within MOST_BYTES but for a single tensor."""
    runs: list[list[Tensor]] = []
    last: dict[tuple[torch.dtype, torch.device], tuple[list[Tensor], int]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        run, nbytes = last.get(kind, ([], MOST_BYTES + 1))
        if nbytes + tensor.nbytes > MOST_BYTES:
            run, nbytes = [], 0
            runs.append(run)
        run.append(tensor)
        last[kind] = run, nbytes + tensor.nbytes
    return runs


class BufferSync:
    """Before a forward all ranks take rank 0's buffers, unless the forward before sent no gradients.

    ``syncs(module)``: whether a backward now would send them.
    """

    def __init__(self, module: nn.Module | None, syncs: Callable[[nn.Module], bool] = bool) -> None:
        self._module = module
        self._syncs = syncs
        self._is_due = True

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        self._before()
        yield
        self._after()

    def watch(self) -> None:
        """From now on, around each forward of the module itself. Copies of the module do without."""
        if self._module is not None and next(self._module.buffers(), None) is not None:
            self._module.register_forward_pre_hook(self._before)
            self._module.register_forward_hook(self._after)

    def __reduce__(self) -> tuple[type[BufferSync], tuple[None]]:
        return BufferSync, (None,)

    def _before(self, *_: Any) -> None:
        if self._module is not None and self._is_due:
            broadcast(buffers_of(self._module))

    def _after(self, *_: Any) -> None:
        self._is_due = self._module is not None and torch.is_grad_enabled() and self._syncs(self._module)
