"""The benchmark of bucket sizes: what it checks, and what it leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from bench import buckets, systems
from bench.jobs import WrongResult
from tests.ranks import run_ranks
from zerox.plan.buckets import ParamSpec


@dataclass(frozen=True)
class WideTraining(systems.Training):
    vocabulary: int = 512
    context: int = 8


def test_bucket_sizes_are_timed_beside_the_default_and_drawn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = {name: tmp_path / f"new/buckets.{name}" for name in ("json", "png")}
    arguments = ["--caps", "1", "1000", "--layers=1", "--seconds=0"]
    monkeypatch.setattr(buckets, "Training", WideTraining)
    assert buckets.main([*arguments, *(f"--{name}={path}" for name, path in files.items())]) == 0
    rows = {row["name"]: row for row in json.loads(files["json"].read_text())["rows"]}
    assert list(rows) == ["default", "1 MiB", "1000 MiB", "1 MiB first"]
    assert rows["default"]["as_fast"] == 1.0
    assert rows["default"]["buckets"] == rows["1000 MiB"]["buckets"] == 1, "13 MiB of parameters"
    assert rows["1 MiB"]["buckets"] >= 5, "so many matrices have 1 MiB or more"
    assert rows["1 MiB first"]["buckets"] == 2
    assert files["png"].read_bytes().startswith(b"\x89PNG")


def test_a_first_bucket_that_is_smaller_takes_the_last_parameters() -> None:
    params = [ParamSpec(str(i), numel, "fp32", 4) for i, numel in enumerate([400_000, 200_000, 100_000, 200_000])]
    plans = buckets.plan_first_smaller(params, 2, 2**30)
    assert [sorted(plan.params) for plan in plans] == [[2, 3], [0, 1]]


def say_what_other_bits_give(_: int, __: int) -> str:
    training = systems.Training(layers=1, width=64, vocabulary=64, context=8)
    built = [buckets.Capped(training, cap_mib) for cap_mib in (None, 1)]
    buckets.check_bits(built)
    with torch.no_grad():
        built[1].parameters()[3].view(-1)[0] += 1e-6
    try:
        buckets.check_bits(built)
    except WrongResult as error:
        return str(error)
    return "nothing"


def test_a_bucket_size_that_changes_a_bit_is_not_timed() -> None:
    said = "buckets of 1 MiB give other bits than those of default"
    assert run_ranks(say_what_other_bits_give, 2) == [said, said]
