"""A ZeRO stage as data: what is sharded and what every rank holds whole."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Distribution(enum.Enum):
    REPLICATED = "whole on every rank"
    SHARDED = "one shard a rank"


REPLICATED = Distribution.REPLICATED
SHARDED = Distribution.SHARDED


class Move(enum.Enum):
    REDUCE_SCATTER = "each rank gets its shard of the mean"
    ALL_GATHER = "each rank gets all shards"


@dataclass(frozen=True)
class Stage:
    """Where parameters and gradients are between steps. Optimizer state is sharded in every stage."""

    number: int
    params: Distribution
    grads: Distribution

    @property
    def grad_route(self) -> tuple[Move, ...]:
        """The moves from each rank's own whole gradient to where it is between steps."""
        return (Move.REDUCE_SCATTER,) if self.grads is SHARDED else (Move.REDUCE_SCATTER, Move.ALL_GATHER)


# Who reads it: Grads (grads/grads.py) and make_mean_grads (csrc/grads/mean_grads.cpp) for gradients;
# make_gather (residency/residency.py) and the constructor of BucketManager (csrc/grads) for parameters; rank_bytes.py
# for memory; ranks/advice.py for what it advises.
STAGES = {
    1: Stage(1, params=REPLICATED, grads=REPLICATED),
    2: Stage(2, params=REPLICATED, grads=SHARDED),
    3: Stage(3, params=SHARDED, grads=SHARDED),
}


def stage_of(number: int) -> Stage:
    """Raises ValueError that names the known stages."""
    if isinstance(number, bool) or number not in tuple(STAGES):
        raise ValueError(f"zerox: stage must be one of {sorted(STAGES)}, got {number!r}")
    return STAGES[number]
