"""docs/limits.md and docs/accelerate.md list the calls that all ranks make together: those that the code has."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from typing import Any

import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from zerox.engine import Engine

ROOT = Path(__file__).parents[1]
LIMITS = (ROOT / "docs/limits.md").read_text()
ACCELERATE = (ROOT / "docs/accelerate.md").read_text()
NOT_CALLS = {"the end of join()", "the end of optimizer.whole()"}  # they stand there by the blocks that they end
# Names that only some frameworks' users see, and what calls of others use inside.
OF_FRAMEWORKS = {
    "accelerator.save_state()",
    "the Trainer's save of a checkpoint",
    "trainer.save_checkpoint()",
    "fabric.save()",
}
INSIDE = {"the exchange of rows"}


def section(page: str, title: str) -> str:
    found = re.search(rf"^## {title}\n(.*?)^## ", page, re.S | re.M)
    assert found, f"no section '{title}'"
    return found[1]


def listed(text: str) -> set[str]:
    rows = [line for line in text.splitlines() if line.startswith("| ") and not line.startswith("| |")]
    return {name for row in rows for name in re.findall(r"`([^`]+)`", row.split("|", 2)[2])}


def is_collective(function: Any) -> bool:
    text = inspect.getdoc(function) or ""
    return "ollective" in text and not re.search(r"[Nn]ot collective", text)


def by_docstring() -> set[str]:
    """Public functions and methods that say so of themselves."""
    found = set()
    for name in zerox.__all__:
        each = getattr(zerox, name)
        if inspect.isfunction(each) and is_collective(each):
            found.add(f"zerox.{name}()")
    for owner in (Engine, zerox.Sparsity):
        for name, each in inspect.getmembers(owner, callable):
            if (
                not name.startswith("_")
                and is_collective(each)
                and "zerox" in (inspect.getmodule(each) or ast).__name__
            ):
                found.add(f"{'Sparsity.' if owner is zerox.Sparsity else ''}{name}()")
    return found


def sync_points() -> set[str]:
    text = (ROOT / "csrc/grads/sync_points.cpp").read_text()
    return set(re.findall(r'"([^"]+\(\))"', text.partition("kNames")[2]))


def names_given() -> set[str]:
    """In Python, by zerox.ranks.calls.named()."""
    found = set()
    for path in (ROOT / "zerox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Call) and isinstance(node.func, ast.Name) and node.func.id == "named":
                assert isinstance(node.args[0], ast.Constant)
                found.add(node.args[0].value)
    return found


def in_words(name: str) -> str:
    """As the table has it."""
    return {
        "the end of backward()": "backward()",
        "Sparsity()": "zerox.Sparsity()",
        "torch.distributed.checkpoint's getters of state with full_state_dict=True": "full_state_dict=True",
        "whole()": "optimizer.whole()",
    }.get(name, name)


def test_limits_has_every_call_of_all_ranks_and_no_other() -> None:
    written = listed(section(LIMITS, "Calls that all ranks make together"))
    found = (
        {in_words(name) for name in by_docstring() | sync_points() | names_given()} - NOT_CALLS - OF_FRAMEWORKS - INSIDE
    )
    assert len(found) > 25, "they were not recognised"
    assert found - written == set()
    assert written - found - {"optimizer.join()", "zerox.join()"} == set(), "nothing in the code says that they are"


def test_what_synchronizes_says_in_its_docstring_that_it_is_collective() -> None:
    """Of public methods, so that the list above is all there is."""
    synchronizing = 0
    for path in (ROOT / "zerox").rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef) or node.name.startswith("_"):
                continue
            calls = [each.func for each in ast.walk(node) if isinstance(each, ast.Call)]
            if any(ast.unparse(call).endswith("core.sync") for call in calls):
                synchronizing += 1
                assert "ollective" in (ast.get_docstring(node) or ""), f"{path.name}: {node.name}"
    assert synchronizing > 15, "they were not recognised"


def test_the_page_about_accelerate_has_every_method_of_all_processes() -> None:
    tree = ast.parse((ROOT / "zerox/integrations/accelerate.py").read_text())
    written = listed(section(ACCELERATE, "What all processes call"))
    names = {name.rpartition(".")[2].removesuffix("()") for name in written}
    found = set()
    for owner in (node for node in tree.body if isinstance(node, ast.ClassDef)):
        for method in (node for node in owner.body if isinstance(node, ast.FunctionDef)):
            is_named = any("named(" in ast.unparse(each) for each in method.decorator_list)
            if is_named or "Collective" in (ast.get_docstring(method) or ""):
                found.add(method.name)
    public = {name for name in found if not name.startswith("_")} - {"share_buffers", "whole"}  # which others call
    assert {"save_state", "clip_grad_norm_", "consolidate_state_dict"} <= public, "they were not recognised"
    assert public <= names


def run_block(rank: int, world_size: int, code: str, folder: str) -> bool:
    model = nn.Linear(4, 4)
    optimizer = zerox.FusedShardedAdam(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    path = Path(folder, "state.pt")
    exec(code, {"optimizer": optimizer, "rank": rank, "torch": torch, "path": path})
    return path.exists() or rank != 0


def test_the_page_s_way_to_save_on_one_rank_runs(tmp_path: Path) -> None:
    [code] = re.findall(r"```python\n(.*?)```", section(LIMITS, "Calls that all ranks make together"), re.S)
    assert all(run_ranks(run_block, 2, code, str(tmp_path)))
