"""`pip install .` as people type it: pip's isolated build, beside a torch that is installed."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

import pytest

pytestmark = pytest.mark.deep
ROOT = Path(__file__).parents[1]
BUILD_TOOLS = ("setuptools", "wheel", "ninja", "packaging")
# Enough to be compiled as C++20 with torch's headers, linked with torch, and imported.
MODULE = """
#include <c10/core/ScalarType.h>
#include <Python.h>
static PyModuleDef module = {PyModuleDef_HEAD_INIT, "_C", nullptr, -1, nullptr, nullptr, nullptr, nullptr, nullptr};
PyMODINIT_FUNC PyInit__C() {
  PyObject* made = PyModule_Create(&module);
  PyModule_AddStringConstant(made, "a_dtype", c10::toString(c10::kFloat));
  return made;
}
"""


@pytest.fixture(scope="module")
def wheels(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """What an isolated build may fetch; there is no torch, so a build that wants another one fails."""
    folder = tmp_path_factory.mktemp("wheels")
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "-d", folder, *BUILD_TOOLS]
    done = subprocess.run([*map(str, command), "-c", str(ROOT / "constraints.txt")], capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"no package index gives the build tools: {done.stderr.splitlines()[-1]}")
    return folder


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """This project, with an extension of a few lines: what is built is not in question, but against what."""
    folder = tmp_path / "source"
    for name in ("zerox", "scripts"):
        ignored = shutil.ignore_patterns("__pycache__", "_C*.so", "_build_info.py")
        shutil.copytree(ROOT / name, folder / name, ignore=ignored)
    for name in ("setup.py", "pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, folder / name)
    (folder / "csrc/bindings").mkdir(parents=True)
    (folder / "csrc/bindings/module.cpp").write_text(MODULE)
    (folder / "csrc/op_arguments.cpp").write_text("")
    return folder


class Environment:
    """A virtual environment in which what this Python has, or pip alone, is installed: as links, which take no time."""

    def __init__(self, folder: Path, wheels: Path, with_torch: bool) -> None:
        venv.create(folder)
        self.python = folder / "bin/python"
        self.variables = {name: value for name, value in os.environ.items() if not name.startswith(("PIP_", "PYTHON"))}
        self.variables |= {"PATH": os.defpath, "ZEROX_CUDA": "0", "PIP_CONFIG_FILE": os.devnull}
        self.variables |= {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": str(wheels), "PIP_DISABLE_PIP_VERSION_CHECK": "1"}
        here = Path(self.ask("import sysconfig; print(sysconfig.get_path('purelib'))"))
        for entry in Path(sysconfig.get_path("purelib")).iterdir():
            is_ours = entry.name.lower().startswith(("zerox", "__editable__"))
            if not is_ours and (with_torch or entry.name.startswith("pip")):
                (here / entry.name).symlink_to(entry)

    def run(self, *arguments: object, **options: object) -> subprocess.CompletedProcess[str]:
        command = [str(self.python), *map(str, arguments)]
        return subprocess.run(command, capture_output=True, text=True, env=self.variables, **options)

    def ask(self, script: str, **options: object) -> str:
        done = self.run("-c", script, **options)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()


# The extension by itself, since the package would ask it for kernels.
LOAD = """
import importlib.util, pathlib, runpy, torch
package = pathlib.Path(importlib.util.find_spec("zerox").origin).parent
(path,) = package.glob("_C*.so")
spec = importlib.util.spec_from_file_location("zerox._C", path)
module = importlib.util.module_from_spec(spec)
built = runpy.run_path(str(package / "_build_info.py"))["BUILD_INFO"]
print(module.a_dtype, built["torch"] == torch.__version__, path)
"""


@pytest.mark.parametrize("editable", [(), ("-e",)], ids=["installed", "editable"])
def test_pip_builds_against_the_torch_that_is_installed(
    editable: tuple[str, ...], source: Path, tmp_path: Path, wheels: Path
) -> None:
    here = Environment(tmp_path / "venv", wheels, with_torch=True)
    done = here.run("-m", "pip", "install", *editable, source)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "torch<2.15,>=2.11" in done.stdout
    assert "Successfully installed zerox-" in done.stdout
    assert "ownloading torch" not in done.stdout
    dtype, is_same_torch, path = here.ask(LOAD, cwd=tmp_path).split()
    assert (dtype, is_same_torch) == ("Float", "True")
    assert Path(path).is_relative_to(source if editable else tmp_path / "venv")
    if not editable:
        said = here.ask(
            "try:\n    from zerox import FusedShardedAdam\nexcept ImportError as error:\n    print(error)", cwd=source
        )
        assert said.startswith(f"zerox's sources in {source} hide the installed package, {tmp_path}/venv/lib")
        assert "start Python in another folder" in said


def test_without_torch_the_build_ends_with_one_line_that_says_what_to_do(
    source: Path, tmp_path: Path, wheels: Path
) -> None:
    here = Environment(tmp_path / "venv", wheels, with_torch=False)
    done = here.run("-m", "pip", "install", source)
    assert done.returncode == 1
    said = [line.strip() for line in (done.stdout + done.stderr).splitlines()]
    (line,) = [line for line in said if line.startswith("zerox: ")]
    assert line.startswith("zerox: no torch to build against: run `pip install torch`")
    assert said[said.index(line) + 1] == "[end of output]", "the last line of what the build says"


def test_a_compiler_of_several_words_is_used(source: Path, tmp_path: Path) -> None:
    """torch 2.13 takes all of CXX for the name of a program, and would leave the second word of CC to the compiler."""
    log = tmp_path / "log"
    wrapper = tmp_path / "a wrapper"
    wrapper.write_text(f'#!/bin/sh\necho "$@" >> {log}\nexec "$@"\n')
    wrapper.chmod(0o755)
    command = [sys.executable, "setup.py", "-q", "build_ext", "--build-lib", tmp_path / "built"]
    environment = os.environ | {"CXX": f"'{wrapper}' g++ -DAS_TOLD", "CC": f"'{wrapper}' gcc", "ZEROX_CUDA": "0"}
    done = subprocess.run(list(map(str, command)), cwd=source, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    compiled = [line for line in log.read_text().splitlines() if "-c " in line and "folders/bindings.cpp" in line]
    assert compiled
    assert all(line.startswith("g++ -DAS_TOLD ") for line in compiled)
