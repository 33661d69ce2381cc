"""bench.optimizer_step: every system takes the same steps, and time is told from what it is counted from."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import optimizer_step, steppers
from bench.jobs import WrongResult
from bench.peers import PEERS, Peer
from bench.timing import Timing

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]
# Other peers go the way of torch's: through WithMasters.
ALWAYS_HERE = [each for each in steppers.SYSTEMS if each.is_ours or each.name.startswith(("torch ", "FSDP2"))]


@pytest.fixture
def group() -> Iterator[None]:
    with optimizer_step.group_of_one(CPU):
        yield


def test_the_command_times_all_that_run_here_and_draws_them(tmp_path: Path) -> None:
    files = [f"--json={tmp_path / 'step.json'}", f"--png={tmp_path / 'step.png'}"]
    command = [sys.executable, "-m", "bench.optimizer_step", "--quick", "--seconds=1", *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "step.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["command"].startswith("python -m bench.optimizer_step --quick")
    for dtype in ("fp32", "bf16"):
        for model in ("gpt2-0.1m", "20 params"):
            rows = {row["who"]: row for row in result["rows"] if (row["dtype"], row["model"]) == (dtype, model)}
            assert {"zerox", "zerox, 8-bit state", "torch AdamW(fused)", "FSDP2, AdamW(fused)"} < set(rows)
            alone_ms = rows["backward alone"]["p50_ms"]
            for row in rows.values():
                assert row["step_ms"] == row["p50_ms"] - alone_ms
                assert row["host_us"] is None
            theirs = rows["torch AdamW(fused)"]
            assert theirs["theirs_over_ours"] == theirs["step_ms"] / rows["zerox"]["step_ms"]
    assert f"{theirs['theirs_over_ours']:.2f}x" in ended.stdout


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("system", ALWAYS_HERE, ids=lambda system: system.name)
def test_a_wrong_step_of_ours_is_an_error_and_of_theirs_not_timed(
    group: None,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    system: steppers.System,
    dtype: torch.dtype,
) -> None:
    def twice(given: steppers.Given) -> steppers.Stepper:
        stepper = system.build(given)
        own_step = stepper.step

        def step() -> None:
            own_step()
            own_step()

        monkeypatch.setattr(stepper, "step", step)
        return stepper

    wrong = steppers.System(system.name, system.state, twice)
    monkeypatch.setattr(optimizer_step, "SYSTEMS", [steppers.BACKWARD, wrong])
    capsys.readouterr()
    if system.is_ours:
        with pytest.raises(WrongResult, match=system.name):
            optimizer_step.able(dtype, CPU)
    else:
        assert optimizer_step.able(dtype, CPU) == [steppers.BACKWARD]
        assert f"skipped {system.name}: its parameters are up to" in capsys.readouterr().out


def test_a_peer_that_is_missing_is_told(
    group: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Peer("x", "no_such_package.optim", "fp32", PEERS[0].make)
    system = steppers.System("x", "fp32", partial(steppers.WithMasters, peer=missing))
    monkeypatch.setattr(optimizer_step, "SYSTEMS", [steppers.BACKWARD, system])
    assert optimizer_step.able(torch.float32, CPU) == [steppers.BACKWARD]
    assert "skipped x: no_such_package is not installed" in capsys.readouterr().out


def test_a_row_says_what_a_step_takes_beyond_backward() -> None:
    ours, theirs = steppers.OURS["fp32"], steppers.REFERENCE

    def measured(ms: float, host_us: float | None) -> optimizer_step.Measured:
        return optimizer_step.Measured(Timing(ms, ms, ms, 5, host_bound=True), host_us)

    found = {steppers.BACKWARD: measured(1.0, 3.0), ours: measured(1.5, 80.0), theirs: measured(2.0, None)}
    given = steppers.Given.random([(3, 2), (5,)], torch.float32, CPU)
    rows = optimizer_step.rows_of(found, "fp32", "x", given)
    assert [(row["step_ms"], row["theirs_over_ours"]) for row in rows] == [(0.0, None), (0.5, None), (1.0, 2.0)]
    assert (rows[1]["params"], rows[1]["numel"]) == (2, 11)
    assert optimizer_step.cells(rows[1])[3:] == ("1.500 (host)", "0.0%", "0.500", "", "80")
    assert optimizer_step.cells(rows[2])[-2:] == ("2.00x", "")
