"""bench.kernels --only step: every system takes the same steps, and time is told from what it is counted from."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch

from bench import steppers
from bench.jobs import Job, Kind, WrongResult
from bench.peers import PEERS, Peer
from bench.timing import Timing

CPU = torch.device("cpu")
ROOT = Path(__file__).parents[1]


@pytest.fixture
def group() -> Iterator[None]:
    with steppers.group_of_one(CPU):
        yield


def test_the_command_times_all_that_run_here_and_draws_them(tmp_path: Path) -> None:
    files = [f"--json={tmp_path / 'step.json'}", f"--png={tmp_path / 'step.png'}"]
    command = [sys.executable, "-m", "bench.kernels", "--only=step", "--quick", "--seconds=1", *files]
    ended = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "step.png").stat().st_size > 10_000
    result = json.loads((tmp_path / "step.json").read_text())
    assert result["command"].startswith("python -m bench.kernels --only=step --quick")
    for kind, size in itertools.product(("fp32", "bf16 + remainder"), ("gpt2-0.1m", "20 params")):
        found = [row for row in result["rows"] if (row["kind"], row["size"]) == (kind, size)]
        assert [row["who"] for row in found if row["state"] == "8bit"][:1] == ["zerox"]
        rows = {row["who"]: row for row in found if row["state"] == "fp32"}
        assert {"zerox", "torch AdamW(foreach)", "torch AdamW(fused)", "FSDP2, AdamW(fused)"} <= set(rows)
        theirs = rows["torch AdamW(fused)"]
        assert theirs["theirs_over_ours"] == theirs["p50_ms"] / rows["zerox"]["p50_ms"]
        assert theirs["bytes"] == theirs["numel"] * (28 + 4 if kind == "fp32" else 26 + 2)
        assert theirs["host_us"] is None
    assert f"{theirs['theirs_over_ours']:.2f}" in ended.stdout


@pytest.mark.parametrize("kind", steppers.STEPPED, ids=lambda kind: f"{kind.name}, {kind.state}")
def test_a_wrong_step_of_ours_is_an_error_and_of_theirs_not_timed(
    group: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], kind: Kind
) -> None:
    builds = steppers.systems(kind.state)
    others = [name for name in builds if name.startswith(("torch AdamW(", "FSDP2"))]

    def twice(build: steppers.Build, given: steppers.Given) -> steppers.Stepper:
        stepper = build(given)
        own_step = stepper.step

        def step() -> None:
            own_step()
            own_step()

        monkeypatch.setattr(stepper, "step", step)
        return stepper

    wrong = {name: partial(twice, builds[name]) for name in others}
    right = {"zerox": builds["zerox"]}
    monkeypatch.setattr(steppers, "systems", lambda _: {**right, **wrong})
    assert steppers.able.__wrapped__(kind, CPU) == right
    said = capsys.readouterr().out
    assert all(f"skipped {name}: its parameters are up to" in said for name in others)
    monkeypatch.setattr(steppers, "systems", lambda _: {"zerox": partial(twice, builds["zerox"])})
    with pytest.raises(WrongResult, match=f"step, .*{kind.state}"):
        steppers.able.__wrapped__(kind, CPU)


def test_a_peer_that_is_missing_is_told(
    group: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = Peer("x", "no_such_package.optim", "fp32", PEERS[0].make)
    monkeypatch.setattr(steppers, "systems", lambda _: {"x": partial(steppers.WithMasters, peer=missing)})
    assert steppers.able.__wrapped__(steppers.STEPPED[0], CPU) == {}
    assert "skipped x: no_such_package is not installed" in capsys.readouterr().out


def test_a_step_is_what_is_beyond_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    took_ms = {steppers.BACKWARD: 1.0, "zerox": 1.5, "theirs": 2.0}
    monkeypatch.setattr(steppers, "able", lambda *_: {"zerox": steppers.Stepper, "theirs": steppers.Stepper})
    monkeypatch.setattr(
        steppers,
        "time_in_turn",
        lambda calls, *_: {name: Timing(took_ms[name], took_ms[name], took_ms[name], 5) for name in calls},
    )
    found = steppers.time_steps(Job("step", steppers.STEPPED[0], "", (3, 2)), CPU, 0.0)
    assert {name: timing.p50_ms for name, timing in found.items()} == {"zerox": 0.5, "theirs": 1.0}
