"""What scripts/gpu_report.py reads in the outputs of pytest and of compute-sanitizer."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import gpu_report as report

PYTEST = """\
============================= test session starts ==============================
collecting ... collected 8 items

tests/gpu/test_a.py::test_one PASSED                                     [ 12%]
tests/gpu/test_a.py::test_two[two arms, late-torch.float32] FAILED       [ 25%]
tests/gpu/test_a.py::test_three SKIPPED (needs 66 GiB of GPU memory)     [ 37%]
tests/gpu/test_a.py::test_four PASSED                                    [ 50%]
tests/gpu/test_a.py::test_four ERROR                                     [ 50%]

=================================== FAILURES ===================================
tests/gpu/test_a.py:7: AssertionError
=========================== short test summary info ============================
SKIPPED [1] tests/gpu/test_a.py:31: needs 66 GiB of GPU memory, 40 are free
SKIPPED [3] tests/gpu/conftest.py:35: no CUDA GPU: none
FAILED tests/gpu/test_a.py::test_two[two arms, late-torch.float32] - assert 1 == 2
ERROR tests/gpu/test_a.py::test_four - RuntimeError: teardown
ERROR tests/gpu/test_b.py - ImportError: no module
==================== 1 failed, 1 passed, 1 skipped, 2 errors in 3.45s ==========
"""


def test_pytest_s_output_gives_counts_failures_and_reasons() -> None:
    found = report.read_pytest(PYTEST)
    assert found["counts"] == {"error": 2, "failed": 1, "passed": 1, "skipped": 1}
    assert found["failures"] == {
        "tests/gpu/test_a.py::test_two[two arms, late-torch.float32]": "assert 1 == 2",
        "tests/gpu/test_a.py::test_four": "RuntimeError: teardown",
        "tests/gpu/test_b.py": "ImportError: no module",
    }
    assert found["skips"] == {"needs 66 GiB of GPU memory, 40 are free": 1, "no CUDA GPU: none": 3}
    assert found["unfinished"] is None


def test_a_run_that_was_killed_tells_where() -> None:
    found = report.read_pytest("".join(PYTEST.splitlines(keepends=True)[:5]) + "tests/gpu/test_a.py::test_hangs[x y] ")
    assert found["counts"] == {"failed": 1, "passed": 1}
    assert found["unfinished"] == "tests/gpu/test_a.py::test_hangs[x y]"


def test_the_pytest_that_is_installed_writes_what_is_read(tmp_path: Path) -> None:
    (tmp_path / "test_x.py").write_text(
        "import pytest\n"
        "@pytest.mark.parametrize('a', ['one two', 'b'])\n"
        "def test_good(a): print('noise')\n"
        "def test_bad(): assert 1 == 2\n"
        "def test_skipped(): pytest.skip('because: of this')\n"
        "@pytest.fixture\n"
        "def broken(): raise ValueError('broken')\n"
        "def test_error(broken): pass\n"
    )
    command = [sys.executable, "-m", "pytest", "-v", "-ra", "-p", "no:cacheprovider", "test_x.py"]
    text = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True).stdout
    found = report.read_pytest(text)
    assert found["counts"] == {"error": 1, "failed": 1, "passed": 2, "skipped": 1}
    assert found["failures"] == {"test_x.py::test_bad": "assert 1 == 2", "test_x.py::test_error": "ValueError: broken"}
    assert found["skips"] == {"because: of this": 1}


MEMCHECK = """\
========= COMPUTE-SANITIZER
========= Invalid __global__ write of size 4 bytes
=========     at flatten_kernel(FlattenArgs)+0x120
tests/gpu/test_sanitized.py::test_flatten[0] PASSED                      [ 50%]
========= ERROR SUMMARY: 2 errors
"""
RACECHECK = "========= COMPUTE-SANITIZER\n========= RACECHECK SUMMARY: 1 hazard displayed (0 errors, 1 warning)\n"
UNSUPPORTED = "========= COMPUTE-SANITIZER\n========= Error: Device not supported. Please refer to the documentation\n"


def test_a_sanitizer_s_output_gives_its_summary_and_findings() -> None:
    found = report.read_sanitizer(MEMCHECK)
    assert (found["errors"], found["summary"]) == (2, "2 errors")
    assert found["findings"][1] == "========= Invalid __global__ write of size 4 bytes"
    found = report.read_sanitizer(RACECHECK)
    assert (found["errors"], found["summary"]) == (1, "1 hazards, 0 errors, 1 warnings")
    assert report.read_sanitizer(RACECHECK.replace("1", "0"))["errors"] == 0
    assert report.read_sanitizer(UNSUPPORTED)["unsupported"].startswith("Error: Device not supported")
    assert report.read_sanitizer("Segmentation fault")["errors"] is None
