"""Importing a name from a zerox that is installed wrongly raises one line that names the fault and the way out."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from zerox import _ext

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"torch": "2.1.0"}, r"zerox was built for torch 2\.1\.0, this is torch \d.*: run `pip install .*` again"),
        ({"python": "3.7"}, r"zerox was built for Python 3\.7, this is 3\.\d+: run `pip install .*` again"),
    ],
)
def test_a_build_for_another_torch_or_python_is_refused_before_it_is_opened(
    changes: dict[str, Any], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    info = _ext.build_info() | changes
    monkeypatch.setattr(_ext, "build_info", lambda: info)
    monkeypatch.setattr(_ext.importlib, "import_module", lambda _: pytest.fail("the library was opened"))
    with pytest.raises(ImportError, match=f"^{reason}$"):
        _ext._load()


def test_a_library_that_does_not_load_is_refused_with_what_the_loader_said(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(_: str) -> None:
        raise ImportError("undefined symbol: _ZN2at4sin")

    monkeypatch.setattr(_ext.importlib, "import_module", fails)
    with pytest.raises(ImportError, match=r"does not load, run `pip install .*` again: undefined symbol: _ZN2at4sin$"):
        _ext._load()


def test_nothing_built_is_refused_with_what_to_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(_ext.importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ImportError, match=r"extension is not built: run `pip install .*` in the source folder$"):
        _ext._load()


def test_an_instruction_set_that_this_cpu_lacks_is_refused_at_import() -> None:
    script = (
        "import zerox\ntry:\n    from zerox import FusedShardedAdam\nexcept ImportError as error:\n    print(error)"
    )
    found = subprocess.run(
        [sys.executable, "-c", script],
        cwd=ROOT,
        env=os.environ | {"ZEROX_ISA": "avx1024"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert found.stdout.startswith("ZEROX_ISA=avx1024: this CPU can run scalar"), found.stdout
    assert found.stdout.endswith("; unset ZEROX_ISA to use the fastest\n")
    assert found.stdout.count("\n") == 1


def test_sources_that_hide_an_installed_package_say_so(tmp_path: Path) -> None:
    source, site = tmp_path / "source", tmp_path / "site"
    ignored = shutil.ignore_patterns("__pycache__", "_C*.so", "_build_info.py")
    shutil.copytree(ROOT / "zerox", source / "zerox", ignore=ignored)
    (source / "setup.py").touch()
    installed = shutil.copytree(source / "zerox", site / "zerox")
    script = "try:\n    from zerox import estimate\nexcept ImportError as error:\n    print(error)"

    def said() -> str:
        # Without site: this very project may be installed here.
        command = [sys.executable, "-S", "-c", script]
        environment = os.environ | {"PYTHONPATH": str(site)}
        return subprocess.run(command, cwd=source, env=environment, capture_output=True, text=True, check=True).stdout

    assert said() == "zerox's C++ extension is not built: run `pip install -e .` in the source folder\n"
    (installed / "_build_info.py").write_text("BUILD_INFO = {}")
    assert said() == (
        f"zerox's sources in {source} hide the installed package, {installed}: start Python in another folder, or run "
        "`pip install -e .` in the source folder to use the sources\n"
    )


@pytest.mark.parametrize(
    ("isolated", "built", "said"),
    [
        ([], True, "{version}\n"),
        (["-S"], True, "{version}\n"),  # without site-packages: sources beside what was built, not installed
        (["-S"], False, "zerox.__version__ is not known, .*: zerox.s C.* is not built: run `pip install .*"),
    ],
)
def test_the_version_is_that_of_pyproject(isolated: list[str], built: bool, said: str, tmp_path: Path) -> None:
    ignored = shutil.ignore_patterns("__pycache__", *([] if built else ["_C*.so", "_build_info.py"]))
    shutil.copytree(ROOT / "zerox", tmp_path / "zerox", ignore=ignored)
    [version] = re.findall(r'^version = "(.+)"$', (ROOT / "pyproject.toml").read_text(), re.M)
    script = (
        "import zerox\nassert '__version__' not in vars(zerox)\n"
        "try:\n    print(zerox.__version__)\nexcept AttributeError as error:\n    print(error)"
    )
    environment = os.environ | {"PYTHONPATH": str(tmp_path)}
    command = [sys.executable, *isolated, "-c", script]
    found = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=True).stdout
    assert re.fullmatch(said.format(version=re.escape(version)), found, re.S), found
