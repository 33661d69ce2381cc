"""Which weights go into which file, as all ranks of a save know it: stages of a pipeline, and experts, have others."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from torch import nn

from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.safetensors_file import DTYPES, NAMES
from zerox.checkpoint.weight_parts import Weight
from zerox.checkpoint.weight_writer import PlannedFile, Whole, plan_files

INSTEAD = "zerox.save() has them"
TWICE = "ranks have other weights of this name, as experts: give each the name that it has in the whole model"


class Plan(NamedTuple):
    """``own``: names of the weights whose parts this rank writes. ``num_parameters``: elements of parameters."""

    files: list[PlannedFile]
    own: set[str]
    num_parameters: int

    @property
    def total_bytes(self) -> int:
        return sum(entry.stop - entry.start for file in self.files for entry in file.entries.values())


class Line(NamedTuple):
    """What a rank says of a weight that it knows."""

    name: str
    shape: list[int]
    dtype: str
    is_param: bool


class Said(NamedTuple):
    """By a rank: its stage of a pipeline, and of each of its weights the elements that its parts have. ``digest``: of
    the lines about them."""

    stage: tuple[int, ...]
    most_bytes: int
    digest: str
    numels: list[int]


def agree(weights: Mapping[str, Weight], most_bytes: int, ranks: Everyone, failure: str) -> Plan:
    """``weights``: this rank's, by the names that files have for them. Collective.

    Raises CheckpointError, on all ranks, unless the parts of all ranks make up each weight.
    """
    lines: list[Line] = []
    with ranks.failing_together(failure):
        lines = [_describe(name, weight) for name, weight in weights.items()]
    numels = [sum(math.prod(part.sizes) for part in weight.parts) for weight in weights.values()]
    digest = hashlib.sha256(json.dumps(lines).encode()).hexdigest()
    everyones = ranks.gather(Said(ranks.pipeline_stage, most_bytes, digest, numels), failure)
    are_same = len({said.digest for said in everyones}) == 1
    lists = [lines] * len(everyones) if are_same else ranks.gather(lines, failure)
    with ranks.failing_together(failure):
        sizes = sorted({said.most_bytes for said in everyones})
        if len(sizes) > 1:
            raise CheckpointError(f"ranks passed other values of max_shard_size, {sizes[0]} and {sizes[-1]} bytes")
        return _plan(lists, everyones, ranks.pipeline_stage)


def _describe(name: str, weight: Weight) -> Line:
    if weight.dtype not in NAMES:
        raise CheckpointError(f"'{name}' is {weight.dtype}, which safetensors files do not have: {INSTEAD}")
    return Line(name, list(weight.shape), NAMES[weight.dtype], isinstance(weight.tensor, nn.Parameter))


def _plan(lists: Sequence[Sequence[Line]], everyones: Sequence[Said], own_stage: tuple[int, ...]) -> Plan:
    """``lists``: of each rank, in the order of ``everyones``. A weight of several stages, which is tied between them,
    is the first one's to write."""
    known: dict[str, Line] = {}
    stages: dict[str, tuple[int, ...]] = {}
    numels: dict[str, int] = {}
    for lines, said in zip(lists, everyones, strict=True):
        for line, numel in zip(lines, said.numels, strict=True):
            if known.setdefault(line.name, line)[:3] != line[:3]:
                raise CheckpointError(
                    f"ranks have different weights of the name '{line.name}': {_form(known[line.name])} and "
                    f"{_form(line)}"
                )
            if stages.setdefault(line.name, said.stage) == said.stage:
                numels[line.name] = numels.get(line.name, 0) + numel
    for name, line in known.items():
        if (whole := math.prod(line.shape)) != numels[name]:
            raise CheckpointError(
                f"ranks have {numels[name]} elements of '{name}' between them, and it has {whole}: "
                + (TWICE if numels[name] > whole else f"a part of it is on no rank. {INSTEAD}")
            )
    wholes = [Whole(line.name, DTYPES[line.dtype], tuple(line.shape)) for line in known.values()]
    own = {name for name, stage in stages.items() if stage == own_stage}
    num_parameters = sum(math.prod(line.shape) for line in known.values() if line.is_param)
    return Plan(plan_files(wholes, everyones[0].most_bytes), own, num_parameters)


def _form(line: Line) -> str:
    return f"{line.dtype} of shape {line.shape}"
