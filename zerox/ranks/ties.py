"""A weight that two pipeline stages share, which each trains by itself: what shows of it at construction."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from zerox.ranks.model_axes import ModelAxes, ModelAxis

# Note [Tied pipeline stages]
# Ranks of two pipeline stages have no memory in common, so nothing proves that two of their parameters are one weight.
# Names don't: stages of nn.Sequential are all named "0.weight", and a tied weight has another name at either end.
# Values do nearly: random ones are equal if one is a copy of the other, or if stages were seeded alike. That is
# harmless, so equal values are a warning and no error.
# What is no sign of anything is left out: values that are all the same, such as a norm's ones; those that a stage has
# twice, which follow from a formula; and frozen parameters, whose gradients nobody misses.

MOST_VALUES = 64  # of a parameter that are compared, at even distances
WAY_OUT = (
    "If that is one weight, nobody adds up its two gradients: keep it on one stage, or add p.grad up over both inside "
    "no_sync(), after the schedule. If these stages were only seeded alike, this does no harm"
)


def ties(model: ModelAxes, params: Iterable[tuple[str, Tensor]]) -> list[str]:
    """For each axis whose ranks have other parameters, a sentence on equal ones there. Collective over these.

    ``params``: those that are trained, as they lie here, with their names.
    """
    axes = [axis for axis in model.axes if not axis.is_of_params]
    prints = _prints(params) if axes else {}
    return [said for axis in axes if (said := _find_tied(axis, axis.gather_objects(prints)))]


def _find_tied(axis: ModelAxis, prints: Sequence[dict[str, str]]) -> str:
    first: dict[str, tuple[int, str]] = {}
    found = []
    for rank, of_rank in zip(axis.ranks, prints, strict=True):
        for what, name in of_rank.items():
            if what in first:
                found.append((*first[what], rank, name))
            first.setdefault(what, (rank, name))
    if not found:
        return ""
    one, name, other, other_name = found[0]
    more = f", and {len(found) - 1} more have others' values" if len(found) > 1 else ""
    return (
        f"zerox: along axis {axis.name}, parameter '{name}' of rank {one} has the values of '{other_name}' of rank "
        f"{other}{more}. {WAY_OUT}"
    )


def _prints(params: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    """Names by fingerprint."""
    of = [(_print_of(param), name) for name, param in params]
    counts = Counter(what for what, _ in of)
    return {what: name for what, name in of if what and counts[what] == 1}


def _print_of(param: Tensor) -> str:
    """Of the shape and some values; empty if these are all the same."""
    flat = param.detach().flatten()
    values = flat[:: max(1, flat.numel() // MOST_VALUES)][:MOST_VALUES].contiguous().cpu()
    if values.numel() == 0 or bool((values == values[0]).all()):
        return ""
    content = f"{param.dtype} {tuple(param.shape)} {values.view(torch.uint8).tolist()}"
    return hashlib.blake2b(content.encode(), digest_size=16).hexdigest()
