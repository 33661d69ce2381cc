"""examples/train_recommender.py: what it prints, its picture, and its one-line refusals."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

from tests.example import assert_refused_in_one_line, run_script

EXAMPLE = "train_recommender.py"
run = partial(run_script, EXAMPLE)


def test_both_systems_end_with_the_same_bits(tmp_path: Path) -> None:
    picture = tmp_path / "picture.png"
    draws = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    ended = run("--tokens", "20000", "--steps", "40", "--batch", "128", *draws, ranks=2)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith("2 ranks, ")
    rows = re.findall(r"^(zerox|DDP \+ SparseAdam) +[\d.]+ +-?[\d.]+ +([\d.]+)", ended.stdout, re.M)
    assert [name for name, *_ in rows] == ["zerox", "DDP + SparseAdam"]
    assert rows[0][1] == rows[1][1]
    assert float(rows[0][1]) > 0.6, "it learns"
    assert "the floor is forward and backward alone: " in ended.stdout
    assert "farthest parameter apart: 0\n" in ended.stdout
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


def test_a_file_of_pairs_will_do_and_a_line_that_is_none_is_named(tmp_path: Path) -> None:
    pairs = tmp_path / "pairs"
    pairs.write_text("".join(f"user{i % 17} item{i % 5}\n" for i in range(200)))
    ended = run("--ranks", "1", "--data", str(pairs), "--steps", "20", "--batch", "8")
    assert ended.returncode == 0, ended.stderr
    assert "200 pairs of 17 x 5 words" in ended.stdout
    pairs.write_text("user item\nuser\n")
    ended = run("--ranks", "1", "--data", str(pairs))
    assert ended.returncode == 2
    assert ended.stderr.strip().endswith("line 2: two words are needed, got 1")


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ("--picture missing/p.png", "--picture missing/p.png: there is no folder missing"),
        ("--ranks 2 --data missing/pairs", "cannot read missing/pairs: No such file or directory"),
        ("--steps 5", "--steps must be more than 13"),
        ("--ranks 0", "--ranks must be at least 1"),
    ],
)
def test_what_can_not_be_drawn_or_trained_is_said_before_the_training(options: str, reason: str) -> None:
    assert_refused_in_one_line(EXAMPLE, options, reason)
