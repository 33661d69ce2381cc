"""In CI one training a pair of options runs where what it rests on has changed, and wherever nobody can tell."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from deep_tests import ALL, RESTS_ON, ROOT, WITHOUT_PAIRS, base, git, marks

Commit = Callable[..., None]


@pytest.fixture
def commit(tmp_path: Path) -> Commit:
    """Writes a file and commits it, that many hours after the first commit."""

    def made(name: str, hours: int) -> None:
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"{name} {hours}")
        date = f"{1_700_000_000 + 3600 * hours} +0000"
        own = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        assert git(tmp_path, "add", "-A") is not None
        subprocess.run(
            ["git", *own, "commit", "-qm", name],
            cwd=tmp_path,
            env={"GIT_COMMITTER_DATE": date, "GIT_AUTHOR_DATE": date, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)},
            check=True,
        )

    assert git(tmp_path, "init", "-q", "-b", "main") is not None
    made("README.md", 0)
    return made


def test_without_history_all_runs(tmp_path: Path, commit: Commit) -> None:
    assert marks(tmp_path) == ALL  # one commit: nothing is a day older
    commit("zerox/engine.py", 2)
    assert marks(tmp_path) == ALL
    assert marks(tmp_path / "zerox" / "..") == ALL


def test_outside_git_all_runs(tmp_path: Path) -> None:
    assert marks(tmp_path) == ALL


@pytest.mark.parametrize("path", RESTS_ON)
def test_pairs_run_where_something_changed_that_they_rest_on(tmp_path: Path, commit: Commit, path: str) -> None:
    commit("zerox/engine.py", 30)
    assert marks(tmp_path) == WITHOUT_PAIRS
    commit(path if path.endswith(".py") else f"{path}/file.h", 31)
    assert marks(tmp_path) == ALL
    commit("zerox/engine.py", 60)
    assert marks(tmp_path) == WITHOUT_PAIRS, "that was pushed a day ago"


def test_on_a_branch_all_since_it_left_main_counts(tmp_path: Path, commit: Commit) -> None:
    commit("zerox/engine.py", 30)
    assert git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD") is not None
    commit("csrc/math/adam.h", 31)
    commit("zerox/engine.py", 90)
    assert marks(tmp_path) == ALL
    assert git(tmp_path, "update-ref", "refs/remotes/origin/main", "HEAD~1") is not None
    assert marks(tmp_path) == WITHOUT_PAIRS


def test_what_is_not_committed_counts(tmp_path: Path, commit: Commit) -> None:
    commit("zerox/plan/cut.py", 1)
    commit("zerox/engine.py", 60)
    assert base(tmp_path)
    (tmp_path / "zerox/plan/cut.py").write_text("changed")
    assert marks(tmp_path) == ALL


def test_what_pairs_rest_on_exists() -> None:
    assert all((ROOT / path).exists() for path in RESTS_ON)


def test_every_deep_file_is_found_by_make() -> None:
    """It looks for the mark at the end of a line."""
    for path in (ROOT / "tests").rglob("test_*.py"):
        marked = [line for line in path.read_text().splitlines() if "pytest.mark.deep" in line]
        assert path == Path(__file__) or all(line.endswith("pytest.mark.deep") for line in marked), path
