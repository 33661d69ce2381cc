"""A few trainings in which every pair of options shows: a covering array, drawn from the table of which go together.

One training a pair (ways.py) names the pair that is wrong, and takes a dozen times as many. Here a pair that must show
also shows beside the default of nearly each third option: what goes wrong with a default else hides behind the others.
"""

from __future__ import annotations

import functools
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence, Set
from itertools import combinations

from tests.optimizer.ways import REFUSED, Item, Pair, Way, costs, needs_accelerator, not_refused, plain_twin, way_of
from zerox.plan import combinations as table
from zerox.plan.choices import A_SUBGROUP, CHOICES, DTENSORS, LIE_AS, SUBGROUP, Setting

OF_FOUR = {("process_group", "a 2-D mesh"), (LIE_AS, DTENSORS), (SUBGROUP, A_SUBGROUP)}  # need four ranks
CANDIDATES = 3  # rows of which the one that shows most is taken
LEAST = 30  # of pairs beside a default, or a row is not worth its training
WORTH = dict.fromkeys(OF_FOUR, 0.5)  # four ranks take twice the time of two
Asked = frozenset[Item]  # a pair, or one with a default

# What does nothing beside these, and shows in no row that has them.
HIDDEN_BY: dict[str, tuple[Item, ...]] = {
    **dict.fromkeys(("stage", "resident_mb", "exchange", "join"), (("process_group", '"alone"'),)),
    "overlap_gather": (("process_group", '"alone"'), ("stage", "3")),
    "reduce_dtype": (("process_group", '"alone"'),),
    "state_dtype": (("parameters", "float64"),),
    "accumulate_dtype": (("parameters", "float32"), ("parameters", "float64")),
    "master_weights": (("parameters", "float32"), ("parameters", "float64")),
}
# Three that don't go together, where each two do: refused, or other bits than the twin has, as a But says.
NOT_TOGETHER: tuple[frozenset[Item], ...] = tuple(
    map(
        frozenset,
        (
            (("optimizer", "ShardedOptimizer"), ("lr", "a tensor"), ("foreach", "True")),  # torch's own class refuses
            # It computes with a rate of float32, where torch_step() has the number.
            (("optimizer", "ShardedOptimizer"), ("lr", "a tensor"), ("parameters", "float64")),
            (("stage", "3"), ("process_group", "a 2-D mesh"), ("sparse", "True")),
            *(
                (("exchange", '"native"'), ("process_group", "a 2-D mesh"), narrow)
                for narrow in (
                    ("parameters", "bfloat16"),
                    ("parameters", "float16"),
                    ("reduce_dtype", "torch.bfloat16"),
                    ("reduce_dtype", "torch.float16"),
                )
            ),
            # The backend rounds the sum, and others the quotient, whose smallest numbers have fewer digits in float16.
            *(
                (("exchange", '"native"'), ("gradient_divisor", "a number"), narrow)
                for narrow in (("parameters", "float16"), ("reduce_dtype", "torch.float16"))
            ),
            (("stage", "1"), ("mean_over", "called"), ("parameters", "float16")),
            (("stage", "1"), ("mean_over", "called"), ("reduce_dtype", "torch.float16")),
        ),
    )
)
# A wire of the parameters' own dtype, by the wire.
SAME_WIRE = {f"torch.{name}": ("parameters", name) for name in ("float32", "bfloat16", "float16")}


def rows() -> list[Way]:
    """Trainings on the CPU; the same ones every time."""
    return list(_rows(tuple(CHOICES.values()), table.ROWS))


@functools.lru_cache(2)
def _rows(*_: object) -> list[Way]:
    """Of choices and a table as they are: tests replace both."""
    return [{name: row[name] for name in CHOICES} for row in _Array(pairs_on_cpu()).rows()]


def share_shown(drawn: Iterable[Way]) -> float:
    """Of all pairs, by themselves and beside the default of each third option, those that these trainings show."""
    array = _Array(pairs_on_cpu())
    asked = len(array.left)
    for row in drawn:
        for each in array._shown(row):
            del array.left[each]
    return 1 - len(array.left) / asked


def singles() -> list[Way]:
    """Each value with all else at its default, where that goes."""
    settings = [Setting(choice.option, value) for choice in CHOICES.values() for value in choice.values]
    found = [way_of(setting) for setting in settings]
    return _each_once(way for way in found if way is not None and not needs_accelerator(way))


def with_twins(ways: Sequence[Way]) -> list[Way]:
    return _each_once(each for way in ways for each in (way, plain_twin(way)))


def pairs_on_cpu() -> list[Pair]:
    found = []
    for pair in not_refused():
        way = way_of(*pair)
        assert way is not None, f"{pair[0]} and {pair[1]} are not refused, and go with no values of the others"
        if not needs_accelerator(way):
            found.append(pair)
    return found


def shows(asked: Iterable[Item], row: Way) -> bool:
    """Whether the row has these values, and none that hides them."""
    items = set(asked)
    return items <= row.items() and not hiding(items) & row.items()


def hiding(asked: Set[Item]) -> set[Item]:
    """Values of other options beside which one of these does nothing."""
    found = {each for item in asked for each in HIDDEN_BY.get(item[0], ())} | {
        SAME_WIRE[value] for option, value in asked if option == "reduce_dtype" and value in SAME_WIRE
    }
    return {each for each in found if each[0] not in dict(asked)}


def _each_once(ways: Iterable[Way]) -> list[Way]:
    return list({tuple(way.values()): way for way in ways}.values())


def _is_default(item: Item) -> bool:
    return item[1] == CHOICES[item[0]].values[0]


class _Array:
    """Sets of values are integers here, a bit for each value of each option: what is left is counted very often."""

    def __init__(self, pairs: Sequence[Pair]) -> None:
        self.random = random.Random(0)
        items = [(choice.option, value) for choice in CHOICES.values() for value in choice.values]
        self.bit = {item: 1 << index for index, item in enumerate(items)}
        self.refused = dict.fromkeys(items, 0)
        for item, found in costs().items():
            self.refused[item] = self._mask(other for other, cost in found.items() if cost >= REFUSED)
        self.not_with = {item: [self._mask(s - {item}) for s in NOT_TOGETHER if item in s] for item in items}
        self.left: dict[Asked, None] = {}
        self.partners = dict.fromkeys(items, 0)  # by one of a pair that is left
        self.beside: dict[Item, Counter[Item]] = {item: Counter() for item in items if _is_default(item)}
        self.asked = [frozenset((each.option, each.value) for each in pair) for pair in pairs]
        for each in (*self.asked, *self._with_defaults()):
            self.left[each] = None
            self._toggle(each)

    def _mask(self, items: Iterable[Item]) -> int:
        return sum(self.bit[item] for item in items)

    def _with_defaults(self) -> Iterator[Asked]:
        for pair in self.asked:
            if not any(map(_is_default, pair)):
                mask, options = self._mask(pair), [option for option, _ in pair]
                yield from (
                    pair | {item} for item in self.beside if item[0] not in options and not self.refused[item] & mask
                )

    def _toggle(self, asked: Asked) -> None:
        if len(asked) == 2:
            one, other = asked
            self.partners[one] ^= self.bit[other]
            self.partners[other] ^= self.bit[one]
        else:
            (default,) = filter(_is_default, asked)
            one, other = asked - {default}
            self.beside[default][one] ^= self.bit[other]
            self.beside[default][other] ^= self.bit[one]

    def rows(self) -> list[Way]:
        found = []
        while self.left:
            seed = next(iter(self.left))
            drawn = [row for _ in range(CANDIDATES) if (row := self._row(seed)) and shows(seed, row)]
            shown = [(row, self._shown(row)) for row in drawn or self._by_defaults(seed)]
            row, now = max(shown, key=lambda each: len(each[1]), default=({}, []))
            if len(seed) == 2 or len(now) >= LEAST:
                found.append(row)
            else:
                now = []  # rare, or with this default the two don't go together
            for each in {*now, seed}:
                del self.left[each]
                self._toggle(each)
        return found

    def _by_defaults(self, seed: Asked) -> list[Way]:
        """The training that a pair by itself would have. A default that shows nowhere has none."""
        way = way_of(*(Setting(*item) for item in sorted(seed)))
        return [way] if way is not None and (len(seed) == 2 or shows(seed, way)) else []

    def _row(self, seed: Asked) -> Way | None:
        """Values for the other options in a random order, each the one that adds most. None: a dead end."""
        row = dict([*seed, ("device", "cpu"), ("backend", "gloo")])
        mask, hides = self._mask(row.items()), hiding(seed)
        others = [name for name in CHOICES if name not in row]
        self.random.shuffle(others)
        for option in others:
            items = [(option, value) for value in CHOICES[option].values]
            fits = [item for item in items if item not in hides and self._fits(item, mask)]
            if not fits:
                return None
            best = max(
                fits, key=lambda item: (self._gain(item, row, mask) * WORTH.get(item, 1.0), self.random.random())
            )
            row[option] = best[1]
            mask |= self.bit[best]
        return row

    def _fits(self, item: Item, mask: int) -> bool:
        if self.refused[item] & mask:
            return False
        return not any(rest & mask == rest for rest in self.not_with[item])

    def _gain(self, item: Item, row: Way, mask: int) -> int:
        pairs = (self.partners[item] & mask).bit_count()
        if item in self.beside:
            return pairs + sum((self.beside[item][each] & mask).bit_count() for each in row.items()) // 2
        defaults = (self.beside[each] for each in row.items() if each in self.beside)
        return pairs + sum((beside[item] & mask).bit_count() for beside in defaults)

    def _shown(self, row: Way) -> list[Asked]:
        plain = [item for item in row.items() if item in self.beside]
        special = [item for item in row.items() if item not in self.beside]
        pairs = [frozenset(pair) for pair in combinations(row.items(), 2)]
        more = [frozenset((*pair, default)) for pair in combinations(special, 2) for default in plain]
        return [each for each in (*pairs, *more) if each in self.left and shows(each, row)]
