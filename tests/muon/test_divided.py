"""Stacks of matrices whose slices lie on all ranks: which stacks, which slices, and that nothing else sees it.

What is trained, saved and loaded with them is in the other files: rig.py has one among its parameters.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.kernels.shards import same_bits
from tests.muon.rig import CAP_MB, OPTIONS, Model, build
from tests.ranks import run_ranks
from zerox import FusedShardedMuon
from zerox.memory.bucket import Bucket
from zerox.plan.buckets import ParamSpec, loads_in, plan_buckets
from zerox.plan.layout import Layout

SLICE = 32 * 24


def bucket_of(buckets: list[Bucket], name: str) -> Bucket:
    return next(bucket for bucket in buckets if any(member.name == name for member in bucket.members))


def trained(rank: int, world_size: int, stage: int) -> tuple[tuple[int, ...] | None, int, bool, float]:
    """How a stack is divided, the elements of this rank's momentum, whether another one is divided, and what the
    slowest rank computes over the mean."""
    model = Model()
    optimizer = build(model, False, OPTIONS, stage=stage)
    model.backward(rank, 0)
    optimizer.step()
    buckets = optimizer.inside.buckets
    divided, other = (bucket_of(buckets, name) for name in ("divided", "experts"))
    numel = divided.state["momentum_buffer"].values.numel()
    loads = loads_in([bucket.plan for bucket in buckets], world_size)
    slowest = max(load.cost for load in loads) * world_size / sum(load.cost for load in loads)
    return divided.plan.layout.slices, numel, other.plan.layout.slices is not None, slowest


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize(("world_size", "counts"), [(1, None), (2, [3, 4]), (3, [2, 2, 3]), (4, [1, 2, 2, 2])])
def test_each_rank_has_slices_and_their_momentum(world_size: int, counts: list[int] | None, stage: int) -> None:
    found = run_ranks(trained, world_size, stage)
    slices = found[0][0]
    assert (None if slices is None else sorted(slices)) == counts
    for rank, (same, numel, is_other_divided, _) in enumerate(found):
        assert same == slices
        assert numel == SLICE * (7 if slices is None else slices[rank])
        assert not is_other_divided


@pytest.mark.parametrize(
    ("slices", "numel", "world_size", "cap_bytes"),
    [
        (8, 8 * 256, 1, 1),  # there is one rank
        (3, 3 * 256, 4, 1),  # one would have none
        (8, 8 * 255, 4, 1),  # a block would have two owners
        (8, 8 * 256, 4, 8 * 256 * 4),  # it shares its bucket
    ],
)
def test_others_lie_on_one_rank(slices: int, numel: int, world_size: int, cap_bytes: int) -> None:
    [plan] = plan_buckets([ParamSpec("x", numel, "f", 4, cost=slices, slices=slices)], world_size, cap_bytes)
    assert plan.layout.slices is None
    assert plan.layout.owners == (0,)


def test_a_stack_whose_slices_lie_inside_each_other_lies_on_one_rank() -> None:
    inside = torch.zeros(32, 24, 8).permute(2, 0, 1)
    for stack, is_divided in ((inside, False), (inside.contiguous(), True), (torch.zeros(8, 24, 32).mT, True)):
        group: dict[str, Any] = {"params": [("x", nn.Parameter(stack))]}
        slowest = zerox.estimate([group], 4, rule="muon", bucket_cap_mb=CAP_MB).slowest_over_mean
        assert slowest == (1.0 if is_divided else 4.0)


def test_what_is_left_goes_to_those_that_have_less() -> None:
    """Three stacks of 5 slices and a matrix of the cost of two, on 4 ranks: 17 in all."""
    stack = ParamSpec("stack", 5 * 256, "f", 4, cost=50, slices=5)
    plans = plan_buckets([stack, stack, stack, ParamSpec("matrix", 512, "f", 4, cost=20)], 4, 1024)
    assert sorted(load.cost for load in loads_in(plans, 4)) == [40, 40, 40, 50]
    later = plan_buckets([stack], 4, 1024, loads_in(plans, 4))
    assert max(load.cost for load in loads_in([*plans, *later], 4)) == 60


def test_experts_of_a_model_are_balanced() -> None:
    """48 layers of 128 experts on 64 ranks: 144 stacks, of which a rank would own two or three."""
    experts = [("gate_up", (128, 1536, 2048)), ("down", (128, 2048, 768))]
    named: list[tuple[str, Tensor]] = [
        (f"{layer}.{name}", nn.Parameter(torch.empty(shape, dtype=torch.bfloat16, device="meta")))
        for layer in range(48)
        for name, shape in experts
    ]
    found = zerox.estimate([{"params": named}], 64, rule="muon", backend="nccl")
    assert found.slowest_over_mean == 1.0
    numel = sum(param.numel() for _, param in named)
    assert found.moments == numel * 4 // 64


def test_a_layout_by_slices_says_where_each_lies() -> None:
    layout = Layout((5 * 256,), 3, slices=(1, 3, 1))
    assert [layout.shard_span(rank).numel for rank in range(3)] == [256, 768, 256]
    assert list(layout.shards_of(0)) == [0, 1, 2]
    assert layout.cut_slots == (0,)
    assert layout.numels_in_front(1) == [256, 768, 256]
    assert layout.draw(["x"]).splitlines()[2] == "rank 1: 0..768 x[256:1024]"
    for numels, slices in (((256, 256), (1, 1, 0)), ((512,), (1, 1, 0)), ((765,), (1, 1, 1)), ((768,), (1, 2))):
        with pytest.raises(ValueError, match="slices must be of one parameter"):
            Layout(numels, 3, slices=slices)


def added(rank: int, world_size: int) -> list[tuple[int, ...] | None]:
    """What comes later is divided so that ranks which had less get more."""
    first, second = (nn.Parameter(torch.ones(7, 32, 24)) for _ in range(2))
    optimizer = FusedShardedMuon([first], bucket_cap_mb=CAP_MB)
    optimizer.add_param_group({"params": [second]})
    first.grad, second.grad = torch.rand_like(first), torch.rand_like(second)
    optimizer.step()
    return [bucket.plan.layout.slices for bucket in optimizer.inside.buckets]


def test_what_is_added_evens_out_what_there_is() -> None:
    assert run_ranks(added, 2)[0] == [(4, 3), (3, 4)]


def in_fewer_bits(rank: int, world_size: int, state_dtype: Any) -> list[Tensor]:
    """All ranks have the same gradients, whose mean is exact."""
    stack = nn.Parameter(torch.linspace(-1, 1, 8 * SLICE).view(8, 32, 24).clone())
    optimizer = FusedShardedMuon([stack], lr=0.1, bucket_cap_mb=CAP_MB, state_dtype=state_dtype)
    for number in range(3):
        stack.grad = torch.randn(stack.shape, generator=torch.Generator().manual_seed(number))
        optimizer.step()
    optimizer.synchronize()
    kept = optimizer.full_state_dict().get("state", {0: {}})[0]  # of rank 0
    return [stack.detach().clone(), *(value for _, value in sorted(kept.items()) if isinstance(value, Tensor))]


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
def test_a_momentum_in_fewer_bits_does_not_depend_on_who_has_which_slice(state_dtype: Any) -> None:
    """Random bits, by which it is rounded, are drawn by an element's place in the whole stack."""
    alone = run_ranks(in_fewer_bits, 1, state_dtype)[0]
    for world_size in (2, 4):
        found = run_ranks(in_fewer_bits, world_size, state_dtype)[0]
        assert len(found) == len(alone) > 1
        assert all(map(same_bits, found, alone))
