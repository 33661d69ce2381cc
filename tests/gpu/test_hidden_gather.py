"""The gather hides under the next forward: what is computed first waits for its own parameters only, and what is on
its way to later layers arrives meanwhile. Shown by what is there when, without a stopwatch."""

from __future__ import annotations

import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Lines, Scales, batch_of, sleep
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

LAYERS, NUMEL = 5, 5000
ORDER = [4, 3, 2, 1, 0]  # of buckets in forward: the last layer has the first one
WARM_UP = 3  # steps: gathers are in the order of the forward by then
LONG = 1_000_000_000  # cycles: half a second, more or less
PATIENCE_S = 30.0  # for what comes at once, unless it never comes


class Trained:
    """Some steps of layers in a row, each a bucket, and another backward."""

    def __init__(self, rank: int, device: torch.device, overlap: bool) -> None:
        self.device, self.lines = device, Lines(device, 1)
        self.x = batch_of(rank, 0, NUMEL).to(device)
        self.model = nn.Sequential(*(Scales(1, NUMEL, seed) for seed in range(LAYERS))).to(device)
        self.optimizer = FusedShardedAdam(self.model.parameters(), lr=1e-2, bucket_cap_mb=NUMEL * 4 / MIB)
        assert len(self.optimizer.inside.buckets) == LAYERS
        if overlap:
            self.optimizer.overlap_gather(self.model)
        self.backward()
        for _ in range(WARM_UP):
            self.optimizer.step()
            self.backward()
        sleep(device, 1)  # loads it
        self.lines.synchronize()

    def backward(self) -> None:
        self.optimizer.zero_grad()
        self.model(self.x).square().sum().backward()

    @property
    def used(self) -> list[int]:
        """Buckets that somebody has waited for, as all do who read, since the last step."""
        return list(self.optimizer.inside.manager.params.order_of_use)

    def look_at(self, bucket: int) -> Tensor:
        """Parameters as they lie there now: on a stream of its own, unseen by what makes readers wait."""
        torch.autograd._enable_record_function(False)
        try:
            with self.lines.on(0):
                return self.optimizer.inside.buckets[bucket].buffer.flat.to("cpu", copy=True)
        finally:
            torch.autograd._enable_record_function(True)


def hold_back_all_but_the_first(trained: Trained) -> None:
    """The next step's gathers start late: when all ranks have synchronized, and then each after a sleep of its own."""
    start = trained.optimizer.inside.gather.start

    def start_late(index: int, background: bool = False) -> None:
        if index == ORDER[1]:
            dist.barrier()
        if index != ORDER[0]:
            sleep(trained.device, LONG // 20)
            time.sleep(0.02)
        start(index, background)

    trained.optimizer.inside.gather.start = start_late  # type: ignore[method-assign]


def first_layer_ahead_of_gathers(rank: int, _: int, device_type: str) -> dict[str, Any]:
    """Rank 1 sends nothing but the first layer's parameters until rank 0 has computed that layer, and then met it."""
    device = torch.device(device_type)
    plain, ours = Trained(rank, device, overlap=False), Trained(rank, device, overlap=True)
    plain.optimizer.step()
    plain.lines.synchronize()
    before = [ours.look_at(bucket) for bucket in ORDER]
    seen: dict[str, Any] = {"order": ours.optimizer.inside.manager.params.order}

    def look(_: nn.Module, __: Any, output: Tensor) -> None:
        if device.type == "cuda":
            computed = torch.cuda.Event()
            computed.record()
            computed.synchronize()
        seen["used"] = ours.used
        seen["first"] = same_bits(output, plain.model[0](plain.x))
        now = [ours.look_at(bucket) for bucket in ORDER]
        of_rank_1 = slice(len(now[0]) // 2, None)
        seen["stale"] = [same_bits(a[of_rank_1], b[of_rank_1]) for a, b in zip(now, before, strict=True)]
        dist.barrier()

    if rank == 0:
        hook = ours.model[0].register_forward_hook(look)
    else:
        hold_back_all_but_the_first(ours)
    ours.optimizer.step()
    output = ours.model(ours.x)
    seen["used afterwards"] = ours.used
    seen["result"] = same_bits(output, plain.model(plain.x))
    if rank == 0:
        hook.remove()
    ours.optimizer.synchronize()
    seen["params"] = [same_bits(p, q) for p, q in zip(ours.model.parameters(), plain.model.parameters(), strict=True)]
    return seen


def test_the_first_layer_is_computed_before_later_gathers_are_even_sent(device: torch.device) -> None:
    """On the device, whose work a host can only wait for. Were anything waited for too early, none would go on."""
    first_rank, second_rank = run_ranks(first_layer_ahead_of_gathers, 2, device.type, timeout_s=PATIENCE_S)
    assert first_rank["used"] == ORDER[:1]
    assert first_rank["stale"] == [False, *[True] * (LAYERS - 1)]
    assert first_rank["first"]
    for seen in (first_rank, second_rank):
        assert seen["order"] == seen["used afterwards"] == ORDER
        assert seen["result"], "the forward read what had not arrived"
        assert all(seen["params"])


def gathers_under_the_first_layer(rank: int, _: int, device_type: str, cycles: int, held: bool) -> tuple[bool, bool]:
    """Whether everything had come before the first layer was computed, and whether the forward's result is right.

    On an accelerator, where that layer sleeps for ``cycles``: whether the host, which waits for what the wire brings
    before it puts a later layer in line, has done so for all of them. Only copies and layers are in line then. On the
    CPU the layer lasts until all is there, for PATIENCE_S at most.
    """
    device = torch.device(device_type)
    plain, ours = Trained(rank, device, overlap=False), Trained(rank, device, overlap=True)
    plain.optimizer.step()
    plain.lines.synchronize()
    expected = [plain.look_at(bucket) for bucket in ORDER]
    ours.optimizer.inside.manager.params.hold_back(held)
    on_time = [False]
    computed = torch.cuda.Event() if device.type == "cuda" else None

    def take_long(_: nn.Module, __: Any) -> None:
        sleep(device, cycles)
        stop = time.monotonic() + PATIENCE_S / (20 if held else 1)
        while computed is None and not on_time[-1] and time.monotonic() < stop:
            time.sleep(0.001)
            now = [ours.look_at(bucket) for bucket in ORDER]
            on_time.append(all(same_bits(a, b) for a, b in zip(now, expected, strict=True)))

    def note(_: nn.Module, __: Any, ___: Tensor) -> None:
        if computed is not None:
            computed.record()

    hooks = [ours.model[0].register_forward_pre_hook(take_long), ours.model[0].register_forward_hook(note)]
    ours.optimizer.step()
    output = ours.model(ours.x)
    if computed is not None:
        on_time.append(not computed.query() and ours.used == ORDER)
    for hook in hooks:
        hook.remove()
    right = same_bits(output, plain.model(plain.x))
    ours.optimizer.synchronize()
    return on_time[-1], right


def all_arrive(device: torch.device, cycles: int, held: bool = False) -> bool:
    results = run_ranks(gathers_under_the_first_layer, 2, device.type, cycles, held)
    assert all(right for _, right in results)
    return all(on_time for on_time, _ in results)


def test_a_first_layer_that_takes_long_hides_the_gathers_of_the_others(device: torch.device) -> None:
    """However long: a host that waits for the device is never done before it, and a slow machine only needs longer."""
    assert any(all_arrive(device, times * LONG) for times in (1, 4, 16))


def test_gathers_held_back_are_not_hidden(device: torch.device) -> None:
    """The test above measures what it says: without the worker that takes gathers in, it fails."""
    if device.type != "cpu":
        pytest.skip("an accelerator has no worker for gathers, and holds nothing back")
    assert not all_arrive(device, LONG, held=True)
