"""Which parameters a Sparsity is of."""

from __future__ import annotations

from collections.abc import Mapping
from fnmatch import fnmatchcase

from zerox.engine import Engine
from zerox.memory.bucket import Member
from zerox.memory.mask import stands_for
from zerox.options import parameter_words
from zerox.plan import combinations
from zerox.plan.choices import MASKS, SPARSITY

MOST_NAMES = 8


def match(optimizer: Engine, globs: Mapping[str, float]) -> dict[str, list[Member]]:
    """By glob the parameters that it stands for. Raises ValueError as :class:`zerox.Sparsity`."""
    if not globs:
        raise ValueError("Sparsity: no names of parameters were given")
    if any("param_names" not in group for group in optimizer.param_groups):
        raise ValueError("Sparsity finds parameters by name: build the optimizer from model.named_parameters()")
    in_buckets = [member for bucket in optimizer.inside.buckets for member in bucket.members]
    known = sorted(in_buckets, key=lambda member: member.number)
    own = optimizer.inside.calls.own.params
    for group in optimizer.param_groups if own else ():
        for name, param in zip(group["param_names"], group["params"], strict=False):
            if id(param) in own and (glob := next((each for each in globs if stands_for(each, name, param)), None)):
                raise ValueError(
                    f"Sparsity: {glob!r} stands for '{name}', this rank's own parameter, which no "
                    "DistributedDataParallel has, and masks are of parameters that ranks share: give names that stand "
                    "for none of these"
                )
    found: dict[str, list[Member]] = {}
    of: dict[int, str] = {}
    for glob, value in globs.items():
        if not 0.0 <= value < 1.0:
            raise ValueError(f"Sparsity: {glob!r} asks for {value}: it must be at least 0 and less than 1")
        found[glob] = [m for m in known if stands_for(glob, m.name, m.param)]
        if not found[glob]:
            raise ValueError(_nothing(glob, known))
        for member in found[glob]:
            if member.number in of:
                raise ValueError(
                    f"Sparsity: {of[member.number]!r} and {glob!r} both stand for parameter '{member.name}': name it "
                    "in one of them"
                )
            of[member.number] = glob
    return found


def _nothing(glob: str, known: list[Member]) -> str:
    near = [m for m in known if fnmatchcase(m.name, glob)]
    if near:
        combinations.check({MASKS: {SPARSITY}, "parameters": parameter_words(m.param.dtype for m in near)})
        return (
            f"Sparsity: {glob!r} stands for {', '.join([m.name for m in near][:MOST_NAMES])}, which have one "
            "dimension: biases and norms are taken by their full names only"
        )
    names = ", ".join(m.name for m in known[:MOST_NAMES])
    return f"Sparsity: {glob!r} stands for no trained parameter; the first are {names}"
