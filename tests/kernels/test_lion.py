"""What only Lion does: its update is a sign, which is 0 for either zero, and NaN for NaN."""

from __future__ import annotations

import pytest
import torch

from tests.kernels.rule import CONFIGS
from tests.kernels.shards import Shard, group_of, options_table, same_bits
from zerox.rules.lion import LION
from zerox.rules.reference import LionState, lion_step


@pytest.mark.skipif(
    torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"), reason="torch multiplies and adds apart"
)
@pytest.mark.parametrize("config", CONFIGS["lion"].values(), ids=CONFIGS["lion"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_steps_have_the_bits_of_the_reference(dtype: torch.dtype, config: dict[str, object]) -> None:
    shard = Shard(16_384, dtype, step=3, rule=LION, config=config)
    state = LionState(shard.param.clone(), shard.exp_avg.clone())
    generator = torch.Generator().manual_seed(1)
    for _ in range(5):
        shard.grad.normal_(generator=generator)
        shard.update()
        lion_step(state, shard.grad, **group_of(LION, **config))
        assert same_bits(shard.param, state.param)
        assert same_bits(shard.exp_avg, state.exp_avg)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
def test_every_element_moves_by_lr_towards_its_sign_or_not_at_all(dtype: torch.dtype) -> None:
    shard = Shard(64, dtype, rule=LION)
    tiny = torch.finfo(dtype).smallest_normal
    grads = [0.0, -0.0, 1.0, -1.0, tiny, -tiny, torch.inf, -torch.inf]
    shard.grad.copy_(torch.tensor(grads, dtype=dtype).repeat(8))
    shard.param.zero_()
    shard.update(options_table(LION, lr=0.5, weight_decay=0.0))
    assert shard.param.tolist() == [0.0, 0.0, -0.5, 0.5, -0.5, 0.5, -0.5, 0.5] * 8


def test_a_nan_stays_one() -> None:
    shard = Shard(100, rule=LION, step=1)
    shard.exp_avg[7] = torch.nan
    shard.grad[70] = torch.nan
    shard.update()
    for values in (shard.param, shard.exp_avg):
        assert values.isnan().nonzero().flatten().tolist() == [7, 70]
