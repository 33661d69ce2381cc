"""What zerox/plan/combinations.py may say of a pair of options."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass

from zerox.plan.choices import Setting, some


@dataclass(frozen=True)
class Refused:
    """``way_out``: what to do instead, as a sentence of its own."""

    reason: str
    way_out: str
    error: type[Exception] = ValueError

    def raise_of(self, one: str, other: str) -> None:
        raise self.error(f"zerox: {one} does not go with {other}: {self.reason}. {self.way_out}")

    def __str__(self) -> str:
        return f"refused: {self.reason}. {self.way_out}"


@dataclass(frozen=True)
class But:
    """The pair works. ``text`` is what nobody would expect who knows each of both options."""

    text: str

    def __str__(self) -> str:
        return f"**But** {self.text}"


@dataclass(frozen=True)
class Untried:
    """Nothing speaks against the pair, and nobody has tried it."""

    text: str

    def __str__(self) -> str:
        return f"untried: {self.text}"


Ruling = Refused | But | Untried


@dataclass(frozen=True)
class Row:
    """What holds for any of ``ones`` with any of ``others``."""

    ones: tuple[Setting, ...]
    others: tuple[Setting, ...]
    ruling: Ruling

    def pairs(self) -> Iterator[tuple[Setting, Setting]]:
        return itertools.product(self.ones, self.others)


OF_STAGE_3 = (*some("stage", "3"), *some("resident_mb", "a number"))
ON_GPUS = (*some("device", "cuda"), *some("backend", "nccl"))
BATCHES = "Give all ranks equally many batches"
