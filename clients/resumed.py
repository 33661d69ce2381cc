"""A script's own checkpoint: saved and resumed on equal and unequal numbers of ranks, beside the unchanged script's."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from clients.client import Client
from clients.launch import Failed, Result, run
from clients.report import differences

DDP = 0  # in place of a stage: the script as it is


class Resumption:
    """Of one script. ``folder``: for copies of its repository, and what the runs record."""

    def __init__(self, client: Client, scripts: Path, folder: Path) -> None:
        assert client.resume is not None
        self.client, self.scripts, self.folder = client, scripts, folder
        self.first, self.then = client.resume.first.split(), client.resume.then.split()
        self.num_ranks = client.resume.num_ranks

    def save(self, stage: int) -> None:
        where = self.client.copied(self.scripts, self._saved(stage), is_changed=stage != DDP)
        run(self.client, where, self.folder / f"save{stage}", stage, arguments=self.first)

    def go_on(self, saved: int, stage: int, num_ranks: int, fault: str = "") -> Result:
        """In this stage from what was saved in the other."""
        name = f"{saved}to{stage}on{num_ranks}{fault}"
        to = self.folder / f"copy{name}"
        where = self.client.copied_to_go_on(self._saved(saved), saved != DDP, to, is_changed=stage != DDP)
        out, in_order = self.folder / name, num_ranks > 2
        return run(self.client, where, out, stage, fault, arguments=self.then, num_ranks=num_ranks, in_order=in_order)

    def _saved(self, stage: int) -> Path:
        return self.folder / f"saved{stage}"


def resumed(client: Client, scripts: Path, stages: Sequence[int], folder: Path) -> dict[str, Any]:
    """What resumed runs differ by from the unchanged script's own: on other numbers of ranks, from its file and into
    it, and if it had not loaded its optimizer."""
    of = Resumption(client, scripts, folder)
    print(f"{client.name}: as it is", flush=True)
    of.save(DDP)
    bases = {num_ranks: of.go_on(DDP, DDP, num_ranks) for num_ranks in of.num_ranks}
    num_ranks, base = next(iter(bases.items()))
    row: dict[str, Any] = {
        "name": client.name,
        "repository": client.repository,
        "commit": client.commit,
        "steps": base.num_steps,
        "allowed": client.most,
        "stages": {},
        "faults": {"forgets": _far(base, of, DDP, DDP, num_ranks, "forgets")},
    }
    for stage in stages:
        print(f"{client.name}: stage {stage}", flush=True)
        row["stages"][stage] = _of_stage(of, stage, bases)
    return row


def _of_stage(of: Resumption, stage: int, bases: dict[int, Result]) -> dict[str, Any]:
    try:
        of.save(stage)
    except Failed as failed:
        return {"saves": {"failed": str(failed)}}
    num_ranks, base = next(iter(bases.items()))
    found = {f"on {number}": _far(each, of, stage, stage, number) for number, each in bases.items()}
    found["from its file"] = _far(base, of, DDP, stage, num_ranks)
    found["by itself"] = _far(base, of, stage, DDP, num_ranks)
    return found


def _far(base: Result, of: Resumption, *how: Any) -> dict[str, Any]:
    try:
        return differences(base, of.go_on(*how))
    except Failed as failed:
        return {"failed": str(failed)}
