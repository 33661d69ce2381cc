"""An error that ends the script of one rank is what the other ranks' error says."""

from __future__ import annotations

import re
from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.programs import run_all

# Each rank is a script of its own. The store is where rank 0 puts it, or in a file.
SCRIPT = """
import os, sys, torch, torch.distributed as dist
from datetime import timedelta
import zerox

rank, how, folder = int(sys.argv[1]), sys.argv[2], sys.argv[3]
store = dist.FileStore(folder + "/store", 2)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=timedelta(seconds=60))
torch.manual_seed(0)
model = torch.nn.Linear(4, 4)
optimizers = [zerox.FusedShardedAdam([param], stage=1 + index) for index, param in enumerate(model.parameters())]

def train():
    model(torch.ones(2, 4)).sum().backward()
    for optimizer in optimizers:
        optimizer.step()
        optimizer.zero_grad()

train()
if rank == 1:
    if how == "raises":
        open("/no/such/file")
    if how == "catches":
        try:
            open("/no/such/file")
        except OSError:
            pass
    if how == "a child raises":
        if os.fork() == 0:
            raise ValueError("a child's own")
        os.wait()
    if how == "exits":
        sys.exit(3)
train()
print("trained")
"""


def run(how: str, folder: Path) -> list[CompletedProcess[str]]:
    script = folder / "train.py"
    script.write_text(SCRIPT)
    return run_all(script, [[f"{rank}", how, str(folder)] for rank in range(2)], within_s=100)


def test_the_others_error_has_the_error_that_ended_a_script(tmp_path: Path) -> None:
    first, second = run("raises", tmp_path)
    error = "FileNotFoundError: [Errno 2] No such file or directory: '/no/such/file'"
    assert error in second.stderr
    assert second.returncode == 1, "as Python ends after an error"
    assert first.returncode == 1
    assert re.search(rf"zerox: .* a rank did not answer: rank 1 raised {re.escape(error)}", first.stderr), first.stderr
    assert "is gone" not in first.stderr


@pytest.mark.parametrize("how", ["catches", "a child raises"])
def test_an_error_that_ends_no_rank_is_told_to_nobody(how: str, tmp_path: Path) -> None:
    for rank in run(how, tmp_path):
        assert rank.returncode == 0, rank.stderr
        assert rank.stdout.startswith("trained")


def test_a_script_that_ends_without_an_error_is_named_so(tmp_path: Path) -> None:
    first, second = run("exits", tmp_path)
    assert second.returncode == 3
    assert "rank 1 has come to the end of its script" in first.stderr
