"""The dtype in which autograd adds up a parameter's gradients: torch's own ``Tensor.grad_dtype``."""

from __future__ import annotations

import weakref
from collections.abc import Iterable

import torch
from torch import Tensor

NARROW = (torch.bfloat16, torch.float16)


def can_be_set() -> bool:
    """Whether this torch lets a gradient have another dtype than its parameter."""
    return hasattr(Tensor, "grad_dtype")


def grad_dtype_of(param: Tensor, accumulate_dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of a parameter's ``p.grad``, now or with ``accumulate_dtype``; one that the user set comes first."""
    chosen: torch.dtype | None = param.grad_dtype if can_be_set() and param.is_leaf else None  # None: any dtype
    if chosen in (None, param.dtype) and accumulate_dtype is not None and param.dtype in NARROW:
        return accumulate_dtype
    return chosen or param.dtype


def set_grad_dtype(param: Tensor, dtype: torch.dtype | None) -> None:
    """Also casts a gradient that is there already."""
    grad, param.grad = param.grad, None
    param.grad_dtype = dtype
    if grad is not None:
        param.grad = grad if dtype is None else grad.to(dtype)


class Widened:
    """Parameters whose gradients add up in another dtype while an optimizer lives."""

    def __init__(self, accumulate_dtype: torch.dtype | None) -> None:
        self.accumulate_dtype = accumulate_dtype
        self.before: list[tuple[weakref.ref[Tensor], torch.dtype | None]] = []

    def take(self, params: Iterable[Tensor]) -> None:
        for param in params:
            wanted = grad_dtype_of(param, self.accumulate_dtype)
            if wanted != grad_dtype_of(param):
                self.before.append((weakref.ref(param), param.grad_dtype))
                set_grad_dtype(param, wanted)

    def give_back(self) -> None:
        """Restores the dtypes from before; placeholders are dropped."""
        for to_param, dtype in self.before:
            param = to_param()
            if param is None:
                continue
            if type(param.grad) is not Tensor:
                param.grad = None
            set_grad_dtype(param, dtype)
        self.before.clear()
