"""Rank 0's buffers on all ranks before a forward, as DistributedDataParallel hands them out."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from zerox.ranks.wrapped import note_hand_out
from zerox.wrapper.values import broadcast, named_buffers_of


class BufferSync:
    """Before a forward all ranks take rank 0's buffers, unless the forward before sent no gradients.

    ``syncs(module)``: whether a backward now would send them.
    """

    def __init__(self, module: nn.Module | None, syncs: Callable[[nn.Module], bool] = bool) -> None:
        self._module = module
        self._syncs = syncs
        self._is_due = True
        if module is not None:
            note_hand_out(module)

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
            buffers = named_buffers_of(self._module).values()
            broadcast(buffers, default_group(), f"buffers of {type(self._module).__name__}")

    def _after(self, *_: Any) -> None:
        self._is_due = self._module is not None and torch.is_grad_enabled() and self._syncs(self._module)


def default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
