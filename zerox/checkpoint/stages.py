"""Ranks with parameters of their own, as the stages of a pipeline: one checkpoint has those of all, by their names."""

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
    """Those of all ranks. Collective where there are stages. Raises CheckpointError, as the others here."""
    return set().union(*ranks.gather(set(names), failure)) if ranks.has_stages else set(names)


def joined(ranks: Everyone, tensors: Mapping[str, Tensor], host: Mapping[str, Any], failure: str) -> dict[str, Any]:
    """The host's part of all stages. Collective where there are stages.

    A name that two of them have stands for one tensor in a checkpoint: it may only be that of equal buffers.
    """
    if not ranks.has_stages:
        return dict(host)
    own = {name.removeprefix(MODEL): tensor for name, tensor in tensors.items() if name.startswith(MODEL)}
    sent = {part: host[part] for part in ("groups", "memory_order", "model")}
    everyones = ranks.gather((ranks.stage, {*own, *host["model"]}, sent), failure)
    hosts = {stage: of_rank for stage, _, of_rank in everyones}
    trained = {stage: {name for group in each["groups"] for name in group["names"]} for stage, each in hosts.items()}
    of_stage = {stage: names | trained[stage] for stage, names, _ in everyones}
    shared = {name for name in set().union(*of_stage.values()) if sum(name in each for each in of_stage.values()) > 1}
    differ = shared & set().union(*trained.values())
    digests = ranks.gather({name: _digest(own[name]) for name in shared - differ if name in own}, failure)
    differ |= {name for name in shared - differ if len({each.get(name) for each in digests}) > 1}
    with ranks.failing_together(failure):
        if differ:
            raise CheckpointError(
                f"ranks of different stages have {some(sorted(differ))}: give each the name that it has in the whole "
                "model, and a weight of two stages to one of them; or save each stage to a path of its own, with "
                "process_group= its optimizer's"
            )
    merged = dict(host)
    for part in ("memory_order", "model"):
        merged[part] = {name: value for each in hosts.values() for name, value in each[part].items()}
    merged["groups"] = _joined_groups([each["groups"] for each in hosts.values()])
    return merged


def _joined_groups(of_stages: list[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Those of one index with the same options are one group."""
    found: list[tuple[int, dict[str, Any], list[str]]] = []
    for groups in of_stages:
        for index, group in enumerate(groups):
            options = {key: value for key, value in group.items() if key != "names"}
            alike = [names for at, known, names in found if at == index and known == options]
            if alike:
                alike[0].extend(group["names"])
            else:
                found.append((index, options, list(group["names"])))
    return [{**options, "names": names} for _, options, names in sorted(found, key=lambda each: each[0])]


def _digest(tensor: Tensor) -> int:
    values = tensor.own if isinstance(tensor, SlicedTensor) else tensor.detach()
    return int(C.digest(values.cpu().contiguous()))
