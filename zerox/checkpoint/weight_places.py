"""Tensors of files that are parts of one weight of the model, as experts that newer models have in one tensor."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.weight_files import Chunk, Stored, WeightFiles
from zerox.checkpoint.weight_parts import Weight
from zerox.plan.file_runs import Place

Index = int | slice | tuple[int | slice, ...]


class Placed(NamedTuple):
    """The tensor ``name`` of the files is what the weight has at this index."""

    name: str
    at: tuple[Any, ...]  # of int and slice, as weights are indexed


def stored_as(
    files: WeightFiles, names: Mapping[str, str], parts: Mapping[str, Sequence[Placed]], weights: Sequence[Weight]
) -> dict[str, Stored]:
    """By name in the model, the tensor of the files, or what is made of several. ``names``, ``parts``: of renamed().

    CheckpointError if such parts do not fit, or leave out some elements.
    """
    shapes = {name: weight.shape for weight in weights for name in weight.names}
    found = {new: files.tensors[name] for new, name in names.items() if new not in parts and name in files.tensors}
    made = {new: _compose(new, shapes[new], each, files) for new, each in parts.items() if new in shapes}
    return found | made


def _compose(name: str, shape: tuple[int, ...], parts: Sequence[Placed], files: WeightFiles) -> Stored:
    chunks: list[Chunk] = []
    places: list[Place] = []
    dtypes = {files.tensors[each.name].dtype for each in parts}
    if len(dtypes) > 1:
        raise CheckpointError(f"parts of {name} are {' and '.join(sorted(map(str, dtypes)))} in the files")
    for part in parts:
        stored = files.tensors[part.name]
        place, kept = _place(name, shape, part)
        inside = tuple(place[1][dim] for dim in kept)
        if inside != stored.shape:
            raise CheckpointError(
                f"'{part.name}' has shape {list(stored.shape)}, and goes to {_text(name, part)}, which has "
                f"{list(inside)}"
            )
        chunks += [_moved(chunk, place, kept) for chunk in stored.chunks]
        places.append(place)
    if not _make_up(shape, places):
        numel = sum(math.prod(sizes) for _, sizes in places)
        raise CheckpointError(
            f"'{parts[0].name}' and {len(parts) - 1} more tensors of the files do not make up {name}: of its "
            f"{math.prod(shape)} elements they have {numel}, or some twice; or they are not cut along one "
            "dimension after the other"
        )
    return Stored(dtypes.pop(), shape, tuple(chunks))


def _make_up(shape: Sequence[int], places: Sequence[Place]) -> bool:
    """Whether rectangles have each element once. They must be cut along the first dimension first, and so on."""
    if not shape:
        return len(places) == 1
    inside: dict[tuple[int, int], list[Place]] = {}
    for offsets, sizes in places:
        inside.setdefault((offsets[0], sizes[0]), []).append((offsets[1:], sizes[1:]))
    end = 0
    for (start, size), each in sorted(inside.items(), key=lambda item: item[0]):
        if start != end or not _make_up(shape[1:], each):
            return False
        end += size
    return end == shape[0]


def _place(name: str, shape: tuple[int, ...], part: Placed) -> tuple[Place, list[int]]:
    """The rectangle of an index, and which dimensions it keeps."""
    offsets, sizes, kept = [], [], []
    if len(part.at) > len(shape):
        raise CheckpointError(f"{_text(name, part)}: {name} has {len(shape)} dimensions")
    index = [*part.at, *[slice(None)] * (len(shape) - len(part.at))]
    for dim, (size, at) in enumerate(zip(shape, index, strict=True)):
        if isinstance(at, slice):
            start, stop, step = at.indices(size)
            kept.append(dim)
        else:
            start, step = at + size if at < 0 else at, 1
            stop = start + 1
        if step != 1 or not 0 <= start < stop <= size:
            raise CheckpointError(f"{_text(name, part)} is no part of {name}, which has shape {list(shape)}")
        offsets.append(start)
        sizes.append(stop - start)
    return (tuple(offsets), tuple(sizes)), kept


def _moved(chunk: Chunk, place: Place, kept: Sequence[int]) -> Chunk:
    """A rectangle of the part as one of the whole weight."""
    offsets, sizes = list(place[0]), [1] * len(place[0])
    strides = [0] * len(place[0])  # of a dimension of one element it does not matter
    for inside, dim in enumerate(kept):
        offsets[dim] += chunk.offsets[inside]
        sizes[dim] = chunk.sizes[inside]
        strides[dim] = chunk.strides[inside] if chunk.strides else 0
    return chunk._replace(offsets=tuple(offsets), sizes=tuple(sizes), strides=tuple(strides) if chunk.strides else ())


def _text(name: str, part: Placed) -> str:
    return f"{name}[{', '.join(map(_of_index, part.at))}]"


def _of_index(at: Any) -> str:
    if not isinstance(at, slice):
        return str(at)
    ends = ["" if end is None else str(end) for end in (at.start, at.stop)]
    return ":".join([*ends, *([] if at.step is None else [str(at.step)])])
