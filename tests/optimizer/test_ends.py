"""A program ends with exit code 0 where gloo's threads are late: see Note [Tensors that Python does not know]."""

from __future__ import annotations

import os
from pathlib import Path
from unittest.mock import patch

from bench.common import library
from tests.programs import run_programs

LIBRARY = Path(__file__).parents[1] / "late_threads.cpp"

# The interpreter's last act, after which it gives no thread its lock, is to sleep with its lock: registered first, it
# runs last. A thread that is late by a second asks for the lock meanwhile.
PROGRAM = """
import atexit, ctypes, sys
atexit.register(ctypes.PyDLL(None).sleep, 3)

import torch
import torch.distributed as dist
from zerox import DistributedDataParallel, FusedShardedAdam

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = DistributedDataParallel(torch.nn.Linear(4, 4))
optimizer = FusedShardedAdam(model.parameters())
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
ctypes.CDLL(None).be_late()
"""
OF_OWN_GROUP = 'optimizer.inside.ranks.all_gather_text("the program ends")'
# Python knows this tensor, so the group's thread needs the interpreter, and has it only until the group is destroyed.
OF_USERS_GROUP = """
loss = torch.ones(1)
dist.all_reduce(loss)
dist.destroy_process_group()
"""
LAST = "\nprint(ctypes.CDLL(None).num_late())"


def assert_ends_well(last: str, folder: Path) -> None:
    with patch.dict(os.environ, {"LD_PRELOAD": str(library(LIBRARY, ("-O1",)))}):
        for printed in run_programs(PROGRAM + last + LAST, folder, forked=False):
            assert int(printed) > 0, "no thread was late"


def test_a_program_ends_well_though_threads_of_its_own_group_are_late(tmp_path: Path) -> None:
    assert_ends_well(OF_OWN_GROUP, tmp_path)


def test_a_group_that_is_destroyed_ends_while_optimizer_and_wrapper_live(tmp_path: Path) -> None:
    assert_ends_well(OF_USERS_GROUP, tmp_path)


# A rank's gradients are still on their way when it ends. Python knows them, since they stood in p.grad between the two
# backwards. Large ones are sent from where they are, so that a worker has them until the other rank's have come.
IN_THE_AIR = """
import atexit, ctypes, sys, time
atexit.register(ctypes.PyDLL(None).sleep, 5)

import torch
import torch.distributed as dist
from zerox import FusedShardedAdam

rank, store = int(sys.argv[1]), sys.argv[2]
torch.set_num_threads(1)
dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
model = torch.nn.Linear(1024, 1024)
optimizer = FusedShardedAdam(model.parameters())
x = torch.ones(2, 1024)
with optimizer.no_sync():
    model(x).sum().backward()
known = [param.grad for param in model.parameters()]
dist.barrier()
time.sleep(2 * rank)
model(x).sum().backward()
dist.destroy_process_group()
"""


def test_a_program_ends_well_though_gradients_are_on_their_way(tmp_path: Path) -> None:
    run_programs(IN_THE_AIR, tmp_path, forked=False)
