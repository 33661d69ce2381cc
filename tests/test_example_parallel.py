"""examples/train_parallel.py: what it prints, and its one-line refusals."""

from __future__ import annotations

import importlib.util
import re
from functools import partial
from pathlib import Path

import pytest

from tests.example import assert_refused_in_one_line, run_script

EXAMPLE = "train_parallel.py"
run = partial(run_script, EXAMPLE)


@pytest.mark.parametrize(
    ("axes", "ranks"),
    [
        ("--tp 2", None),  # torchrun starts them, which takes longer than the training
        ("--tp 2 --pp 2", 4),
        ("--replicate 2 --shard 2", 4),
        ("--experts 2 --shard 2", 4),
    ],
)
def test_it_prints_how_far_its_training_is_from_one_process(axes: str, ranks: int | None) -> None:
    ended = run(*axes.split(), "--steps", "5", ranks=ranks)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.startswith(f"{ranks or 2} ranks (")
    rows = dict(re.findall(r"^(.*\w) +([\d.,e+-]+)$", ended.stdout, re.M))
    assert float(rows["farthest parameter from one process with AdamW"]) < 2e-5
    assert float(rows["farthest gradient norm, relative"]) < 1e-6


def test_layouts_are_one_table_and_one_picture(tmp_path: Path) -> None:
    picture = tmp_path / "layouts.png"
    draws = ["--picture", str(picture)] if importlib.util.find_spec("matplotlib") else []
    ended = run("--layouts", "--steps", "3", *draws)
    assert ended.returncode == 0, ended.stderr
    rows = re.findall(r"^(.+?) +(\d+) +([\d.]+) +(\S+) +(\S+) +([\d,]+) +([\d,]+)$", ended.stdout, re.M)
    assert [name for name, *_ in rows] == [
        "one rank",
        "tp 2",
        "pp 2",
        "replicate 2, shard 2",
        "experts 2",
        "pp 2, shard 2, tp 2",
    ]
    assert len({loss for name, _, loss, *_ in rows if "experts" not in name}) == 1, "all read the same text"
    for _, _, _, apart, norm, _, _ in rows:
        # Where a gradient is smaller than Adam's eps, torch is 1e-4 from itself, with two micro-batches for one.
        assert float(apart) < 2e-4
        assert float(norm) < 1e-6
    assert not draws or picture.read_bytes().startswith(b"\x89PNG")


WRONG = {
    "--layouts --tp 2": "--layouts has layouts of its own: leave out tp 2",
    "--picture layouts.png": "--picture draws the layouts of --layouts, which is not given",
    "--pp 3": "--pp 3: the model has 2 blocks to divide",
    "--tp 3": "--tp 3: 256 hidden units and 256 logits can't be cut evenly",
    "--experts 3": "--experts 3: each block has 4 experts to share out evenly",
    "--experts 2 --tp 2": "--experts does not go with --tp: zerox refuses it, see docs/meshes.md",
}


@pytest.mark.parametrize("arguments", WRONG)
def test_a_wrong_option_is_one_line(arguments: str) -> None:
    assert_refused_in_one_line(EXAMPLE, arguments, WRONG[arguments])
