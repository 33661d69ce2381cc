"""The code of docs/lightning.md and docs/watching.md runs, and its diffs are all that a script needs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import zerox.integrations.lightning  # noqa: F401
from zerox import FusedShardedAdam

DOCS = Path(__file__).parents[2] / "docs"


def blocks(page: str, language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", (DOCS / page).read_text(), re.S)


def swapped(script: str, diff: str) -> str:
    """The script before the diff was made."""
    for line in diff.splitlines():
        if line.startswith("+"):
            assert script.count(line[1:]) == 1, line
        if line.startswith("+import"):
            script = script.replace(f"{line[1:]}\n", "")
    old, new = (next(line[1:] for line in diff.splitlines() if line.startswith(f"{sign}trainer")) for sign in "-+")
    return script.replace(new, old)


def sum_of_weights(script: str, folder: Path) -> float:
    folder.mkdir()
    (folder / "train.py").write_text(script)
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "train.py"], cwd=folder, env=environment, capture_output=True, text=True, timeout=200
    )
    found = re.search(r"sum of the weights (\S+)", done.stdout)
    assert found, done.stderr
    return float(found[1])


def test_two_changed_lines_make_a_script_with_ddp_one_with_zerox(tmp_path: Path) -> None:
    [script] = [each for each in blocks("lightning.md", "python") if each.startswith("# train.py")]
    diff = blocks("lightning.md", "diff")[0]
    assert sum(line.startswith("+") for line in diff.splitlines()) <= 3
    before = swapped(script, diff)
    assert "zerox" not in before
    assert sum_of_weights(script, tmp_path / "zerox") == pytest.approx(
        sum_of_weights(before, tmp_path / "ddp"), abs=2e-5
    )


def test_the_code_of_the_page_on_lightning_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from lightning.pytorch import Trainer

    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"torch": torch, "Trainer": Trainer}
    found = [each for each in blocks("lightning.md", "python") if not each.startswith("# train.py")]
    assert len(found) == 2
    try:
        for block in found:
            exec(block, names)
    finally:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
    assert names["trainer"].strategy.sharding.options == {"stage": 3, "resident_mb": 512}
    assert type(names["optimizer"].optimizer) is FusedShardedAdam


def test_the_code_of_the_page_on_watching_runs(tmp_path: Path) -> None:
    from torch.utils.tensorboard import SummaryWriter

    model = torch.nn.Linear(4, 1)
    names: dict[str, Any] = {"torch": torch, "model": model, "num_steps": 5, "writer": SummaryWriter(tmp_path)}
    names |= {"optimizer": FusedShardedAdam(model.parameters()), "batch": lambda: torch.randn(2, 4)}
    [block, *others] = blocks("watching.md", "python")
    exec(block, names)
    names["writer"].close()
    assert list(tmp_path.glob("events*"))
    for each in others:
        exec(each, names)


def test_the_figures_are_those_that_there_are() -> None:
    from zerox.integrations.watch import Watch

    optimizer = FusedShardedAdam([torch.nn.Parameter(torch.ones(3))])
    watch = Watch(optimizer)
    optimizer.param_groups[0]["params"][0].sum().backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    [(_, figures)] = watch.take()
    rows = re.findall(r"^\| `(\w+)` \|", (DOCS / "watching.md").read_text(), re.M)
    assert rows == list(figures)
