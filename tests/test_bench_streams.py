"""bench.streams and bench.exposed: who did what in a step, and what of an exchange was not hidden."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch._C._autograd import DeviceType
from torch.multiprocessing.spawn import ProcessRaisedException

from bench import exposed, streams
from bench.ranks import on_ranks
from bench.streams import Work

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


def test_what_overlaps_on_a_lane_is_counted_once() -> None:
    ms = 1_000_000
    works = [Work("a", "copy", 0, 4 * ms), Work("a", "copy", 3 * ms, 5 * ms), Work("b", "adam", 9 * ms, 10 * ms)]
    assert streams.times_ms(works) == {"step": 10.0, "a: copy": 5.0, "b: adam": 1.0}


def test_a_step_is_drawn_with_all_that_happens_to_its_buckets(tmp_path: Path) -> None:
    files = [f"--{kind}={tmp_path / f'streams.{kind}'}" for kind in ("json", "png")]
    small = ["--device=cpu", "--layers=1", "--batch=1", "--clip"]
    assert streams.main([*small, *files, f"--trace={tmp_path / 'trace.json'}"]) == 0
    [row] = json.loads((tmp_path / "streams.json").read_text())["rows"]
    phases = sum(row["ms"][f"training: {phase}"] for phase in ("forward", "backward", "clip", "step"))
    assert 0 < phases <= row["ms"]["step"]
    assert 0 < row["ms"]["training: update"] <= row["ms"]["training: step"]
    assert (tmp_path / "streams.png").stat().st_size > 5_000
    assert "zerox::update bucket 0" in (tmp_path / "trace.json").read_text()


def test_exposed_is_what_comes_after_backward(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [f"--{kind}={tmp_path / f'exposed.{kind}'}" for kind in ("json", "png")]
    small = ["--device=cpu", "--layers=6", "--layer-mib=16", "--rounds=1"]
    assert exposed.main([*small, *files]) == 0
    [row] = json.loads((tmp_path / "exposed.json").read_text())["rows"]
    assert (row["ranks"], row["layers"], row["mib"], row["buckets"], row["least"]) == (2, 6, 96.0, 6, 1 / 6)
    assert 0 < row["exposed_ms"] < row["together_ms"]
    assert row["exposed"] == pytest.approx(row["exposed_ms"] / row["exchange_ms"])
    assert (tmp_path / "exposed.png").stat().st_size > 5_000
    assert f"{row['exposed']:.1%} of the exchange" in capsys.readouterr().out


def test_a_backward_waits_as_long_as_it_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    wait = exposed.Wait(torch.device("cpu"))
    waited: list[float] = []
    monkeypatch.setattr(exposed.time, "sleep", waited.append)
    params = [torch.zeros(3, requires_grad=True) for _ in range(4)]
    grads = [torch.full((3,), float(index)) for index in range(4)]
    exposed.Backward(params, grads, wait)(2.0)
    assert waited == [0.5] * 4
    assert [param.grad.tolist() for param in params if param.grad is not None] == [grad.tolist() for grad in grads]


def broken(*_: Any) -> None:
    """On each rank: gradients are others than the check expects."""
    wait = exposed.Wait(torch.device("cpu"))
    params = [torch.nn.Parameter(torch.zeros(3)) for _ in range(2)]
    backward = exposed.Backward(params, [torch.full((3,), 4.0) for _ in range(2)], wait)
    exposed.check(exposed.FusedShardedAdam(params), params, backward)


def test_a_wrong_exchange_is_not_timed() -> None:
    with pytest.raises(ProcessRaisedException, match="WrongResult: the norm of the mean gradient is"):
        on_ranks(broken, 2)


def test_one_rank_has_nothing_to_hide(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        exposed.main(["--ranks=1"])
    assert ended.value.code == 2
    assert "nothing to hide" in capsys.readouterr().err
