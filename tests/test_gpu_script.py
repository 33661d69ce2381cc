"""scripts/gpu.py without a GPU: how it divides time, and that it writes down whatever happens."""

from __future__ import annotations

import _thread
import functools
import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import gpu
import gpu_report as report
import gpu_run
from tests.test_gpu_report import UNSUPPORTED

PASSES = "tests/gpu/test_sanitized.py::test_norm[0] PASSED                       [100%]"


@pytest.mark.parametrize(
    ("says", "status", "outcome"),
    [
        ([PASSES, "========= ERROR SUMMARY: 0 errors"], 0, report.PASSED),
        ([PASSES, "========= ERROR SUMMARY: 1 error"], gpu.FOUND, report.FAILED),
        ([PASSES], 0, report.FAILED),
        (["========= ERROR SUMMARY: 0 errors"], 0, report.FAILED),
        ([PASSES.replace("PASSED", "FAILED"), "========= ERROR SUMMARY: 0 errors"], 1, report.FAILED),
        (UNSUPPORTED.splitlines(), 1, report.NOT_SUPPORTED),
        (["sleeps"], 0, report.TIMED_OUT),
    ],
)
def test_a_sanitizer_s_run_is_judged_by_status_summary_and_tests(
    logs: Path, says: list[str], status: int, outcome: str
) -> None:
    program = logs / "sanitizer"
    text = "\n".join(f"echo '{line}'" for line in says)
    program.write_text(f"#!/bin/sh\n{text}\n{'sleep 60' if says == ['sleeps'] else ''}\nexit {status}\n")
    program.chmod(0o755)
    limit_s = 0.5 if outcome == report.TIMED_OUT else 30.0
    assert gpu.sanitize(str(program), "memcheck", limit_s)["outcome"] == outcome


def test_without_a_sanitizer_the_part_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setattr(gpu, "find_sanitizer", lambda: None)
    assert gpu.sanitizer(MACHINE, 10.0)["outcome"] == report.NOT_AVAILABLE


# ---- time


def test_what_a_part_leaves_over_goes_to_the_next(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(gpu_run.time, "monotonic", lambda: now[0])
    parts, reserved_s = ["a", "b", "c"], {"a": 0.0, "b": 30.0, "c": 20.0}
    assert gpu_run.limit_s("a", parts, reserved_s, 1100.0) == 50.0
    now[0] += 10.0
    assert gpu_run.limit_s("b", parts, reserved_s, 1100.0) == 70.0
    now[0] += 75.0
    assert gpu_run.limit_s("c", parts, reserved_s, 1100.0) == 15.0
    now[0] += 75.0
    assert gpu_run.limit_s("c", parts, reserved_s, 1100.0) == 0.0


def test_budgets_are_of_the_parts_and_leave_time_to_build() -> None:
    assert (
        list(gpu.RESERVED_S)
        == list(gpu.PARTS)
        == list(dict.fromkeys(part for run in gpu.RUNS.values() for part in run))
    )
    for parts in gpu.RUNS.values():
        assert parts[0] == "build"
        assert gpu.TOTAL_S - sum(gpu.RESERVED_S[part] for part in parts if part not in gpu.NAMED_S) >= 120
    assert gpu.TOTAL_S < 600
    assert max(gpu.NAMED_S.values()) <= 180


def test_a_part_that_runs_only_by_name_has_a_limit_of_its_own(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    given: dict[str, float] = {}
    for name in ("clip", "muon"):
        monkeypatch.setitem(gpu.PARTS, name, lambda _, limit_s, name=name: given.update({name: limit_s}) or dict(GOOD))
    assert gpu.run_parts(["clip"], MACHINE, tmp_path, "figures")
    assert gpu.run_parts(["muon"], MACHINE, tmp_path, "figures")
    assert given["clip"] == pytest.approx(gpu.TOTAL_S, abs=5)
    assert given["muon"] == gpu.NAMED_S["muon"]
    assert gpu.run_parts(["muon"], MACHINE, tmp_path, "figures", 100.0)
    assert given["muon"] == pytest.approx(100, abs=5)


def test_what_hangs_is_killed_with_all_it_started(logs: Path) -> None:
    child = "import signal, time; signal.signal(signal.SIGINT, signal.SIG_IGN); time.sleep(600)"
    hangs = (
        "import signal, subprocess, sys, time\n"
        f"print(subprocess.Popen([sys.executable, '-c', {child!r}]).pid, flush=True)\n"
        "signal.signal(signal.SIGINT, lambda *_: print('interrupted', flush=True))\n"
        "signal.pause()\n"
        "sys.exit(3)\n"
    )
    ended = gpu_run.run([sys.executable, "-c", hangs], "hangs", 2.0)
    assert (ended.timed_out, ended.outcome) == (True, report.TIMED_OUT)
    pid, said = ended.text.split()
    assert said == "interrupted"
    deadline = time.monotonic() + 10
    while is_running(pid):
        assert time.monotonic() < deadline, "the child lives on"
        time.sleep(0.05)


def is_running(pid: str) -> bool:
    try:
        return Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


# ---- parts


MACHINE = gpu.Machine({"device": "NVIDIA H100 80GB HBM3", "compute_capability": "9.0", "torch": "2.11.0"}, quick=False)
GOOD = {"outcome": report.PASSED}


@pytest.fixture
def logs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    monkeypatch.setattr(gpu_run, "LOGS", tmp_path / "logs")
    return tmp_path


def run_with(monkeypatch: pytest.MonkeyPatch, folder: Path, **parts: Any) -> tuple[bool, dict[str, Any], str]:
    """Whether it went well, and the two files, of a run in which parts return what they are given, or raise it."""

    def part_of(ending: Any) -> Any:
        def part(*_: Any) -> Any:
            if isinstance(ending, dict):
                return ending
            raise ending

        return part

    monkeypatch.setattr(gpu, "PARTS", {name: part_of(ending) for name, ending in parts.items()})
    monkeypatch.setattr(gpu, "RESERVED_S", dict.fromkeys(parts, 1.0))
    well = gpu.run_parts(list(parts), MACHINE, folder, "proof")
    stem = "*-nvidia-h100-80gb-hbm3-proof"
    [in_json], [in_markdown] = folder.glob(f"{stem}.json"), folder.glob(f"{stem}.md")
    return well, json.loads(in_json.read_text()), in_markdown.read_text()


def outcomes(result: dict[str, Any]) -> dict[str, str]:
    return {name: part["outcome"] for name, part in result["parts"].items()}


def test_all_well(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    parts = {
        "build": {**GOOD, "note": "for 9.0"},
        "test": {**GOOD, "counts": {"passed": 900, "skipped": 1}, "skips": {"needs 66 GiB": 1}},
        "kernels": {**GOOD, "command": "python -m x", "said": ["adam  0.0500", "norm"], "picture": "kernels.png"},
        "sanitizer": {"outcome": report.NOT_AVAILABLE, "note": "nowhere"},
    }
    well, result, text = run_with(monkeypatch, tmp_path, **parts)
    assert well
    assert result["facts"]["device"] == "NVIDIA H100 80GB HBM3"
    assert set(outcomes(result).values()) == {report.PASSED, report.NOT_AVAILABLE}
    for line in (
        "| device | NVIDIA H100 80GB HBM3 |",
        "| build | passed | 0 | for 9.0 |",
        "| test | passed | 0 | 900 passed, 1 skipped |",
        "- test skipped 1: needs 66 GiB",
        "![kernels](kernels.png)",
    ):
        assert line in text.splitlines()
    assert "## kernels\n\n```\n$ python -m x\nadam  0.0500\nnorm\n```\n" in text


def test_a_part_that_fails_or_breaks_does_not_take_the_others_along(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = {"tests/gpu/test_a.py::test_two": "assert 1 == 2"}
    bad = {"outcome": report.FAILED, "failures": failures, "tails": {"a": "the end of the log"}}
    well, result, text = run_with(monkeypatch, tmp_path, build=GOOD, test=bad, step=ZeroDivisionError(), nccl=GOOD)
    assert not well
    assert outcomes(result) == {"build": "passed", "test": "FAILED", "step": "FAILED", "nccl": "passed"}
    assert "ZeroDivisionError" in result["parts"]["step"]["tail"]
    assert "- **test** tests/gpu/test_a.py::test_two: assert 1 == 2" in text
    assert "the end of the log" in capsys.readouterr().out


def test_without_a_build_nothing_else_is_run(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    well, result, _ = run_with(monkeypatch, tmp_path, build={"outcome": report.TIMED_OUT}, test=AssertionError())
    assert not well
    assert outcomes(result) == {"build": report.TIMED_OUT, "test": report.NOT_RUN}
    assert result["parts"]["test"]["note"] == "the build failed"


def test_an_interruption_leaves_what_was_known(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    well, result, _ = run_with(monkeypatch, tmp_path, build=GOOD, test=KeyboardInterrupt(), nccl=GOOD)
    assert not well
    assert outcomes(result) == {"build": "passed", "test": report.INTERRUPTED, "nccl": report.NOT_RUN}


def test_every_file_of_tests_gpu_is_run_but_that_of_nccl(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "run_tests", lambda files, *_: set(files))
    files = {f"tests/gpu/{path.name}" for path in (Path(__file__).parent / "gpu").glob("test_*.py")}
    assert {gpu.NCCL_TESTS, gpu.LARGE_TESTS} < files
    assert {gpu.name_of(file) for file in files} > set(gpu.ALONE)
    assert gpu.test(MACHINE, 60.0) == files - {gpu.NCCL_TESTS}
    assert gpu.test(replace(MACHINE, quick=True), 60.0) == files - {gpu.NCCL_TESTS, gpu.LARGE_TESTS}


def test_every_file_of_tests_gpu_can_be_imported() -> None:
    """Without a GPU pytest does not collect them."""
    for path in sorted((Path(__file__).parent / "gpu").glob("test_*.py")):
        importlib.import_module(f"tests.gpu.{path.stem}")


def test_tests_are_run_by_file_and_a_hang_costs_its_own_only(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    (logs / "test_hangs.py").write_text("import time\ndef test_hangs(): time.sleep(600)\n")
    (logs / "test_good.py").write_text("def test_good(): pass\n")
    monkeypatch.setattr(gpu, "pytest", lambda *names: [sys.executable, "-m", "pytest", *names])
    found = gpu.run_tests([str(logs / f"test_{name}.py") for name in ("hangs", "good")], 90.0, 12.0)
    assert found["outcome"] == report.TIMED_OUT
    assert found["counts"] == {"passed": 1}
    assert found["unfinished_tests"][0].endswith("test_hangs.py::test_hangs")
    assert found["file_seconds"]["hangs"] > found["file_seconds"]["good"] > 0
    found = gpu.run_tests([str(logs / "test_good.py")], 0.0, 12.0)
    assert (found["outcome"], found["unfinished_tests"]) == (report.TIMED_OUT, ["good: no time was left"])


def test_files_share_the_gpu_but_for_those_that_watch_it(monkeypatch: pytest.MonkeyPatch, logs: Path) -> None:
    """Each of two waits for the other: the first of a pair that does not run side by side waits in vain."""
    pairs = {"one": "two", "two": "one", "trace": "streams", "streams": "trace"}
    for name, other in pairs.items():
        patience_s = 1 if name in gpu.ALONE else 30
        (logs / f"test_{name}.py").write_text(f"""
import time
from pathlib import Path
def test_meets(here=Path(__file__).parent, end=time.monotonic() + {patience_s}):
    (here / "{name}").touch()
    while not (here / "{other}").exists():
        assert time.monotonic() < end
        time.sleep(0.01)
""")
    monkeypatch.setattr(gpu, "pytest", lambda *names: [sys.executable, "-m", "pytest", *names])
    monkeypatch.setattr(gpu, "CORES_A_FILE", 0.5 * len(os.sched_getaffinity(0)))
    found = gpu.run_tests([str(logs / f"test_{name}.py") for name in ("trace", "one", "streams", "two")], 60.0, 40.0)
    assert list(found["tails"]) == ["trace"]


@pytest.fixture
def interruptible() -> Iterator[None]:
    """Also where SIGINT is ignored, as in what a shell starts in the background."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("interruptible")
def test_an_interruption_kills_what_runs(logs: Path) -> None:
    def interrupt() -> None:
        while not gpu_run.running:
            time.sleep(0.01)
        _thread.interrupt_main()

    sleeps = functools.partial(gpu_run.run, [sys.executable, "-c", "import time; time.sleep(600)"], "sleeps", 600.0)
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        gpu_run.side_by_side([interrupt, sleeps], 2)
    assert time.monotonic() - started < 60
    assert not gpu_run.running


# ---- the command


def test_only_named_parts_run_in_their_order(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(gpu, "read_machine", lambda quick: MACHINE)
    monkeypatch.setattr(gpu, "run_parts", lambda names, *more: asked.append((more[-2], names)) or True)
    assert gpu.main(["--only", "step", "--only", "nccl"]) == 0
    assert asked == [("proof", ["nccl"]), ("figures", ["step"])]
    asked.clear()
    assert gpu.main([]) == 0
    assert gpu.main(["figures"]) == 0
    runs = [(name, [part for part in parts if part not in gpu.NAMED_S]) for name, parts in gpu.RUNS.items()]
    assert asked == [*runs, runs[1]]
    asked.clear()
    assert gpu.main(["--only", "muon"]) == 0
    assert asked == [("figures", ["muon"])]
    for wrong in (["--only", "everything"], ["everything"]):
        with pytest.raises(SystemExit) as ended:
            gpu.main(wrong)
        assert ended.value.code == 2


def test_a_run_that_fails_does_not_keep_the_other_from_running(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[str] = []
    monkeypatch.setattr(gpu, "read_machine", lambda quick: MACHINE)
    monkeypatch.setattr(gpu, "run_parts", lambda *arguments: asked.append(arguments[-2]) or asked != ["proof"])
    assert gpu.main([]) == 1
    assert asked == ["proof", "figures"]


def test_without_a_gpu_it_ends_with_one_line_and_1(tmp_path: Path) -> None:
    script = Path(gpu.__file__)
    ended = subprocess.run(
        [sys.executable, str(script), "--out", str(tmp_path)],
        env={**os.environ, "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert ended.returncode == 1
    assert len(ended.stderr.splitlines()) == 1
    assert ended.stderr.startswith("gpu.py: torch")
    assert ended.stdout == ""
    assert not list(tmp_path.iterdir())
