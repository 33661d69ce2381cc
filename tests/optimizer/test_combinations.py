"""Every pair of options does what zerox/plan/combinations.py says of it. The pairs are drawn from that table.

Those that are not refused are trained by test_pairs.py.
"""

from __future__ import annotations

import ast
import inspect
import re

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.optimizer.combined import Training, outcome
from tests.optimizer.covering import OF_FOUR
from tests.optimizer.made import ELSEWHERE, OF_CLASSES, ON_MESH, arguments, build, of_optimizer
from tests.optimizer.ways import (
    OF_RANKS,
    Pair,
    Way,
    first_of,
    name_of,
    needs_accelerator,
    not_refused,
    pairs_with,
    way_of,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer, Sparsity, estimate
from zerox.options import ACCUMULATE_DTYPES, MASTER_WEIGHTS, PARAM_DTYPES, REDUCE_DTYPES, STATE_FORMS, _word
from zerox.plan import combinations
from zerox.plan.choices import (
    A_SUBGROUP,
    CHOICES,
    DTENSORS,
    FIRST_VALUES,
    FUSED,
    MASKS,
    ON_META,
    SHARDED,
    SPARSITY,
    TABLES,
    Setting,
    some,
)
from zerox.plan.combinations import Refused, Row, Untried, pairs, ruling
from zerox.plan.owners import WHOLE
from zerox.plan.stage import STAGES
from zerox.ranks.exchange import EXCHANGES
from zerox.rules.adam import ADAM
from zerox.rules.known import options_of
from zerox.rules.rule import FLAGS

ON_MESH_OF = 4  # ranks, and so many have DTensors and sub-groups
# Numbers, what can only be False, and ranks with other parts of the model, which tests/mesh has.
NO_CHOICES = {"params", "betas", "eps", "weight_decay", "differentiable", "norm_group", "model", "init"}


# ---- the table


def test_every_option_of_the_constructor_has_a_choice_with_its_values() -> None:
    asked = set(inspect.signature(FusedShardedAdam).parameters) - NO_CHOICES
    assert asked == set(CHOICES) - set(ELSEWHERE) - set(OF_CLASSES)
    assert set(OF_CLASSES) <= set(inspect.signature(ShardedOptimizer).parameters)
    taken = {
        "stage": STAGES,
        "reduce_dtype": REDUCE_DTYPES,
        "accumulate_dtype": ACCUMULATE_DTYPES,
        "state_dtype": STATE_FORMS,
        "master_weights": MASTER_WEIGHTS,
        "exchange": (None, *EXCHANGES),
        "whole": WHOLE,
    }
    for option, values in taken.items():
        assert {_word(option, value) for value in values} == set(CHOICES[option].values), option
    assert {str(each).removeprefix("torch.") for each in PARAM_DTYPES} == set(CHOICES["parameters"].values)


def test_defaults_are_the_first_values() -> None:
    of_both = [*inspect.signature(FusedShardedAdam).parameters.items()]
    for name, parameter in [*of_both, *inspect.signature(ShardedOptimizer).parameters.items()]:
        if name in CHOICES:
            assert _word(name, parameter.default) == CHOICES[name].values[0]


def test_rows_are_of_options_and_values_that_there_are_and_of_no_pair_twice() -> None:
    found = [frozenset(pair) for row in combinations.ROWS for pair in row.pairs()]
    assert len(found) == len(set(found))
    assert set(found) <= {frozenset(pair) for pair in pairs()}


def test_the_reasons_are_sentences_with_a_way_out() -> None:
    for row in combinations.ROWS:
        said = row.ruling.way_out if isinstance(row.ruling, Refused) else row.ruling.text
        assert said
        assert not said.endswith(".")


# ---- pairs that are refused


def not_a_group(backend: str) -> dist.ProcessGroup:
    """A group of two that has no backend for the CPU."""
    group = dist.ProcessGroup(0, 2)
    dist.distributed_c10d._world.pg_map[group] = (backend, None)  # type: ignore[assignment]
    return group


def of_class(pair: Pair) -> Pair:
    """The pair itself, or if ShardedOptimizer refuses the other one in any case, those two: that is said first."""
    others = [each for each in pair if each.option not in OF_CLASSES]
    if len(others) == len(pair) or others[0].option == "optimizer":
        return pair
    found = Setting("optimizer", SHARDED), others[0]
    return found if isinstance(ruling(*found), Refused) else pair


def way_of_refused(pair: Pair) -> dict[str, str]:
    """All else at its default, but for an option that only ShardedOptimizer has."""
    has_class = set(OF_CLASSES) & {each.option for each in pair}
    plain = {name: choice.values[0] for name, choice in CHOICES.items()}
    return plain | ({"optimizer": SHARDED} if has_class else {}) | {each.option: each.value for each in pair}


@pytest.mark.parametrize("pair", pairs_with(Refused), ids=name_of)
def test_a_refused_pair_raises_what_the_table_says(pair: Pair) -> None:
    refused = ruling(*pair)
    assert isinstance(refused, Refused)
    message = re.escape(f"{refused.reason}. {refused.way_out}")
    settings = {each.option: each.value for each in pair}
    plain = way_of_refused(pair)
    of_ranks = (
        {"cuda", ON_MESH, DTENSORS, A_SUBGROUP} & set(settings.values())
        or {"join", "capturable"} <= set(settings)
        or {MASKS, "capturable"} <= set(settings)
        or {TABLES, "resident_mb"} <= set(settings)  # stage 3, which it needs, is refused first
        or (set(OF_CLASSES) & set(settings) and FUSED in settings.values())  # whose constructor has no such argument
    )
    if of_ranks or (settings.get("backend") == "nccl" and "device" not in settings):
        # As the constructor asks, where there is such a device, and where there are ranks.
        with pytest.raises(refused.error, match=message):
            combinations.check({name: {value} for name, value in settings.items()})
        return
    pair = of_class(pair)
    refused = ruling(*pair)
    assert isinstance(refused, Refused)
    message = re.escape(f"{refused.reason}. {refused.way_out}")
    shape = (3, 2) if plain[TABLES] == "True" or plain["rule"] == '"muon"' else (3,)
    params = [nn.Parameter(torch.ones(shape, dtype=getattr(torch, plain["parameters"])))]
    options = arguments({**plain, "backend": "gloo"})
    if plain[FIRST_VALUES] == ON_META:
        options["model"] = nn.ParameterList(params).to("meta")
        params = [*options["model"].parameters()]
    if settings.get("backend") == "nccl":
        options["process_group"] = not_a_group("nccl")
    if "join" in settings:  # which is asked for later
        optimizer = build([("w", params[0])], plain, **options)
        sparsity = Sparsity(optimizer, {"w": 0.5}) if MASKS in settings else None
        with pytest.raises(refused.error, match=message):
            optimizer.join()
        del sparsity
        return
    if MASKS in settings:  # so are they
        with pytest.raises(refused.error, match=message):
            Sparsity(build([("w", params[0])], plain, **options), {"w": 0.5})
        return
    before = params[0].data_ptr()
    with pytest.raises(refused.error, match=message) as raised:
        build(params, plain, **options)
    assert all(str(each) in str(raised.value) for each in pair)
    assert params[0].data_ptr() == before, "nothing has changed"
    if not set(settings) & {"device", "backend", FIRST_VALUES}:  # which may be others than those of the estimate
        given = [{"params": params, "sparse": True}] if plain[TABLES] == "True" else params
        rule = ast.literal_eval(plain["rule"])
        mute = {*ADAM.defaults, *FLAGS} - {*options_of(rule)}
        options = {name: v for name, v in options.items() if name not in mute or v != ADAM.defaults.get(name)}
        with pytest.raises(refused.error, match=message):
            estimate(given, 2, rule=rule, **of_optimizer(plain, options))
    dist.distributed_c10d._world.pg_map.pop(options["process_group"], None)


def on_ranks() -> list[Pair]:
    """Refused pairs that four ranks on the CPU can ask for."""
    found = [pair for pair in pairs_with(Refused) if OF_FOUR & {(each.option, each.value) for each in pair}]
    return [pair for pair in found if not set(some("capturable", "True")) & set(pair)]


def raised_of(rank: int, _: int, asked: list[Pair]) -> list[str]:
    ways = [way_of_refused(pair) for pair in asked]
    for way in ways:
        way["stage"] = "3" if way["resident_mb"] == "a number" else way["stage"]
    return [str(outcome(lambda way=way: Training(rank, way))) for way in ways]


def test_a_refused_pair_of_ranks_raises_what_the_table_says() -> None:
    asked = on_ranks()
    assert len(asked) >= 9
    for messages in run_ranks(raised_of, ON_MESH_OF, asked):
        for pair, message in zip(map(of_class, asked), messages, strict=True):
            refused = ruling(*pair)
            assert isinstance(refused, Refused)
            if "resident_mb" not in {each.option for each in pair}:  # stage 3, which it needs, is refused first
                assert f"{refused.reason}. {refused.way_out}" in message, name_of(pair)
                assert all(str(each) in message for each in pair), name_of(pair)
            assert message.startswith(f"{refused.error.__name__}: "), name_of(pair)


def test_only_gpus_are_untried() -> None:
    for pair in pairs_with(Untried):
        assert {each.value for each in pair} & {"cuda", "nccl"}, name_of(pair)


REFUSES = Refused("this test says so", "Leave it out")
UNSAID = {
    *some("whole", '"none"'),
    *some("rule", '"adam"'),
    *some("foreach", "None"),
    *some("fused", "None"),
    *some("overlap_gather", "not called"),
    *some("mean_over", "not called", "called"),
    *some("join", "outside"),
    *some(MASKS, "None"),
    *some(TABLES, "False"),
}


# At their defaults, which a group of another rule does not name.
OF_ADAM = {*some("amsgrad", "False"), *some("decoupled_weight_decay", "True")}
MUTE = {'"sgd"': OF_ADAM, '"lion"': OF_ADAM, '"muon"': {*OF_ADAM, *some("maximize", "False")}}

# What is called when parameters have their values.
LATER = {*some("overlap_gather", "called"), *some("join", "inside"), *some(MASKS, SPARSITY)}


def is_said(pair: Pair) -> bool:
    """Whether the constructor is told of both."""
    if set(some(FIRST_VALUES, ON_META)) & set(pair) and LATER & set(pair):
        return False
    return not UNSAID & set(pair) and not any(MUTE.get(each.value, set()) & set(pair) for each in pair)


def refusals(rank: int, world_size: int, asked: list[tuple[Pair, Way]]) -> list[str]:
    """What building an optimizer raises where the table refuses nothing but one of the pairs."""
    before = combinations.ROWS
    found = []
    try:
        for (one, other), way in asked:
            combinations.ROWS = (Row((one,), (other,), REFUSES),)
            found.append(outcome(lambda way=way: Training(rank, way)))
    finally:
        combinations.ROWS = before
    return [each if isinstance(each, str) else "taken" for each in found]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_row_of_the_table_is_all_that_the_constructor_needs_to_refuse(world_size: int) -> None:
    """So a later option is refused from its first row on. Of what only several ranks ask, with some values of each."""
    asked = []
    for pair in not_refused():
        way = way_of(*pair)
        in_turn = sum(each.option in OF_RANKS for each in pair) == world_size - 1
        few = world_size == 1 or any(each.value == first_of(each.option) for each in pair)
        if way and in_turn and few and not needs_accelerator(way) and is_said(pair) and way["process_group"] != ON_MESH:
            asked.append((pair, way))
    assert len(asked) > 100
    by_rank = [refusals(0, 1, asked)] if world_size == 1 else run_ranks(refusals, 2, asked, timeout_s=300)
    for messages in by_rank:
        for (pair, _), message in zip(asked, messages, strict=True):
            assert message.endswith("this test says so. Leave it out"), f"{name_of(pair)}: {message}"
