"""Several tensors through one operator: on an accelerator each operator is a launch, for which the host takes longer
than the device does for a small tensor. Of one tensor nothing is copied."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from zerox import _torch

Key = TypeVar("Key", bound=Hashable)
Piece = TypeVar("Piece")


def together(pieces: Iterable[tuple[Key, int, Piece]], most: int) -> Iterator[tuple[Key, list[Piece]]]:
    """Neighbours of one key, in lists of at most so many elements, or one. Each comes with its key and its elements."""
    some: list[Piece] = []
    of: Key | None = None
    total = 0
    for key, numel, piece in pieces:
        if some and (key != of or total + numel > most):
            assert of is not None
            yield of, some
            some, total = [], 0
        some.append(piece)
        of, total = key, total + numel
    if some:
        assert of is not None
        yield of, some


def joined(tensors: Sequence[Tensor]) -> Tensor:
    """1-D, one behind the other; one tensor as it is."""
    return tensors[0] if len(tensors) == 1 else torch.cat([each.reshape(-1) for each in tensors])


def copy_apart(values: Tensor, into: Sequence[Tensor]) -> None:
    """The reverse of joined()."""
    if len(into) == 1:
        into[0].copy_(values)
        return
    parts = values.split([each.numel() for each in into])
    _torch.for_each("copy_", list(into), [part.view(each.shape) for part, each in zip(parts, into, strict=True)])


def wide(tensors: Sequence[Tensor], dtype: torch.dtype) -> list[Tensor]:
    """In this dtype, with as few launches as there can be."""
    if tensors[0].dtype == dtype:
        return list(tensors)
    if len(tensors) == 1:
        return [tensors[0].to(dtype)]
    parts = joined(tensors).to(dtype).split([each.numel() for each in tensors])
    return [part.view(each.shape) for part, each in zip(parts, tensors, strict=True)]
