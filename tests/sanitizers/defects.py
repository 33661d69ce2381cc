"""Memory that is not what zerox thinks it is. Each run of this program has one such defect, named by its argument, that
the sanitizers have to report: proof that they watch the extension's kernels and workers. See tests/test_sanitizers.py.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor, nn

import tests.sanitizers.extension  # noqa: F401  (first)
from tests.ranks import run_threads
from zerox import FusedShardedAdam

NUMEL = 301  # a tail in every instruction set


def shorten(tensor: Tensor, numel: int) -> None:
    """The tensor still says what it said, but its memory ends after ``numel`` elements."""
    tensor.untyped_storage().resize_(numel * tensor.element_size())


def moments_too_short() -> None:
    """The update reads and writes one element past their end, on the thread that calls step()."""
    param = nn.Parameter(torch.ones(NUMEL))
    optimizer = FusedShardedAdam([param])
    param.sum().backward()
    optimizer.step()  # makes views, which torch would refuse to make of too short a memory
    param.sum().backward()
    shorten(optimizer.inside.buckets[0].state["exp_avg"].values, NUMEL - 1)
    optimizer.step()


def shard_too_short() -> None:
    """The second backward's gradients are reduced into a shard that is an element too short, on the reduce worker."""

    def train(group: dist.ProcessGroup) -> None:
        param = nn.Parameter(torch.ones(NUMEL))
        optimizer = FusedShardedAdam([param], process_group=group)
        param.sum().backward()
        optimizer.synchronize()
        shard = optimizer.inside.grads.shard(0)
        if optimizer.inside.buckets[0].own_segments:
            assert shard is not None
            shorten(shard, NUMEL - 1)
        param.sum().backward()
        optimizer.step()

    run_threads(train, 2)


def step_count_overflows() -> None:
    param = nn.Parameter(torch.ones(NUMEL))
    optimizer = FusedShardedAdam([param])
    param.sum().backward()
    optimizer.inside.buckets[0].steps.fill_(2**63 - 1)
    optimizer.step()


DEFECTS: dict[str, Callable[[], None]] = {
    each.__name__: each for each in (moments_too_short, shard_too_short, step_count_overflows)
}

if __name__ == "__main__":
    DEFECTS[sys.argv[1]]()
    print("nobody noticed")
