"""Where a backward begins: a forward's outputs tell bucket managers, some of whose parameters it may never reach."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import fields, is_dataclass

from torch import Tensor

from zerox import _torch
from zerox._C import BucketManager, Decision


def tell_begin(outputs: object, managers: Sequence[BucketManager], decision: Decision) -> None:
    """All ranks tell these in the same order, in which they synchronize where the backward ends. Called after the
    forward.
    """
    known = [weakref.ref(manager) for manager in managers]
    inside = _torch.in_backward()  # a reentrant checkpoint around the wrapper recomputes it

    def begin(_: Tensor) -> None:
        for manager in (reference() for reference in known):
            if manager is not None:
                manager.backward.begin(decision, inside=inside)

    for tensor in tensors_in(outputs):
        if tensor.grad_fn is not None:  # a leaf would keep the hook for good
            tensor.register_hook(begin)


def tensors_in(outputs: object) -> Iterator[Tensor]:
    """Of what a forward returns: in lists, tuples, dicts and their subclasses, dataclasses, and what pytree knows."""
    waiting, seen = [outputs], set()
    while waiting:
        each = waiting.pop()
        if isinstance(each, Tensor):
            yield each
        elif id(each) not in seen:
            seen.add(id(each))
            waiting += _inside(each)


def _inside(each: object) -> list[object]:
    if isinstance(each, list | tuple | set):
        return list(each)
    if isinstance(each, Mapping):
        return list(each.values())
    if is_dataclass(each) and not isinstance(each, type):
        return [getattr(each, field.name) for field in fields(each)]
    return [leaf for leaf in _torch.leaves_of(each) if leaf is not each]
