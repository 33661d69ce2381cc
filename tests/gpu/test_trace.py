"""A profile counts what happened: ranges of each bucket, ops and the device's kernels, each against a closed form.

S steps over B buckets, R backwards of each step exchange, C = 1 where they clip, else 0. What no_sync() keeps back adds
nothing, and neither do more ranks or more parameters in a bucket. Tests of CUDA alone hold the kernels to the form of
the ops that launch them, which the others hold on any device.
"""

from __future__ import annotations

import itertools
import re
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import Mock, patch

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

import zerox.engine
from bench.trace import KERNEL, profile_all_threads, ranges_of
from tests.gpu.chain import MIB, Scales, batch_of
from tests.gpu.processes import run_processes
from tests.gpu.test_nccl import BACKEND, TIMEOUT_S, ranks_of_one
from tests.gpu.twins import DEVICE
from tests.optimizer.test_ranges import OF_A_FLIGHT, OF_WHOLE_GRADS
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.ranks.exchange import EXCHANGES

ROOT = Path(__file__).parents[2]
BUCKET_NUMEL = 16_384
# The kernels of csrc/cuda that each op launches.
KERNELS = {
    "flatten_": ("flatten",),
    "read_flags_": ("read_flags",),
    "reduce_": ("reduce", "carry"),
    "norm_": ("norm", "carry"),
    "norm_value": ("norm_value",),
    "update_": ("fold", "update"),
    "update_rows_": ("update_rows",),
}
EIGHT_BIT = {"update": "update_block"}  # in place of the other


@dataclass(frozen=True)
class Work:
    """``steps`` steps; in each, ``backwards`` that exchange, and in front of each another one in no_sync()."""

    stage: int
    backwards: int = 1
    clips: bool = True
    state_dtype: torch.dtype | str = torch.float32
    buckets: int = 3
    params_in_bucket: int = 2
    steps: int = 2

    def __str__(self) -> str:
        clips, moments = "clip" if self.clips else "no clip", f"{self.state_dtype}".removeprefix("torch.")
        return f"stage {self.stage}, {self.backwards} x {self.params_in_bucket}, {clips}, {moments}"


WORKS = [
    *(Work(2), Work(1), Work(2, backwards=2), Work(1, backwards=2, clips=False), Work(2, clips=False)),
    *(Work(1, params_in_bucket=16), Work(2, params_in_bucket=16), Work(2, state_dtype="8bit")),
]


def expected_ranges(work: Work, exchanges: bool) -> Counter[tuple[str, int | None]]:
    """Where ranks exchange, for each bucket:

        launch, pack, land, wait, reduce, let_go    S * R
        gather_grads, gather_grads_wait             S * R in stage 1
        update, gather, gather_wait                 S

    and for all of them together S * (1 + C) times settle and agree, in stage 1 S * R more. One rank alone waits
    for no messages and for no gather, and in stage 1 launches nothing either.
    """
    of_a_step = ["update", "gather", "gather_wait"] if exchanges else ["update", "gather"]
    of_a_backward: list[str] = []
    if exchanges:
        of_a_backward += OF_A_FLIGHT if work.stage == 2 else OF_A_FLIGHT + OF_WHOLE_GRADS
    elif work.stage == 2:
        of_a_backward += ["launch", "pack", "land", "reduce"]
    sync_points = work.steps * (1 + work.clips)
    if exchanges and work.stage == 1:
        sync_points += work.steps * work.backwards
    expected: Counter[tuple[str, int | None]] = Counter({("settle", None): sync_points, ("agree", None): sync_points})
    for bucket in range(work.buckets):
        expected.update({(what, bucket): work.steps for what in of_a_step})
        expected.update({(what, bucket): work.steps * work.backwards for what in of_a_backward})
    return expected


def expected_ops(work: Work, exchanges: bool) -> Counter[str]:
    """Where ranks exchange, of all buckets together:

        flatten_        S * R * B, and S * (1 + C) * B more in stage 1, where who reads the shard packs it first
        read_flags_     S * R * B
        reduce_         S * R * B
        norm_           S * C * B in stage 1; in stage 2 the reduction leaves the sum
        norm_value      S * C
        update_         S * B on the CPU, S elsewhere, where buckets as small as these are updated together

    One rank alone reduces what is added to something, S * (R - 1) * B, and takes norms where that is nothing. In stage
    1 it has no flights: then these, the flags and S * R * B of flatten_ fall away.
    """
    of_all = work.steps * work.buckets
    flights = of_all * work.backwards if exchanges or work.stage == 2 else 0
    added = 0 if work.stage == 1 else of_all * (work.backwards - 1)
    reductions = flights if exchanges else added
    on_cpu = DEVICE.type == "cpu"
    sums_are_there = work.stage == 2 and reductions > 0
    return +Counter(
        {
            "flatten_": flights + (of_all * (1 + work.clips) if work.stage == 1 else 0),
            "read_flags_": flights,
            "reduce_": reductions,
            "norm_": 0 if sums_are_there else of_all * work.clips,
            "norm_value": work.steps * work.clips,
            "update_": of_all if on_cpu else work.steps,
        }
    )


def expected_kernels(work: Work, exchanges: bool) -> Counter[str]:
    found: Counter[str] = Counter()
    replaced = EIGHT_BIT if work.state_dtype == "8bit" else {}
    for op, count in expected_ops(work, exchanges).items():
        found.update({replaced.get(kernel, kernel): count for kernel in KERNELS[op]})
    return found


# ---- what a profile shows


def names_of(profiled: profile, device_type: DeviceType) -> Iterator[str]:
    """Of everything that happened there, but for ranges, which a profiler draws on an accelerator too."""
    assert profiled.profiler is not None
    assert profiled.profiler.kineto_results is not None
    for event in profiled.profiler.kineto_results.events():
        if event.device_type() == device_type and not event.is_user_annotation():
            yield event.name()


def ops_of(profiled: profile) -> Counter[str]:
    names = (name.partition("::") for name in names_of(profiled, DeviceType.CPU))
    return Counter(op for library, _, op in names if library == "zerox")


def kernels_of(profiled: profile) -> Counter[str]:
    """Launches of csrc/cuda's kernels: "flatten" for flatten_kernel, whatever its template arguments."""
    found = (KERNEL.search(name) for name in names_of(profiled, DeviceType.CUDA))
    return Counter(kernel[1] for kernel in found if kernel)


def profile_device() -> profile:
    of_device = [ProfilerActivity.CUDA] if DEVICE.type == "cuda" else []
    return profile(activities=[ProfilerActivity.CPU, *of_device])


def finish_device() -> None:
    if DEVICE.type == "cuda":
        torch.cuda.synchronize()


def what_a_profiler_lacks() -> str | None:
    """Why nothing can be said of kernels."""
    if DEVICE.type != "cuda":
        return None
    with profile_device() as seen:
        torch.ones(10, device=DEVICE)
        finish_device()
    return None if any(names_of(seen, DeviceType.CUDA)) else "torch's profiler sees no kernel of the device at all"


class Training:
    def __init__(self, rank: int, work: Work) -> None:
        self.work = work
        numel = BUCKET_NUMEL // work.params_in_bucket
        self.model = Scales(work.buckets * work.params_in_bucket, numel).to(DEVICE)
        options: dict[str, Any] = {"stage": work.stage, "state_dtype": work.state_dtype}
        self.optimizer = FusedShardedAdam(self.model.parameters(), bucket_cap_mb=BUCKET_NUMEL * 4 / MIB, **options)
        assert len(self.optimizer.inside.buckets) == work.buckets
        self.x = batch_of(rank, 0, numel).to(DEVICE)
        self.train(2)  # learns the order of buckets, loads modules

    def train(self, steps: int) -> None:
        for _ in range(steps):
            self.backward()
            self.update()

    def backward(self) -> None:
        for _ in range(self.work.backwards):
            with self.optimizer.no_sync():
                self.model(self.x).square().sum().backward()
            self.model(self.x).square().sum().backward()

    def update(self) -> None:
        if self.work.clips:
            self.optimizer.clip_grad_norm_(0.1)
        self.optimizer.step()
        self.optimizer.zero_grad()


@dataclass
class Counts:
    ranges: Counter[tuple[str, int | None]]
    ops: Counter[str]
    kernels: Counter[str]
    lacks: str | None  # why kernels can't be counted


def counts_of(rank: int, _: int, work: Work) -> Counts:
    training = Training(rank, work)
    with profile_all_threads() as on_host:
        training.train(work.steps)
    lacks = what_a_profiler_lacks()
    finish_device()
    with profile_device() as on_device:
        training.train(work.steps)
        finish_device()
    ranges = Counter((each.what, each.bucket) for each in ranges_of(on_host))
    return Counts(ranges, ops_of(on_host), kernels_of(on_device), lacks)


def counts_with_itself(rank: int, world_size: int, works: list[Work]) -> list[tuple[str, Work, Counts]]:
    """Of one rank that sends everything through its backend, with each exchange."""
    found = []
    for exchange, work in itertools.product(EXCHANGES, works):
        with patch.object(zerox.engine, "find_ranks", lambda *_, exchange=exchange: ranks_of_one(exchange)):
            found.append((exchange, work, counts_of(rank, world_size, work)))
    return found


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_ranges_and_ops_are_those_of_the_closed_form(device: torch.device, world_size: int, work: Work) -> None:
    for counts in run_ranks(counts_of, world_size, work):
        assert counts.ranges == expected_ranges(work, exchanges=world_size > 1)
        assert counts.ops == expected_ops(work, exchanges=world_size > 1)


@pytest.mark.parametrize("work", WORKS, ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_kernels_are_those_of_the_closed_form(cuda: torch.device, world_size: int, work: Work) -> None:
    for counts in run_ranks(counts_of, world_size, work):
        if counts.lacks:
            pytest.skip(counts.lacks)
        assert counts.kernels == expected_kernels(work, exchanges=world_size > 1)


def test_a_backend_s_collectives_change_none_of_it(device: torch.device) -> None:
    [found] = run_processes(counts_with_itself, 1, WORKS[:3], backend=BACKEND, timeout_s=2 * TIMEOUT_S)
    assert len(found) == 3 * len(EXCHANGES)
    for exchange, work, counts in found:
        assert counts.ranges == expected_ranges(work, exchanges=True), exchange
        assert counts.ops == expected_ops(work, exchanges=True), exchange
        if DEVICE.type == "cuda" and not counts.lacks:
            assert counts.kernels == expected_kernels(work, exchanges=True), exchange


def update_of(rank: int, _: int, work: Work) -> tuple[Counter[str], int, str | None]:
    """After a backward: operators of the thread that updates, by name, how much the device did, and what is lacking."""
    training = Training(rank, work)
    lacks = what_a_profiler_lacks()
    training.backward()
    training.optimizer.synchronize()
    finish_device()
    with profile_device() as seen:
        training.update()
        finish_device()
    operators = Counter(name for name in names_of(seen, DeviceType.CPU) if "::" in name)
    return operators, sum(1 for _ in names_of(seen, DeviceType.CUDA)), lacks


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2])
def test_an_update_is_the_same_for_more_params_in_a_bucket(device: torch.device, world_size: int, stage: int) -> None:
    """Operator for operator on the host, and in number on the device, copies and kernels of torch's too."""
    few, many = (run_ranks(update_of, world_size, Work(stage, params_in_bucket=count)) for count in (2, 16))
    for (operators, on_device, lacks), (more_operators, more_on_device, _) in zip(few, many, strict=True):
        assert operators["zerox::norm_value"] == 1
        assert more_operators == operators
        if DEVICE.type == "cuda" and not lacks:
            assert on_device > 0
            assert more_on_device == on_device


# ---- the counting itself


def profile_with(*events: tuple[str, DeviceType, bool]) -> Any:
    """As torch's profiler, with (name, device type, whether it is a range)."""
    keys = ("name.return_value", "device_type.return_value", "is_user_annotation.return_value")
    made = [Mock(**dict(zip(keys, event, strict=True))) for event in events]
    return Mock(**{"profiler.kineto_results.events.return_value": made})


OURS = [  # some cut short
    ("read_flags", "_ZN2zx4cuda41_GLOBAL__N__a57df4db_9_reduce_cu_96c9550017read_flags_kernelIjEEvNS1_13ReadFlagsA"),
    ("update", "_ZN2zx4cuda13update_kernelINS0_10UpdateArgsINS_4AdamENS0_10SplitParamENS_4bf16ES4_EEEEvNS0_8Toge"),
    ("reduce", "void zx::cuda::(anonymous namespace)::reduce_kernel<float, zx::f16, true>(zx::cuda::ReduceArgs)"),
    ("norm", "void zx::cuda::(anonymous namespace)::norm_kernel<zx::f16, (zx::Norm)3>(zx::cuda::NormArgs<zx::f16>)"),
    ("norm_value", "zx::cuda::(anonymous namespace)::norm_value_kernel(zx::cuda::(anonymous namespace)::ValueArgs)"),
    ("carry", "zx::cuda::_GLOBAL__N__8a2a5fea_7_norm_cu_0bdabbca::carry_kernel(zx::cuda::CarryArgs)"),
    ("update", "void zx::cuda::update_kernel<zx::cuda::UpdateArgs<zx::Adam, zx::cuda::PlainParam<float>, float, flo"),
]
OTHERS = [
    "void at::native::reduce_kernel<512, 1, at::native::ReduceOp<float> >(at::native::ReduceOp<float>)",
    "_ZN2at6native13reduce_kernelILi512ELi1ENS0_8ReduceOpIfEEEEvT1_",
    "Memcpy HtoD (Pinned -> Device)",
]


def test_kernels_are_told_from_others_by_their_names(device: torch.device) -> None:
    names = [name for _, name in OURS] + OTHERS
    assert kernels_of(profile_with(*((name, DeviceType.CUDA, False) for name in names))) == Counter(k for k, _ in OURS)
    assert not kernels_of(profile_with(*((name, DeviceType.CPU, False) for name in names)))


def test_a_range_is_no_kernel_and_no_op(device: torch.device) -> None:
    seen = profile_with(
        ("zerox::update_", DeviceType.CPU, False),
        ("aten::add", DeviceType.CPU, False),
        ("cudaLaunchKernel", DeviceType.CPU, False),
        ("zerox::settle", DeviceType.CPU, True),
        ("zerox::reduce bucket 0", DeviceType.CUDA, True),
        (OURS[0][1], DeviceType.CUDA, False),
    )
    assert ops_of(seen) == {"update_": 1}
    assert list(names_of(seen, DeviceType.CUDA)) == [OURS[0][1]]


def test_every_kernel_that_there_is_has_an_op_that_launches_it(device: torch.device) -> None:
    """By the sources, and by the names that nvcc gave in tests/cuda/kernel_resources.txt."""
    known = {*itertools.chain(*KERNELS.values()), *EIGHT_BIT.values()}
    sources = [path.read_text() for path in (ROOT / "csrc/cuda").glob("*.cu*")]
    assert {name for text in sources for name in re.findall(r"__global__ .*?(\w+)_kernel\(", text)} == known
    table = (ROOT / "tests/cuda/kernel_resources.txt").read_text().splitlines()
    names = ["zx::" + line for line in table if line.startswith("cuda::")]
    counted = kernels_of(profile_with(*((name, DeviceType.CUDA, False) for name in names)))
    assert counted.keys() == known
    assert counted.total() == len(names)
