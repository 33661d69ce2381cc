"""Every pair of options that zerox/plan/combinations.py does not refuse trains as torch does.

They are trained in a covering array (covering.py), and one by one where marked ``pairs``: `make test-deep`. Those with
parameters on an accelerator are trained by tests/accelerator/test_combinations.py.
"""

from __future__ import annotations

import functools
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.optimizer.combined import outcome, train, trained
from tests.optimizer.covering import OF_FOUR, pairs_on_cpu, rows, share_shown, shows, singles, with_twins
from tests.optimizer.ways import (
    OF_RANKS,
    Pair,
    Way,
    first_of,
    is_inner,
    name_of,
    needs_accelerator,
    not_refused,
    plain_twin,
    way_of,
    ways,
)
from tests.ranks import run_ranks
from zerox.plan.choices import CHOICES, Choice, Setting

ROOT = Path(__file__).parents[2]
ON_MESH_OF = 4  # ranks, and so many have DTensors and sub-groups
# What each rank does with its shard, once it has the gradient: for these one rank is enough.
OF_SHARDS = (
    "state_dtype", "master_weights", "capturable", "lr", "rule", "amsgrad", "maximize", "decoupled_weight_decay",
    "foreach", "fused",
)  # fmt: skip


def said_of(way: Way) -> str:
    return ", ".join(str(Setting(*item)) for item in way.items() if item[1] != first_of(item[0]))


def of_shards(pair: Pair) -> bool:
    return all(each.option in OF_SHARDS for each in pair)


def ranks_of(way: Way) -> int:
    return ON_MESH_OF if way.items() & OF_FOUR else 2


def one_a_pair(world_size: int) -> list[Way]:
    if world_size == 1:
        return [way for way in ways(accelerator=False) if all(way[name] == first_of(name) for name in OF_RANKS)]
    many = ways(accelerator=False, asked=[pair for pair in not_refused() if not of_shards(pair)])
    return [way for way in many if ranks_of(way) == world_size]


def in_array(world_size: int) -> list[Way]:
    """One rank alone trains each value with all else at its default."""
    if world_size == 1:
        return with_twins([way for way in singles() if all(way[name] == first_of(name) for name in OF_RANKS)])
    return [way for way in with_twins([*rows(), *singles()]) if ranks_of(way) == world_size]


@functools.cache
def digests(drawn: Callable[[int], list[Way]], world_size: int) -> dict[tuple[str, ...], list[Any]]:
    """By the values of a way: what each rank's training came to."""
    many = drawn(world_size)
    by_rank = [trained(0, 1, many)] if world_size == 1 else run_ranks(trained, world_size, many, timeout_s=300)
    return {tuple(way.values()): list(each) for way, *each in zip(many, *by_rank, strict=True)}


def said_of_wrong(found: Mapping[tuple[str, ...], list[Any]]) -> list[str]:
    """Trainings that raise, that have other bits than their twins, or whose ranks differ."""
    wrong = []
    for values, outcomes in found.items():
        way = dict(zip(CHOICES, values, strict=True))
        raised = [each for each in outcomes if isinstance(each, str)]
        if raised:
            wrong.append(f"{said_of(way)}: {raised[0]}")
        elif outcomes != found[tuple(plain_twin(way).values())]:
            wrong.append(f"{said_of(way)}: other bits than {said_of(plain_twin(way))}")
        elif len({params for params, _ in outcomes}) > 1 and way["process_group"] != '"alone"':
            wrong.append(f"{said_of(way)}: ranks differ")
    return wrong


ONE_A_PAIR = "To find the pair, train them one by one: make test-deep ARGS='-k test_pairs'"


@pytest.mark.parametrize("world_size", [1, 2, ON_MESH_OF])
def test_an_array_of_all_pairs_trains_as_torch_does_with_the_bits_of_its_twins(world_size: int) -> None:
    """A twin differs in options that must not show; it is compared with torch.optim at each step."""
    wrong = said_of_wrong(digests(in_array, world_size))
    assert not wrong, "\n".join([*wrong, ONE_A_PAIR])


# In no training: stage 3 has no gather to hide, and a wire that is as wide as its parameters is no wire of its own.
NEVER_SHOWN = {
    "a number for resident_mb with overlap_gather() not called",
    "a number for resident_mb with overlap_gather() called",
    'reduce_dtype=torch.bfloat16 with master_weights="remainder"',
}


def test_every_pair_that_works_is_in_the_array() -> None:
    """In a training where nothing hides it."""
    drawn = rows()
    for pair in pairs_on_cpu():
        items = {(each.option, each.value) for each in pair}
        has = [row for row in drawn if items <= row.items()]
        assert has, name_of(pair)
        assert any(shows(items, row) for row in has) or name_of(pair) in NEVER_SHOWN, name_of(pair)


def test_nearly_every_pair_shows_beside_the_default_of_each_third_option() -> None:
    assert share_shown(rows()) > 0.96
    assert share_shown(rows()[:40]) < 0.96


def test_the_array_is_the_same_in_every_process() -> None:
    """Whatever the order in which a set's elements come."""
    command = [sys.executable, "-c", "from tests.optimizer.covering import rows; print(rows())"]
    found = subprocess.check_output(command, cwd=ROOT, env={**os.environ, "PYTHONHASHSEED": "1"}, text=True)
    assert found.strip() == str(rows())


@pytest.mark.deep
@pytest.mark.pairs
@pytest.mark.parametrize("world_size", [1, 2, ON_MESH_OF])
def test_pairs_that_work_train_as_torch_does_with_the_bits_of_their_twins(world_size: int) -> None:
    wrong = said_of_wrong(digests(one_a_pair, world_size))
    assert not wrong, "\n".join(wrong)


@pytest.mark.deep
@pytest.mark.pairs
def test_every_pair_that_works_was_trained() -> None:
    """On one rank or, where ranks matter, on two, or four (OF_FOUR); or on an accelerator."""
    sizes = (1, 2, ON_MESH_OF)
    here = {size: [set(zip(CHOICES, values, strict=True)) for values in digests(one_a_pair, size)] for size in sizes}
    there = [set(way.items()) for way in ways(accelerator=True)]
    for pair in not_refused():
        way = way_of(*pair)
        if way is not None and is_inner(way) and needs_accelerator(way):
            continue  # tests/gpu/test_any_class.py
        settings = {(each.option, each.value) for each in pair}
        trainings = [*there, *(here[1] if of_shards(pair) else [*here[2], *here[ON_MESH_OF]])]
        assert any(settings <= way for way in trainings), name_of(pair)


def test_a_new_value_has_to_be_trained_with(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainings are drawn with it, and fail while it can't be had. Three at once: drawing takes seconds."""
    new = {"stage": "4", "bucket_cap_mb": "a wish", "parameters": "int8"}
    for option, value in new.items():
        monkeypatch.setitem(CHOICES, option, replace(CHOICES[option], values=(*CHOICES[option].values, value)))
    of_pairs, of_array = ways(accelerator=False), rows()
    for option, value in new.items():
        added = [way for way in of_pairs if [each for each in new if way[each] == new[each]] == [option]]
        assert len(added) > 20
        assert sum(row[option] == value for row in of_array) > 5
        assert isinstance(outcome(lambda way=added[0]: train(0, 1, way)), str)


def test_an_option_that_no_training_can_have_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(CHOICES, "offload", Choice("offload", ("False", "True")))
    way = way_of(Setting("offload", "True"))
    assert way is not None
    assert outcome(lambda: train(0, 1, way)).startswith("TypeError: ")
