"""What is known of one script: where it is from, what it is run with, and what it is judged by."""

from __future__ import annotations

import hashlib
import importlib
import shutil
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).parent
DIFF, HASHES = "two_lines.diff", "files.sha256"


# For checkpoints with objects of the script's own: torch loaded them when it was written.
LOADS_OBJECTS = {"TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": "1"}


class Misfit(Exception):
    """A script that is not here, or not as the diff expects it."""


@dataclass(frozen=True)
class Resume:
    """Two runs of a script: one that ends early and saves by its own code, and one that goes on from there.

    ``first``, ``then``: their arguments, behind those of the command. ``num_ranks``: of those that go on.
    """

    first: str
    then: str
    num_ranks: Sequence[int] = (2, 3, 1)


@dataclass(frozen=True)
class Client:
    """``command``: the script and its arguments, from the copy of the repository that it runs in.

    ``make_data``: writes tiny data into that copy. ``most``: what losses and evaluations may differ by, as a part of
    the number, or of 1 if that is more. ``faults``: those of faults.py that must show.
    """

    name: str  # of its folder
    repository: str  # on GitHub
    commit: str
    command: Sequence[str]
    make_data: Callable[[Path], None]
    most: float = 5e-6
    faults: Sequence[str] = ("beta", "averaging")
    environment: dict[str, str] = field(default_factory=dict)
    under: str = "."  # of the repository, where the command runs
    same_bits: bool = True  # of the first mean gradients
    resume: Resume | None = None  # None of a script that saves no optimizer
    shares: str = ""  # the name of the client whose folder this one has too
    among: Path = HERE  # where its folder is

    @property
    def folder(self) -> Path:
        return self.among / (self.shares or self.name)

    @property
    def stand_ins(self) -> str:
        """A module that each rank imports before the script, for what a machine lacks; empty if there is none."""
        return f"clients.{self.folder.name}.stand_ins" if (self.folder / "stand_ins.py").is_file() else ""

    @property
    def num_changed(self) -> int:
        """Lines that the diff takes away or changes, and those that it adds beyond: a changed line counts once."""
        total, added, removed = 0, 0, 0
        for line in [*(self.folder / DIFF).read_text().splitlines(), "@@"]:
            if line.startswith("@@"):
                total, added, removed = total + max(added, removed), 0, 0
            elif line.startswith("+") and not line.startswith("+++"):
                added += 1
            elif line.startswith("-") and not line.startswith("---"):
                removed += 1
        return total

    def found_in(self, scripts: Path) -> Path:
        """The repository's folder among ``scripts``, whose files are as they were when the diff was made."""
        found = scripts / self.repository.split("/")[1]
        for line in (self.folder / HASHES).read_text().splitlines():
            expected, name = line.split(maxsplit=1)
            path = found / name
            if not path.is_file():
                raise Misfit(f"{path} is not there: put {self.repository} at commit {self.commit} into {scripts}")
            if hashlib.sha256(path.read_bytes()).hexdigest() != expected:
                raise Misfit(f"{path} is another version: {self.repository} is meant at commit {self.commit}")
        return found

    def copied(self, scripts: Path, to: Path, is_changed: bool) -> Path:
        """A copy to run in, with the two lines if ``is_changed``, and with its data."""
        shutil.copytree(self.found_in(scripts), to)
        if is_changed:
            self._apply(to)
        self.make_data(to)
        return to / self.under

    def copied_to_go_on(self, saved: Path, was_changed: bool, to: Path, is_changed: bool) -> Path:
        """A copy of such a copy with all that a run has left there."""
        shutil.copytree(saved, to)
        if was_changed != is_changed:
            self._apply(to, *(("-R",) if was_changed else ()))
        return to / self.under

    def _apply(self, to: Path, *options: str) -> None:
        diff = self.folder / DIFF
        subprocess.run(["git", "apply", *options, "--unidiff-zero", "-p1", str(diff)], cwd=to, check=True)


def clients() -> dict[str, Client]:
    """All, by name."""
    names = sorted(path.parent.name for path in HERE.glob("*/client.py"))
    return {name: importlib.import_module(f"clients.{name}.client").CLIENT for name in names}
