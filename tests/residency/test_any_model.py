"""Stage 3 has stage 2's bits however a model reads its parameters, also where each bucket is released at once."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.ranks import run_ranks
from tests.residency.models import ALL, CASES, COMPILED, DEEP, Case
from tests.residency.rig import assert_as_in_stage_2, assert_same, build, by_way, residents, train

HOW = {"released at once": True, "two buckets": False}


def both_stages(rank: int, world_size: int, name: str, ways: list[str]) -> list[tuple[int, int]]:
    """Of each way, how often buckets were fetched and how many stayed."""
    case = ALL[name]
    found = []

    def run(stage: int, hostile: bool = False, anew: bool = False) -> tuple[list[Tensor], Any]:
        """``anew``: what is compiled is compiled again."""
        if anew:
            torch._dynamo.reset()
        torch.manual_seed(0)
        model = case.model()
        smallest = {"resident_mb": 0.017} if stage == 3 and not hostile else {}
        optimizer = build(model, stage, hostile, **smallest)
        return train(model, optimizer, rank, case.loss, case.wrap(model)), optimizer

    expected, _ = run(2, anew=True)
    for way in ways:
        hostile = HOW[way]
        got, optimizer = run(3, hostile, anew=True)
        assert_same(got, expected)
        if hostile:
            with by_way("messages", rank):
                assert_same(run(3, hostile)[0], expected)
        counts = residents(optimizer).counts
        assert counts.faults == 0 or name == "raw reads in a forward" or name not in CASES
        assert counts.faults > 0 or name != "raw reads in a forward" or not hostile
        found.append((counts.fetches, len(residents(optimizer).resident)))
    return found


@pytest.mark.parametrize("name", [*CASES, *COMPILED])
def test_a_training_has_the_bits_of_stage_2(name: str) -> None:
    assert_bits_of_stage_2(name)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.deep
def test_a_training_that_inductor_compiles_has_the_bits_of_stage_2(name: str) -> None:
    assert_bits_of_stage_2(name)


def assert_bits_of_stage_2(name: str) -> None:
    for ways in run_ranks(both_stages, 2, name, list(HOW)):
        for fetches, num_buckets in ways:
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
