"""Builds zerox for this machine's GPU, tests and measures it there, and writes down what came of it.

    python scripts/gpu.py [proof|figures] [--only PART] [--out DIR] [--quick] [--limit-s SECONDS]

Uses the Python that starts it, with whatever CUDA build of torch that has; needs no network and no virtual environment,
only setuptools, packaging, ninja, pytest and hypothesis beside torch, and nvcc. Each part runs in processes of its own
with a time limit, and what is known is written after each, so that a hang or a crash costs its own part only. Proof and
figures take less than 10 minutes each, and write a JSON, a table and pictures each. Exits with 1 if anything failed.
What does not fit into these runs only if --only names it.

    build      setup.py build_ext --inplace, with CUDA kernels for this GPU (TORCH_CUDA_ARCH_LIST names others)
  proof:
    test       every test in tests/gpu, but for those of NCCL
    sanitizer  compute-sanitizer's memcheck, racecheck and initcheck on tests/gpu/test_sanitized.py, where it works
    nccl       tests/gpu/test_nccl.py; ZEROX_NCCL_LIBRARY names an NCCL of 2.30 or newer for two ranks on one GPU
  figures:
    kernels    bench.kernels, beside what memory and instructions allow
    step       bench.step: whole clipped steps of one rank, and what of them comes after backward, beside DDP and FSDP2
    streams    bench.streams: a timeline of one training step
    exposed    the same of two ranks over gloo: how much of their communication backward does not hide
    clip       bench.host: clipping 1,000 gradients
    muon       only with --only muon, in at most 3 minutes: bench.muon_update, the update of GPT-2's and GPT-2 XL's
               matrices by Muon, beside its products alone, torch.optim.Muon, and Adam

Complete logs lie in build/gpu.
"""

from __future__ import annotations

import argparse
import datetime
import json
import os
import runpy
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import gpu_report as report
import gpu_run
from gpu_report import Part
from gpu_run import ROOT, Ended, environment, python, run, tail

NCCL_TESTS = "tests/gpu/test_nccl.py"
SANITIZED_TESTS = "tests/gpu/test_sanitized.py"
LARGE_TESTS = "tests/gpu/test_large.py"
TOOLS = ("memcheck", "racecheck", "initcheck")
FOUND = 86  # compute-sanitizer's exit status where it found something
TEST_FILE_S = 120.0  # no file of tests may take longer: what hangs must leave time for the others
CORES_A_FILE = 2  # the tests of a file start up to four ranks, and compare with the CPU's kernels
# They look at what happens on the GPU beside or before something else, and by when.
ALONE = ("hidden_gather", "no_sync", "overlap", "sharded_params", "streams", "trace")

# Seconds that each part has in any case. What one leaves over goes to the next; the build, being first, has the rest.
PROOF_S = {"build": 0.0, "test": 230.0, "sanitizer": 110.0, "nccl": 70.0}
FIGURES_S = {"kernels": 170.0, "step": 150.0, "streams": 50.0, "exposed": 50.0, "clip": 20.0}
NAMED_S = {"muon": 180.0}  # run only where --only names them, and have no more than this
RESERVED_S = {**PROOF_S, **FIGURES_S, **NAMED_S}
TOTAL_S = 570.0  # of a run, unless --limit-s is less
RUNS = {"proof": tuple(PROOF_S), "figures": ("build", *FIGURES_S, *NAMED_S)}


def pytest(*arguments: str) -> list[str]:
    return python("-m", "pytest", "-p", "no:cacheprovider", *arguments)


# ---- the parts: each takes seconds, and returns at least its outcome


@dataclass(frozen=True)
class Machine:
    """``files``: what this run writes, but for what distinguishes it."""

    facts: dict[str, Any]
    quick: bool
    files: Path = ROOT / "bench" / "results" / "gpu"
    device: str = "cuda"


def build(machine: Machine, limit_s: float) -> Part:
    archs = os.environ.get("TORCH_CUDA_ARCH_LIST") or machine.facts["compute_capability"]
    env = environment(ZEROX_CUDA="1", TORCH_CUDA_ARCH_LIST=archs)
    return {**run(python("setup.py", "build_ext", "--inplace"), "build", limit_s, env).part, "note": f"for {archs}"}


def build_info() -> dict[str, Any]:
    path = ROOT / "zerox" / "_build_info.py"
    return dict(runpy.run_path(str(path))["BUILD_INFO"]) if path.exists() else {}


def run_tests(files: Sequence[str], limit_s: float, file_limit_s: float) -> Part:
    """By file, each in a process of its own: side by side, but for those that must have the GPU to themselves."""
    end = time.monotonic() + limit_s
    cores = len(os.sched_getaffinity(0))
    shared = [file for file in files if name_of(file) not in ALONE]
    alone = [file for file in files if name_of(file) in ALONE]
    calls = {file: partial(run_file, file, end, file_limit_s) for file in (*shared, *alone)}
    ended = gpu_run.side_by_side([calls[file] for file in shared], max(1, cores // CORES_A_FILE))
    ended += gpu_run.side_by_side([calls[file] for file in alone], 1)
    part: Part = {"outcome": report.PASSED, "unfinished_tests": [], "tails": {}, "file_seconds": {}}
    for file, each in zip(calls, ended, strict=True):
        name = name_of(file)
        part["file_seconds"][name] = round(each.seconds, 1)
        if each.timed_out:
            part["unfinished_tests"].append(report.read_pytest(each.text)["unfinished"] or f"{name}: {each.text}")
        if each.outcome != report.PASSED:
            part["tails"][name] = tail(each.text, 150)
            part["outcome"] = each.outcome if part["outcome"] != report.FAILED else report.FAILED
    found = report.read_pytest("\n".join(each.text for each in ended))
    return part | {key: found[key] for key in ("counts", "failures", "skips")}


def name_of(file: str) -> str:
    return Path(file).stem.removeprefix("test_")


def run_file(file: str, end: float, file_limit_s: float) -> Ended:
    left_s = end - time.monotonic()
    if left_s <= 0:
        return Ended(1, True, "no time was left")
    return run(pytest("-v", file), f"test-{name_of(file)}", min(left_s, file_limit_s))


def test(machine: Machine, limit_s: float) -> Part:
    found = sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "tests/gpu").glob("test_*.py"))
    left_out = {NCCL_TESTS, *([LARGE_TESTS] if machine.quick else [])}
    return run_tests([file for file in found if file not in left_out], limit_s, TEST_FILE_S)


def nccl(machine: Machine, limit_s: float) -> Part:
    return run_tests([NCCL_TESTS], limit_s, limit_s)


def find_sanitizer() -> str | None:
    """On the PATH, or in the toolkit that nvcc belongs to."""
    found = shutil.which("compute-sanitizer")
    nvcc = shutil.which("nvcc") or "/usr/local/cuda/bin/nvcc"
    toolkit = Path(nvcc).resolve().parents[1]
    beside = (toolkit / "bin" / "compute-sanitizer", toolkit / "compute-sanitizer" / "compute-sanitizer")
    return found or next((str(path) for path in beside if path.exists()), None)


def sanitizer(machine: Machine, limit_s: float) -> Part:
    program = find_sanitizer()
    if program is None:
        return {"outcome": report.NOT_AVAILABLE, "note": "compute-sanitizer is neither on the PATH nor beside nvcc"}
    tools = TOOLS[:1] if machine.quick else TOOLS
    found = gpu_run.side_by_side([partial(sanitize, program, tool, limit_s) for tool in tools], len(tools))
    part: Part = {"tools": dict(zip(tools, found, strict=True))}
    outcomes = [each["outcome"] for each in part["tools"].values()]
    worst = next((each for each in (*report.BAD, report.NOT_SUPPORTED) if each in outcomes), report.PASSED)
    return part | {"outcome": worst}


def sanitize(program: str, tool: str, limit_s: float) -> Part:
    options = ["--tool", tool, "--error-exitcode", str(FOUND), "--print-limit", "20"]
    if tool == "memcheck":
        options += ["--report-api-errors", "no"]  # torch asks the driver questions that it may answer with no
    env = environment(PYTORCH_NO_CUDA_MEMORY_CACHING="1")
    ended = run([program, *options, *pytest("-v", SANITIZED_TESTS)], f"sanitizer-{tool}", limit_s, env)
    found, tests = report.read_sanitizer(ended.text), report.read_pytest(ended.text)
    outcome = ended.outcome
    if outcome == report.PASSED and (found["errors"] != 0 or not tests["counts"].get("passed")):
        outcome = report.FAILED  # no summary, or nothing ran under it
    if outcome != report.PASSED and found["unsupported"] and not found["errors"]:
        outcome = report.NOT_SUPPORTED
        found["summary"] = found["unsupported"]
    part = {"outcome": outcome, "counts": tests["counts"], "failures": tests["failures"], **found}
    return part if outcome == report.PASSED else {**part, "tail": tail(ended.text)}


@dataclass(frozen=True)
class Figure:
    """A benchmark. ``timed``: the share of the limit that goes into timing; the rest is for data, checks and so on."""

    command: str
    quick: str
    timed: float | None = None
    drawn: bool = False


FIGURES = {
    "kernels": Figure("bench.kernels", quick="--quick", timed=0.4),
    "step": Figure(
        "bench.step --ranks=1 --dtype=bf16 --clip --layers=48 --batch=8",
        quick="--layers=1 --batch=1 --dtype=fp32 --systems fused stage",
        timed=0.4,
    ),
    "streams": Figure("bench.streams --dtype=bf16 --clip", quick="--layers=1 --batch=1 --dtype=fp32", drawn=True),
    "exposed": Figure("bench.streams --ranks=2", quick="--layers=1 --batch=1", drawn=True),
    "clip": Figure("bench.host --ranks=1 --parts=clips", quick="--rounds=60"),
    "muon": Figure("bench.muon_update", quick="--model=tiny", timed=0.4),
}


def measure(name: str, machine: Machine, limit_s: float) -> Part:
    """Its numbers, its output, and its picture where matplotlib is installed."""
    figure, file = FIGURES[name], gpu_run.LOGS / f"{name}.json"
    picture = machine.files.with_name(f"{machine.files.name}-{name}.png")
    file.unlink(missing_ok=True)
    command = [*figure.command.split(), *(figure.quick.split() if machine.quick else [])]
    command += [f"--device={machine.device}", f"--json={file}", *([f"--png={picture}"] if figure.drawn else [])]
    command += [f"--seconds={figure.timed * limit_s:.0f}"] if figure.timed is not None else []
    ended = run(python("-m", *command), name, limit_s)
    part = json.loads(file.read_text()) if file.exists() else {}
    part |= {"picture": picture.name} if picture.exists() else {}
    return {**part, **ended.part, "said": ended.text.splitlines()}


PARTS: dict[str, Callable[[Machine, float], Part]] = {
    "build": build,
    "test": test,
    "sanitizer": sanitizer,
    "nccl": nccl,
    **{name: partial(measure, name) for name in FIGURES},
}


# ---- all of it


def commit() -> str:
    command = ["git", "describe", "--always", "--dirty", "--abbrev=40", "--exclude=*"]
    try:
        return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return os.environ.get("ZEROX_COMMIT", "unknown")


def read_machine(quick: bool) -> Machine:
    """Ends the program with one line where there is no GPU."""
    asked = subprocess.run(python(gpu_run.__file__), capture_output=True, text=True, check=False)
    if asked.returncode:
        lines = asked.stderr.strip().splitlines() or ["gpu_run.py failed"]
        sys.exit(f"gpu.py: {lines[-1]}")
    return Machine({"commit": commit(), **json.loads(asked.stdout.splitlines()[-1])}, quick)


def run_parts(selected: list[str], machine: Machine, folder: Path, title: str, total_s: float = TOTAL_S) -> bool:
    """Runs the parts, writing after each; True if nothing failed."""
    now = datetime.datetime.now(datetime.timezone.utc)
    stem = f"{now:%Y-%m-%d-%H%M}-{report.slug(machine.facts['device'])}-{title}"
    machine = replace(machine, files=folder / stem)
    parts: dict[str, Part] = {name: {"outcome": report.NOT_RUN, "seconds": 0.0} for name in selected}
    result: Part = {"date": f"{now:%Y-%m-%d %H:%M} UTC", "facts": dict(machine.facts), "quick": machine.quick}
    result["parts"] = parts
    paths = report.write(folder, stem, result)
    end = time.monotonic() + total_s
    reserved_s = {name: each * total_s / TOTAL_S for name, each in RESERVED_S.items()}
    try:
        for name in selected:
            limit_s = min(gpu_run.limit_s(name, selected, reserved_s, end), NAMED_S.get(name, total_s))
            if parts.get("build", {}).get("outcome") in report.BAD and name != "build":
                parts[name]["note"] = "the build failed"
                continue
            print(f"gpu.py: {name}, {limit_s:.0f} s at most ...", flush=True)
            started = time.monotonic()
            try:
                parts[name].update(PARTS[name](machine, limit_s))
            except KeyboardInterrupt:
                parts[name]["outcome"] = report.INTERRUPTED
                raise
            except Exception:
                parts[name].update(outcome=report.FAILED, note="gpu.py itself", tail=traceback.format_exc())
            finally:
                parts[name]["seconds"] = round(time.monotonic() - started, 1)
                info = build_info()
                result["facts"].update({f"build_{key}": info[key] for key in info if key not in ("version", "torch")})
                report.write(folder, stem, result)
            tell(name, parts[name])
    except KeyboardInterrupt:
        print("gpu.py: interrupted", file=sys.stderr)
    report.write(folder, stem, result)
    print(f"gpu.py: wrote {' and '.join(map(str, paths))}")
    return not any(part["outcome"] in (*report.BAD, report.NOT_RUN) for part in parts.values())


def tell(name: str, part: Part) -> None:
    """What somebody who only sees the output needs: the outcome, and the end of what went wrong."""
    tails = {name: part.get("tail"), **part.get("tails", {})}
    tails |= {f"{tool}: {found['summary']}": found.get("tail") for tool, found in part.get("tools", {}).items()}
    for where, text in tails.items():
        if text:
            print(f"---- {where}\n{text}")
    print(f"gpu.py: {name} {part['outcome']} in {part['seconds']:.0f} s {report.says(part)}".rstrip(), flush=True)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="*", metavar="RUN", help=f"{' or '.join(RUNS)}; default: both")
    parser.add_argument(
        "--only", action="append", choices=list(PARTS), metavar="PART", help=f"{', '.join(PARTS)}; repeatable"
    )
    parser.add_argument(
        "--out", type=Path, default=ROOT / "bench" / "results", metavar="DIR", help="default: bench/results"
    )
    parser.add_argument(
        "--quick", action="store_true", help="no shards beyond 2^32, the smallest benchmark sizes, memcheck only"
    )
    parser.add_argument(
        "--limit-s", type=float, default=TOTAL_S, metavar="S", help="seconds of each run at most; default: %(default)s"
    )
    args = parser.parse_args(argv)
    if unknown := [name for name in args.runs if name not in RUNS]:
        parser.error(f"there is no run {unknown[0]}: {', '.join(RUNS)}")
    machine = read_machine(args.quick)
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # raises KeyboardInterrupt
    well = True
    for name in args.runs or RUNS:
        selected = [part for part in RUNS[name] if (part in args.only if args.only else part not in NAMED_S)]
        if selected:
            well = run_parts(selected, machine, args.out, name, args.limit_s) and well
    return 0 if well else 1


if __name__ == "__main__":
    sys.exit(main())
