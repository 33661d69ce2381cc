"""The pages about frameworks: every block of code runs, alone and on two ranks, and versions are the pinned ones."""

from __future__ import annotations

import difflib
import os
import re
from pathlib import Path
from typing import Any

import pytest

from tests.hugging_face import ALONE, accelerators_environment, run_anywhere

ROOT = Path(__file__).parents[2]
PAGES = {name: (ROOT / f"docs/{name}.md").read_text() for name in ("accelerate", "trainer")}
MOST_CHANGED = 3


def blocks(kind: str) -> list[tuple[str, str]]:
    return [(page, block) for page, text in PAGES.items() for block in re.findall(rf"```{kind}\n(.*?)```", text, re.S)]


def sides(block: str) -> tuple[str, str]:
    """The script before and after."""
    lines = block.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in "-+")  # type: ignore[return-value]


SCRIPTS = [block for _, block in blocks("python")] + [side for _, block in blocks("diff") for side in sides(block)]


def run(rank: int, world_size: int, script: str, folder: Path) -> None:
    names: dict[str, Any] = {"__name__": "__main__"}
    was = os.getcwd()
    os.chdir(folder)
    try:
        with accelerators_environment(rank, world_size):
            exec(compile(script, "script", "exec"), names)
    finally:
        os.chdir(was)


@pytest.mark.parametrize("world_size", [ALONE, 2])
@pytest.mark.parametrize("number", range(len(SCRIPTS)))
def test_a_block_of_code_runs(number: int, world_size: int, tmp_path: Path) -> None:
    run_anywhere(run, world_size, SCRIPTS[number], tmp_path)


@pytest.mark.parametrize("page", PAGES)
def test_few_lines_change(page: str) -> None:
    [block] = [block for name, block in blocks("diff") if name == page]
    before, after = (side.splitlines() for side in sides(block))
    changed = [line for line in difflib.ndiff(before, after) if line.startswith("+ ")]
    assert 1 <= len(changed) <= MOST_CHANGED


def test_versions_are_those_that_are_pinned() -> None:
    pins = dict(re.findall(r"^([\w-]+)==([\d.]+)", (ROOT / "constraints.txt").read_text(), re.M))
    found = re.findall(r"(\w+) (\d+\.\d+\.\d+)\b(?!\.\d)", "".join(PAGES.values()))
    named = {name.lower(): version for name, version in found}
    assert named.keys() >= {"accelerate", "transformers", "peft", "trl", "datasets"}
    pinned = pins | {"transformers": "5.23.0"}  # for Python 3.11 and newer
    assert named == {name: pinned[name] for name in named}


def test_there_are_scripts() -> None:
    assert len(SCRIPTS) >= 6
