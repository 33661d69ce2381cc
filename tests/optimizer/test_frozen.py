"""Parameters that require no gradient when the optimizer is built, and those that are unfrozen later."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.own_state import own_state
from tests.ranks import run_ranks
from zerox import FusedShardedAdam


def start_frozen(rank: int, _: int) -> list[Tensor]:
    """Every rank has values of its own, in tensors of several memory orders."""
    trained = nn.Parameter(torch.full((3,), float(rank)))
    tensors = [
        torch.full((5,), float(rank)),
        torch.arange(24.0).reshape(1, 2, 3, 4).to(memory_format=torch.channels_last) + rank,
        torch.arange(6.0).reshape(2, 3).t() + rank,
        torch.zeros(0, 2),
        torch.tensor(float(rank)),
    ]
    frozen = [nn.Parameter(tensor, requires_grad=False) for tensor in tensors]
    late = nn.Parameter(torch.full((2,), float(rank)), requires_grad=False)
    optimizer = FusedShardedAdam([trained, *frozen])
    optimizer.add_param_group({"params": [late]})
    return [param.detach() for param in [trained, *frozen, late]]


def test_frozen_parameters_start_with_rank_0_s_values_too() -> None:
    first, *others = run_ranks(start_frozen, 3)
    assert torch.equal(first[0], torch.zeros(3))
    for other in others:
        assert all(same_bits(a, b) for a, b in zip(other, first, strict=True))


def unfreeze(rank: int, _: int, stage: int) -> list[Tensor]:
    """In the step that makes the second parameter's bucket, the first one has its mean already."""
    values = torch.linspace(-1, 1, 40).bfloat16()
    params = [nn.Parameter(values.clone()), nn.Parameter(values.clone(), requires_grad=False)]
    optimizer = FusedShardedAdam(params, stage=stage, reduce_dtype=torch.float32)
    for step in range(3):
        params[1].requires_grad_(step > 0)
        generator = torch.Generator().manual_seed(10 * step + rank)
        grads = torch.randn(2, 40, generator=generator).bfloat16()
        torch.autograd.backward([(p * g).sum() for p, g in zip(params, grads, strict=True) if p.requires_grad])
        optimizer.step()
        optimizer.zero_grad()
    state = [tensor for state in own_state(optimizer).values() for tensor in state.values()]
    return [tensor.detach().clone() for tensor in [*params, *state]]


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_unfreezing_one_parameter_leaves_the_others_mean_as_it_was(world_size: int) -> None:
    """A wire of more bits than p.grad: sent again from there in stage 1, the mean would lose them."""
    whole, sharded = (run_ranks(unfreeze, world_size, stage) for stage in (1, 2))
    for ours, theirs in zip(whole, sharded, strict=True):
        assert all(same_bits(a, b) for a, b in zip(ours, theirs, strict=True))
