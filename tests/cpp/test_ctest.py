"""Builds the C++ unit tests with CMake and runs them through CTest: plain, and under each sanitizer.

Objects are kept in build/cpp-*, so a second run compiles what changed only.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest
import torch
from filelock import FileLock

ROOT = Path(__file__).parents[2]


def tool(name: str) -> str:
    """A program of this Python's environment, or of the system."""
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    found = shutil.which(name, path=path)
    assert found, f"{name} is missing: pip install {name}"
    return found


def run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True)
    output = done.stdout + done.stderr
    assert done.returncode == 0, f"{' '.join(command)}\n{output[-8000:]}"
    return output


def built_kernels() -> list[Path]:
    """The objects of the CPU kernels in the extension, if they are newer than all that they are made of."""
    made_of = [path for folder in ("cpu", "math") for path in (ROOT / "csrc" / folder).iterdir()]
    stems = [path.stem for path in made_of if path.stem == "isa" or path.stem.startswith("kernels_")]
    for folder in (ROOT / "build").glob("obj-*/csrc/cpu"):
        objects = [folder / f"{stem}.o" for stem in sorted({*stems})]
        if all(path.exists() for path in objects):
            oldest = min(path.stat().st_mtime for path in objects)
            if all(path.stat().st_mtime < oldest for path in made_of):
                return objects
    return []


def build(sanitizer: str, target: str = "all") -> Path:
    """Returns the folder."""
    folder = ROOT / "build" / f"cpp-{sanitizer.replace(',', '-') or 'plain'}"
    folder.mkdir(parents=True, exist_ok=True)
    configure = [
        tool("cmake"),
        *("-S", str(ROOT), "-B", str(folder), "-G", "Ninja", f"-DCMAKE_MAKE_PROGRAM={tool('ninja')}"),
        f"-DZEROX_SANITIZE={sanitizer}",
        f"-DZEROX_KERNEL_OBJECTS={'' if sanitizer else ';'.join(map(str, built_kernels()))}",
        f"-DZEROX_TORCH={Path(torch.__file__).parent}",
        f"-DZEROX_PYTHON_INCLUDE={sysconfig.get_path('include')}",
    ]
    with FileLock(folder / "lock"):  # tests/test_sanitizers.py builds in one of these too, maybe at the same time
        run(configure)
        run([tool("cmake"), "--build", str(folder), "--parallel", "2", "--target", target])
    return folder


def build_and_test(sanitizer: str, *selection: str, target: str = "all") -> str:
    folder = build(sanitizer, target)
    return run(
        [
            tool("ctest"),
            "--test-dir",
            str(folder),
            "--parallel",
            "2",
            "--output-on-failure",
            "--no-tests=error",
            *selection,
        ]
    )


@pytest.mark.deep
def test_cpp_units_pass_optimised() -> None:
    assert "100% tests passed" in build_and_test("", "--exclude-regex", "^cuda_", target="cpu_tests")


@pytest.mark.deep
def test_cpp_units_pass_under_address_and_undefined_behaviour_sanitizers() -> None:
    output = build_and_test("address,undefined")
    assert "catches heap-overflow" in output
    assert "catches signed-overflow" in output


@pytest.mark.deep
def test_threads_pass_under_the_thread_sanitizer() -> None:
    output = build_and_test(
        "thread",
        "--tests-regex",
        "workers?_test|launch_order_test|locks_test|published_state_test|catches",
        target="thread_tests",
    )
    assert "catches data-race" in output
    assert "catches an early arrival" in output


@pytest.mark.parametrize("name", ["cmake", "no-such-tool"])
def test_a_missing_tool_is_said_in_one_line(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(AssertionError, match=f"{name} is missing: pip install {name}"):
        tool(name)
