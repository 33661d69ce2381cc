"""Random trainings: a model's parameters, an optimizer's options, and what each rank does in each step.

A :class:`Program` is plain data, so that Hypothesis can print, shrink and replay it. Gradients follow from ``seed``.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from hypothesis import strategies as st
from torch import Tensor

from zerox.plan.layout import SMALL_NUMEL

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
NEVER = 1000
LIMITS = ("default", "two buckets", "released at once")


@dataclass(frozen=True)
class Param:
    """``trained_from``: the first step in which it requires a gradient; 0: from construction on."""

    shape: tuple[int, ...]
    dtype: str = "fp32"
    transposed: bool = False  # channels-last where it has 4 dimensions
    group: int = 0
    trained_from: int = 0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class Step:
    """``micros``: whether each backward synchronises. ``absent``: (rank, micro, param) without a gradient. ``idle``:
    ranks that run no backward. ``frozen``: parameters that require no gradient in this step. ``zero``: what follows
    the step, as set_to_none of zero_grad(); None: no zero_grad()."""

    micros: tuple[bool, ...] = (True,)
    absent: frozenset[tuple[int, int, int]] = frozenset()
    idle: frozenset[int] = frozenset()
    frozen: frozenset[int] = frozenset()
    clip: tuple[float, float] | None = None  # max_norm, norm_type
    zero: bool | None = True


@dataclass(frozen=True)
class Program:
    params: tuple[Param, ...]
    groups: tuple[dict[str, Any], ...]
    steps: tuple[Step, ...]
    world_size: int
    options: dict[str, Any]  # of the constructor: stage, bucket_cap_mb, reduce_dtype, master_weights
    seed: int = 0
    hold: bool = False  # no overlap
    residency: str = LIMITS[0]  # of sharded parameters: what may be whole at a time

    def with_options(self, hold: bool, **options: Any) -> Program:
        return replace(self, options={**self.options, **options}, hold=hold)

    @property
    def anchor(self) -> int:
        """A parameter that every backward reaches: ranks must run the same number of them."""
        return next(index for index, param in enumerate(self.params) if param.trained_from == 0)

    def is_trained(self, index: int, step: int) -> bool:
        return step >= self.params[index].trained_from and index not in self.steps[step].frozen

    def has_gradient(self, rank: int, step: int, micro: int, index: int) -> bool:
        at = self.steps[step]
        if rank in at.idle or not self.is_trained(index, step):
            return False
        return index == self.anchor or (rank, micro, index) not in at.absent

    def values(self, rank: int) -> list[Tensor]:
        """What the rank's parameters hold before construction, in memory order."""
        return self._random(1000 + rank, 1.0)

    def gradients(self, rank: int, step: int, micro: int) -> list[Tensor]:
        """What this backward adds to each parameter that it reaches, in memory order."""
        scale = 2.0 ** ((self.seed + 3 * step) % 9 - 6)
        return self._random(100 * rank + 10 * step + micro, scale)

    def _random(self, stream: int, scale: float) -> list[Tensor]:
        generator = torch.Generator().manual_seed(10_000 * self.seed + stream)
        everything = torch.randn(sum(param.numel for param in self.params), generator=generator) * scale
        parts = everything.split([param.numel for param in self.params])
        return [part.to(DTYPES[param.dtype], copy=True) for part, param in zip(parts, self.params, strict=True)]


def shaped(values: Tensor, param: Param) -> Tensor:
    """1-D ``values`` in memory order as a tensor of the parameter's shape and strides."""
    if not param.transposed or len(param.shape) < 2:
        return values.view(param.shape)
    axes = (0, 2, 3, 1) if len(param.shape) == 4 else tuple(reversed(range(len(param.shape))))  # outermost first
    back = [axes.index(axis) for axis in range(len(axes))]
    return values.view([param.shape[axis] for axis in axes]).permute(back)


def _shapes() -> st.SearchStrategy[tuple[int, ...]]:
    few = st.integers(0, 5)
    large = st.sampled_from([SMALL_NUMEL - 1, SMALL_NUMEL, SMALL_NUMEL + 1, 6000])
    return st.one_of(
        st.just(()),
        st.tuples(st.integers(0, 300)),
        st.tuples(few, few),
        st.tuples(few, few, few),
        st.tuples(few, few, few, few),
        st.tuples(large),
        st.tuples(st.just(70), st.integers(60, 80)),
    )


def _groups() -> st.SearchStrategy[dict[str, Any]]:
    beta = st.sampled_from([0.0, 0.3, 0.5, 0.9, 0.99, 0.999])
    return st.fixed_dictionaries(
        {
            "lr": st.sampled_from([1e-2, 0.0, 1e-4, 0.3]) | st.floats(1e-6, 1.0),
            "betas": st.tuples(beta, beta),
            "eps": st.sampled_from([1e-8, 1e-3, 1.0]),
            "weight_decay": st.sampled_from([0.0, 1e-2, 0.5]),
            "amsgrad": st.booleans(),
            "maximize": st.booleans(),
            "decoupled_weight_decay": st.booleans(),
        }
    )


def _some(of: st.SearchStrategy[Any], max_size: int) -> st.SearchStrategy[frozenset[Any]]:
    return st.just(frozenset()) | st.frozensets(of, max_size=max_size)


@st.composite
def _steps(draw: st.DrawFn, world_size: int, num_params: int, anchor: int, one_exchange: bool) -> Step:
    rank, param = st.integers(0, world_size - 1), st.integers(0, num_params - 1)
    if one_exchange:
        micros = (*[False] * draw(st.integers(0, 2)), True)
    else:
        micros = tuple(draw(st.lists(st.booleans(), min_size=1, max_size=3)))
    clip = st.tuples(st.sampled_from([0.05, 1.0, 1e6, math.inf]), st.sampled_from([2.0, 1.0, math.inf, 3.0]))
    return Step(
        micros=micros,
        absent=draw(_some(st.tuples(rank, st.integers(0, len(micros) - 1), param), 8)),
        idle=draw(_some(rank, world_size)),
        frozen=draw(_some(param, num_params)) - {anchor},
        clip=draw(st.none() | clip),
        zero=draw(st.booleans() if one_exchange else st.sampled_from([True, False, None])),
    )


CAPS = st.sampled_from([None, 1e-6, 64.0]) | st.floats(1e-4, 0.05)  # MiB


@st.composite
def programs(draw: st.DrawFn, one_exchange: bool = False) -> Program:
    """``one_exchange``: every step has one synchronising backward, its last, and starts without gradients or from zero:
    what the contract promises equal bits in both stages for."""
    groups = draw(st.lists(_groups(), min_size=1, max_size=3))
    dtypes = draw(st.lists(st.sampled_from(sorted(DTYPES)), min_size=1, max_size=3))
    num_steps = draw(st.integers(1, 3))
    late = st.sampled_from([*range(num_steps), NEVER])
    param = st.builds(
        Param,
        shape=_shapes(),
        dtype=st.sampled_from(dtypes),
        transposed=st.booleans(),
        group=st.integers(0, len(groups) - 1),
        trained_from=st.just(0) | late,
    )
    params = draw(st.lists(param, min_size=1, max_size=6).filter(lambda each: any(p.trained_from == 0 for p in each)))
    anchor = next(index for index, each in enumerate(params) if each.trained_from == 0)
    world_size = draw(st.sampled_from([1, 2, 3, 4, 2]))
    step = _steps(world_size, len(params), anchor, one_exchange)
    masters = ["auto", "fp32", None]
    if any(p.dtype == "bf16" and p.trained_from == 0 for p in params) and all(p.dtype != "fp16" for p in params):
        masters.append("remainder")
    return Program(
        params=tuple(params),
        groups=tuple(groups),
        steps=tuple(draw(st.lists(step, min_size=num_steps, max_size=num_steps))),
        world_size=world_size,
        options={
            "stage": draw(st.sampled_from([2, 3, 1])),
            "bucket_cap_mb": draw(CAPS),
            "reduce_dtype": draw(st.sampled_from([None, torch.float32, torch.bfloat16, torch.float16])),
            "master_weights": draw(st.sampled_from(masters)),
        },
        seed=draw(st.integers(0, 999)),
        hold=draw(st.booleans()),
        residency=draw(st.sampled_from(LIMITS)),
    )
