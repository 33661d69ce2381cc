"""Flat storage for the parameters of a bucket."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerox.large_pages import zeros
from zerox.model_names import quoted
from zerox.plan.layout import Layout


def dense_strides(param: Tensor) -> tuple[int, ...]:
    """The parameter's own strides where it has no gaps (channels-last, transposed), else dense ones."""
    return torch.empty_like(param, device="meta").stride()


class FlatBuffer:
    """One storage ``[layout.numel]`` that a bucket's parameters become views of.

    Only ``param.data`` changes: the parameters stay the objects that model and optimizer know. The old storages are
    freed one by one, so moving a bucket in needs memory for that bucket once more and no more.
    """

    def __init__(self, params: Sequence[Tensor], layout: Layout) -> None:
        self.params = list(params)
        self.layout = layout
        self.shapes = [param.shape for param in params]
        self.strides = [dense_strides(param) for param in params]
        # Padding is sent with everything else: it should not be what lay in memory before.
        self.flat = zeros(layout.numel, params[0].dtype, params[0].device)
        for slot in range(len(self.params)):
            self.take_in(slot)

    @torch.no_grad()
    def take_in(self, slot: int) -> None:
        """Copies the parameter's values to its place, and makes it a view of that."""
        param = self.params[slot]
        view = self.flat.as_strided(param.shape, self.strides[slot], self.layout.offsets[slot])
        shares = param.untyped_storage().data_ptr() == self.flat.untyped_storage().data_ptr()
        view.copy_(param.clone() if shares else param)  # it may be the same memory in another order
        param.data = view

    def shard(self, rank: int) -> Tensor:
        span = self.layout.shard_span(rank)
        return self.flat[span.start : span.stop]

    def misfit(self, slot: int, name: str) -> str:
        """Why a parameter that has another storage (after .to(), .data =) can't be taken in; empty if it can."""
        param = self.params[slot]
        built = f"{tuple(self.shapes[slot])} of {self.flat.dtype} on {self.flat.device}"
        now = f"{tuple(param.shape)} of {param.dtype} on {param.device}"
        if built == now:
            return ""
        return (
            f"parameter {quoted(name, param)} is {now}, but was {built} when the optimizer was built; build the "
            "optimizer after such a change"
        )
