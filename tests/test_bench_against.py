"""bench.against: another commit is built and used, sides take turns, and a difference is held against none."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import against, against_work, allocator
from bench.against import AGAIN, HERE, THERE
from bench.against_work import Work
from bench.systems import Training

TINY = Training(layers=1, width=64, vocabulary=64, context=8, batch=2)
COUNTS = {"allocations", "messages", "sent_bytes", "copies", "peak_bytes"}
TIMES = {"step_ms", "backward_us", "small_step_us", "zero_grad_us"}


def test_a_checkout_trains_with_its_own_zerox_and_tells_all_numbers() -> None:
    work = Work(ranks=2, zerox="", allocator=str(allocator.build()), steps=1, num_small=7, training=TINY)
    found = against.Checkout.of(against.ROOT / "zerox", "tested").run(work)
    assert set(found) == {"stage 1", "stage 2"}
    for numbers in found.values():
        assert set(numbers) == COUNTS | TIMES
        assert all(value > 0 for value in numbers.values())
    # One bucket: one message to the other rank for its gradients and one for its parameters; stage 1 gathers those too.
    assert (found["stage 1"]["messages"], found["stage 2"]["messages"]) == (3, 2)
    assert found["stage 1"]["sent_bytes"] > found["stage 2"]["sent_bytes"]


def test_another_zerox_than_the_one_that_was_meant_is_not_timed(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError, match=f"not of {tmp_path}"):
        against_work.run(Work(ranks=1, zerox=str(tmp_path), allocator=""))


def git(folder: Path, *command: str) -> None:
    identity = ["-c", "user.name=nobody", "-c", "user.email=nobody@localhost"]
    subprocess.run(["git", *identity, *command], cwd=folder, check=True, capture_output=True)


def test_a_commit_is_built_once_in_a_worktree_of_its_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(against, "ROOT", tmp_path)
    monkeypatch.setattr(against, "FOLDER", tmp_path / "build/against")
    (tmp_path / "zerox").mkdir()
    (tmp_path / "zerox/__init__.py").write_text("then = True\n")
    (tmp_path / "setup.py").write_text("import pathlib; pathlib.Path('zerox/_C.so').write_text('built')\n")
    git(tmp_path, "init", "-q")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-qm", "then")
    (tmp_path / "zerox/__init__.py").write_text("now = True\n")
    for _ in range(2):
        checkout = against.built("HEAD")
        assert (checkout.path / "zerox/__init__.py").read_text() == "then = True\n"
        assert (checkout.path / "zerox/_C.so").read_text() == "built"
        assert [each.name for each in checkout.path.iterdir()] == ["zerox"]
        (checkout.path / "zerox").resolve().with_name("setup.py").unlink(missing_ok=True)  # what builds, once
    assert not (tmp_path / "zerox/_C.so").exists()


@dataclass
class Fake:
    """A checkout whose runs take what ``value`` says, in order of all runs."""

    name: str
    value: Callable[[int], float]
    log: list[str]

    def run(self, work: Work) -> dict[str, dict[str, float]]:
        self.log.append(self.name)
        value = self.value(len([name for name in self.log if name == self.name]))
        found = {"step_ms": value, "messages": 0.0}
        return {"stage 2": found if self.name == HERE else {**found, "instructions": 1.0}}


def rows(here: Callable[[int], float], again: Callable[[int], float], pairs: int = 8) -> Sequence[against.Row]:
    log: list[str] = []
    sides = {HERE: Fake(HERE, here, log), THERE: Fake(THERE, lambda _: 100.0, log), AGAIN: Fake(AGAIN, again, log)}
    found = against.samples_in_turn(sides, [Work(1, "", "")], pairs)  # type: ignore[arg-type]
    assert log[:6] == [HERE, THERE, AGAIN, THERE, AGAIN, HERE]
    return against.rows_of(found)


@pytest.mark.parametrize(
    ("here", "again", "passes"),
    [
        (lambda n: 101.9, lambda n: 101.9, True),
        (lambda n: 102.1, lambda n: 102.1, False),
        (lambda n: 104.0, lambda n: 104.0 * (1.06 if n % 2 else 1.0), True),  # as much as the same commit shows
        (lambda n: 104.0, lambda n: 104.0 * (0.94 if n % 2 else 1.0), True),
        (lambda n: 108.0, lambda n: 108.0 * (1.06 if n % 2 else 1.0), False),
        (lambda n: 50.0, lambda n: 50.0, True),
    ],
)
def test_a_difference_passes_within_2_percent_or_what_the_same_commit_shows(
    here: Callable[[int], float], again: Callable[[int], float], passes: bool
) -> None:
    step_ms, messages = rows(here, again)
    assert step_ms["passes"] is passes
    assert step_ms["ratio"] == pytest.approx(here(0) / 100)
    assert (messages["ratio"], messages["passes"]) == (1.0, True), "none on both sides"
    assert messages["what"] == "messages", "what one side can't count is left out"


def test_what_there_was_none_of_before_does_not_pass() -> None:
    assert against.ratio([0.0, 3.0], [0.0, 0.0]) == [1.0, float("inf")]


def test_all_numbers_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    log: list[str] = []
    monkeypatch.setattr(against, "built", lambda commit: Fake(THERE, lambda _: 100.0, log))
    monkeypatch.setattr(Fake, "path", tmp_path / "only-123", raising=False)
    monkeypatch.setattr(against.Checkout, "of", lambda *_: Fake(HERE, lambda _: 110.0, log))
    monkeypatch.setattr(against.allocator, "build", lambda: tmp_path)
    assert against.main(["v1", "--pairs=2", "--ranks", "1", "2", f"--json={tmp_path / 'x.json'}"]) == 1
    result = json.loads((tmp_path / "x.json").read_text())
    assert (result["against"], result["pairs"], len(result["rows"])) == ("123", 2, 4)
    assert "2 of 4 numbers are larger than at v1" in capsys.readouterr().out
