"""What only SGD does: its buffer starts late, with the first gradient, and stays while momentum is off."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.kernels.shards import Shard, group_of, options_table, same_bits
from tests.tolerances import assert_one_step_bound
from zerox.rules.sgd import SGD

MOMENTA = {
    "from the start": [0.9] * 4,
    "from the third step on": [0.0, 0.0, 0.9, 0.9, 0.9],
    "turned off and on again": [0.9, 0.9, 0.0, 0.0, 0.9, 0.5],
}


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
def test_the_first_gradient_is_the_buffer_whatever_lay_there(state_dtype: torch.dtype) -> None:
    clean, dirty = (Shard(1024, step=0, rule=SGD, state_dtype=state_dtype) for _ in range(2))
    dirty.momentum_buffer.fill_(255 if state_dtype is torch.uint8 else torch.nan)
    for scales in dirty.scales:
        scales.fill_(torch.nan)
    for shard in (clean, dirty):
        shard.update(options_table(SGD, dampening=0.7))
    assert all(same_bits(a, b) for a, b in zip(clean.tensors(), dirty.tensors(), strict=True))
    if state_dtype is torch.float32:
        before = Shard(1024, rule=SGD)
        assert same_bits(dirty.momentum_buffer, before.grad.add(before.param, alpha=0.1)), "with decay, undamped"


@pytest.mark.parametrize("momenta", MOMENTA.values(), ids=MOMENTA)
@pytest.mark.parametrize("config", [{}, {"dampening": 0.3}, {"nesterov": True}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_momentum_that_comes_and_goes_is_torch_s(dtype: torch.dtype, config: Any, momenta: list[float]) -> None:
    """Each step from torch's own state before it. Steps are those of the buffer."""
    shard = Shard(10_007, dtype, step=0, rule=SGD)
    leaf = torch.nn.Parameter(shard.param.clone())
    optimizer = torch.optim.SGD([leaf], foreach=False, **group_of(SGD, **config))
    generator = torch.Generator().manual_seed(1)
    for index, momentum in enumerate(momenta):
        shard.grad.normal_(generator=generator)
        leaf.grad = shard.grad.clone()
        for option, value in (("momentum", momentum), ("nesterov", bool(config.get("nesterov") and momentum))):
            optimizer.param_groups[0][option] = value
        before = leaf.detach().clone()
        optimizer.step()
        unused = shard.momentum_buffer.clone()
        shard.update(options_table(SGD, **{key: optimizer.param_groups[0][key] for key in SGD.defaults}))
        theirs = optimizer.state[leaf].get("momentum_buffer")
        states = {} if theirs is None else {"momentum_buffer": (shard.momentum_buffer, theirs)}
        assert_one_step_bound(before, shard.param, leaf.detach(), states)
        assert shard.steps.tolist() == [sum(each != 0 for each in momenta[: index + 1])]
        assert momentum or same_bits(shard.momentum_buffer, unused)
        shard.param.copy_(leaf.detach())
        if theirs is not None:
            shard.momentum_buffer.copy_(theirs)
