"""A value of every option, drawn for each pair from the table of which go together."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from zerox.plan import combinations
from zerox.plan.choices import CHOICES, FIRST_VALUES, LIE_AS, SHARDED, SUBGROUP, Setting, some
from zerox.plan.combinations import But, Refused, Untried, pairs, ruling

Way = Mapping[str, str]  # a value of every option
Pair = tuple[Setting, Setting]
Item = tuple[str, str]  # an option and a value
Costs = dict[Item, dict[Item, int]]  # of one beside the other, where they do not simply work

REFUSED = 1000
_read: tuple[object, Costs] = (None, {})  # the table's rows, and what they cost

# What must not change a bit. (An optimizer alone has gradients of its own rank: that is another training.)
NEUTRAL = (
    "stage", FIRST_VALUES, "device", "backend", "exchange", "bucket_cap_mb", "resident_mb", "capturable",
    "overlap_gather", "join", "whole", "lr", "foreach", "fused",
)  # fmt: skip
# But torch's own classes have a path, and other last bits, for each of these.
OF_CLASS = ("lr", "foreach", "fused")
# One rank alone asks none of these.
OF_RANKS = ("process_group", LIE_AS, SUBGROUP, "backend", "exchange")
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
    by_item = costs()
    spent: Counter[Item] = Counter()  # by what might be chosen, beside all that is
    for item in way.items():
        spent.update(by_item.get(item, {}))
    for choice in CHOICES.values():
        if choice.option not in way:
            item = min(((choice.option, value) for value in choice.values), key=spent.__getitem__)
            way[choice.option] = item[1]
            spent.update(by_item.get(item, {}))
    if any(spent[item] >= REFUSED for item in way.items()):
        return None
    return {name: way[name] for name in CHOICES}


def costs() -> Costs:
    """Of the table as it is: tests replace it. It is asked for thousands of times, and read once."""
    global _read
    if _read[0] is not combinations.ROWS:
        costs: Costs = {}
        for row in combinations.ROWS:
            cost = REFUSED if isinstance(row.ruling, Refused) else int(isinstance(row.ruling, But | Untried))
            for one, other in row.pairs():
                for this, that in ((one, other), (other, one)):
                    costs.setdefault((this.option, this.value), {})[that.option, that.value] = cost
        _read = combinations.ROWS, costs
    return _read[1]


def first_of(option: str) -> str:
    return CHOICES[option].values[0]


def name_of(pair: Pair) -> str:
    return " with ".join(map(str, pair))


def pairs_with(kind: type | None) -> list[Pair]:
    """Those that are Refused, that have a But, or that (None) simply work."""
    return [pair for pair in pairs() if isinstance(ruling(*pair), kind or type(None))]


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
