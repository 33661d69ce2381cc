"""Flat storage for the parameters of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerox import _C as C
from zerox.memory.pages import zeros
from zerox.model_names import quoted
from zerox.plan.layout import Layout


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it has no gaps (channels-last, transposed), else dense ones."""
    return torch.empty_like(param, device="meta").stride()


class FlatBuffer:
    """Memory ``[layout.numel]`` that a bucket's parameters lie in, side by side, each in a storage of its own.

    Only ``param.data`` changes: the parameters stay the objects that model and optimizer know. The buffer lives as long
    as one of them. Moving in takes memory for the bucket once more.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self.params = list(params)
        self.layout = layout
        self.shapes = [param.shape for param in params]
        self.strides = [dense_strides(param) for param in params]
        # Padding is sent with everything else: it should not be old memory.
        self.flat = zeros(layout.numel, params[0].dtype, params[0].device)
        take_in(self.slots())

    def slots(self) -> list[BufferSlot]:
        return [(self, slot) for slot in range(len(self.params))]

    def home(self, slot: int) -> Tensor:
        """The parameter's place, as a view of the buffer."""
        return self.flat.as_strided(self.shapes[slot], self.strides[slot], self.layout.offsets[slot])

    def shard(self, rank: int) -> Tensor:
        span = self.layout.shard_span(rank)
        return self.flat[span.start : span.stop]

    def misfit(self, slot: int, name: str) -> str:
        """Why a parameter that lies elsewhere (after .to(), .data =) can't be taken in; empty if it can."""
        param = self.params[slot]
        built = f"{tuple(self.shapes[slot])} of {self.flat.dtype} on {self.flat.device}"
        now = f"{tuple(param.shape)} of {param.dtype} on {param.device}"
        if built == now:
            return ""
        return (
            f"parameter {quoted(name, param)} is {now}, but was {built} when the optimizer was built; build the "
            "optimizer after such a change"
        )


BufferSlot = tuple[FlatBuffer, int]


@torch.no_grad()
def take_in(slots: Sequence[BufferSlot]) -> None:
    """Copies the values of these parameters home, and lets the parameters lie there.

    But a parameter in shared memory stays there, where other processes read it: see give_out().
    """
    params = [buffer.params[slot] for buffer, slot in slots]
    # Two parameters may have been exchanged, or one transposed in place: then one's values lie in another's home.
    values = [param.clone() if C.has_own_storage(param) else param.detach() for param in params]
    for (buffer, slot), param, value in zip(slots, params, values, strict=True):
        home = buffer.home(slot)
        home.copy_(value)
        if not in_shared_memory(param):
            param.data = C.with_own_storage(home)


@torch.no_grad()
def give_out(slots: Sequence[BufferSlot]) -> None:
    """Copies new values from home to those of these parameters that are in shared memory."""
    for buffer, slot in slots:
        if in_shared_memory(param := buffer.params[slot]):
            param.copy_(buffer.home(slot))


def in_shared_memory(param: Tensor) -> bool:
    """Whether other processes may read it: after share_memory_(), or when it was sent to one."""
    return param.device.type == "cpu" and param.is_shared()
