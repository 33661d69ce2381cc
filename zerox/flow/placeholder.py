"""The placeholder in p.grad for a gradient that has left for its owner."""

from __future__ import annotations

import math
import weakref
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from zerox.memory.grad_dtype import grad_dtype_of
from zerox.model_names import quoted


class ShardedGrad(Tensor):
    """A gradient without storage: shape and device of the parameter, dtype of its gradients, and no values to read.

    It keeps the meaning of ``p.grad is None``, and both forms of ``zero_grad`` work on it. It takes ``mul_`` and
    ``div_`` by a number: see multiplied.py. Everything else that would read or write values raises RuntimeError, so
    that ``torch.nn.utils.clip_grad_norm_`` can't find a norm of 0 in it.

    A module moves ``p.grad`` along with its parameters (``.to()``, ``.half()``): torch makes a copy and gives the
    placeholder its dtype and device, so that it stays the same object. Where a copy itself becomes some ``p.grad``, on
    another kind of device or by deepcopy(), it stands for no gradient there: no optimizer takes it.
    """

    _name: str
    _to_param: weakref.ref[Tensor]
    _on_zero: Callable[[], None] | None  # None: this is a copy
    is_sent: bool  # to other ranks: one rank alone keeps its gradients
    factor: float
    on_multiply: Callable[[], None] | None

    @staticmethod
    def __new__(cls, param: Tensor, name: str, on_zero: Callable[[], None], is_sent: bool = True) -> ShardedGrad:
        self = Tensor._make_wrapper_subclass(
            cls, param.shape, param.stride(), dtype=grad_dtype_of(param), device=param.device, layout=param.layout
        )
        self._note(name, weakref.ref(param), on_zero, is_sent)
        return self

    def _note(
        self, name: str, to_param: weakref.ref[Tensor], on_zero: Callable[[], None] | None, is_sent: bool
    ) -> None:
        self._name = name
        self._to_param = to_param
        self._on_zero = on_zero
        self.is_sent = is_sent
        self.factor = 1.0
        self.on_multiply = None

    def copy(
        self,
        dtype: torch.dtype | None = None,
        device: torch.device | None = None,
        memory_format: torch.memory_format | None = None,
        **_: Any,
    ) -> ShardedGrad:
        """With the arguments of ``aten._to_copy``; those of the values' memory mean nothing."""
        laid_out = torch.empty_strided(self.shape, self.stride(), device="meta")
        strides = torch.empty_like(laid_out, memory_format=memory_format or torch.preserve_format).stride()
        there = torch.empty(0, dtype=dtype or self.dtype, device=device or self.device)  # "cuda" gets its index
        made = Tensor._make_wrapper_subclass(
            type(self), self.shape, strides, dtype=there.dtype, device=there.device, layout=self.layout
        )
        made._note(self._name, self._to_param, None, self.is_sent)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGrad:
        return memo.setdefault(id(self), self.copy())

    @property
    def is_set(self) -> bool:
        param = self._to_param()
        return param is not None and param.grad is self

    @property
    def quoted(self) -> str:
        return quoted(self._name, self._to_param())

    def note_factor(self, factor: float) -> None:
        assert self.on_multiply is not None
        self.on_multiply()
        self.factor *= factor

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self._name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def share_memory_(self) -> ShardedGrad:
        """Does nothing: it has no memory. model.share_memory() calls this for every gradient."""
        return self

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        if func in COPIES:
            return args[0].copy(**kwargs or {})
        if func is aten.zero_.default and args[0]._on_zero is not None:
            args[0].factor = 1.0
            args[0]._on_zero()
            return args[0]
        if func is aten._foreach_zero_.default:
            for grad in args[0]:
                grad.zero_()
            return None
        if func is aten.detach.default:
            return args[0]
        if _multiplies(func, args):
            several = isinstance(args[0], list)
            for grad in args[0] if several else args[:1]:
                grad.note_factor(args[1] if func in TIMES else 1.0 / args[1])
            return None if several else args[0]
        raise _no_values(next((x for x in _tensors(args) if isinstance(x, ShardedGrad)), None), func)

    # ---- reads of values without an operator

    def numpy(self, *, force: bool = False) -> Any:
        raise _no_values(self, "numpy()")

    def tolist(self) -> Any:
        raise _no_values(self, "tolist()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise _no_values(self, "an array")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise _no_values(self, "DLPack")


aten = torch.ops.aten
COPIES = (aten._to_copy.default, aten.empty_like.default)  # which Module.to() and .to_empty() call for each p.grad
TIMES = (aten.mul_.Tensor, aten.mul_.Scalar, aten._foreach_mul_.Scalar)
OVER = (aten.div_.Tensor, aten.div_.Scalar, aten._foreach_div_.Scalar)


def is_number(value: Any) -> bool:
    """That a product can be divided by again."""
    return isinstance(value, int | float) and value != 0 and math.isfinite(value)


def _multiplies(func: Any, args: Any) -> bool:
    """Whether it multiplies placeholders, and nothing else, by a number."""
    if func not in (*TIMES, *OVER) or not is_number(args[1]):
        return False
    grads = args[0] if isinstance(args[0], list) else args[:1]
    return all(isinstance(each, ShardedGrad) and each.on_multiply is not None for each in grads)


def _no_values(grad: ShardedGrad | None, what: Any) -> RuntimeError:
    name = "'?'" if grad is None else grad.quoted
    where = "was sent to the ranks that own it" if grad is None or grad.is_sent else "is kept by the optimizer"
    is_copy = grad is not None and grad._on_zero is None
    what_it_is = "this is only a copy of the placeholder in its p.grad" if is_copy else "p.grad is only its placeholder"
    of_copies = (
        ". A model that was copied, or moved to another kind of device, needs zero_grad() first" if is_copy else ""
    )
    return RuntimeError(
        f"zerox: the gradient of parameter {name} {where}, {what_it_is} and {what} needs values. Use "
        "optimizer.clip_grad_norm_() to clip or to get the norm, clip_grad_value_() to cut elements, zerox.GradScaler "
        "to unscale, scale_grads_() to multiply, or build the optimizer with stage=1 to keep whole gradients in p.grad"
        + of_copies
    )


def _tensors(args: Any) -> list[Any]:
    found = []
    for arg in args:
        if isinstance(arg, list | tuple):
            found += _tensors(arg)
        else:
            found.append(arg)
    return found
