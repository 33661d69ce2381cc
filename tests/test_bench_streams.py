"""bench.streams: who did what in a step, and what of its communication was not hidden."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch._C._autograd import DeviceType

from bench import common, streams, systems
from bench.streams import Work
from bench.trace import Range

UPDATE = "void zx::cuda::(anonymous namespace)::update_block_kernel<zx::cuda::BlockArgs<float> >(zx::cuda::BlockArgs)"


def event(name: str, stream: int, start: int, stop: int, where: DeviceType = DeviceType.CUDA) -> Any:
    return SimpleNamespace(
        name=lambda: name,
        device_type=lambda: where,
        device_resource_id=lambda: stream,
        start_ns=lambda: start,
        end_ns=lambda: stop,
    )


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        (UPDATE, "update_block"),
        ("_ZN2zx4cuda12_GLOBAL__N_114flatten_kernelIfEEvNS0_11FlattenArgsIT_EE", "flatten"),
        ("Memcpy DtoH (Device -> Pinned)", "copy"),
        ("Memset (Device)", "copy"),
        ("ncclDevKernel_ReduceScatter_Sum_f32_RING_LL(ncclDevKernelArgsStorage<4096ul>)", "NCCL"),
        ("ampere_sgemm_128x64_nt", "model"),
    ],
)
def test_kernels_are_told_apart_by_name(name: str, kind: str) -> None:
    assert streams.kind_of(name) == kind


def test_the_device_s_work_lies_on_its_streams() -> None:
    events = [
        event("aten::mm", 0, 1, 2, DeviceType.CPU),
        event("zerox::update bucket 0", 7, 1, 9),  # ranges are shown on the device too
        event("phase::step", 7, 1, 9),
        event(UPDATE, 7, 5, 8),
        event("ampere_sgemm", 20, 3, 4),
    ]
    assert streams.device_work(events) == [Work("stream 20", "model", 3, 4), Work("stream 7", "update_block", 5, 8)]


def test_what_overlaps_on_a_track_is_counted_once() -> None:
    ms = 1_000_000
    works = [Work("a", "copy", 0, 4 * ms), Work("a", "copy", 3 * ms, 5 * ms), Work("b", "adam", 9 * ms, 10 * ms)]
    assert streams.times_ms(works) == {"step": 10.0, "a: copy": 5.0, "b: adam": 1.0}


MS = 1_000_000
TRAINER, PACK_WORKER, LAND_WORKER = 1, 2, 3


def ranges(*rows: tuple[str, int | None, int, int, int]) -> list[Range]:
    """Rows of what, bucket, first and last millisecond, thread."""
    return [Range(what, bucket, start * MS, stop * MS, thread) for what, bucket, start, stop, thread in rows]


def test_time_is_hidden_where_the_thread_that_trains_does_not_wait() -> None:
    found = streams.bucket_rows(
        ranges(
            ("forward", None, 100, 110, TRAINER),
            ("backward", None, 110, 140, TRAINER),
            ("launch", 0, 120, 121, TRAINER),
            ("pack", 0, 121, 124, PACK_WORKER),
            ("land", 0, 124, 130, LAND_WORKER),
            ("wait", 0, 124, 126, LAND_WORKER),
            ("reduce", 0, 126, 129, LAND_WORKER),
            ("launch", 1, 138, 139, TRAINER),
            ("pack", 1, 139, 142, PACK_WORKER),
            ("land", 1, 142, 150, LAND_WORKER),
            ("wait", 1, 142, 145, LAND_WORKER),
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
    assert first["hidden_ms"] == pytest.approx((124 - 121) + (130 - 124))
    assert first["exposed_ms"] == pytest.approx(1 + 1 + 2)  # launch, gather, gather_wait
    times = {"launched": 20, "packed": 24, "arrived": 26, "reduced": 30, "updated": 53, "gathered": 60}
    assert {key: first[key] for key in times} == times
    assert second["hidden_ms"] == pytest.approx(141 - 139)  # packing, until step() waits
    assert second["exposed_ms"] == pytest.approx(1 + (142 - 141) + (150 - 142) + 1 + 5)


def test_a_step_is_drawn_with_all_that_happens_to_its_buckets(tmp_path: Path) -> None:
    files = [f"--{kind}={tmp_path / f'streams.{kind}'}" for kind in ("json", "png")]
    small = ["--device=cpu", "--layers=1", "--width=64", "--batch=1", "--clip"]
    streams.main([*small, *files, f"--trace={tmp_path}"])
    [row] = json.loads((tmp_path / "streams.json").read_text())["rows"]
    phases = sum(row["ms"][f"training: {phase}"] for phase in ("forward", "backward", "clip", "step"))
    assert 0 < phases <= row["ms"]["step"]
    assert 0 < row["ms"]["training: update"] <= row["ms"]["training: step"]
    assert (tmp_path / "streams.png").stat().st_size > 5_000
    assert "zerox::update bucket 0" in (tmp_path / "rank-0.json").read_text()


@dataclass(frozen=True)
class SmallTraining(systems.Training):
    width: int = 64
    vocabulary: int = 256


def test_of_several_ranks_each_bucket_is_told_and_all_are_traced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "Training", SmallTraining)
    files = {name: tmp_path / f"new/streams.{name}" for name in ("json", "png", "trace")}
    arguments = ["--ranks=2", "--device=cpu", "--layers=1", "--width=64", "--batch=1", "--clip"]
    streams.main([*arguments, *(f"--{name}={path}" for name, path in files.items())])
    rows = json.loads(files["json"].read_text())["rows"]
    assert [row["rank"] for row in rows] == [0, 1]
    for row in rows:
        check_buckets(row["buckets"])
        assert row["exposed_ms"] == pytest.approx(sum(bucket["exposed_ms"] for bucket in row["buckets"]))
        assert row["ms"]["pack worker: pack"] > 0
    assert files["png"].read_bytes().startswith(b"\x89PNG")
    for rank in range(2):
        events = json.loads((files["trace"] / f"rank-{rank}.json").read_text())["traceEvents"]
        seen = {event.get("name") for event in events}
        assert {"zerox::land bucket 0", "zerox::gather_wait bucket 0", "phase::backward"} <= seen
    assert "rank 1: communication of" in capsys.readouterr().out


def check_buckets(buckets: list[streams.Row]) -> None:
    assert buckets
    for bucket in buckets:
        times = [bucket[key] for key in ("launched", "packed", "arrived", "reduced", "updated", "gathered")]
        assert times == sorted(times)
        assert bucket["exposed_ms"] > 0  # gathering
