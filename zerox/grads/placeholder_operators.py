"""The operators that a placeholder takes (placeholder.py), by torch's names: questions, and what is done in place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import _torch
from zerox.grads.placeholder import Answers, ShardedGrad, Unreadable, no_values


class Elementwise(Unreadable):
    """What an operator would make of each element of a gradient that has left (``of``): abs(), isfinite() and its
    parts. It has no values either; max(), all() and any() of it can be answered."""

    of: ShardedGrad
    what: str

    @staticmethod
    def __new__(cls, of: ShardedGrad, what: str) -> Elementwise:
        dtype = of.dtype if what == ABS else torch.bool
        self = _torch.make_wrapper(cls, of.shape, of.stride(), dtype=dtype, device=of.device)
        self.of = of
        self.what = what
        return self

    @property
    def source(self) -> ShardedGrad:
        return self.of

    def __repr__(self) -> str:  # type: ignore[override]
        return f"{self.what} of {self.of!r}"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:  # type: ignore[override]
        made = _of_elementwise(func, args)
        if made is NotImplemented or kwargs:
            raise no_values(args[0].of if isinstance(args[0], Elementwise) else None, func)
        return made


aten = torch.ops.aten
ABS, NO_NAN, IS_NAN, NO_INF, FINITE = "abs()", "x == x", "isnan()", "abs() != inf", "isfinite()"


def _of_elementwise(func: Any, args: Any) -> Any:
    each = args[0]
    if not isinstance(each, Elementwise):
        return NotImplemented
    grad, what, given = each.of, each.what, args[1:]
    if what == ABS and func in (aten.max.default, aten.amax.default) and not any(given):
        return _answers_of(grad, "abs().max()").norm(grad, "abs().max()", float("inf"))
    if what == ABS and func is aten.ne.Scalar and given == (float("inf"),):
        return Elementwise(grad, NO_INF)
    if func is aten.mul.Tensor and isinstance(given[0], Elementwise) and given[0].of is grad:
        return Elementwise(grad, FINITE) if {what, given[0].what} == {NO_NAN, NO_INF} else NotImplemented
    if func is aten.logical_not.default and what in (NO_NAN, IS_NAN):
        return Elementwise(grad, IS_NAN if what == NO_NAN else NO_NAN)
    if given:
        return NotImplemented
    if what == FINITE and func is aten.all.default:
        return _answers_of(grad, "isfinite().all()").is_finite(grad, "isfinite().all()")
    if what == IS_NAN and func is aten.any.default:
        return _answers_of(grad, "isnan().any()").has_nan(grad, "isnan().any()")
    if what == NO_NAN and func is aten.all.default:
        return ~_answers_of(grad, "isnan().any()").has_nan(grad, "isnan().any()")
    return NotImplemented


# ---- operators: a handler gets what __torch_dispatch__ gets, and returns NotImplemented for what needs values. Scripts
# call some of them for each of a thousand parameters: what a handler knows beforehand it does not look up.

Handler = Callable[[tuple[Any, ...], dict[str, Any]], Any]


def _copy(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0].copy(**kwargs) if isinstance(args[0], ShardedGrad) else NotImplemented


def _zero(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    if grad._on_zero is None:
        return NotImplemented
    grad.done = ()
    grad.answered = -1
    if grad.notes is not None:
        grad.notes.count += 1
    grad._on_zero()
    return grad


def _all_zeroed(args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    for grad in args[0]:
        grad.zero_()


def _itself(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return args[0]


def _note(name: str) -> Handler:
    """An in-place operator with numbers, on one placeholder."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, *numbers = args
        if kwargs or not isinstance(grad, ShardedGrad) or grad.notes is None or not all(map(_is_number, numbers)):
            return NotImplemented
        grad.notes.note(grad, *_as_clamp(name, numbers))
        return grad

    return handle


def _times(name: str) -> Handler:
    """The same with one number. torch's clip passes the same tensor for each parameter."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grad, number = args
        if kwargs or type(grad) is not ShardedGrad or (notes := grad.notes) is None:
            return NotImplemented
        if notes.repeat(grad, name, number):
            return grad
        if not _is_number(number):
            return NotImplemented
        notes.note(grad, name, (number,))
        return grad

    return handle


def _all_noted(name: str) -> Handler:
    """The same on several, and on nothing else."""

    def handle(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        grads, *numbers = args
        if kwargs or not all(map(_is_number, numbers)):
            return NotImplemented
        if not all(isinstance(each, ShardedGrad) and each.notes is not None for each in grads):
            return NotImplemented
        note = _as_clamp(name, numbers)
        for grad in grads:
            grad.notes.note(grad, *note)
        return None

    return handle


def _as_clamp(name: str, numbers: Sequence[Any]) -> tuple[str, Sequence[Any]]:
    if name == "clamp_min_":
        return "clamp_", (numbers[0], None)
    if name == "clamp_max_":
        return "clamp_", (None, numbers[0])
    return name, numbers or (None,)


def _norm(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grad = args[0]
    if len(args) == 2 and not kwargs and type(args[1]) is float and args[1] > 0.0 and (of := grad.to_answers()):
        return of.norm(grad, "norm()", args[1])
    p = float(args[1]) if len(args) > 1 else 2.0
    if not isinstance(grad, ShardedGrad) or not p > 0.0 or any(args[2:]) or (kwargs and kwargs.keys() != {"dtype"}):
        return NotImplemented
    return _answers_of(grad, "norm()").norm(grad, "norm()", p, kwargs.get("dtype"))


def _all_norms(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    grads, p, *rest = (*args, 2.0) if len(args) == 1 else args
    dtype = kwargs.get("dtype") or (rest[0] if rest else None)
    return [torch.linalg.vector_norm(grad, p, dtype=dtype) for grad in grads]


def _unscale(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    every, found_inf, inverse_scale = args
    grads = [grad for grad in every if isinstance(grad, ShardedGrad)]
    plain = [grad for grad in every if not isinstance(grad, ShardedGrad)]
    if not grads or (plain and not _answers_of(grads[0], "GradScaler.unscale_()").knows(plain)):
        return NotImplemented
    _answers_of(grads[0], "GradScaler.unscale_()").unscale(grads, found_inf, inverse_scale)
    if plain:
        _torch.unscale(plain, found_inf, inverse_scale)
    return None


def _abs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Elementwise(args[0], ABS)


def _is_nan(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    return Elementwise(args[0], IS_NAN)


def _with_itself(what: str) -> Handler:
    """A comparison, in which only NaN is not equal."""
    return lambda args, kwargs: Elementwise(args[0], what) if args[0] is args[1] else NotImplemented


def _is_number(value: Any) -> bool:
    if isinstance(value, Tensor):
        return value.numel() == 1 and not isinstance(value, Unreadable) and not value.is_complex()
    return value is None or isinstance(value, int | float)


def _answers_of(grad: ShardedGrad, what: str) -> Answers:
    answers = grad.to_answers()
    if answers is None:
        raise no_values(grad, what)
    return answers


# The names of in-place operators are those of a shard's, too.
IN_PLACE = {
    "clamp_": (aten.clamp_.default, aten.clamp_.Tensor),
    "clamp_min_": (aten.clamp_min_.default, aten.clamp_min_.Tensor),
    "clamp_max_": (aten.clamp_max_.default, aten.clamp_max_.Tensor),
    "nan_to_num_": (aten.nan_to_num_.default,),
    "fill_": (aten.fill_.Scalar, aten.fill_.Tensor),
}
PRODUCTS = {
    "mul_": (aten.mul_.Tensor, aten.mul_.Scalar),
    "div_": (aten.div_.Tensor, aten.div_.Scalar),
}
ON_SEVERAL = {
    "mul_": _torch.ALL_MUL,
    "div_": _torch.ALL_DIV,
    "clamp_min_": _torch.ALL_CLAMP_MIN,
    "clamp_max_": _torch.ALL_CLAMP_MAX,
}
HANDLERS: dict[Any, Handler] = {
    # Module.to() and .to_empty() call these two for each p.grad.
    **dict.fromkeys((aten.empty_like.default, *_torch.TO_COPY), _copy),
    aten.zero_.default: _zero,
    **dict.fromkeys(_torch.ALL_ZERO, _all_zeroed),
    aten.detach.default: _itself,
    **{func: _note(name) for name, funcs in IN_PLACE.items() for func in funcs},
    **{func: _times(name) for name, funcs in PRODUCTS.items() for func in funcs},
    **{func: _all_noted(name) for name, funcs in ON_SEVERAL.items() for func in funcs},
    aten.linalg_vector_norm.default: _norm,
    **dict.fromkeys(_torch.ALL_NORMS, _all_norms),
    **dict.fromkeys(_torch.UNSCALE, _unscale),
    aten.abs.default: _abs,
    aten.isnan.default: _is_nan,
    aten.eq.Tensor: _with_itself(NO_NAN),
    aten.ne.Tensor: _with_itself(IS_NAN),
}
ShardedGrad.handlers |= {id(func): handler for func, handler in HANDLERS.items()}  # torch keeps each for ever
