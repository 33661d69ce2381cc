"""README and docs: the example does what it says, and tables are as commands print them."""

from __future__ import annotations

import ast
import inspect
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import find_torch
import zerox
from bench import report
from zerox.plan import combinations, environment
from zerox.state.optimizer_state import OptimizerStateFace

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"


COMMANDS = {
    1: "python train.py",
    2: "torchrun --local-addr 127.0.0.1 --nproc-per-node 2 train.py",
}


@pytest.mark.parametrize("ranks", COMMANDS)
def test_the_first_example_trains_as_printed_below_it(ranks: int, tmp_path: Path) -> None:
    found = re.search(r"```python\n# train.py\n(.*?)```\n```\n(.*?)```", README.read_text(), re.S)
    assert found
    (tmp_path / "train.py").write_text(found[1])
    assert COMMANDS[ranks] in [line.partition("#")[0].strip() for line in found[2].splitlines()]
    command = COMMANDS[ranks].replace("python ", f"{sys.executable} ")
    command = command.replace("torchrun ", f"{sys.executable} -m torch.distributed.run ")
    environment = {name: value for name, value in os.environ.items() if name != "RANK"} | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command.split(), cwd=tmp_path, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.search(r"loss ([\d.]+), ([\d,]+) bytes of moments", done.stdout)
    assert said, done.stdout
    assert float(said.group(1)) < 60.0, "the loss starts at about 64, the variance of a sum of 64"
    numel = 64 * 256 + 256 + 256 + 1
    assert numel * 8 / ranks <= int(said.group(2).replace(",", "")) <= numel * 8 / ranks * 1.1


def test_the_table_of_environment_variables_is_the_one_of_zerox_env() -> None:
    written = (DOCS / "install.md").read_text()
    assert environment.rows() in written, "zerox.plan.environment.rows() gives what should be there"
    printed = subprocess.run([sys.executable, "-m", "zerox", "env"], capture_output=True, text=True).stdout
    for variable in environment.VARIABLES:
        assert re.search(rf"^  {variable.name} .*{re.escape(variable.meaning)}$", printed, re.M)


def test_which_torch_will_do_is_said_as_the_build_has_it() -> None:
    least, following = find_torch.LEAST_TORCH, find_torch.NEXT_TORCH
    newest = f"{following[0]}.{following[1] - 1}"
    said = f"{least[0]}.{least[1]} to {newest}"
    assert f"torch {said} (any build)" in README.read_text()
    assert f"| torch | {said}, any build;" in (DOCS / "install.md").read_text()
    [switch] = [each for each in environment.VARIABLES if each.name == "ZEROX_ANY_TORCH"]
    assert f"newer than {newest}," in switch.meaning


def test_the_table_of_options_is_the_one_of_zerox_options() -> None:
    printed = subprocess.run([sys.executable, "-m", "zerox", "options"], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == combinations.rows()
    assert combinations.rows() in (DOCS / "usage.md").read_text(), "python -m zerox options prints what should be there"


def test_every_variable_of_zerox_that_something_reads_is_in_the_table() -> None:
    internal = {"ZEROX_FRESH_INSIDE", "ZEROX_TEST_EXTENSION", "ZEROX_COMMIT"}  # set and read by the same code
    listed = subprocess.run(["git", "ls-files"], cwd=README.parent, capture_output=True, text=True, check=True).stdout
    paths = [README.parent / name for name in listed.split() if name.endswith((".py", ".sh", ".cpp", ".h"))]
    reads = re.compile(r"""(?:environ(?:\.get\(|\[)|getenv\()["'](ZEROX_\w+)|[$][{]?!?(ZEROX_[A-Z_]+)""")
    read = {name for path in paths for found in reads.findall(path.read_text()) for name in found if name}
    assert {"ZEROX_ISA", "ZEROX_CUDA", "ZEROX_EXCHANGE", "ZEROX_TORCH_INDEX"} <= read, "they were not recognised"
    assert read - internal <= {variable.name for variable in environment.VARIABLES}


WRITTEN = {
    README: (report.summary, report.stages_line, report.gpu_line),
    DOCS / "benchmarks.md": (
        *(report.steps, report.peaks, report.range_line, report.stages, report.residency, report.sources),
        *(report.wrapper, report.wrapper_sources, report.gpu_updates, report.gpu_steps),
    ),
    DOCS / "sharded-parameters.md": (report.room_line,),
}


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_speed_and_memory_are_those_of_the_newest_results(page: Path) -> None:
    written = " ".join(page.read_text().split())  # sentences are wrapped
    for text in WRITTEN[page]:
        assert " ".join(text().split()) in written, f"python -m bench.report prints what should be in {page.name}"
    assert max(report.GPU_FIGURES.parent.glob("*-figures.json")) == report.GPU_FIGURES, "there are newer ones"


def test_results_are_of_commits() -> None:
    """Of a GPU too, but its runs so far were of copies without history."""
    dirty = {path.stem for path in report.RESULTS.glob("*.json") if "-dirty" in report.load(path.stem)["commit"]}
    assert dirty == set()


def test_every_public_name_is_in_the_reference() -> None:
    written = (DOCS / "reference.md").read_text()
    own = [name for name in vars(zerox.FusedShardedAdam) | vars(OptimizerStateFace) if not name.startswith("_")]
    missing = [name for name in (*zerox.__all__, *own) if not re.search(rf"`[^`]*\b{name}\b", written)]
    assert not missing


def written_in_the_reference(name: str) -> dict[str, Any]:
    """The defaults in its signature there."""
    found = re.search(rf"^(zerox.{name}\(.*?^\))", (DOCS / "reference.md").read_text(), re.S | re.M)
    assert found
    [call] = [node for node in ast.walk(ast.parse(found[1].replace("*,", ""))) if isinstance(node, ast.Call)]
    return {str(each.arg): eval(ast.unparse(each.value), {"torch": torch}) for each in call.keywords}


def defaults_of(function: Any) -> dict[str, Any]:
    parameters = inspect.signature(function).parameters.items()
    return {name: each.default for name, each in parameters if each.default is not inspect.Parameter.empty}


MUON_LACKS = {"capturable", "foreach", "fused", "differentiable"}


def test_the_reference_has_the_constructor_s_options_and_defaults() -> None:
    shared: dict[str, Any] = {}
    for kind in (zerox.FusedShardedAdam, zerox.FusedShardedSGD, zerox.FusedShardedLion, zerox.FusedShardedMuon):
        defaults = defaults_of(kind)
        shared = shared or {name: defaults[name] for name in list(defaults)[list(defaults).index("process_group") :]}
        lacks = MUON_LACKS if kind is zerox.FusedShardedMuon else set()
        of_all = {name: value for name, value in shared.items() if name not in lacks}
        assert {**of_all, **written_in_the_reference(kind.__name__)} == defaults
    assert written_in_the_reference("muon_groups") == defaults_of(zerox.muon_groups)


def test_errors_that_are_explained_are_errors_that_there_are() -> None:
    sources = "".join(
        path.read_text()
        for folder in ("zerox", "csrc")
        for path in (README.parent / folder).rglob("*.*")
        if path.suffix in (".py", ".cpp", ".h")
    )
    said = re.sub(r"""["']\s*f?["']""", "", sources)
    rows = re.findall(r"^\| `([^|]+)` [^|]*\|", (DOCS / "limits.md").read_text(), re.M)
    assert len(rows) > 5, "the table was not found"
    for row in rows:
        for part in filter(None, map(str.strip, re.split(r"\.\.\.|'|\[|\]", row))):
            assert part in said, f"nothing says {part!r}"


def test_files_that_contributors_are_sent_to_are_there() -> None:
    names = {path.name for folder in ("zerox", "csrc") for path in (README.parent / folder).rglob("*.*")}
    page = (README.parent / "CONTRIBUTING.md").read_text()
    rows = re.search(r"\*\*Where is it\?\*\*(.*)\n\*\*To add an option", page, re.S)
    assert rows, "the tables were not found"
    said = set(re.findall(r"[\w/]+\.(?:py|cpp|h|cuh?)\b", rows[1]))
    assert len(said) > 80
    assert not {each for each in said if each.split("/")[-1] not in names}
    said = set(re.findall(r"`((?:zerox|csrc|tests)/[\w./]+)`", (DOCS / "coming-features.md").read_text()))
    assert len(said) > 40
    assert not [each for each in said if not (README.parent / each).exists()]


def test_links_in_the_docs_lead_somewhere() -> None:
    for page in (README, README.parent / "CONTRIBUTING.md", *DOCS.glob("*.md")):
        for link in re.findall(r"\]\(([^)#\s]+)", page.read_text()):
            assert link.startswith("http") or (page.parent / link).exists(), f"{page.name}: {link}"
