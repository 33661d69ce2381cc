"""Gradients that are sent without being packed: the same bits, in the messages that the layout says."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import WHOLE, Awkward, GradsOfModel
from tests.bucket_manager.test_twin import EVEN, EVERY, compare_scenarios, loss_of
from tests.ranks import run_ranks
from zerox.plan import buckets
from zerox.plan.layout import Layout
from zerox.ranks.group import find_ranks


@contextmanager
def from_bytes(nbytes: int) -> Iterator[None]:
    """Gradients of so many bytes and more are sent without a copy, however small a rank's slice."""
    with patch.multiple(buckets, ZERO_COPY_BYTES=nbytes, ZERO_COPY_SLICE_BYTES=1):
        yield


def compare_with_twin(rank: int, world_size: int, dtype: torch.dtype, stage: int, nbytes: int) -> list[str]:
    with from_bytes(nbytes):
        return compare_scenarios(rank, world_size, dtype, stage)


# 4 bytes: all but empty ones. 8,000: those that may span shards, and others behind them.
@pytest.mark.parametrize("nbytes", [4, 8000])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(
    ("world_size", "dtype"),
    [(1, torch.float32), (2, torch.float32), (3, torch.float32), (3, torch.bfloat16)],
    ids=str,
)
def test_reduced_gradients_equal_the_twins_bit_for_bit(
    world_size: int, dtype: torch.dtype, stage: int, nbytes: int
) -> None:
    assert run_ranks(compare_with_twin, world_size, dtype, stage, nbytes) == [[]] * world_size


def messages_to(layout: Layout, rank: int, num_zero_copy: int) -> list[int]:
    """Elements of each message that a rank is sent of a bucket."""
    zero_copy = [segment.span for segment in layout.segments(rank) if segment.slot < num_zero_copy]
    end = max((span.stop for span in zero_copy), default=0)
    return [*(span.numel for span in zero_copy), layout.shard_numel - end + layout.trailer_numel]


def count(rank: int, _: int) -> list[tuple[int, int]]:
    """Messages and bytes of two backwards: as counted, and as the layout says."""
    with from_bytes(2000):
        ours = GradsOfModel(find_ranks(None), params := list((model := Awkward(torch.float32)).parameters()), 20_000)
    for index, who in enumerate((EVERY, EVEN)):
        loss_of(model, rank, index, who).backward()
        ours.sync()
    expected = [0, 0]
    for bucket in ours.buckets:
        for peer in range(ours.grads.ranks.size):
            if peer != rank:
                sent = messages_to(bucket.plan.layout, peer, bucket.plan.num_zero_copy)
                expected = [expected[0] + 2 * len(sent), expected[1] + 2 * 4 * sum(sent)]
    zero_copy = sum(bucket.plan.num_zero_copy for bucket in ours.buckets)
    assert 0 < zero_copy < len(params)
    return [ours.manager.traffic, tuple(expected)]  # type: ignore[list-item]


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_messages_are_the_large_gradients_parts_and_one_with_the_rest(world_size: int) -> None:
    for counted, expected in run_ranks(count, world_size):
        assert counted == expected


def shard_with_gaps(_: int, __: int) -> list[bool]:
    """Whether what lies between the parts of each shard is zero: it travels on in stage 1, and into norms of it."""
    with from_bytes(4):
        ours = GradsOfModel(find_ranks(None), [torch.nn.Parameter(torch.ones(n)) for n in (4097, 5000, 9001)], WHOLE)
    [bucket] = ours.buckets
    assert bucket.plan.num_zero_copy == 3
    found = []
    for _ in range(3):  # memory that was something else before
        torch.full((1 << 16,), torch.nan)
        sum(p.sum() for p in bucket.buffer.params).backward()
        ours.sync()
        shard = ours.grads.shard(0)
        assert shard is not None
        outside = torch.ones_like(shard, dtype=torch.bool)
        for segment in bucket.own_segments:
            outside[segment.span.start : segment.span.stop] = False
        found.append(bool(outside.any()) and not shard[outside].any())
        ours.grads.zero(set_to_none=True)
    return found


def test_padding_between_parts_is_zero() -> None:
    assert run_ranks(shard_with_gaps, 2) == [[True] * 3] * 2


def test_alone_gradients_stay_where_autograd_left_them_and_are_not_written() -> None:
    with from_bytes(4):
        ours = GradsOfModel(find_ranks(None), params := [nn.Parameter(torch.ones(n)) for n in (40, 3, 20)], WHOLE)
    left: dict[int, Tensor] = {}
    for index, param in enumerate(params):

        def note(param: Tensor, index: int = index) -> None:
            assert param.grad is not None
            left[index] = param.grad.detach()

        param.register_post_accumulate_grad_hook(note)
    before = [torch.full_like(param, 3.0 + index) for index, param in enumerate(params)]
    for last in (False, True):
        sum((p * value).sum() for p, value in zip(params, before, strict=True)).backward()  # type: ignore[union-attr]
        ours.sync()
        [*pieces, _] = ours.manager.grads.shard_by_part(0)
        assert {piece.data_ptr() for piece in pieces} == {grad.data_ptr() for grad in left.values()}
        if not last:
            ours.grads.zero(set_to_none=True)
            assert not ours.manager.grads.shard_by_part(0)
    params[0].grad = None
    params[2].grad.zero_()  # type: ignore[union-attr]
    ours.sync()
    assert not ours.manager.grads.shard_by_part(0)
    reduced = {ours.buckets[0].plan.params[slot]: value for (_, slot), value in ours.reduced().items()}
    assert torch.equal(reduced[1], before[1])
    assert torch.equal(reduced[2], torch.zeros(20))
    assert 0 not in reduced
    assert all(torch.equal(left[index], value) for index, value in enumerate(before))


def test_alone_gradients_stay_in_place_after_the_models_zero_grad() -> None:
    with from_bytes(4):
        ours = GradsOfModel(find_ranks(None), params := [nn.Parameter(torch.ones(n)) for n in (40, 20)], WHOLE)
    for step in range(3):
        loss = (params[0] * (step + 1.0)).sum() + (params[1] * (step + 2.0)).sum()
        loss.backward()
        ours.sync()
        assert len(ours.manager.grads.shard_by_part(0)) == 3
        assert sorted(float(piece[0]) for piece in ours.manager.grads.shard_by_part(0)[:2]) == [step + 1.0, step + 2.0]
        for param in params:
            param.grad = None
