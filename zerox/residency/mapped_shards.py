"""Other ranks' shards in their devices' memory, mapped on this rank: Note [Shards in a device's memory] in csrc."""

from __future__ import annotations

import json
import os
import secrets
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.ranks.group import Ranks
from zerox.ranks.roll_call import summary_of
from zerox.residency.device_memory import BY_TYPE, DeviceMemory

SWITCH = "ZEROX_DEVICE_READS"
Mapped = dict[int, Tensor]  # a shard's bytes, by the rank that owns it


def map_shards(ranks: Ranks, neighbours: Sequence[int], shards: Sequence[Tensor]) -> list[Mapped]:
    """For each of this rank's ``shards``, of which others have their parts: those of all neighbours, or none.

    All ranks map all their neighbours' or none does, which a warning explains. Collective. ``neighbours``: as
    find_neighbours() gives them. ValueError if the environment variable has another value than those that it may have.
    """
    memory = BY_TYPE.get(ranks.device.type)
    none: list[Mapped] = [{} for _ in shards]
    if memory is None or not neighbours or not shards:
        return none
    others = [rank for rank, process in enumerate(neighbours) if process and rank != ranks.rank]
    probe = torch.tensor([secrets.randbits(62)], device=shards[0].device)
    told: dict[str, Any] = {"number": int(probe), "wants": _is_wanted(), "refusal": "", "tokens": {}}
    if told["wants"]:
        try:
            told["tokens"] = {rank: [memory.share(each) for each in (probe, *shards)] for rank in others}
        except Exception as error:
            told["refusal"] = f"share its device's memory: {summary_of(error)}"
    everyone = [json.loads(text) for text in ranks.all_gather_text(json.dumps(told))]
    refusals = [each["refusal"] for each in everyone]
    tokens = {rank: everyone[rank]["tokens"].get(str(ranks.rank), []) for rank in others}
    if not all(each["wants"] for each in everyone) or any(refusals):
        _decline(memory, tokens)
        _warn(refusals)
        return none
    mapped, refusal = none, ""
    try:
        mapped = _open(memory, tokens, {rank: everyone[rank]["number"] for rank in others}, shards)
    except Exception as error:
        refusal = f"read another rank's memory from its device: {summary_of(error)}"
    # Also the barrier that keeps the probe in place until all have read it.
    refusals = ranks.all_gather_text(refusal)
    if any(refusals):
        _warn(refusals)
        return [{} for _ in shards]
    return mapped


def _is_wanted() -> bool:
    value = os.environ.get(SWITCH) or "auto"
    if value not in ("auto", "0"):
        raise ValueError(f"{SWITCH} must be 'auto' or '0', got '{value}'")
    return value == "auto"


def _open(
    memory: DeviceMemory, tokens: dict[int, list[str]], numbers: dict[int, int], shards: Sequence[Tensor]
) -> list[Mapped]:
    """``numbers``: what the probe, the first of each rank's tokens, must hold."""
    found: dict[int, list[Tensor]] = {rank: [] for rank in tokens}
    try:
        for rank, of_rank in tokens.items():
            for token in of_rank:
                found[rank].append(memory.open(token, shards[0].device))
            number = int(found[rank][0].view(torch.int64)[0])
            if number != numbers[rank]:
                raise RuntimeError(f"rank {rank} has {numbers[rank]} where {number} was read")
    except BaseException:
        _decline(memory, {rank: of_rank[len(found[rank]) :] for rank, of_rank in tokens.items()})
        raise
    return [{rank: theirs[index] for rank, (_, *theirs) in found.items()} for index in range(len(shards))]


def _decline(memory: DeviceMemory, tokens: dict[int, list[str]]) -> None:
    for of_rank in tokens.values():
        for token in of_rank:
            memory.decline(token)


def _warn(refusals: Sequence[str]) -> None:
    for rank, refusal in enumerate(refusals):
        if refusal:
            warnings.warn(
                f"zerox: rank {rank} can't {refusal}. So all ranks fetch sharded parameters through the host's memory, "
                f"which is slower, and right. {SWITCH}=0 on all ranks does so without this warning",
                stacklevel=2,
            )
            return
