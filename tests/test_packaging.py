"""What setup.py packs, links and refuses."""

from __future__ import annotations

import os
import re
import runpy
import subprocess
import sys
import tarfile
from pathlib import Path
from subprocess import CompletedProcess
from typing import Any

import pytest
import torch

import build_cuda
from tests import forked
from tests.cuda.fake_nvcc import FakeToolkit
from tests.cuda.tools import need
from zerox import _C, _ext

ROOT = Path(__file__).parents[1]
SWITCHES = ("ZEROX_CUDA", "FORCE_CUDA", "CUDA_HOME", "CUDA_PATH", "TORCH_CUDA_ARCH_LIST", "MAX_JOBS")
CLEAN = {name: value for name, value in os.environ.items() if name not in SWITCHES}


def run(*arguments: str, **variables: str) -> CompletedProcess[str]:
    """setup.py."""
    return forked.run(set_up, *arguments, folder=ROOT, environment=CLEAN | variables)


def planned(torch_is: dict[str, str | None], **variables: str) -> CompletedProcess[str]:
    """setup.py up to the build. ``torch_is``: what torch says of itself, "cuda" or "version"."""
    return forked.run(plan, torch_is, folder=ROOT, environment=CLEAN | variables)


def set_up(*arguments: str, name: str = "__main__") -> dict[str, Any]:
    """In a process of its own."""
    for module in ("build_cuda", "find_torch", "torch.utils.cpp_extension"):  # they look at the environment
        sys.modules.pop(module, None)
    sys.argv = ["setup.py", *arguments]
    return runpy.run_path("setup.py", run_name=name)


def plan(torch_is: dict[str, str | None]) -> None:
    """Prints whether kernels for CUDA are built, and why not."""
    for name, value in torch_is.items():
        setattr(*((torch.version, "cuda") if name == "cuda" else (torch, "__version__")), value)
    made = set_up("build_ext", "--help", name="setup")
    print("planned:", made["cuda"] is not None, made["why_not"])


def test_an_sdist_has_every_source_and_nothing_that_was_built(tmp_path: Path) -> None:
    done = run("-q", "egg_info", "-e", str(tmp_path), "sdist", "-d", str(tmp_path))
    assert done.returncode == 0, done.stderr
    with tarfile.open(next(tmp_path.glob("*.tar.gz"))) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    sources = {path.relative_to(ROOT).as_posix() for path in ROOT.glob("csrc/**/*") if path.is_file()}
    assert sources <= packed
    scripts = {"scripts/build_cuda.py", "scripts/find_torch.py"}
    assert {"setup.py", "pyproject.toml", *scripts, "LICENSE", "zerox/_C/__init__.pyi", "zerox/_C/rows.pyi"} <= packed
    assert not {name for name in packed if name.endswith((".so", "_build_info.py"))}


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"ZEROX_CUDA": "yes"}, "ZEROX_CUDA=yes is not one of auto, 0, 1"),
        ({"MAX_JOBS": "many"}, "MAX_JOBS=many is not a number of jobs"),
        ({"ZEROX_CUDA": "1", "CUDA_HOME": "/nowhere"}, "no bin/nvcc in CUDA_HOME=/nowhere; .* ZEROX_CUDA=0"),
        ({"FORCE_CUDA": "1", "CUDA_HOME": "/nowhere"}, "no bin/nvcc in CUDA_HOME=/nowhere; .* ZEROX_CUDA=0"),
    ],
    ids=str,
)
def test_what_can_t_be_built_is_said_in_one_line(variables: dict[str, str], message: str) -> None:
    done = run("build_ext", "--help", **variables)
    assert done.returncode == 1
    assert re.fullmatch(rf"zerox: .*{message}\n", done.stderr), done.stderr


@pytest.mark.skipif(not build_cuda.kernel_sources(ROOT), reason="csrc/cuda has no kernels")
def test_an_nvcc_of_another_major_release_than_torch_s_is_refused(tmp_path: Path) -> None:
    nvcc = FakeToolkit(tmp_path / "cuda").nvcc
    done = planned({"cuda": "12.9"}, CUDA_HOME=str(nvcc.parents[1]))
    assert done.returncode == 1
    assert re.fullmatch(r"zerox: \S+ is of CUDA 13\.1\.7, torch .* of CUDA 12\.9: .* ZEROX_CUDA=0\n", done.stderr)


def what_is_planned(of_torch: str | None, nvcc: Path, **variables: str) -> CompletedProcess[str]:
    """Runs setup.py up to the build."""
    return planned({"cuda": of_torch}, CUDA_HOME=str(nvcc.parents[1]), **variables)


@pytest.mark.skipif(not build_cuda.kernel_sources(ROOT), reason="csrc/cuda has no kernels")
def test_kernels_are_built_where_torch_has_cuda_or_where_they_are_asked_for(tmp_path: Path) -> None:
    nvcc = FakeToolkit(tmp_path / "cuda").nvcc
    asked = what_is_planned(None, nvcc, ZEROX_CUDA="1")
    assert "planned: True" in asked.stdout, asked.stderr
    followed = what_is_planned("13.1", nvcc)
    assert "planned: True" in followed.stdout, followed.stderr
    left_out = what_is_planned(None, nvcc)
    reason = f"torch {torch.__version__} is a CPU build; ZEROX_CUDA=1 builds kernels all the same"
    assert f"planned: False {reason}\n" in left_out.stdout, left_out.stderr


def as_if_torch_were(version: str, **variables: str) -> CompletedProcess[str]:
    return planned({"version": version}, ZEROX_CUDA="0", **variables)


@pytest.mark.parametrize(
    ("version", "reason"),
    [
        ("2.10.1", r"torch 2\.10\.1 is too old for zerox: pip install 'torch>=2\.11,<2\.15'"),
        ("2.15.0.dev1", r"torch 2\.15\.0\.dev1 is newer than zerox was tried with: .*ZEROX_ANY_TORCH=1"),
        ("2.15.0+cu130", r"torch 2\.15\.0\+cu130 is newer than zerox was tried with: .*ZEROX_ANY_TORCH=1"),
        ("3.0.0", r"torch 3\.0\.0 is newer than zerox was tried with: .*ZEROX_ANY_TORCH=1"),
    ],
)
def test_a_torch_that_was_not_tried_is_refused_unless_asked_for(version: str, reason: str) -> None:
    done = as_if_torch_were(version)
    assert done.returncode == 1
    assert re.fullmatch(rf"zerox: {reason}\n", done.stderr), done.stderr
    if version[:4] != "2.10":
        done = as_if_torch_were(version, ZEROX_ANY_TORCH="1")
        assert done.returncode == 0, done.stderr


def test_a_wheel_requires_a_torch_that_was_tried_unless_another_was_asked_for(tmp_path: Path) -> None:
    for asked, wanted in (("0", "torch<2.15,>=2.11"), ("1", "torch>=2.11")):
        done = run("-q", "egg_info", "-e", str(tmp_path), ZEROX_ANY_TORCH=asked)
        assert done.returncode == 0, done.stderr
        assert f"Requires-Dist: {wanted}\n" in (tmp_path / "zerox.egg-info/PKG-INFO").read_text()


@pytest.mark.skipif(not build_cuda.kernel_sources(ROOT), reason="csrc/cuda has no kernels")
def test_a_missing_tmpdir_is_not_blamed_on_nvcc(tmp_path: Path) -> None:
    nvcc = FakeToolkit(tmp_path / "cuda").nvcc
    done = what_is_planned(None, nvcc, ZEROX_CUDA="1", TMPDIR=str(tmp_path / "none"))
    assert done.returncode == 1
    assert done.stderr.startswith(f"zerox: TMPDIR={tmp_path}/none, where nvcc writes, is not a folder to write to: ")
    assert what_is_planned(None, nvcc, TMPDIR=str(tmp_path / "none")).returncode == 0, "nvcc is not needed here"


@pytest.fixture
def with_cuda() -> None:
    if not _ext.build_info()["cuda"]:
        need("no CUDA kernels in this build: ZEROX_CUDA=1 builds them")


@pytest.mark.usefixtures("with_cuda")
def test_every_op_has_a_kernel_for_cuda_whatever_torch_is_there() -> None:
    ops = [name for name in torch._C._dispatch_get_all_op_names() if name.startswith("zerox::")]
    assert ops
    assert not [op for op in ops if not torch._C._dispatch_has_kernel_for_dispatch_key(op, "CUDA")]


@pytest.mark.usefixtures("with_cuda")
def test_the_cuda_runtime_inside_is_invisible_outside() -> None:
    """torch loads its own libcudart with RTLD_GLOBAL: a visible call of ours would land there."""
    names = subprocess.run(["nm", "-D", _C.__file__], capture_output=True, text=True, check=True).stdout
    assert "PyInit__C" in names
    assert not re.findall(r"\s(?:__cuda|cuda|cu)[A-Z]\w*(?:@.*)?$", names, re.MULTILINE)
