"""zerox.estimate() adds up the very plan that an optimizer is built from."""

from __future__ import annotations

from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from zerox.optimizer import planning
from zerox.plan.plan import Plan


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.words = nn.Embedding(300, 20, sparse=True, dtype=dtype)
        self.body = nn.Sequential(nn.Linear(100, 70, dtype=dtype), nn.Linear(70, 60, dtype=dtype))
        self.still = nn.Linear(50, 40, dtype=dtype).requires_grad_(False)
        self.expert = nn.Linear(64, 80, dtype=dtype)


def groups_of(model: Model, experts: int) -> list[dict[str, Any]]:
    dense = [*model.body.named_parameters(), *model.still.named_parameters()]
    tables = {"params": list(model.words.named_parameters()), "sparse": True, "weight_decay": 0.0}
    others = {"params": list(model.expert.named_parameters()), "weight_decay": 0.5}
    if experts > 1:
        return [{"params": dense}, {**others, "process_group": "alone"}]
    return [{"params": dense}, tables, others]


def plans(rank: int, size: int, dtype: torch.dtype, experts: int, options: dict[str, Any]) -> tuple[Plan, Plan]:
    model, found = Model(dtype), []

    def note(*args: Any) -> Plan:
        found.append(make_plan(*args))
        return found[-1]

    make_plan = planning.make_plan
    with patch("zerox.optimizer.planning.make_plan", note), patch("zerox.estimate.make_plan", note):
        groups = groups_of(model, experts)
        for group in groups:
            group |= {"process_group": 1} if "process_group" in group else {}
        zerox.estimate(groups, size, **options)
        zerox.FusedShardedAdam(groups_of(model, experts), **options)
    formula, built = found
    return formula, built


@pytest.mark.parametrize(
    ("dtype", "experts", "options"),
    [
        (torch.float32, 1, {"stage": 1}),
        (torch.bfloat16, 1, {"stage": 2, "bucket_cap_mb": 0.01}),
        (torch.float32, 1, {"stage": 3, "state_dtype": "8bit", "bucket_cap_mb": 0.02}),
        (torch.bfloat16, 1, {"stage": 3, "master_weights": "fp32"}),
        (torch.float32, 2, {"stage": 2, "reduce_dtype": torch.bfloat16}),
    ],
    ids=str,
)
def test_an_estimate_adds_up_the_plan_that_the_optimizer_is_built_from(
    dtype: torch.dtype, experts: int, options: dict[str, Any]
) -> None:
    for formula, built in run_ranks(plans, 2, dtype, experts, options):
        assert formula == built
        assert {place for each in built.buckets for place in each.params} <= set(range(len(built.names)))
        assert bool(built.tables) == (experts == 1)
        assert bool(built.frozen) == (options["stage"] == 3)
