"""clients/: scripts of other people run beside their own selves, so a small one of ours shows what is seen there."""

from __future__ import annotations

import hashlib
import time
from dataclasses import replace
from pathlib import Path

import pytest

from clients.__main__ import compared, main
from clients.client import Client, Misfit, Resume, clients
from clients.launch import Failed, run
from clients.report import WAYS, is_good, is_resumed_well, table, table_of_resumed
from clients.resumed import resumed

SCRIPT = """
import argparse, os
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

parser = argparse.ArgumentParser()
parser.add_argument("--steps", type=int)
parser.add_argument("--resume")
args = parser.parse_args()
dist.init_process_group("nccl")
rank = dist.get_rank()
device = torch.device("cuda", rank)
data = torch.load("data.pt").to(device)
model = DistributedDataParallel(torch.nn.Linear(40, 40).cuda(rank), device_ids=[rank])
optimizer = AdamW(model.parameters(), lr=0.05)
first = 0
if args.resume:
    saved = torch.load(args.resume)
    model.module.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    first = saved["step"]
for step in range(first, args.steps):
    optimizer.zero_grad()
    (model(data[rank]) - data[1 - rank]).square().mean().backward()
    optimizer.step()
if rank == 0:
    kept = {"model": model.module.state_dict(), "optimizer": optimizer.state_dict(), "step": args.steps}
    torch.save(kept, "last.pt")
with torch.no_grad():
    print("loss", model(data[rank]).square().mean().item())
dist.destroy_process_group()
"""
DIFF = """\
diff --git a/train.py b/train.py
--- a/train.py
+++ b/train.py
@@ -5,2 +5 @@
-from torch.nn.parallel import DistributedDataParallel
-from torch.optim import AdamW
+from zerox import DistributedDataParallel, FusedShardedAdam as AdamW
"""
NAMES = sorted(clients())


def make_data(folder: Path) -> None:
    import torch

    torch.save(torch.randn(3, 8, 40, generator=torch.Generator().manual_seed(0)), folder / "data.pt")


@pytest.fixture
def small(tmp_path: Path) -> Client:
    (tmp_path / "scripts" / "small").mkdir(parents=True)
    (tmp_path / "scripts" / "small" / "train.py").write_text(SCRIPT)
    (tmp_path / "clients" / "small").mkdir(parents=True)
    (tmp_path / "clients" / "small" / "two_lines.diff").write_text(DIFF)
    digest = hashlib.sha256(SCRIPT.encode()).hexdigest()
    (tmp_path / "clients" / "small" / "files.sha256").write_text(f"{digest}  train.py\n")
    command = ["train.py", "--steps", "12"]
    return Client(
        "small",
        "somebody/small",
        "1234567",
        command,
        make_data,
        faults=["beta"],
        resume=Resume("--steps 6", "--resume last.pt"),
        among=tmp_path / "clients",
    )


def test_a_script_is_compared_with_itself(small: Client, tmp_path: Path) -> None:
    row = compared(small, tmp_path / "scripts", [2], tmp_path / "runs")
    assert row["steps"] == 12
    assert row["evaluations"] == 2
    assert row["changed lines"] == 2
    assert row["stages"][2]["gradients"] == 2
    assert is_good(row), row
    assert row["faults"]["beta"]["losses"] > 1e-3
    text, num_failed = table([row])
    assert num_failed == 0
    assert "| small | 2 | 12 |" in text
    assert not is_good({**row, "stages": {2: row["faults"]["beta"]}}), "a stage as far away as a fault"
    assert not is_good({**row, "faults": {"beta": row["stages"][2]}}), "a fault that does not show"
    assert not is_good({**row, "stages": {2: {"failed": "rank 0: ..."}}})
    assert not is_good({**row, "stages": {2: {**row["stages"][2], "of other bits": 1}}})


@pytest.mark.deep
def test_a_script_resumes_on_other_numbers_of_ranks_and_across(small: Client, tmp_path: Path) -> None:
    row = resumed(small, tmp_path / "scripts", [2], tmp_path / "runs")
    assert row["steps"] == 6
    assert row["stages"][2].keys() == set(WAYS)
    assert is_resumed_well(row), row
    assert row["faults"]["forgets"]["losses"] > 1e-3


def test_resumed_runs_are_judged() -> None:
    near, far = {"losses": 1e-7, "evaluations": 0.0}, {"losses": 1e-2, "evaluations": 0.0}
    row = {
        "name": "small",
        "steps": 6,
        "allowed": 5e-6,
        "stages": {2: dict.fromkeys(WAYS, near)},
        "faults": {"forgets": far},
    }
    text, num_failed = table_of_resumed([row])
    assert num_failed == 0
    assert "| small | 6 |" in text
    assert not is_resumed_well({**row, "faults": {"forgets": near}}), "a fault that does not show"
    assert not is_resumed_well({**row, "stages": {2: dict.fromkeys(WAYS, near) | {"on 3": far}}})
    broken = {**row, "stages": {2: {"saves": {"failed": "rank 0: ..."}}}}
    assert not is_resumed_well(broken)
    assert "failed" in table_of_resumed([broken])[0]


def test_a_script_of_another_version_is_refused(small: Client, tmp_path: Path) -> None:
    (tmp_path / "scripts" / "small" / "train.py").write_text(SCRIPT + "\n")
    with pytest.raises(Misfit, match="another version: somebody/small is meant at commit 1234567"):
        small.found_in(tmp_path / "scripts")
    with pytest.raises(Misfit, match="is not there: put somebody/other at commit"):
        replace(small, repository="somebody/other").found_in(tmp_path / "scripts")


def test_a_rank_that_fails_ends_the_run(small: Client, tmp_path: Path) -> None:
    """Its partner would wait for it."""
    script = SCRIPT.replace('device = torch.device("cuda", rank)', "assert rank == 0, 'no second rank here'")
    where = tmp_path / "broken"
    where.mkdir()
    (where / "train.py").write_text(script.replace("torch.load", "dist.barrier() or torch.load"))
    begin = time.monotonic()
    with pytest.raises(Failed, match="no second rank here"):
        run(small, where, tmp_path / "out")
    assert time.monotonic() - begin < 120


@pytest.mark.parametrize("name", NAMES)
def test_a_client_is_whole(name: str) -> None:
    """The diff has no line of the script's but those that it changes, and is about files whose hashes are there."""
    client = clients()[name]
    assert client.name == name
    lines = (client.folder / "two_lines.diff").read_text().splitlines()
    assert all(line.startswith(("diff ", "--- ", "+++ ", "@@ ", "+", "-")) for line in lines)
    changed = {line.removeprefix("--- a/") for line in lines if line.startswith("--- ")}
    hashed = {line.split(maxsplit=1)[1] for line in (client.folder / "files.sha256").read_text().splitlines()}
    assert hashed == changed
    assert client.num_changed <= 6
    assert "stage=" not in "\n".join(lines)


def test_they_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--list"]) == 0
    listed = capsys.readouterr().out
    assert all(name in listed for name in NAMES)
    with pytest.raises(SystemExit):
        main(["somewhere", "no_such_client"])
