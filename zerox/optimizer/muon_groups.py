"""The param groups of a model that is trained by Muon: which parameter goes to Muon, and which to AdamW."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from fnmatch import fnmatchcase
from itertools import compress
from operator import not_
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from zerox.optimizer.model_parts import LEAST, Part, parts_of
from zerox.rules.muon import MUON, check_group

CALL = "zerox.muon_groups()"
Names = str | Sequence[str]


def muon_groups(
    model: nn.Module,
    *,
    lr: float | Tensor,
    adamw_lr: float | Tensor,
    weight_decay: float | None = None,
    adamw_weight_decay: float | None = None,
    adamw_betas: tuple[float, float] | None = None,
    adamw_eps: float | None = None,
    muon: Names = (),
    adamw: Names = (),
    split_sizes: Mapping[str, Sequence[int]] | None = None,
    num_heads: Mapping[str, int] | None = None,
    verbose: bool = True,
) -> list[dict[str, Any]]:
    """Param groups of all parameters, frozen ones too, for :class:`FusedShardedMuon` or :class:`FusedShardedAdam`.

    Muon gets parameters ``[rows, columns]`` and stacks ``[experts, rows, columns]`` of at least 16 rows and columns.
    AdamW gets all others, and of these: embeddings, which are what an ``nn.Embedding`` or ``nn.EmbeddingBag`` holds,
    and a parameter with "embed" in its own name or in its module's class; kernels of convolutions; heads, and what
    shares memory with one of these. A head is what ``get_output_embeddings()`` returns. Outside of repeated layers it
    is also a linear layer called "lm_head", "head", "classifier" or "score", and one that is as wide as the largest
    embedding has rows (without embeddings, the last linear layer). Rank 0 prints to stderr what went where.

    Args:
        lr, weight_decay: of Muon. An option that is None, or has no argument here, is the optimizer's own.
        adamw_lr, adamw_weight_decay, adamw_betas, adamw_eps: of AdamW.
        muon, adamw: names of parameters that go there in any case, or patterns of names, as ``"blocks.*.gate"``.
        split_sizes, num_heads: how Muon cuts parameters by rows, as in :class:`FusedShardedMuon`, by their names or
            patterns: ``{"*.qkv.weight": (768, 768, 768)}``.
        verbose: False prints nothing.

    Raises ValueError for a name or pattern that no parameter has (of the cut ones: none of Muon's), for one parameter
    under two of them, for one that Muon can't take or cut so, and if nothing is left for Muon; TypeError for what is no
    model, as ``model.parameters()``.
    """
    if not isinstance(model, nn.Module):
        raise TypeError(
            f"{CALL} takes the model itself, since it goes by modules and names, got {type(model).__name__}"
        )
    parts = parts_of(model)
    asked = {"muon": _matching(parts, "muon", muon), "adamw": _matching(parts, "adamw", adamw)}
    if both := asked["muon"] & asked["adamw"]:
        raise ValueError(f"{CALL}: muon= and adamw= both name '{parts[min(both)].names[0]}'")
    for name, indices in asked.items():
        for index in indices:
            parts[index] = parts[index]._replace(kind=f"named by {name}=")
    is_of_muon = [part.is_matrix or index in asked["muon"] for index, part in enumerate(parts)]
    by_muon = list(compress(parts, is_of_muon))
    if not by_muon:
        raise ValueError(
            f"{CALL}: {type(model).__name__} has no parameter for Muon, which gets matrices of at least {LEAST} rows "
            "and columns that are no embeddings, heads or convolutions. Train it with FusedShardedAdam, or name "
            "parameters for Muon by muon="
        )
    of_muon = _given(lr=lr, weight_decay=weight_decay)
    groups = [{"rule": "muon", **of_muon, **group} for group in _cut(by_muon, split_sizes or {}, num_heads or {})]
    if rest := list(compress(parts, map(not_, is_of_muon))):
        of_adamw = _given(lr=adamw_lr, weight_decay=adamw_weight_decay, betas=adamw_betas, eps=adamw_eps)
        groups.append({"rule": "adam", **of_adamw, "params": rest})
    if verbose and _is_first_rank():
        print("\n".join(_lines(groups)), file=sys.stderr, flush=True)
    return [{**group, "params": [(part.names[0], part.param) for part in group["params"]]} for group in groups]


def _given(**options: Any) -> dict[str, Any]:
    return {name: value for name, value in options.items() if value is not None}


def _matching(parts: Sequence[Part], argument: str, names: Names) -> set[int]:
    """Which of the parts have these names, or match these patterns."""
    found: set[int] = set()
    for name in (names,) if isinstance(names, str) else names:
        fits = {index for index, part in enumerate(parts) if any(fnmatchcase(each, name) for each in part.names)}
        if not fits:
            raise ValueError(f"{CALL}: {argument}={name!r} fits no parameter. Names are those of named_parameters()")
        found |= fits
    return found


def _cut(
    by_muon: Sequence[Part], split_sizes: Mapping[str, Sequence[int]], num_heads: Mapping[str, int]
) -> list[dict[str, Any]]:
    """Groups of parts: those that stay whole first, then those that are cut alike."""
    cuts: dict[int, dict[str, Any]] = {}
    for option, by_name in (("split_sizes", split_sizes), ("num_heads", num_heads)):
        for name, value in by_name.items():
            for index in sorted(_matching(by_muon, f"Muon has nothing to cut: {option}", name)):
                if index in cuts:
                    raise ValueError(
                        f"{CALL}: '{by_muon[index].names[0]}' is to be cut twice: {cuts[index]} and {option}={value!r}"
                    )
                cuts[index] = {option: value}
    groups: dict[str, dict[str, Any]] = {}
    for index in sorted(range(len(by_muon)), key=lambda index: index in cuts):
        part, cut = by_muon[index], cuts.get(index, {})
        try:
            check_group({**MUON.defaults, **cut, "params": [part.param]})
        except (TypeError, ValueError) as error:
            raise type(error)(f"{CALL}: '{part.names[0]}': {error}") from error
        groups.setdefault(repr(cut), {**cut, "params": []})["params"].append(part)
    return list(groups.values())


def _is_first_rank() -> bool:
    if dist.is_available() and dist.is_initialized():
        return dist.get_rank() == 0
    return os.environ.get("RANK", "0") == "0"


def _lines(groups: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """What is printed. Names that differ by a number are one line with a star, which is their pattern, too."""
    rule = f"matrices, and stacks of them, of at least {LEAST} rows and columns"
    yield f"{CALL}: Muon gets {rule}; AdamW gets embeddings, heads, convolutions, and all else"
    for group in groups:
        is_muon = group["rule"] == "muon"
        cut = "".join(f", {name}={group[name]!r}" for name in ("split_sizes", "num_heads") if name in group)
        yield f"  {'Muon' if is_muon else 'AdamW'}, lr={float(group['lr']):g}{cut}:"
        alike: dict[str, list[Part]] = {}
        for part in group["params"]:
            shape = " x ".join(map(str, part.param.shape)) or "a number"
            alike.setdefault(f"{part.kind}\0{_pattern(part.names[0])}\0{shape}", []).append(part)
        said = ""
        for key in sorted(alike, key=lambda key: key.split("\0")[0]):
            (kind, pattern, shape), same = key.split("\0"), alike[key]
            if kind != said:
                said = kind
                yield f"    {kind}:"
            also = "".join(f", also {name}" for name in same[0].names[1:]) if len(same) == 1 else ""
            name = same[0].names[0] if len(same) == 1 else f"{pattern} ({len(same)})"
            frozen = ", frozen" if not any(part.param.requires_grad for part in same) else ""
            yield f"      {name}: {shape}{also}{frozen}"
    yield "  muon= and adamw= move what they name so (* stands for anything), and verbose=False prints nothing"


def _pattern(name: str) -> str:
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
