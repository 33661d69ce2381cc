"""Ops run on as many threads as torch was given: at::parallel_for may fall back to one, and says nothing of it."""

from __future__ import annotations

import subprocess
import sys

import pytest

# In a process of its own, which has started no threads yet: OpenMP keeps those that it once had. Linux counts them.
SCRIPT = """
import os, sys, torch
from zerox import ops

torch.set_num_threads(1)
numel = 300_000
target, source, exp_avg, exp_avg_sq = (torch.ones(numel) for _ in range(4))
one, steps = torch.ones(1, dtype=torch.uint8), torch.zeros(1, dtype=torch.int64)
limbs, flags = torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64), torch.empty(0, dtype=torch.int64)
segments, pieces = torch.tensor([[0, numel, 0, 0, 0]]), torch.tensor([[0, 0, 0, numel]])
options = torch.tensor([[1e-3, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0, 0.0]], dtype=torch.float64)
calls = {
    "flatten_": lambda: ops.flatten_(target, [source], pieces, flags),
    "reduce_": lambda: ops.reduce_(target, limbs, [source], segments, one, 1, False),
    "norm_": lambda: ops.norm_(limbs, source, segments, 2.0),
    "update_": lambda: ops.update_(
        "adam", [ops.Shard(target, None, source, [exp_avg, exp_avg_sq], [], segments, one, steps)], options
    ),
}

def threads_started(num_threads):
    torch.set_num_threads(num_threads)
    before = len(os.listdir("/proc/self/task"))
    calls[sys.argv[1]]()
    return len(os.listdir("/proc/self/task")) - before

print(threads_started(1), threads_started(3))
"""


@pytest.mark.parametrize("op", ["flatten_", "reduce_", "norm_", "update_"])
def test_an_op_works_on_all_threads_that_torch_has(op: str) -> None:
    done = subprocess.run([sys.executable, "-c", SCRIPT, op], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "2"]
