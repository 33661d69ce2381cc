"""Fills one parameter's part of a bucket's state from parts in any saved form."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor

from zerox.memory.bucket import Bucket
from zerox.memory.forms import convert_, master_of, remainder_of, rounding_to
from zerox.memory.stored import Stored
from zerox.plan.form import BLOCK_NUMEL
from zerox.rules.rule import MASK, MASTER, MASTERS, REMAINDER, StateSpec

PIECE_NUMEL = 2**18
assert PIECE_NUMEL % BLOCK_NUMEL == 0


def fill_row(bucket: Bucket, row: int, parts: Mapping[str, Tensor], rest_anew: bool) -> list[str]:
    """Copies ``parts`` (by their key in the optimizer's state, 1-D, on any device) into the segment ``row``.

    With ``rest_anew``, state that they lack becomes that of a parameter that was never updated, else it stays. Returns
    the names of state that had to be rounded. The parameter's own value must be there already.
    """
    own = bucket.own_segments[row].span
    param = bucket.param_of(row)
    parts = {key: part.to(param.device) for key, part in parts.items()}
    rounded: dict[str, None] = {}
    for key, numbers in bucket.numbers.items():
        if key in parts:
            numbers[row] = parts[key].reshape(()).to(numbers)
        elif rest_anew:
            numbers[row] = 0
    for stored in bucket.state.values():
        kept, given = bucket.part_of(stored, row), Stored.among(stored.spec, parts)
        if stored.spec in MASTERS:
            continue
        if given is not None:
            bucket.absent.discard((row, stored.spec.key))
            for piece in pieces(kept.values.numel()):
                if convert_(kept.part(piece), given.part(piece)):
                    rounded[rounding_of(kept)] = None
        elif rest_anew:
            start_anew(bucket, row, stored.spec.key)
    if bucket.mask is not None and MASK.key in parts:
        bucket.mask = bucket.mask.with_replaced(own.start, parts[MASK.key].bool())
    masters = {spec.key: parts[spec.key] for spec in MASTERS if spec.key in parts}
    if bucket.master is None and masters:
        rounded["masters to the parameters' dtype"] = None
    elif bucket.master is not None and (masters or rest_anew):
        for piece in pieces(param.numel()):
            given_master = {key: part[piece] for key, part in masters.items()}
            bucket.part_of(bucket.master, row).values[piece] = as_master(bucket.master.spec, param[piece], given_master)
    return list(rounded)


def rounding_of(kept: Stored) -> str:
    """What is said of state that was rounded to this form."""
    return f"{kept.spec.key} to {kept.form}"


def start_anew(bucket: Bucket, row: int, key: str) -> None:
    """Takes away what a row has of this state, once its count of updates is known."""
    bucket.part_of(bucket.state[key], row).zero_()
    if bucket.rule.starts_itself(key) and bucket.steps[row] > 0:
        bucket.absent.add((row, key))
    else:
        bucket.absent.discard((row, key))


def pieces(numel: int) -> Iterator[slice]:
    """Ranges of elements in turn: a conversion's temporaries need not be as large as a parameter."""
    for start in range(0, numel, PIECE_NUMEL):
        yield slice(start, min(start + PIECE_NUMEL, numel))


def as_master(spec: StateSpec, param: Tensor, parts: Mapping[str, Tensor]) -> Tensor:
    """The master in this form; if ``parts`` has none, it is the parameter's value."""
    given, remainder = parts.get(MASTER.key), parts.get(REMAINDER.key)
    if spec == REMAINDER:
        if remainder is not None:
            return remainder
        return remainder_of(param, given.float() if given is not None else param.float())
    if given is None and remainder is not None:
        return rounding_to(param, master_of(param, remainder))
    return given if given is not None else param
