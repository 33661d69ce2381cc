"""Backward, packing and reduction overlap, seen without a stopwatch; and gradients go while backward still runs."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import Chain, input_of, same_bits
from tests.bucket_manager.test_overlap import NUM_LAYERS, reduced_when_backward_ends
from tests.gpu.chain import MIB, Delay
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

LONG = 1_000_000_000  # cycles: half a second, more or less


class SleepsAtTheEnd(nn.Module):
    """Its backward, when all but the first layer are done, sleeps on the device."""

    def __init__(self, num_layers: int, cycles: int) -> None:
        super().__init__()
        self.first, self.rest, self.cycles = Chain(1, seed=1), Chain(num_layers - 1, seed=2), cycles

    def forward(self, x: Tensor) -> Tensor:
        return self.rest(Delay.apply(self.first(x), self.cycles))


def segments_of(optimizer: FusedShardedAdam) -> dict[Tensor, Tensor]:
    """The mean gradient of each parameter in this rank's shards, as 1-D."""
    found = {}
    for index, bucket in enumerate(optimizer.inside.buckets):
        shard = optimizer.inside.manager.grads.shard(index)
        assert shard is not None
        for segment in bucket.own_segments:
            found[bucket.members[segment.slot].param] = shard[segment.span.start : segment.span.stop]
    return found


def assert_reduced_beside_backward(device: torch.device) -> None:
    """All buckets but the last are there, with the right values, while backward's stream still sleeps."""
    model = SleepsAtTheEnd(8, LONG).to(device)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, bucket_cap_mb=(64 * 64 + 64) * 4 / MIB)
    assert len(optimizer.inside.buckets) == 8
    x = input_of(0, seed=3).to(device)
    params = list(model.rest.parameters())
    expected = [grad.cpu() for grad in torch.autograd.grad(model.rest(model.first(x)).square().sum(), params)]
    # Of a priority that nobody else has, or it could stand in line behind the sleeper in a connection to the device.
    aside = torch.cuda.Stream(device, priority=-1)

    model.cycles = 0
    model(input_of(0, seed=4).to(device)).square().sum().backward()  # loads modules, and leaves other values in memory
    optimizer.zero_grad()
    torch.cuda.synchronize(device)
    model.cycles = LONG
    model(x).square().sum().backward()
    backward_done = torch.cuda.Event()
    backward_done.record()
    shards = segments_of(optimizer)
    for param, grad in zip(params, expected, strict=True):
        reduced, in_time = False, True
        while in_time and not reduced:
            with torch.cuda.stream(aside):  # what lies there now, whether somebody still writes it or not
                values = shards[param].cpu()
            reduced = torch.allclose(values, grad.reshape(-1), rtol=1e-4, atol=1e-5)
            in_time = not backward_done.query()
        assert in_time, "backward's stream was done before"
        assert reduced
    torch.cuda.synchronize(device)


def test_buckets_land_while_backward_s_stream_is_busy(cuda: torch.device) -> None:
    assert_reduced_beside_backward(cuda)


def test_flights_between_ranks_land_while_backward_runs(device: torch.device) -> None:
    for reduced, launched, _ in run_ranks(reduced_when_backward_ends, 2, False, 3.0, device.type):
        assert launched == NUM_LAYERS
        assert reduced >= NUM_LAYERS - 1


def test_overlap_between_ranks_changes_no_bit(device: torch.device) -> None:
    overlapped = run_ranks(reduced_when_backward_ends, 2, False, 3.0, device.type)
    held = run_ranks(reduced_when_backward_ends, 2, True, 0.0, device.type)
    for (_, _, one), (_, _, other) in zip(overlapped, held, strict=True):
        assert len(one) > 0
        assert all(same_bits(a, b) for a, b in zip(one, other, strict=True))


def peak_of_backward(device: torch.device, stage: int, num_layers: int, width: int) -> tuple[int, int]:
    """Bytes that a backward takes at most, and that all gradients have; gradients are halved on the wire."""
    model = Chain(num_layers, width).to(device)
    layer_bytes = (width * width + width) * 4
    optimizer = FusedShardedAdam(
        model.parameters(), stage=stage, reduce_dtype=torch.bfloat16, bucket_cap_mb=layer_bytes / MIB
    )
    x = input_of(0, rows=1, width=width).to(device)
    peak = 0
    for _ in range(3):  # the first brings the library's workspaces
        loss = model(x).square().sum()
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        loss.backward()
        peak = torch.cuda.max_memory_allocated(device) - before
        optimizer.step()
        optimizer.zero_grad()
    return peak, num_layers * layer_bytes


def test_gradients_go_while_backward_runs(cuda: torch.device) -> None:
    """Stage 2 holds what is reduced, here half as wide, and the gradients of a few buckets; stage 1 all of them."""
    num_layers, width = 32, 1024
    peak, gradients = peak_of_backward(cuda, 2, num_layers, width)
    whole, _ = peak_of_backward(cuda, 1, num_layers, width)
    bucket = gradients // num_layers
    assert whole >= gradients - bucket  # what forward saved goes meanwhile
    assert peak <= gradients // 2 + 6 * bucket
    assert peak < 0.75 * whole
