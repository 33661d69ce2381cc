"""The placeholder in p.grad for a gradient that has left for its owner."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from zerox import _torch
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.model_names import quote
from zerox.params.compiled_regions import untraced


class Notes(Protocol):
    """See grad_operators.py."""

    count: int

    def repeat(self, grad: ShardedGrad, name: str, number: object) -> bool: ...
    def note(self, grad: ShardedGrad, name: str, numbers: Sequence[float | Tensor | None]) -> None: ...


class Answers(Protocol):
    """See grad_answers.py."""

    def norm(self, grad: ShardedGrad, what: str, p: float, dtype: torch.dtype | None = None) -> Tensor: ...
    def is_finite(self, grad: ShardedGrad, what: str) -> Tensor: ...
    def has_nan(self, grad: ShardedGrad, what: str) -> Tensor: ...
    def knows(self, plain: Sequence[Tensor]) -> bool: ...
    def unscale(self, grads: Sequence[ShardedGrad], found_inf: Tensor, inverse_scale: Tensor) -> None: ...


class Unreadable(Tensor):
    """A tensor without values: reads of them without an operator raise."""

    @property
    def source(self) -> ShardedGrad:
        """The gradient that it is about."""
        raise NotImplementedError

    def numpy(self, *, force: bool = False) -> Any:
        raise no_values(self.source, "numpy()")

    def tolist(self) -> Any:
        raise no_values(self.source, "tolist()")

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise no_values(self.source, "an array")

    def __dlpack__(self, *_: Any, **__: Any) -> Any:
        raise no_values(self.source, "DLPack")


class ShardedGrad(Unreadable):
    """A gradient without storage: shape and device of the parameter, dtype of its gradients, and no values to read.

    It keeps the meaning of ``p.grad is None``, and both forms of ``zero_grad`` work on it. It answers what all ranks
    ask of it (norms, whether it is finite: grad_answers.py), and takes in-place operators with numbers (mul_, clamp_:
    grad_operators.py), so that torch's clips and scaler work on it. Everything else that would read or write values
    raises RuntimeError.

    A module moves ``p.grad`` along with its parameters (``.to()``, ``.half()``): torch makes a copy and gives the
    placeholder its dtype and device, so that it stays the same object. Where a copy itself becomes some ``p.grad``, on
    another kind of device or by deepcopy(), it stands for no gradient there: no optimizer takes it.
    """

    handlers: ClassVar[dict[int, Callable[[Any, Any], Any]]] = {}  # of operators: placeholder_operators.py

    param_name: str
    _to_param: weakref.ref[Tensor]
    _on_zero: Callable[[], None] | None  # None: this is a copy
    is_sent: bool  # to other ranks: one rank alone keeps its gradients
    number: int  # among all of the optimizer
    notes: Notes | None
    done: tuple[Any, ...]  # operators
    to_answers: Callable[[], Answers | None]
    answered: int  # when its answers were computed, by the answers' count; -1: it was changed since

    @staticmethod
    def __new__(cls, param: Tensor, name: str, on_zero: Callable[[], None], is_sent: bool = True) -> ShardedGrad:
        self = _torch.make_wrapper(
            cls, param.shape, param.stride(), dtype=grad_dtype_of(param), device=param.device, layout=param.layout
        )
        self._note(name, weakref.ref(param), on_zero, is_sent)
        return self

    def _note(
        self, name: str, to_param: weakref.ref[Tensor], on_zero: Callable[[], None] | None, is_sent: bool
    ) -> None:
        self.param_name = name
        self._to_param = to_param
        self._on_zero = on_zero
        self.is_sent = is_sent
        self.number = -1
        self.notes = None
        self.done = ()
        self.to_answers = _nobody
        self.answered = -1

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
        made = _torch.make_wrapper(
            type(self), self.shape, strides, dtype=there.dtype, device=there.device, layout=self.layout
        )
        made._note(self.param_name, self._to_param, None, self.is_sent)
        return made

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedGrad:
        return memo.setdefault(id(self), self.copy())

    @property
    def source(self) -> ShardedGrad:
        return self

    @property
    def is_set(self) -> bool:
        param = self._to_param()
        return param is not None and param.grad is self

    @property
    def quoted(self) -> str:
        return quote(self.param_name, self._to_param())

    def __repr__(self) -> str:  # type: ignore[override]
        return f"ShardedGrad({self.param_name}, shape={tuple(self.shape)}, dtype={self.dtype})"

    def mul_(self, other: Any) -> Tensor:
        """As torch's. torch's clip calls it for each gradient, with one number, which the dispatcher need not see."""
        notes = self.notes
        if notes is not None and notes.repeat(self, "mul_", other):
            return self
        return super().mul_(other)

    def share_memory_(self) -> ShardedGrad:
        """Does nothing: it has no memory. model.share_memory() calls this for every gradient."""
        return self

    @classmethod
    @untraced
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        handle = cls.handlers.get(id(func))  # its own hash is a call of Python
        result = NotImplemented if handle is None else handle(args, kwargs or {})
        if result is not NotImplemented:
            return result
        raise no_values(next((x for x in _tensors(args) if isinstance(x, ShardedGrad)), None), func)


def _nobody() -> None:
    return None


def no_values(grad: ShardedGrad | None, what: Any) -> RuntimeError:
    name = "'?'" if grad is None else grad.quoted
    where = "was sent to the ranks that own it" if grad is None or grad.is_sent else "is kept by the optimizer"
    is_copy = grad is not None and grad._on_zero is None
    what_it_is = "this is only a copy of the placeholder in its p.grad" if is_copy else "p.grad is only its placeholder"
    of_copies = (
        ". A model that was copied, or moved to another kind of device, needs zero_grad() first" if is_copy else ""
    )
    return RuntimeError(
        f"zerox: the gradient of parameter {name} {where}, {what_it_is} and {what} needs values. Use "
        "optimizer.full_grad() for the values, optimizer.clip_grad_norm_() to clip or to get the norm, "
        "clip_grad_value_() to cut elements, scale_grads_() to multiply, or build the optimizer with stage=1 to keep "
        "whole gradients in p.grad" + of_copies
    )


def _tensors(args: Any) -> list[Any]:
    found = []
    for arg in args:
        if isinstance(arg, list | tuple):
            found += _tensors(arg)
        else:
            found.append(arg)
    return found
