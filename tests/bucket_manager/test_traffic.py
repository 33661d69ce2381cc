"""What crosses the wire, in closed form: each gradient byte once, each parameter byte once."""

from __future__ import annotations

import pytest
import torch

from tests.bucket_manager.rig import LAYER_CAP, WIDTH, Chain, input_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

NUM_LAYERS = 3
Count = tuple[int, int]  # messages, bytes


def traffic_of_one_step(
    rank: int, _: int, stage: int, reduce_dtype: torch.dtype | None, width: int
) -> tuple[list[tuple[int, int]], Count, Count, Count]:
    """(shard_numel, trailer_numel) of each bucket; what was sent by a backward, by a second one, and by step()."""
    model = Chain(NUM_LAYERS, width)
    cap_mb = LAYER_CAP / 2**20
    optimizer = FusedShardedAdam(model.parameters(), stage=stage, bucket_cap_mb=cap_mb, reduce_dtype=reduce_dtype)
    manager = optimizer.inside.manager

    def sent_by(function) -> Count:
        messages, nbytes = manager.traffic
        function()
        optimizer.synchronize()
        return manager.traffic[0] - messages, manager.traffic[1] - nbytes

    def backward() -> None:
        model(input_of(rank, width=width)).square().sum().backward()

    shapes = [(b.plan.layout.shard_numel, b.plan.layout.trailer_numel) for b in optimizer.inside.buckets]
    return shapes, sent_by(backward), sent_by(backward), sent_by(optimizer.step)


def in_closed_form(shapes: list[tuple[int, int]], world_size: int, stage: int, wire_bytes: int) -> tuple[Count, Count]:
    """What a rank sends in backward and in step(): to each other rank one slice, and its own shard, of each bucket."""
    others, param_bytes = world_size - 1, 4
    slices = [(shard + flags) * wire_bytes for shard, flags in shapes]
    shards = [shard * param_bytes for shard, _ in shapes]
    scatter = others * len(shapes), others * sum(slices)
    gather = others * len(shapes), others * sum(shards)
    if stage == 1:  # the mean gradient is gathered as well
        return (scatter[0] + gather[0], scatter[1] + gather[1]), gather
    return scatter, gather


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("reduce_dtype", [None, torch.bfloat16], ids=str)
def test_messages_and_bytes_are_those_of_a_direct_exchange(
    world_size: int, stage: int, reduce_dtype: torch.dtype | None
) -> None:
    results = run_ranks(traffic_of_one_step, world_size, stage, reduce_dtype, WIDTH)
    wire_bytes = (reduce_dtype or torch.float32).itemsize
    for shapes, first, second, step in results:
        assert len(shapes) == NUM_LAYERS
        backward_count, step_count = in_closed_form(shapes, world_size, stage, wire_bytes)
        assert first == second == backward_count
        assert step == step_count


def test_stage_1_sends_one_and_a_half_times_the_bytes_of_stage_2() -> None:
    totals = {}
    for stage in (1, 2):
        _, backward, _, step = run_ranks(traffic_of_one_step, 2, stage, None, 256)[0]
        totals[stage] = backward[1] + step[1]
    assert totals[1] / totals[2] == pytest.approx(1.5, rel=0.01)  # flags and padding are the rest
    params = sum(p.numel() * 4 for p in Chain(NUM_LAYERS, 256).parameters())
    assert totals[2] == pytest.approx(2 * params * (2 - 1) / 2, rel=0.02)
