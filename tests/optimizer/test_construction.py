"""What construction does to parameters and buffers, and that it leaves the user's process group alone."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of, same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

NUM_LAYERS, WIDTH = 6, 256
SMALL_THINGS = 64 * 1024  # tables, messages


def bytes_over_time(prof: Any) -> list[int]:
    """Bytes that the allocator has handed out since the profile began, after each event."""
    events = [event for event in prof.profiler.kineto_results.events() if event.name() == "[memory]"]
    total, seen = 0, []
    for event in sorted(events, key=lambda event: event.start_ns()):
        total += event.nbytes()
        seen.append(total)
    return seen


def construct(rank: int, world_size: int, dtype: torch.dtype) -> tuple[int, int]:
    """Bytes that construction needed beyond what it keeps; bytes of the largest bucket."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as prof:
        # Made inside: of what was allocated before, the profile doesn't see the end.
        params = [nn.Parameter(torch.ones(WIDTH, WIDTH, dtype=dtype)) for _ in range(NUM_LAYERS)]
        optimizer = FusedShardedAdam(params, bucket_cap_mb=WIDTH * WIDTH * dtype.itemsize / 2**20)
    assert len(optimizer.inside.buckets) == NUM_LAYERS
    seen = bytes_over_time(prof)
    return max(seen) - seen[-1], max(bucket.buffer.flat.nbytes for bucket in optimizer.inside.buckets)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_move_with_one_bucket_of_memory_to_spare(world_size: int, dtype: torch.dtype) -> None:
    for extra, bucket_bytes in run_ranks(construct, world_size, dtype):
        assert extra <= bucket_bytes + SMALL_THINGS


class Various(nn.Module):
    """Parameters and buffers of many dtypes and strides, all of one value."""

    def __init__(self, value: int) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4)
        self.norm.weight.data.fill_(float(value))
        self.norm.running_mean.fill_(float(value))
        self.strided = nn.Parameter(torch.full((6, 5), float(value)).t())
        self.narrow = nn.Parameter(torch.full((3,), float(value), dtype=torch.bfloat16))
        self.frozen = nn.Parameter(torch.full((6, 5), float(value)).t(), requires_grad=False)
        self.frozen_scalar = nn.Parameter(torch.tensor(float(value), dtype=torch.float16), requires_grad=False)
        for dtype in (torch.int16, torch.int64, torch.bool, torch.complex64, torch.float8_e4m3fn, torch.float64):
            self.register_buffer(str(dtype).partition(".")[2], torch.full((3,), value).to(dtype))
        self.register_buffer("strange", torch.full((4, 3), float(value)).t()[::2])
        self.register_buffer("count", torch.tensor(value))
        self.register_buffer("nothing", torch.empty(0, 2))


def same_bytes(tensors: list[Tensor], others: list[Tensor]) -> bool:
    pairs = zip(tensors, others, strict=True)
    return all(torch.equal(*(t.detach().contiguous().reshape(-1).view(torch.uint8) for t in pair)) for pair in pairs)


def values_of_rank_0(rank: int, world_size: int) -> list[bool]:
    """The group is ranks 1 and 2: its rank 0 is the world's rank 1."""
    model = Various(2 * rank)
    group = dist.new_group([1, 2])
    if rank == 0:
        return []
    optimizer = FusedShardedAdam(model.named_parameters(), process_group=group)
    own, expected = Various(2 * rank), Various(2)
    same = [
        same_bytes(list(model.parameters()), list(expected.parameters())),
        same_bytes(list(model.buffers()), list(own.buffers())),
    ]
    optimizer.broadcast_buffers(model)
    return [*same, same_bytes(list(model.buffers()), list(expected.buffers()))]


def test_parameters_take_the_values_of_the_groups_rank_0_frozen_ones_too_and_buffers_when_asked() -> None:
    assert run_ranks(values_of_rank_0, 3) == [[], [True] * 3, [True] * 3]


class SumOverRanks(torch.autograd.Function):
    """As SyncBatchNorm: the user's collectives, in forward and in backward, over the default group."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        total = x.clone()
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        everyone = [torch.empty_like(grad) for _ in range(dist.get_world_size())]
        dist.all_gather(everyone, grad.contiguous())
        return torch.stack(everyone).sum(0)


def train_with_collectives(rank: int, world_size: int, stage: int, ours: bool) -> list[Tensor]:
    """With zerox, or with gradients averaged by hand after backward, where nothing can mis-pair."""
    model = Chain(4)
    params = list(model.parameters())
    counted = torch.zeros(())

    def count(_: Tensor) -> None:  # one more, while flights are on their way
        dist.all_reduce(counted)

    if ours:
        optimizer: Any = FusedShardedAdam(params, lr=1e-2, eps=1e-3, stage=stage, bucket_cap_mb=LAYER_CAP / 2**20)
    else:
        optimizer = torch.optim.AdamW(params, lr=1e-2, eps=1e-3, foreach=False)
    for param in params:
        param.register_post_accumulate_grad_hook(count)
    for step in range(3):
        x = input_of(rank, step)
        for layer in model.layers:
            x = SumOverRanks.apply(layer(x).tanh())
        x.square().mean().backward()
        if not ours:
            for param in params:
                dist.all_reduce(param.grad)
                param.grad /= world_size
        optimizer.step()
        optimizer.zero_grad()
    assert int(counted) == 0
    return [p.detach() for p in params]


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_collectives_of_the_users_in_forward_and_backward_never_mis_pair(world_size: int, stage: int) -> None:
    results = run_ranks(train_with_collectives, world_size, stage, True)
    by_hand = run_ranks(train_with_collectives, world_size, stage, False)
    for params, expected in zip(results, by_hand, strict=True):
        assert all(same_bits(a, b) for a, b in zip(params, results[0], strict=True))
        for p, q in zip(params, expected, strict=True):
            torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-6)


def own_group(rank: int, world_size: int) -> list[bool]:
    """zerox's group has the user's ranks in the user's order, and the user's timeout, and is another one."""
    optimizer = FusedShardedAdam([nn.Parameter(torch.ones(3))])
    ranks = optimizer.inside.ranks
    assert ranks is not None
    world = dist.group.WORLD
    group = ranks.data
    assert group is not None
    same_timeout = (
        group._get_backend(torch.device("cpu")).options._timeout
        == world._get_backend(torch.device("cpu")).options._timeout
    )
    sums = torch.tensor([rank + 1])
    group.allreduce([sums]).wait()
    same_ranks = (group.rank(), group.size(), int(sums)) == (rank, world_size, sum(range(1, world_size + 1)))
    return [group is not world, same_ranks, same_timeout]


def test_zerox_talks_over_a_group_of_its_own_with_the_users_ranks_and_timeout() -> None:
    assert run_ranks(own_group, 2) == [[True] * 3] * 2
