"""What goes wrong only where options meet is found by the covering array: 16 faults, put into the call of the kernels.

A fault is in effect where a training has its settings. 12 need a pair; 4 a pair, and a third option at its default. The
trainings of the array that have the pair, and their twins, are run with it, and judged as in test_pairs.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.optimizer.combined import outcome, train
from tests.optimizer.covering import rows, shows, singles, with_twins
from tests.optimizer.test_pairs import ranks_of, said_of_wrong
from tests.optimizer.ways import Item, Way
from tests.ranks import run_ranks
from zerox import ops
from zerox.ops import Shard
from zerox.plan.choices import CHOICES
from zerox.rules.known import KNOWN

MOST = 4  # trainings of the array for a fault: when these find it, all do
Arguments = tuple[str, Sequence[Shard], Tensor, Tensor | None]  # of ops.update_()


def forgets(column: str) -> Callable[[Arguments], Arguments]:
    """An option of the groups is taken for 0, or for False."""

    def changed(of: Arguments) -> Arguments:
        rule, shards, options, scale = of
        options = options.clone()
        for index, each in enumerate(KNOWN[rule].columns):
            if each.option == column:
                options[:, index] = 0.0
        return rule, shards, options, scale

    return changed


def forgets_the_scale(of: Arguments) -> Arguments:
    return (*of[:3], None)


def doubles_the_scale(of: Arguments) -> Arguments:
    scale = of[3]
    return (*of[:3], torch.tensor(2.0, dtype=torch.float64) if scale is None else 2.0 * scale)


def forgets_the_mask(of: Arguments) -> Arguments:
    return of[0], [each._replace(mask=None) for each in of[1]], *of[2:]


def rounds_gradients(of: Arguments) -> Arguments:
    """To 8 bits, as bfloat16 has."""
    rule, shards, *rest = of
    return rule, [each._replace(grad=each.grad.bfloat16().to(each.grad.dtype)) for each in shards], *rest


def leaves_out_the_last_element(of: Arguments) -> Arguments:
    rule, shards, *rest = of
    grads = [each.grad.clone() for each in shards]
    for grad, shard in zip(grads, shards, strict=True):
        if grad.numel() > 0 and len(shard.segments) > 0:  # of four ranks some have nothing
            grad[max(int(shard.segments[0, 1]) - 1, 0)] = 0.0
    return rule, [each._replace(grad=grad) for each, grad in zip(shards, grads, strict=True)], *rest


def counts_a_step_too_many(of: Arguments) -> Arguments:
    for each in of[1]:
        each.steps.add_(1)
    return of


@dataclass(frozen=True)
class Fault:
    pair: tuple[Item, Item]
    does: Callable[[Arguments], Arguments]
    beside: tuple[str, ...] = ()  # options that must be at their defaults

    @property
    def asked(self) -> set[Item]:
        return {*self.pair, *((option, CHOICES[option].values[0]) for option in self.beside)}

    def __str__(self) -> str:
        return " ".join([self.does.__qualname__.split(".")[0], *(f"{option}={value}" for option, value in self.pair)])


FAULTS = [
    Fault((("stage", "1"), ("maximize", "True")), forgets("maximize")),
    Fault((("stage", "3"), ("state_dtype", '"8bit"')), rounds_gradients),
    Fault((("bucket_cap_mb", "a number"), ("amsgrad", "True")), forgets("amsgrad")),
    Fault((("exchange", '"messages"'), ("reduce_dtype", "torch.bfloat16")), leaves_out_the_last_element),
    Fault((("gradient_divisor", "a number"), ("mean_over", "called")), forgets_the_scale),
    Fault((("masks", "a Sparsity"), ("state_dtype", "torch.bfloat16")), forgets_the_mask),
    Fault((("overlap_gather", "called"), ("lr", "a tensor")), forgets("lr")),
    Fault((("accumulate_dtype", "torch.float32"), ("parameters", "float16")), rounds_gradients),
    Fault((("rule", '"lion"'), ("maximize", "True")), forgets("maximize")),
    Fault((("rule", '"sgd"'), ("process_group", "a 2-D mesh")), forgets("weight_decay")),
    Fault((("process_group", '"alone"'), ("sparse", "True")), leaves_out_the_last_element),
    Fault((("join", "inside"), ("resident_mb", "a number")), doubles_the_scale),
    Fault((("stage", "1"), ("fused", "True")), forgets("weight_decay"), ("masks",)),
    Fault((("parameters", "bfloat16"), ("decoupled_weight_decay", "False")), forgets("weight_decay"), ("stage",)),
    Fault((("placement", "DTensors"), ("overlap_gather", "called")), counts_a_step_too_many, ("rule",)),
    Fault((("sparse", "True"), ("state_dtype", '"8bit"')), doubles_the_scale, ("exchange",)),
]


@contextmanager
def planted(fault: Fault, way: Way) -> Iterator[None]:
    """Inside, the kernels are called as the fault has it, if the training has its settings."""
    update = ops.update_

    def faulty(rule: str, shards: Sequence[Shard], options: Tensor, scale: Tensor | None = None) -> None:
        update(*fault.does((rule, shards, options, scale)))

    if fault.asked <= way.items():
        ops.update_ = faulty
    try:
        yield
    finally:
        ops.update_ = update


def trained_with(rank: int, world_size: int, asked: Sequence[tuple[int, Way]]) -> list[Any]:
    """``asked``: numbers of faults, with a training."""
    found = []
    for number, way in asked:
        with planted(FAULTS[number], way):
            found.append(outcome(lambda way=way: train(rank, world_size, way)))
    return found


def that_show(fault: Fault) -> list[Way]:
    found = [row for row in rows() if shows(fault.asked, row)]
    return with_twins(found[:MOST])


def by_ranks(ways: Iterable[Way]) -> dict[int, list[Way]]:
    found: dict[int, list[Way]] = {}
    for way in ways:
        found.setdefault(ranks_of(way), []).append(way)
    return found


@pytest.mark.deep
@pytest.mark.parametrize("fault", FAULTS, ids=str)
def test_a_fault_that_needs_a_pair_is_found_by_the_array(fault: Fault) -> None:
    wrong = []
    for world_size, ways in by_ranks(that_show(fault)).items():
        by_rank = run_ranks(trained_with, world_size, [(FAULTS.index(fault), way) for way in ways])
        wrong += said_of_wrong({tuple(way.values()): list(each) for way, *each in zip(ways, *by_rank, strict=True)})
    assert wrong, "nobody noticed"


def test_no_fault_shows_in_one_value_with_all_else_at_its_default() -> None:
    """They need a pair, neither of which is a default."""
    for fault in FAULTS:
        assert all(value != CHOICES[option].values[0] for option, value in fault.pair)
        assert not any(fault.asked <= way.items() for way in with_twins(singles())), fault
        assert any(fault.asked <= row.items() for row in rows()), fault


def test_12_faults_need_a_pair_and_4_a_pair_with_defaults() -> None:
    assert [len([fault for fault in FAULTS if bool(fault.beside) is has]) for has in (False, True)] == [12, 4]
