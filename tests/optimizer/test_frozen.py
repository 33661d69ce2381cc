"""Parameters that require no gradient when the optimizer is built."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
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
