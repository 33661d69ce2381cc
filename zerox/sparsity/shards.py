"""What this rank's shards have of the parameters that a Sparsity is of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

from zerox.memory.bucket import Bucket, Member
from zerox.memory.forms import master_of
from zerox.memory.one_param import OneParam, each_param
from zerox.ranks.subgroups import Subgroups
from zerox.rules.rule import REMAINDER


def find_owned(buckets: Sequence[Bucket], subgroups: Subgroups, members: Sequence[Member]) -> list[OneParam]:
    """One for each of ``members``, in their order."""
    found = {one.member.number: one for one in each_param(buckets, subgroups)}
    return [found[member.number] for member in members]


def values_of(one: OneParam) -> Tensor:
    """float32, of the elements here: what the update starts from, masters where they still round to their parameter."""
    param = one.bucket.param_shard[one.own_elements]
    if one.bucket.master is None:
        return param.float()
    master = one.bucket.master.values[one.own_elements]
    if one.bucket.master.spec == REMAINDER:
        return master_of(param, master)
    return torch.where(master.to(param.dtype) == param, master, param.float())


def keep_flags_of(one: OneParam) -> Tensor:
    """bool, of the elements here, by the mask that there is."""
    if one.bucket.mask is None:
        return torch.ones(one.own_numel, dtype=torch.bool, device=one.bucket.device)
    return one.bucket.mask.kept(one.own_elements.start, one.own_elements.stop)


def chances_of(one: OneParam, step: int) -> Tensor:
    """int32: random numbers of 31 bits that hang on the parameter's name, the element and the step alone."""
    digest = hashlib.sha256(f"{one.member.name} {step}".encode()).digest()
    mixed = torch.arange(one.own_start, one.own_start + one.own_numel, device="cpu").to(one.bucket.device)
    for shift in (0, 4, 8):
        word = int.from_bytes(digest[shift : shift + 4], "little")
        mixed = (mixed ^ (mixed >> 32) ^ word) * 0x9E3779B1 & 0xFFFFFFFF
        mixed = mixed ^ (mixed >> 15)
    return (mixed >> 1).to(torch.int32)
