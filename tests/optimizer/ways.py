"""A value of every option, drawn for each pair from the table of which go together."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from zerox.plan import combinations
from zerox.plan.choices import CHOICES, SHARDED, Setting, some
from zerox.plan.combinations import But, Refused, Untried, pairs, verdict

Way = Mapping[str, str]  # a value of every option
Pair = tuple[Setting, Setting]

# What must not change a bit. (An optimizer alone has gradients of its own rank: that is another training.)
NEUTRAL = (
    "stage", "device", "backend", "ZEROX_EXCHANGE", "bucket_cap_mb", "resident_mb", "capturable", "overlap_gather",
    "join", "lr", "foreach", "fused",
)  # fmt: skip
# But torch's own classes have a path, and other last bits, for each of these.
OF_CLASS = ("lr", "foreach", "fused")
# What has an effect on 16-bit parameters only is tried with these.
FOR_16_BITS = {
    *some("accumulate_dtype", "torch.float32"),
    *some("reduce_dtype", "torch.float32"),
    *some("master_weights", '"auto"', '"fp32"', "None"),
}


def way_of(*chosen: Setting) -> Way | None:
    """A value of every option with these among them: defaults where they go with the others. None: nothing goes."""
    way = {each.option: each.value for each in chosen}
    if "parameters" not in way and FOR_16_BITS & set(chosen):
        way["parameters"] = "bfloat16"
    verdicts = {frozenset(pair): row.verdict for row in combinations.ROWS for pair in row.pairs()}
    for choice in CHOICES.values():
        if choice.option not in way:
            known = [Setting(*item) for item in way.items()]
            costs = [_cost(verdicts, value, known) for value in some(choice.option, *choice.values)]
            way[choice.option] = choice.values[costs.index(min(costs))]
    settings = [Setting(*item) for item in way.items()]
    if any(isinstance(verdicts.get(frozenset(pair)), Refused) for pair in itertools.combinations(settings, 2)):
        return None
    return {name: way[name] for name in CHOICES}


def _cost(verdicts: Mapping[frozenset[Setting], object], value: Setting, known: Sequence[Setting]) -> int:
    found = [verdicts.get(frozenset((value, other))) for other in known]
    return sum(1000 * isinstance(each, Refused) + isinstance(each, But | Untried) for each in found)


def name_of(pair: Pair) -> str:
    return " with ".join(map(str, pair))


def pairs_with(kind: type | None) -> list[Pair]:
    """Those that are Refused, that have a But, or that (None) simply work."""
    return [pair for pair in pairs() if isinstance(verdict(*pair), kind or type(None))]


def not_refused() -> list[Pair]:
    return [*pairs_with(None), *pairs_with(But)]


def needs_accelerator(way: Way) -> bool:
    return way["device"] != "cpu"


def is_inner(way: Way) -> bool:
    """Whether torch's own class updates. The fake accelerator does not know its operators: tests/gpu has such ways."""
    return way["optimizer"] == SHARDED


def ways(accelerator: bool, asked: Sequence[Pair] | None = None) -> list[Way]:
    """A training for each of these pairs, or for each that is not refused, none twice, with its plain twin.

    Those on the CPU, or the others.
    """
    found: dict[tuple[str, ...], Way] = {}
    for pair in asked or not_refused():
        way = way_of(*pair)
        assert way is not None, f"{pair[0]} and {pair[1]} are not refused, and go with no values of the others"
        for each in (way, plain_twin(way)):
            if needs_accelerator(each) is accelerator and not (accelerator and is_inner(each)):
                found[tuple(each.values())] = each
    return list(found.values())


def plain_twin(way: Way) -> Way:
    """The training whose bits it has to have."""
    neutral = [name for name in NEUTRAL if not (is_inner(way) and name in OF_CLASS)]
    kept = [Setting(*item) for item in way.items() if item[0] not in neutral]
    defaults = [Setting(name, CHOICES[name].values[0]) for name in neutral]
    twin = way_of(*kept, *defaults)
    assert twin is not None
    return twin
