"""The orthogonal factor of matrices, nearly: five products each, in bfloat16."""

from __future__ import annotations

import functools
from typing import NamedTuple

import torch
from torch import Tensor

from zerox import _torch


class Iteration(NamedTuple):
    """``coefficients`` of x, of its cube and of its fifth power, ``steps`` times. ``eps``: the least norm that is
    divided by."""

    coefficients: tuple[float, float, float]
    steps: int
    eps: float


def orthogonalize(matrices: list[Tensor], by: Iteration) -> list[Tensor]:
    """Of bfloat16 matrices of one shape and order in memory, which are overwritten. The list gets empty: each is freed
    as soon as it has been multiplied.

    Source: Jordan et al., "Muon" (2024); operators in the order of torch.optim.Muon, so that bits are equal. On a CPU
    products take as long for one as for many together, and each goes by itself.
    """
    device, shape, strides = matrices[0].device, matrices[0].shape, matrices[0].stride()
    is_cpu, count = device.type == "cpu", len(matrices)
    norms = _torch.for_each("norm", matrices)  # each by itself, also in one launch: its sum has an order of its own
    if is_cpu or count == 1 or not _is_alike_in_batch(device, shape, strides, count):
        _divide(matrices, norms, by.eps)
        return [_iterate(matrices, by) for _ in range(count)]
    batch = [torch.stack(matrices).div_(torch.stack(norms).clamp(min=by.eps).view(-1, 1, 1))]
    matrices.clear()
    return list(_iterate(batch, by))


def bytes_of(rows: int, columns: int) -> int:
    """That are allocated at the most for one matrix, itself too: it, its next value and a product of m by m."""
    return 2 * (2 * rows * columns + min(rows, columns) ** 2)


def _divide(matrices: list[Tensor], norms: list[Tensor], eps: float) -> None:
    for each, norm in zip(matrices, norms, strict=True):
        each.div_(norm.clamp(min=eps))


def _iterate(given: list[Tensor], by: Iteration) -> Tensor:
    """Of the first one, a matrix or a batch of them, which is taken out: no caller may hold it, or it is not freed."""
    x = given.pop(0)
    is_tall = x.shape[-2] > x.shape[-1]
    product = torch.addmm if x.dim() == 2 else torch.baddbmm
    a, b, c = by.coefficients
    x = x.mT if is_tall else x
    for _ in range(by.steps):
        gram = x @ x.mT
        gram = product(gram, gram, gram, beta=b, alpha=c)
        x = product(x, gram, x, beta=a)
    return x.mT if is_tall else x


@functools.cache
def _is_alike_in_batch(device: torch.device, shape: torch.Size, strides: tuple[int, ...], count: int) -> bool:
    """Whether matrices in a batch of so many have the bits that each has alone: then they don't depend on how many
    ranks there are, and so on what else is in the batch."""
    generator = torch.Generator("cpu").manual_seed(0)
    drawn = torch.randn(shape, generator=generator, device="cpu")
    alone = torch.empty_strided(shape, strides, dtype=torch.bfloat16, device=device).copy_(drawn / drawn.norm())
    by = Iteration((2.0, -1.5, 0.5), 2, 0.0)
    return bool((_iterate([torch.stack([alone] * count)], by) == _iterate([alone], by)).all())
