"""exchange="native": the backend's own collectives give what the direct exchange gives, in their own order."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of, reduced, same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def trained(rank: int, _: int, exchange: str, stage: int, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
    """Parameters after some steps, and this rank's parts of the first mean gradients."""
    model = Chain(3).to(dtype)
    options = {"stage": stage, "bucket_cap_mb": LAYER_CAP / 2**20, "exchange": exchange}
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, **options)
    assert optimizer.inside.ranks.exchange == exchange
    first: list[Tensor] = []
    for seed in range(3):
        for part in range(2):
            model(input_of(rank, 2 * seed + part).to(dtype)).square().mean().backward()
        optimizer.synchronize()
        first = first or list(reduced(optimizer.inside.grads, optimizer.inside.buckets).values())
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], first


@pytest.mark.parametrize("stage", [1, 2])
def test_at_two_ranks_native_equals_direct_bit_for_bit(stage: int) -> None:
    """The sum of two numbers has no order."""
    direct, native = (run_ranks(trained, 2, exchange, stage, torch.float32) for exchange in ("direct", "native"))
    for (params, _), (others, _) in zip(direct, native, strict=True):
        assert all(same_bits(a, b) for a, b in zip(params, others, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [3, 4])
def test_native_gradients_are_within_fp32_rounding_of_direct_ones(world_size: int, stage: int) -> None:
    """Any order of a sum of W terms is within (W - 1) half ulps of the sum of magnitudes of any other."""
    direct, native = (
        run_ranks(trained, world_size, exchange, stage, torch.float32) for exchange in ("direct", "native")
    )
    for (_, shards), (_, others) in zip(direct, native, strict=True):
        for a, b in zip(shards, others, strict=True):
            ulps = world_size * 2.0**-23
            torch.testing.assert_close(a, b, rtol=ulps, atol=ulps * float(a.abs().max()))


def refuse_unknown(_: int, __: int) -> str:
    os.environ["ZEROX_EXCHANGE"] = "pigeon"
    try:
        FusedShardedAdam(Chain(1).parameters())
    except ValueError as error:
        return str(error)
    finally:
        del os.environ["ZEROX_EXCHANGE"]
    return "no error"


def test_an_unknown_exchange_is_refused_naming_it_and_those_there_are() -> None:
    for message in run_ranks(refuse_unknown, 2):
        assert all(word in message for word in ("ZEROX_EXCHANGE", "pigeon", "direct", "native"))
