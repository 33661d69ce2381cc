"""What the benchmark of overlap makes of ranges, and the files that it leaves."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from bench import overlap, systems, timeline
from bench.trace import Range, merge_chrome_traces
from tests.ranks import run_ranks

MS = 1_000_000
TRAINER, PACK_LANE, LAND_LANE = 1, 2, 3


def ranges(*rows: tuple[str, int | None, int, int, int]) -> list[Range]:
    """Rows of what, bucket, first and last millisecond, thread."""
    return [Range(what, bucket, start * MS, stop * MS, thread) for what, bucket, start, stop, thread in rows]


def test_time_is_hidden_where_the_thread_that_trains_does_not_wait() -> None:
    totals, found = overlap.times_of(
        ranges(
            ("forward", None, 100, 110, TRAINER),
            ("backward", None, 110, 140, TRAINER),
            ("launch", 0, 120, 121, TRAINER),
            ("pack", 0, 121, 124, PACK_LANE),
            ("land", 0, 124, 130, LAND_LANE),
            ("wait", 0, 124, 126, LAND_LANE),
            ("reduce", 0, 126, 129, LAND_LANE),
            ("launch", 1, 138, 139, TRAINER),
            ("pack", 1, 139, 142, PACK_LANE),
            ("land", 1, 142, 150, LAND_LANE),
            ("wait", 1, 142, 145, LAND_LANE),
            ("step", None, 140, 170, TRAINER),
            ("settle", None, 141, 151, TRAINER),
            ("agree", None, 141, 143, TRAINER),
            ("update", 0, 151, 153, TRAINER),
            ("gather", 0, 153, 154, TRAINER),
            ("update", 1, 154, 157, TRAINER),
            ("gather", 1, 157, 158, TRAINER),
            ("gather_wait", 0, 158, 160, TRAINER),
            ("gather_wait", 1, 160, 165, TRAINER),
        )
    )
    first, second = found
    assert (first.launched, first.packed, first.arrived, first.landed) == (20, 24, 26, 30)
    assert (first.updated, first.gathered) == (53, 60)
    assert first.hidden_ms == pytest.approx((124 - 121) + (130 - 124))
    assert first.exposed_ms == pytest.approx(1 + 1 + 2)  # launch, gather, gather_wait
    assert second.hidden_ms == pytest.approx(141 - 139)  # packing, until step() waits
    assert second.exposed_ms == pytest.approx(1 + (142 - 141) + (150 - 142) + 1 + 5)
    assert (totals.step_ms, totals.forward_ms, totals.backward_ms) == (70, 10, 30)
    assert totals.waited_ms == pytest.approx(1 + 1 + (151 - 141) + 1 + (165 - 157))
    assert totals.hidden_ms == first.hidden_ms + second.hidden_ms
    assert totals.exposed_ms == first.exposed_ms + second.exposed_ms


def test_the_typical_step_is_the_median_one_and_the_profiler_is_judged_round_by_round() -> None:
    seen = overlap.Observed(profiled_ms=[30.0, 11.0, 12.0, 40.0], plain_ms=[15.0, 10.0, 12.0, 32.0], profiles=[])
    assert seen.typical == 2
    assert seen.slowed == pytest.approx((1.1 + 1.25) / 2)


def test_traces_of_ranks_are_put_on_one_clock(tmp_path: Path) -> None:
    paths = [tmp_path / f"{rank}.json" for rank in range(2)]
    for rank, path in enumerate(paths):
        events = [
            {"ph": "M", "name": "process_name", "ts": 0.0, "pid": 10 + rank, "args": {"name": "python"}},
            {"ph": "X", "name": "zerox::settle", "ts": 5.0, "dur": 1.0, "pid": 10 + rank},
            {"ph": "s", "name": "fwdbwd", "id": 1, "ts": 5.0, "pid": 10 + rank},
        ]
        path.write_text(json.dumps({"baseTimeNanoseconds": 1_000_000 - 2_000 * rank, "traceEvents": events}))
    merge_chrome_traces(paths, tmp_path / "new/merged.json")
    merged = json.loads((tmp_path / "new/merged.json").read_text())
    assert merged["baseTimeNanoseconds"] == 998_000
    assert [event["ts"] for event in merged["traceEvents"] if event["ph"] == "X"] == [7.0, 5.0]
    names = {event["pid"]: event["args"]["name"] for event in merged["traceEvents"] if event["ph"] == "M"}
    assert names == {10: "rank 0", 11: "rank 1"}
    assert not any(event["ph"] == "s" for event in merged["traceEvents"])


@dataclass(frozen=True)
class SmallTraining(systems.Training):
    width: int = 64
    vocabulary: int = 256


def check_row(row: overlap.Row) -> None:
    assert len(row["by_rank"]) == row["ranks"] == 2
    for own in row["by_rank"]:
        assert sum(bucket["mib"] for bucket in own["buckets"]) == pytest.approx(4 * row["numel"] / 2**20, rel=0.05)
        assert own["forward_ms"] + own["backward_ms"] < own["step_ms"]
        assert 0 < own["waited_ms"] < own["step_ms"]
        for bucket in own["buckets"]:
            times = [bucket[key] for key in ("launched", "packed", "arrived", "landed", "updated", "gathered")]
            assert times == sorted(times)
            assert bucket["exposed_ms"] > 0  # gathering


def test_overlap_of_a_step_is_told_drawn_and_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(overlap, "Training", SmallTraining)
    files = {name: tmp_path / f"new/overlap.{name}" for name in ("json", "png", "trace")}
    arguments = ["--steps=2", "--layers=1", "--clip"]
    assert overlap.main([*arguments, *(f"--{name}={path}" for name, path in files.items())]) == 0
    [row] = json.loads(files["json"].read_text())["rows"]
    check_row(row)
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    events = json.loads(files["trace"].read_text())["traceEvents"]
    for name in ("zerox::land bucket 0", "zerox::gather_wait bucket 0", "phase::backward"):
        assert len({event["pid"] for event in events if event.get("name") == name}) == 2
    assert "the slowest" in capsys.readouterr().out


def overlap_of_stage_1(_: int, __: int) -> overlap.Row:
    return overlap.overlap_on_ranks(SmallTraining(layers=1, batch=1), stage=1, steps=2, trace=None)[0]


def test_stage_1_is_told_too() -> None:
    for row in run_ranks(overlap_of_stage_1, 2):
        check_row(row)


def test_one_rank_alone_has_no_overlap(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        overlap.main(["--ranks=1"])
    assert end.value.code == 2
    assert "nothing to hide" in capsys.readouterr().err


def test_the_picture_shows_the_time_between_ranges_too() -> None:
    bars = timeline.bars_of(
        ranges(
            ("launch", 3, 1, 2, TRAINER),
            ("pack", 3, 5, 6, PACK_LANE),
            ("wait", 3, 8, 9, LAND_LANE),
            ("reduce", 3, 9, 12, LAND_LANE),
            ("update", 3, 13, 14, TRAINER),
            ("gather", 3, 14, 15, TRAINER),
            ("gather_wait", 3, 17, 19, TRAINER),
        )
    )
    drawn = {name: (start // MS, stop // MS) for bucket, name, start, stop in bars if bucket == 3}
    assert drawn == {
        "queued": (1, 5),
        "pack": (5, 6),
        "sent": (6, 9),
        "reduce": (9, 12),
        "update": (13, 14),
        "gather": (14, 19),
    }
    assert set(drawn) == set(timeline.DRAWN)
