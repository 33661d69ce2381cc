"""Updates and norms under a mask on a device: the CPU's bits."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tests.kernels.rule import MASTERS
from tests.kernels.shards import RULES, USUAL, Shard, options_table, same_bits, segments_of
from zerox import ops
from zerox.memory.mask import Mask
from zerox.rules.rule import Rule

KINDS = [(torch.float64, None), (torch.float32, None), *MASTERS]
NUMELS = (4096, 512, 255)


def random_bits(numel: int) -> torch.Tensor:
    return Mask.of(torch.rand(numel, generator=torch.Generator().manual_seed(numel)) < 0.4, ()).bits


def moved(value: Any, device: torch.device) -> Any:
    if isinstance(value, list):
        return [moved(each, device) for each in value]
    return value.to(device) if isinstance(value, torch.Tensor) else value


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, torch.uint8], ids=str)
@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.name)
def test_a_masked_update_has_the_cpu_s_bits(
    device: torch.device, rule: Rule, dtype: torch.dtype, master: str | None, state_dtype: torch.dtype
) -> None:
    own: dict[str, Any] = {"segments": segments_of(*NUMELS), "state_dtype": state_dtype, "rule": rule}
    ours = (
        Shard(sum(NUMELS), dtype, None, master, USUAL[rule.name], 1, **own)
        .for_op()
        ._replace(mask=random_bits(sum(NUMELS)))
    )
    theirs = ops.Shard(*(moved(each, device) for each in ours))
    options = options_table(rule)
    ops.update_(rule.name, [ours], options)
    ops.update_(rule.name, [theirs], options.to(device))
    assert (ours.param == 0).sum() > sum(NUMELS) // 2
    for expected, found in zip(ours, theirs, strict=True):
        for one, other in zip(
            *((each if isinstance(each, list) else [each]) for each in (expected, found)), strict=True
        ):
            assert (one is None and other is None) or same_bits(other.cpu(), one)


@pytest.mark.parametrize("p", [1.0, 2.0, math.inf])
@pytest.mark.parametrize("dtype", [dtype for dtype, _ in KINDS[:3]], ids=str)
def test_a_masked_norm_has_the_cpu_s_words(device: torch.device, dtype: torch.dtype, p: float) -> None:
    numel = 5001
    shard = torch.randn(numel, generator=torch.Generator().manual_seed(0), dtype=torch.float64).to(dtype)
    segments, mask = segments_of(4000, 1001), random_bits(numel)
    words = [torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=where) for where in ("cpu", device)]
    ops.norm_(words[0], shard, segments, p, mask)
    ops.norm_(words[1], shard.to(device), segments.to(device), p, mask.to(device))
    assert words[0].any()
    assert torch.equal(words[1].cpu(), words[0])
