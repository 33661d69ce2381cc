"""scripts/setup_env.sh says what a machine lacks before it fetches gigabytes of torch, and changes ./.venv alone."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import find_torch

ROOT = Path(__file__).parents[1]
USED = ("bash", "dirname", "awk", "grep", "df", "cat", "mktemp", "rm", "make", "mkdir", "cp", "realpath")
NEWEST_TORCH = (find_torch.NEXT_TORCH[0], find_torch.NEXT_TORCH[1] - 1)
PYTHON = """#!/bin/bash
case "$*" in
  *"import ensurepip, venv"*) exit {no_venv} ;;
  *sysconfig*) echo {include} ;;
  *"-m venv"*) mkdir -p .venv/bin && cp "$0" .venv/bin/python ;;
  *"-m pip --version"*) [ "$0" = "$PWD/.venv/bin/python" ] ;;
  *env_state.py*) exit 1 ;;
  *"-m pip"*) echo "FETCHED $*" >&2; exit 1 ;;
  *) exec {python} "$@" ;;
esac
"""

READY = """#!/bin/bash
case "$*" in
  *"env_state.py fingerprint") echo {wanted} ;;
  *env_state.py*) ;;
  *) echo "BUILT" >&2; exit 1 ;;
esac
"""


class Machine:
    """Has what the script uses, and no torch; its Python says what it would fetch instead of fetching it."""

    def __init__(self, folder: Path) -> None:
        self.tree, self.programs = folder / "tree", folder / "bin"
        shutil.copytree(ROOT / "scripts", self.tree / "scripts")
        for name in ("constraints.txt", "pyproject.toml"):
            shutil.copy(ROOT / name, self.tree)
        self.programs.mkdir()
        for name in USED:
            path = shutil.which(name)
            assert path, f"{name} is missing"
            (self.programs / name).symlink_to(path)
        self.headers = folder / "include"
        self.headers.mkdir()
        (self.headers / "Python.h").touch()
        self.program("c++", "#!/bin/bash\ncat >/dev/null\n")
        self.python(no_venv=0)

    def python(self, no_venv: int) -> None:
        values = {"no_venv": no_venv, "include": self.headers, "python": sys.executable}
        self.program("python3", PYTHON.format(**values))

    def program(self, name: str, script: str) -> None:
        (self.programs / name).unlink(missing_ok=True)
        (self.programs / name).write_text(script)
        (self.programs / name).chmod(0o755)

    def environment(self, script: str) -> Path:
        """Another environment, whose Python is the script."""
        folder = self.programs.parent / "another"
        (folder / "bin").mkdir(parents=True)
        (folder / "bin/python").write_text(script)
        (folder / "bin/python").chmod(0o755)
        return folder

    def free_gb(self, disk: int, downloads: int) -> None:
        script = f'#!/bin/bash\n[ "$2" = "$PWD" ] && free={disk} || free={downloads}\necho header\n'
        self.program("df", script + 'echo "disk 0 0 $((free * 1024 * 1024)) 0% /"\n')

    def said(self, status: int = 1, **more: str) -> list[str]:
        environment = {"PATH": str(self.programs), "HOME": os.environ.get("HOME", "/"), **more}
        script = self.tree / "scripts/setup_env.sh"
        done = subprocess.run([self.programs / "bash", script], env=environment, capture_output=True, text=True)
        assert done.returncode == status
        return done.stderr.splitlines()


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    made = Machine(tmp_path)
    made.free_gb(disk=50, downloads=50)
    return made


def test_a_machine_that_has_everything_goes_on_to_fetch_torch(machine: Machine) -> None:
    assert any(re.match(r"FETCHED -m pip .* torch==", line) for line in machine.said())


def test_no_make(machine: Machine) -> None:
    (machine.programs / "make").unlink()
    assert machine.said() == ["zerox: no make: install make"]


def test_no_folder_for_temporary_files(machine: Machine) -> None:
    reason = "is not a folder to write to: make it, or unset TMPDIR"
    assert machine.said(TMPDIR="/does/not/exist") == [f"zerox: TMPDIR=/does/not/exist {reason}"]


def test_no_compiler(machine: Machine) -> None:
    (machine.programs / "c++").unlink()
    assert machine.said() == ["zerox: no C++ compiler: install g++ 11+ or clang++ 14+, or set CXX"]


def test_no_venv(machine: Machine) -> None:
    machine.python(no_venv=1)
    assert machine.said() == ["zerox: python3 has no venv module: install python3-venv"]


def test_no_python_h(machine: Machine) -> None:
    (machine.headers / "Python.h").unlink()
    last = f"zerox: Python.h is missing ({machine.headers}): install python3-dev (python3-devel)"
    assert machine.said()[1:] == [last]


@pytest.mark.parametrize(
    ("disk", "downloads", "reason"),
    [
        (1, 50, r"zerox: \S+/tree has 1 GB of free disk, torch \(2 GB without CUDA\) may take 8"),
        (50, 0, r"zerox: \S+ has 0 GB of free disk, its download \(TMPDIR names another folder\) may take 3"),
    ],
)
def test_no_room(machine: Machine, disk: int, downloads: int, reason: str) -> None:
    machine.free_gb(disk, downloads)
    *_, last = machine.said()
    assert re.fullmatch(reason, last)


def test_little_room_is_said_before_torch_is_fetched(machine: Machine) -> None:
    machine.free_gb(disk=3, downloads=2)
    _, disk, downloads, *fetched = machine.said()
    assert "has 3 GB of free disk" in disk
    assert "has 2 GB of free disk" in downloads
    assert any(line.startswith("FETCHED") for line in fetched)


@pytest.mark.parametrize(
    ("found", "wanted", "builds"),
    [("a", "a", False), ("a-werror", "a", False), ("a", "a-werror", True), ("b", "a", True), (None, "a", True)],
)
def test_it_builds_where_something_changed_or_warnings_were_allowed(
    machine: Machine, found: str | None, wanted: str, builds: bool
) -> None:
    if found:
        (machine.tree / "build").mkdir()
        (machine.tree / "build/fingerprint").write_text(f"{found}\n")
    asked = machine.environment(READY.format(wanted=wanted))
    said = machine.said(status=int(builds), ZEROX_ENV=str(asked))
    assert ("BUILT" in said) == builds


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_is_left_alone(machine: Machine, variable: str) -> None:
    active = machine.environment(READY.format(wanted="a"))
    said = machine.said(**{variable: str(active)})
    assert "BUILT" not in said, "the active environment's Python was run"
    assert f"zerox: using ./.venv; ZEROX_ENV={active} takes the active environment, and installs zerox into it" in said
    assert any(line.startswith("FETCHED") for line in said)
    assert (machine.tree / ".venv/bin/python").exists()


def test_an_environment_that_was_asked_for_is_not_replaced_by_another(machine: Machine) -> None:
    asked = machine.environment("#!/bin/bash\nexit 1\n")
    least, newest = (".".join(map(str, each)) for each in (find_torch.LEAST_TORCH, NEWEST_TORCH))
    reason = f"has no torch of {least} to {newest}: install one there, or leave ZEROX_ENV out for ./.venv"
    newer = "(ZEROX_ANY_TORCH=1 takes newer ones)"
    assert machine.said(ZEROX_ENV=str(asked)) == [f"zerox: ZEROX_ENV={asked} {reason} {newer}"]
    (asked / "bin/python").unlink()
    reason = "has no bin/python: it is the folder of a Python environment"
    assert machine.said(ZEROX_ENV=str(asked)) == [f"zerox: ZEROX_ENV={asked} {reason}"]
