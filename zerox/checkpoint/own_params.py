"""Ranks with parameters of their own, as pipeline stages or experts: one checkpoint has those of all, by names."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

from torch import Tensor

from zerox import _C as C
from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.names import MODEL
from zerox.sliced_tensor import SlicedTensor


def all_names(ranks: Everyone, names: Collection[str], failure: str) -> set[str]:
    """Those of all ranks. Collective where these have parameters of their own. Raises CheckpointError, as all here."""
    return set().union(*ranks.gather(set(names), failure)) if ranks.has_own_params else set(names)


Owner = tuple[object, ...]


def gather_host_parts(
    ranks: Everyone,
    tensors: Mapping[str, Tensor],
    host: Mapping[str, Any],
    subgroup_of: Mapping[str, tuple[int, int]],
    failure: str,
) -> dict[str, Any]:
    """The host's part of all ranks. Collective where ranks have parameters of their own.

    A name that two of them have stands for one tensor in a checkpoint: it may only be that of equal buffers.
    ``subgroup_of``: the names of what only some ranks of a pipeline stage have, with the subgroup that has it.
    """
    if not ranks.has_own_params:
        return dict(host)
    own = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    sent = {part: host[part] for part in ("groups", "memory_order", "model")}
    everyones = ranks.gather((ranks.pipeline_stage, {*own, *host["model"]}, sent, dict(subgroup_of)), failure)
    hosts = {(stage, *sorted(subgroups.values())): of_rank for stage, _, of_rank, subgroups in reversed(everyones)}
    owners: dict[str, set[Owner]] = {}
    trained = set()
    for stage, names, of_rank, subgroups in everyones:
        given = {name for group in of_rank["groups"] for name in group["names"]}
        trained |= given
        for name in names | given:
            owners.setdefault(name, set()).add((stage, subgroups.get(name)))
    shared = {name for name, found in owners.items() if len(found) > 1}
    differ = shared & trained
    of = "with different experts" if ranks.subgroups else "of different pipeline stages"
    digests = ranks.gather({name: _digest(own[name]) for name in shared - differ if name in own}, failure)
    differ |= {name for name in shared - differ if len({each.get(name) for each in digests}) > 1}
    with ranks.failing_together(failure):
        if differ:
            raise CheckpointError(
                f"ranks {of} have {some(sorted(differ))}: give each the name that it has in the whole "
                "model, and a weight of two pipeline stages to one of them; or save each stage to a path of its own, "
                "with process_group= its optimizer's"
            )
    merged = dict(host)
    for part in ("memory_order", "model"):
        merged[part] = {name: value for each in hosts.values() for name, value in each[part].items()}
    merged["groups"] = _join_groups([each["groups"] for each in hosts.values()])
    return merged


def _join_groups(of_ranks: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Those of one index with the same options are one group."""
    found: list[tuple[int, dict[str, Any], list[str]]] = []
    for groups in of_ranks:
        for index, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "names"}
            alike = [names for at, known, names in found if at == index and known == options]
            if alike:
                alike[0].extend(name for name in group["names"] if name not in alike[0])
            else:
                found.append((index, options, list(group["names"])))
    return [{**options, "names": names} for _, options, names in sorted(found, key=lambda each: each[0])]


def _digest(tensor: Tensor) -> int:
    values = tensor.own if isinstance(tensor, SlicedTensor) else tensor.detach()
    return int(C.digest(values.contiguous()))
