"""Scripts with two changed lines, whose ranks seed their models differently: parameters are as under torch's."""

from __future__ import annotations

import pytest
from torch import Tensor

from tests.ranks import Once
from tests.wrapper import cases, odd_cases, script_cases
from tests.wrapper.cases import CASES
from tests.wrapper.twins import assert_same, with_both

assert {odd_cases.batch_norm.__name__, script_cases.dino_s_clip.__name__} < CASES.keys()


def all_cases(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    return with_both(rank, world_size, CASES)


ALONE = {name: case for name, case in CASES.items() if name != cases.unused_parameters_and_torch_s_clip.__name__}


def cases_alone(rank: int, world_size: int) -> dict[str, list[list[Tensor]]]:
    return with_both(rank, world_size, ALONE)


ON_1 = Once(cases_alone, 1)
ON_2 = Once(all_cases, 2)
ON_3 = Once(all_cases, 3)


@pytest.mark.parametrize("name", CASES)
def test_parameters_are_as_under_torch(name: str) -> None:
    assert_same(ON_2(), name)


@pytest.mark.parametrize("name", CASES)
def test_on_3_ranks_too(name: str) -> None:
    assert_same(ON_3(), name)


@pytest.mark.parametrize("name", ALONE)
def test_on_1_rank_too(name: str) -> None:
    assert_same(ON_1(), name)
