"""Bytes of a rank with parameters of its own, by formula and counted."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from tests.wrapper.own_cases import Recommender, trained
from tests.wrapper.twins import STAGES, Script

RMSPROP = {"optimizer_class": torch.optim.RMSprop, "momentum": 0.9, "centered": True}
CASES: dict[str, tuple[Callable[..., Any], dict[str, Any], dict[str, Any]]] = {
    "AdamW": (zerox.FusedShardedAdam, {}, {}),
    "AMSGrad": (zerox.FusedShardedAdam, {"amsgrad": True, "state_dtype": "8bit"}, {}),
    "SGD": (zerox.FusedShardedSGD, {}, {"rule": "sgd"}),
    "momentum": (zerox.FusedShardedSGD, {"momentum": 0.9}, {"rule": "sgd"}),
    "RMSprop": (zerox.ShardedOptimizer, RMSPROP, {}),
    "other rules": (zerox.FusedShardedAdam, {"of_tables": {"rule": "sgd", "momentum": 0.5}}, {}),
}


def weighed(rank: int, world_size: int, name: str, stage: int, dtype: torch.dtype) -> list[tuple[int, int]]:
    """Lasting bytes of this rank, counted and by formula, with gradients and without."""
    cls, options, of_estimate = CASES[name]
    options = dict(options)
    of_tables = options.pop("of_tables", {})
    script = Script(rank, zerox.DistributedDataParallel, partial(cls, stage=stage, lr=0.01))
    model = Recommender(script)
    model.frozen = nn.Parameter(torch.ones(3, 5), requires_grad=False)
    model.tables.to(dtype)

    def groups() -> list[dict[str, Any]]:
        own = [*model.tables.named_parameters(prefix="tables"), ("frozen", model.frozen)]
        return [{"params": own, **of_tables}, {"params": list(model.top.named_parameters(prefix="top"))}]

    optimizer = script.optimizer(groups(), **options)
    own = [model.frozen, *model.tables.parameters()]
    # The last of three ranks has no table, and what stands for none is refused.
    formulas = [
        zerox.estimate(groups(), world_size, stage=stage, **options, **of_estimate, local=local)
        for local in (["frozen", *(["tables.*"] if rank < 2 else [])], own)
    ]
    first = formulas[0]
    assert formulas[1] == first
    whole = zerox.estimate(groups()[1:], world_size, stage=stage, **options, **of_estimate)
    beside = first.lasting - whole.lasting
    assert (first.peak - whole.peak, first.typical_peak - whole.typical_peak) == (beside, beside)
    assert beside >= sum(param.nbytes for param in own)
    trained(model, optimizer, 1)
    optimizer.synchronize()
    with_grads = optimizer.memory_bytes()
    optimizer.zero_grad()
    with optimizer.whole():  # the estimate is of what stage 3 may have whole, which is all here
        counted = optimizer.memory_bytes()
    return [
        (with_grads.gradients - counted.gradients, first.gradients),
        (counted.parameters, first.parameters),
        (counted.master, first.master),
        (counted.moments, first.moments),
    ]


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("name", CASES)
def test_the_estimate_knows_a_rank_s_own(name: str, stage: int) -> None:
    for found in run_ranks(weighed, 3, name, stage, torch.float32):
        for counted, formula in found:
            assert counted == formula, found


def params() -> list[tuple[str, nn.Parameter]]:
    return [("table", nn.Parameter(torch.ones(8, 4))), ("top", nn.Parameter(torch.ones(4)))]


def test_the_estimate_refuses_what_the_constructor_does() -> None:
    refusals: list[tuple[str, dict[str, Any]]] = [
        ("local: 'tables' stands for no parameter in params", {"local": "tables"}),
        (r"local: a tensor of shape \(2,\) stands for no parameter", {"local": [torch.ones(2)]}),
        ("local stands for all of params", {"local": "*"}),
        ("local: gradient_divisor does not go with .* as 'table'", {"local": "table", "gradient_divisor": 2.0}),
        ("local: capturable=True does not go with", {"local": "table", "capturable": True, "backend": "nccl"}),
    ]
    for said, options in refusals:
        with pytest.raises(ValueError, match=said):
            zerox.estimate(params(), 2, **options)
    for group in ({"rule": "lion"}, {"sparse": True, "weight_decay": 0.0}, {"process_group": 1}):
        [table, top] = params()
        with pytest.raises(ValueError, match=r"^local: "):
            zerox.estimate([{"params": [table], **group}, {"params": [top]}], 2, local="table")


def test_a_rank_alone_has_none() -> None:
    assert zerox.estimate(params(), 1, local="table") == zerox.estimate(params(), 1)
    with_table = zerox.estimate(params(), 2, local="table")
    assert with_table.parameters > zerox.estimate(params()[1:], 2).parameters
