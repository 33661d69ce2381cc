"""Training under torch.use_deterministic_algorithms(True), which fills fresh memory with NaN, is the same."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, backward, batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load, save


def trained(rank: int, world_size: int, kind: str, stage: int, deterministic: bool, path: str) -> list[Tensor]:
    """Everything that ends in parameters: steps, hidden gathers, no_sync, clip, state in memory and on the disk."""
    dtype, options = KINDS[kind]
    torch.use_deterministic_algorithms(deterministic)
    try:
        model = make_model(dtype)
        optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.05, **options)
        optimizer.overlap_gather(model)
        for step in range(3):
            with optimizer.no_sync():
                backward(model, batch(rank, step, 1, dtype=dtype))
            backward(model, batch(rank, step, dtype=dtype), branch=step == 1 and rank == 0)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()
        other = make_model(dtype, seed=1)
        fresh = FusedShardedAdam(other.parameters(), stage=stage, bucket_cap_mb=0.03, **options)
        save(path, model, optimizer)
        load(path, other, fresh)
        optimizer.load_state_dict(optimizer.state_dict())
        full = optimizer.full_state_dict()
        state = [tensor for each in full.get("state", {}).values() for tensor in each.values()]
        for each, its in ((model, optimizer), (other, fresh)):
            backward(each, batch(rank, 3, dtype=dtype))
            its.step()
            its.synchronize()
        return [*state, *(p.detach().clone() for each in (model, other) for p in each.parameters())]
    finally:
        torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize(("kind", "stage"), [("fp32", 1), ("fp32", 2), ("bf16 remainder, 8-bit moments", 2)])
@pytest.mark.parametrize("world_size", [1, 2])
def test_deterministic_algorithms_change_nothing(tmp_path: object, world_size: int, kind: str, stage: int) -> None:
    usual, found = (run_ranks(trained, world_size, kind, stage, on, f"{tmp_path}/{on}") for on in (False, True))
    for ours, expected in zip(found[0], usual[0], strict=True):
        assert same_bits(ours, expected)
        assert not ours.isnan().any()
