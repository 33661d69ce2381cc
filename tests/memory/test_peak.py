"""The most bytes of a step at one time, from the allocator of a rank, beside zerox.estimate: within 2%."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from bench.allocator import Allocator, build
from tests.lingering import await_lingering
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam, MemoryBytes, estimate
from zerox.options import OptimizerOptions, Planned
from zerox.plan import buckets

WIDTH, CAP_MB = 512, 4.0
DEFAULT_WIDTH = 1024  # with four times as much of everything, for buckets of the default size
WITHIN = 0.02
SMALL_THINGS = 256 * 1024  # activations, tables, step counts, messages


class Wide(nn.Module):
    """46 matrices, of which four make a bucket in float32: whether the wire stalls is then the most that 2% leave room
    for; tiny activations."""

    def __init__(self, dtype: torch.dtype, width: int = WIDTH) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.utils.skip_init(nn.Linear, width, width, bias=False, dtype=dtype) for _ in range(42)
        )
        self.head = nn.utils.skip_init(nn.Linear, width, 4 * width, bias=False, dtype=dtype)
        for param in self.parameters():
            nn.init.zeros_(param)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return self.head(x).float().square().mean()


KINDS: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "fp32, bf16 moments": (torch.float32, {"state_dtype": torch.bfloat16}),
    "fp32, 8-bit moments": (torch.float32, {"state_dtype": "8bit"}),
    "bf16 no master": (torch.bfloat16, {"master_weights": None}),
    "bf16 fp32": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16 remainder": (torch.bfloat16, {"master_weights": "remainder"}),
    # The bound is for a bucket that is reduced while the next is being packed, half a bucket more than what happens
    # here. Beside state this small that is over 2% with buckets of 4 MiB.
    "bf16 remainder, 8-bit moments": (
        torch.bfloat16,
        {"master_weights": "remainder", "state_dtype": "8bit", "bucket_cap_mb": 2},
    ),
    "fp16 fp32": (torch.float16, {}),
}


@contextmanager
def of_width(width: int) -> Iterator[None]:
    """Gradients are large, and sent without a copy, where those of the default width are."""
    times = (DEFAULT_WIDTH // width) ** 2
    large = {name: getattr(buckets, name) // times for name in ("ZERO_COPY_BYTES", "ZERO_COPY_SLICE_BYTES")}
    with patch.multiple(buckets, **large):
        yield


def measure(
    rank: int,
    world_size: int,
    library: Path,
    wire: str,
    dtype: torch.dtype,
    options: dict[str, Any],
    exchange: str = "direct",
    mesh: tuple[int, int] | None = None,
    width: int = WIDTH,
) -> tuple[int, int, MemoryBytes]:
    """The peak of a step, what is allocated while the wire stalls, and the formula.

    ``wire``: it "stalls" until rank 0's backward has ended, "keeps up" (a bucket is reduced before the next one's
    gradients are there), or is left "free".
    """
    allocator = Allocator(library)
    await_lingering()
    base = allocator.now
    model = Wide(dtype, width)
    options = {"bucket_cap_mb": CAP_MB if width == WIDTH else None, "exchange": exchange, **options}
    with of_width(width):
        group = None if mesh is None else init_device_mesh("cpu", mesh)
        optimizer = FusedShardedAdam(model.parameters(), process_group=group, **options)
    manager = optimizer.inside.manager
    stalled: list[int] = []

    def step() -> None:
        if wire == "stalls" and rank > 0:
            dist.barrier()  # until rank 0's gradients are all there
        model(torch.ones(1, width, dtype=dtype)).backward()
        if wire == "stalls" and rank == 0:
            wait_until_quiet(allocator)
            stalled.append(allocator.now - base)
            dist.barrier()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()

    def wait_for_flights(_: Tensor) -> None:
        while manager.flights.num_reduced < manager.flights.num_launched:
            time.sleep(0.0005)

    if wire == "keeps up":
        for param in model.parameters():
            param.register_post_accumulate_grad_hook(wait_for_flights)
    peak = allocator.peak_of(step) - base
    with of_width(width):
        formula = estimate(model.parameters(), world_size, mesh_shape=mesh, **options)
    return peak, stalled[0] if stalled else 0, formula


def wait_until_quiet(allocator: Allocator) -> None:
    """Until the workers have allocated what they can without the other ranks."""
    last, since = allocator.now, time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.01)
        if allocator.now != last:
            last, since = allocator.now, time.monotonic()


def assert_near(measured: int, formula: int) -> None:
    assert abs(measured - formula) <= WITHIN * formula, f"{measured:,} bytes and not {formula:,}"


FEW = ("fp32", "bf16 fp32", "bf16 remainder, 8-bit moments")


@pytest.mark.parametrize(("kind", "stage"), thinned(KINDS, FEW, [1, 2], [2]))
def test_peak_of_a_step_is_the_estimate_of_each_stage_master_and_state(stage: int, kind: str) -> None:
    dtype, options = KINDS[kind][0], {"stage": stage, **KINDS[kind][1]}
    wire = "stalls" if stage == 2 else "free"  # in stage 1 backward ends when everything has been reduced
    (peak, stalled, formula), (other_peak, _, _) = run_ranks(measure, 2, build(), wire, dtype, options)
    assert_near(peak, formula.peak)
    if wire == "stalls":  # two buckets, of the same size as all but the last, have left for their buffers
        zero_copy = "reduce_dtype" not in options  # then they wait in their own place
        in_buckets = formula.local_gradients - (0 if zero_copy else 2 * formula.typical_local_gradients)
        expected = formula.lasting - formula.gradients + in_buckets + formula.exchange
        assert expected <= stalled <= expected + SMALL_THINGS
    assert (1 - WITHIN) * formula.typical_peak <= other_peak <= (1 + WITHIN) * formula.peak


@pytest.mark.parametrize("kind", ["fp32", "bf16 remainder, 8-bit moments"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 3])
def test_peak_of_a_step_is_the_estimate_at_each_world_size(world_size: int, stage: int, kind: str) -> None:
    dtype, options = KINDS[kind][0], {"stage": stage, **KINDS[kind][1]}
    wire = "stalls" if stage == 2 and world_size > 1 else "free"
    peak, _, formula = run_ranks(measure, world_size, build(), wire, dtype, options)[0]
    assert_near(peak, formula.peak)


@pytest.mark.parametrize("world_size", [1, 2])
def test_peak_of_a_step_is_the_estimate_with_buckets_of_the_default_size(world_size: int) -> None:
    wire = "stalls" if world_size > 1 else "free"
    found = run_ranks(measure, world_size, build(), wire, torch.float32, {}, "direct", None, DEFAULT_WIDTH)
    peak, _, formula = found[0]
    assert_near(peak, formula.peak)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_peak_of_a_step_is_the_estimate_where_gradients_are_received(world_size: int, stage: int) -> None:
    wire, options = "stalls" if stage == 2 else "free", {"stage": stage}
    peak, _, formula = run_ranks(measure, world_size, build(), wire, torch.float32, options, "messages")[0]
    assert_near(peak, formula.peak)


@pytest.mark.parametrize("exchange", ["direct", "messages"])
@pytest.mark.parametrize(("stage", "kind"), [(2, "fp32"), (2, "bf16 fp32"), (1, "fp32")])
def test_peak_of_a_step_is_the_estimate_on_a_mesh(stage: int, kind: str, exchange: str) -> None:
    """Small buckets, as above: the bound is for one that is reduced, with its sums, while the next is being packed."""
    dtype, options = KINDS[kind][0], {"stage": stage, "bucket_cap_mb": 1, **KINDS[kind][1]}
    for wire in ("stalls", "keeps up") if stage == 2 else ("free",):
        found = run_ranks(measure, 4, build(), wire, dtype, options, exchange, (2, 2))
        peak, _, formula = found[0]
        assert_near(peak, formula.typical_peak if wire == "keeps up" else formula.peak)


@pytest.mark.parametrize(
    ("dtype", "options"), [(torch.float32, {}), (torch.bfloat16, {"reduce_dtype": torch.float32})], ids=str
)
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_peak_where_the_wire_keeps_up(world_size: int, dtype: torch.dtype, options: dict[str, Any]) -> None:
    for peak, _, formula in run_ranks(measure, world_size, build(), "keeps up", dtype, options):
        assert_near(peak, formula.typical_peak)


def construct(_: int, world_size: int, library: Path, dtype: torch.dtype) -> tuple[int, MemoryBytes, int]:
    allocator = Allocator(library)
    await_lingering()
    base = allocator.now
    model = Wide(dtype, DEFAULT_WIDTH)
    peak = allocator.peak_of(lambda: FusedShardedAdam(model.parameters())) - base
    params = list(model.parameters())
    plans = OptimizerOptions().plan([Planned("", param, "adam") for param in params], "gloo", world_size)
    return peak, estimate(params, world_size), max(plan.layout.numel * dtype.itemsize for plan in plans)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_construction_takes_one_bucket_extra_at_most(world_size: int, dtype: torch.dtype) -> None:
    for peak, formula, bucket in run_ranks(construct, world_size, build(), dtype):
        assert formula.lasting - formula.gradients <= peak
        assert peak <= formula.parameters + formula.master + formula.moments + bucket + SMALL_THINGS
