"""The extension under AddressSanitizer and UndefinedBehaviorSanitizer, in processes of their own, ranks as threads.

By hand, once this has built it: the commands that a failure prints.
"""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cpp.test_ctest import ROOT, build, run

pytestmark = pytest.mark.deep
TESTS = ["tests/sanitizers", "tests/kernels/test_ops.py", "tests/properties"]
REPORTS = {
    "moments_too_short": ["AddressSanitizer: heap-buffer-overflow", "csrc/cpu/update_kernel.h"],
    "shard_too_short": ["AddressSanitizer: heap-buffer-overflow", "csrc/cpu/reduce_kernel.h", "zx::Flights::reduce"],
    "step_count_overflows": ["csrc/cpu/update.cpp", "runtime error: signed integer overflow"],
}


@pytest.fixture(scope="module")
def environment() -> dict[str, str]:
    """Environment variables of a process with the sanitized extension, which is built if it is not up to date."""
    folder = build("address,undefined", "extension")
    cache = (folder / "CMakeCache.txt").read_text()
    compiler = re.search(r"^CMAKE_CXX_COMPILER:\w+=(.*)$", cache, re.MULTILINE)
    assert compiler is not None
    runtimes = [run([compiler[1], f"-print-file-name=lib{name}.so"]).strip() for name in ("asan", "ubsan")]
    if not all(os.path.isabs(runtime) for runtime in runtimes):
        reason = f"{compiler[1]} has no shared libasan and libubsan to load into Python: set CXX=g++"
        assert os.environ.get("CI") != "true", reason
        pytest.skip(reason)
    return {
        "LD_PRELOAD": " ".join(runtimes),
        "ZEROX_TEST_EXTENSION": str(folder / "_C.so"),
        # torch and Python leak thousands of blocks themselves, and stacks through torch, which keeps no frame pointers,
        # can't be told apart. tests/bucket_manager/test_deletion.py checks that zerox frees its own.
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }


def in_sanitized_process(environment: dict[str, str], *arguments: str) -> tuple[int, str]:
    """Exit status, and the command with its output."""
    command = [sys.executable, *arguments]
    done = subprocess.run(command, cwd=ROOT, env={**os.environ, **environment}, capture_output=True, text=True)
    settings = " ".join(f"{name}={shlex.quote(value)}" for name, value in environment.items())
    return done.returncode, f"{settings} {shlex.join(command)}\n{done.stdout}{done.stderr}"


def shortened(output: str) -> str:
    return output if len(output) < 24_000 else f"{output[:8000]}\n...\n{output[-16_000:]}"


@pytest.mark.parametrize("defect", REPORTS)
def test_an_injected_defect_is_reported(defect: str, environment: dict[str, str]) -> None:
    status, output = in_sanitized_process(environment, "-m", "tests.sanitizers.defects", defect)
    assert status != 0, shortened(output)
    for part in REPORTS[defect]:
        assert part in output, f"{part} is not in {shortened(output)}"
    assert "nobody noticed" not in output


def test_the_extension_passes_under_address_and_undefined_behaviour_sanitizers(environment: dict[str, str]) -> None:
    options = ["-q", "--no-header", "-p", "tests.sanitizers.extension", "--hypothesis-profile=sanitized"]
    status, output = in_sanitized_process(environment, "-m", "pytest", *options, *TESTS)
    assert status == 0, shortened(output)
    passed = re.search(r"^[1-9]\d+ passed(, \d+ warnings?)? in.*", output, re.MULTILINE)
    assert passed, f"none ran, or some were skipped: {shortened(output)}"
    print(passed[0])


def test_there_is_something_to_run() -> None:
    assert all(Path(ROOT, each).exists() for each in TESTS)
