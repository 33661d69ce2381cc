"""With what a class is tried: small tensors like those of a param group, held as ranks hold them, and its options."""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox.plan.owners import cost_of_whole
from zerox.plan.span import SHARD_ALIGN

Shape = tuple[int, ...]
Piece = tuple[int, int, int]  # of a tensor, by its number: elements [start, stop)

LEAST_LR = 1e-2  # with which the class is tried: under a schedule's first lr, often 0, nothing would differ
NUM_STEPS = 12
ANY: tuple[Shape, ...] = ((7, 111), (301,))  # cut by default, whatever they are
VECTORS: tuple[Shape, ...] = ((777,), (301,))  # the same, where matrices are whole
# Of the tensors above, those of each of three ranks. They are cut where zerox cuts: kernels may round otherwise behind
# the last whole vector register, which is in the same place then.
PIECES: tuple[tuple[Piece, ...], ...] = (
    ((0, 0, SHARD_ALIGN),),
    ((0, SHARD_ALIGN, 777), (1, 0, SHARD_ALIGN)),
    ((1, SHARD_ALIGN, 301),),
)
# Of whole tensors two for each number of dimensions: the first ones of these sizes. Of the matrices one is wide.
WHOLE_SIZES: tuple[Shape, ...] = ((9, 14, 2, 3), (12, 5, 3, 2))
# Gradients lie between 1e-8 and the power of ten of their step. Small ones too: in 16 bits the largest may overflow,
# and where everything is infinite nothing differs.
POWERS = (0, 4, 1, -2, 2, 4)
ZERO_STEPS = {5: 1, 8: 0}  # steps in which gradients of whole tensors are zero: of every second one from this on


@dataclass(frozen=True)
class Samples:
    """``cut``: shapes of tensors that lie in pieces, 1-D, on several ranks: ANY, VECTORS, or none. ``dims``: how many
    dimensions those have that are whole on one rank each."""

    cut: tuple[Shape, ...] = ANY
    dims: tuple[int, ...] = ()

    @property
    def shapes(self) -> tuple[Shape, ...]:
        """Those that are cut come first."""
        return self.cut + tuple(_of(sizes, dims) for dims in self.dims for sizes in WHOLE_SIZES)

    @property
    def ranks(self) -> tuple[tuple[Piece, ...], ...]:
        """What each rank holds. Those that hold pieces come first; a whole tensor has one for itself."""
        whole = list(enumerate(self.shapes))[len(self.cut) :]
        return (PIECES if self.cut else ()) + tuple(((index, 0, math.prod(shape)),) for index, shape in whole)

    @property
    def num_cutting(self) -> int:
        """How many ranks hold pieces."""
        return len(PIECES) if self.cut else 0

    def __str__(self) -> str:
        if not self.dims:
            return "1-D as a rank's piece of any parameter and 2-D"
        whole = " and ".join(f"{dims}-D" for dims in self.dims)
        return f"1-D as a rank's piece of a vector and {whole} as whole ones" if self.cut else f"{whole} as whole ones"


def samples_of(params: Sequence[Tensor], whole: str) -> Samples:
    """Of a param group with these parameters. ``whole``: which of them lie whole on one rank, as WHOLE has it."""
    if whole == "none":
        return Samples()
    shapes = {(1,) * param.dim() for param in params} or {(1, 1)}
    dims = {len(shape) for shape in shapes if cost_of_whole(whole, shape) is not None}
    # State of a tensor of one element can't be told from a number: beside such tensors, others show what is kept.
    dims |= {1} if 0 in dims else set()
    return Samples(VECTORS if any(cost_of_whole(whole, shape) is None for shape in shapes) else (), tuple(sorted(dims)))


def kind_of_option(value: Any) -> Any:
    """Equal for values with which a class keeps the same: whether a number is 0 may decide, and no more of it."""
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(kind_of_option, value))
    return value if isinstance(value, str) else type(value).__name__


def option_for_probe(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.clamp_(min=LEAST_LR) if key == "lr" else value
    if key == "lr" and isinstance(value, (int, float)):
        return max(float(value), LEAST_LR)
    return list(value) if isinstance(value, list) else value


def draw(shapes: Sequence[Shape]) -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values to start from, and the gradients of each step, float64."""
    return _draw(tuple(shapes))


@functools.lru_cache(16)
def _draw(shapes: tuple[Shape, ...]) -> tuple[list[Tensor], list[list[Tensor]]]:
    generator = torch.Generator(device="cpu").manual_seed(0)
    starts = [_spread(shape, (-3, 0), generator) for shape in shapes]
    steps = []
    for number in range(NUM_STEPS):
        grads = [_spread(shape, (-8, POWERS[number % len(POWERS)]), generator) for shape in shapes]
        for grad in grads:
            grad[torch.rand(grad.shape, generator=generator, device="cpu") < 0.1] = 0
        for grad in grads[ZERO_STEPS[number] :: 2] if number in ZERO_STEPS else ():
            grad.zero_()
        steps.append(grads)
    return starts, steps


def _of(sizes: Shape, dims: int) -> Shape:
    return tuple(sizes[index] if index < len(sizes) else index for index in range(dims))


def _spread(shape: Sequence[int], powers: tuple[float, float], generator: torch.Generator) -> Tensor:
    """float64, of both signs, evenly over the powers of ten. Most signs are the same in each call: gradients have a
    direction, in which estimates of the distance grow."""
    low, high = powers
    drawn = torch.rand((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    signs = torch.ones(shape, dtype=torch.float64, device="cpu")
    signs.view(-1)[::2] = -1
    signs[drawn[1] < 0.2] *= -1
    return signs * 10 ** (low + (high - low) * drawn[0])
