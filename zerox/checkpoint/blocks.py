"""8-bit state whose blocks were counted otherwise than they are here: in another memory format, or of another cut.

The codes are read as any other elements, and the scales of all blocks: 1/256 of a parameter's elements.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from zerox.memory.bucket import Member
from zerox.memory.flat import dense_strides
from zerox.memory.forms import decode_with
from zerox.plan.cut import complete_order, dense, slowest_first
from zerox.plan.form import BLOCK_NUMEL
from zerox.rules.rule import StateSpec
from zerox.sliced_tensor import SlicedTensor
from zerox.state.fill import pieces


def memory_order(member: Member) -> list[int]:
    """Dimensions from slowest to fastest, if that is not their own order; else nothing."""
    shape, strides = member.local.shape, dense_strides(member.local)
    found = sorted((dim for dim in range(len(shape)) if shape[dim] > 1), key=lambda dim: -strides[dim])
    return found if found != sorted(found) else []


def are_alike(member: Member, order: list[int]) -> bool:
    """Whether the blocks of a whole parameter that lay in this ``order`` are those that are kept here."""
    return member.keeps_blocks and order == memory_order(member)


def values_of(spec: StateSpec, codes: SlicedTensor, scales: Tensor, order: list[int]) -> Tensor:
    """float32 ``[n]``: what this rank's ``codes`` stand for. ``scales``: of all blocks, in the memory ``order``."""
    strides = dense(codes.shape, complete_order(order, codes.dim()))
    values = torch.empty(codes.own.numel(), device=codes.own.device)
    for piece in pieces(values.numel()):
        blocks = _places(codes, strides, range(codes.start + piece.start, codes.start + piece.stop)) // BLOCK_NUMEL
        of_each = scales[blocks.to(scales.device)].to(values.device)
        values[piece] = decode_with(spec, codes.own[piece], of_each)
    return values


def _places(tensor: SlicedTensor, strides: Sequence[int], elements: range) -> Tensor:
    """Where elements of the local tensor, which are counted in its own order, lie in a whole one of ``strides``."""
    shape, own_strides = tensor.part
    left = torch.arange(elements.start, elements.stop, device="cpu")
    found = torch.zeros_like(left)
    for dim in slowest_first(shape, own_strides):
        index = left // own_strides[dim]
        left = left - index * own_strides[dim]
        found += (index + (tensor.cut.offsets[dim] if tensor.cut else 0)) * strides[dim]
    return found
