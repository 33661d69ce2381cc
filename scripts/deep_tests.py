"""Prints pytest's -m for `make test-deep`. In CI one training a pair of options runs only where something changed that
it rests on: plans (the table of pairs is one), kernels, or what draws and makes the trainings.

Changed since the commit before those that are pushed: where HEAD leaves origin/main; and on main itself, which does not
say what was pushed at once, a day before HEAD. A clone without that history runs all.
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

ROOT = Path(__file__).parents[1]
ALL = "deep"
WITHOUT_PAIRS = "deep and not pairs"
RESTS_ON = (
    "zerox/plan",
    "csrc/cpu",
    "csrc/cuda",
    "csrc/math",
    "csrc/rows",
    *(f"tests/optimizer/{name}.py" for name in ("combined", "covering", "made", "test_pairs", "ways")),
)
DAY_S = 24 * 3600


def git(root: Path, *arguments: str) -> str | None:
    """What it prints; None where it fails."""
    done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True)
    return done.stdout.strip() if done.returncode == 0 else None


def base(root: Path) -> str | None:
    """The commit to compare with; None where there is none."""
    head, fork = git(root, "rev-parse", "HEAD"), git(root, "merge-base", "HEAD", "origin/main")
    if fork and fork != head:
        return fork
    made = git(root, "log", "-1", "--format=%ct", "HEAD")
    return git(root, "rev-list", "-1", f"--before={int(made) - DAY_S}", "HEAD") or None if made else None


def marks(root: Path) -> str:
    since = base(root)
    if since is None:
        return ALL
    unchanged = git(root, "diff", "--quiet", since, "--", *RESTS_ON) is not None
    return WITHOUT_PAIRS if unchanged else ALL


if __name__ == "__main__":
    print(marks(ROOT) if os.environ.get("CI") == "true" else ALL)
