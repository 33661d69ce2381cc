"""Stage 3 has stage 2's bits however a model reads its parameters, also where each bucket is released at once."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.residency.models import CASES, COMPILED, Case
from tests.residency.rig import assert_as_in_stage_2, assert_same, build, by_way, residents, train


def both_stages(rank: int, world_size: int, name: str, hostile: bool) -> tuple[int, int]:
    case = {**CASES, **COMPILED}[name]
    optimizers = {}

    def run(stage: int) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = case.model()
        smallest = {"resident_mb": 0.017} if stage == 3 and not hostile else {}
        optimizers[stage] = build(model, stage, hostile, **smallest)
        return train(model, optimizers[stage], rank, case.loss, case.wrap(model))

    expected = run(2)
    if hostile:
        with by_way("messages", rank):
            assert_same(run(3), expected)
    assert_same(run(3), expected)
    optimizer = optimizers[3]
    counts = residents(optimizer).counts
    assert counts.faults == 0 or name == "raw reads in a forward" or name in COMPILED
    assert counts.faults > 0 or name != "raw reads in a forward" or not hostile
    return counts.fetches, len(residents(optimizer).resident)


@pytest.mark.parametrize("hostile", [True, False], ids=["released at once", "two buckets"])
@pytest.mark.parametrize("name", [*CASES, *COMPILED])
def test_a_training_has_the_bits_of_stage_2(name: str, hostile: bool) -> None:
    for fetches, num_buckets in run_ranks(both_stages, 2, name, hostile):
        assert fetches >= 3 * num_buckets


def all_over_two_machines(rank: int, world_size: int) -> None:
    with by_way("two machines", rank):
        for case in CASES.values():

            def run(stage: int, case: Case = case) -> list[Tensor]:
                torch.manual_seed(0)
                model = case.model()
                return train(model, build(model, stage, hostile=True), rank, case.loss, case.wrap(model), steps=2)

            assert_as_in_stage_2(run)


def test_trainings_over_two_machines_of_two_ranks_have_the_bits_of_stage_2() -> None:
    run_ranks(all_over_two_machines, 4)
