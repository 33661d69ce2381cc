"""How the shards of matrices' owners travel: in as many messages as Adam's; over NCCL by an all-to-all with counts."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.meshes import mesh_once
from tests.muon.rig import CAP_MB, OPTIONS, Model, build
from tests.muon.test_around import digests
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedMuon
from zerox.optimizer.core import Core
from zerox.plan import combinations
from zerox.ranks.axes import Axis
from zerox.ranks.exchange import choose_exchange

_for_manager = Axis.for_manager


def as_over_nccl(axis: Axis, direct: bool, single_messages: bool, via_host: bool, neighbours: Any) -> Any:
    """Gloo has the same all-to-all."""
    return _for_manager(axis, True, False, via_host, [])


@contextmanager
def over_all_to_all(is_on: bool) -> Iterator[dict[str, str]]:
    """Inside, what optimizers do that are made with these options: native, so that what ranks agree by has a group of
    its own, as it has over NCCL."""
    if not is_on:
        yield {}
        return
    with patch.object(Axis, "for_manager", as_over_nccl), patch.object(combinations, "check"):
        yield {"exchange": "native"}


def trained(rank: int, _: int, by_all_to_all: bool, stage: int, on_mesh: bool, grads: str) -> tuple[str, str]:
    model = Model(torch.bfloat16)
    mesh = mesh_once((2, 2), ("replicate", "shard")) if on_mesh else None
    with over_all_to_all(by_all_to_all) as options:
        optimizer = build(model, False, OPTIONS, stage=stage, process_group=mesh, **options)
        if grads == "hidden":
            optimizer.overlap_gather(model)
    for number in range(3):
        model.backward(rank, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    return digests(model, optimizer)


@pytest.mark.parametrize(
    ("world_size", "stage", "on_mesh", "grads"),
    [(2, 1, False, ""), (3, 2, False, ""), (4, 2, False, "hidden"), (4, 2, True, "")],
)
def test_an_all_to_all_has_the_bits_of_single_messages(world_size: int, stage: int, on_mesh: bool, grads: str) -> None:
    by_messages = run_ranks(trained, world_size, False, stage, on_mesh, grads)
    assert run_ranks(trained, world_size, True, stage, on_mesh, grads) == by_messages


def sent(_: int, __: int, by_muon: bool, by_all_to_all: bool) -> tuple[int, int]:
    """Messages and bytes of a step, without those by which ranks agree."""
    params = [nn.Parameter(torch.ones(128, 256 + 64 * (index % 3))) for index in range(24)]
    with over_all_to_all(by_all_to_all) as options:
        kind = partial(FusedShardedMuon, ns_steps=0) if by_muon else FusedShardedAdam
        optimizer = kind(params, bucket_cap_mb=1, **options)
    inside: Core = optimizer.inside
    before = inside.grads.manager.traffic
    torch.stack([param.sum() for param in params]).sum().backward()
    optimizer.step()
    optimizer.synchronize()
    after = inside.grads.manager.traffic
    return after[0] - before[0], after[1] - before[1]


@pytest.mark.parametrize("by_all_to_all", [False, True])
@pytest.mark.parametrize("world_size", [2, 4])
def test_messages_are_at_most_adams_and_bytes_about_as_many(world_size: int, by_all_to_all: bool) -> None:
    muon = run_ranks(sent, world_size, True, by_all_to_all)
    adam = run_ranks(sent, world_size, False, by_all_to_all)
    assert sum(messages for messages, _ in muon) <= sum(messages for messages, _ in adam)
    assert sum(num_bytes for _, num_bytes in muon) <= 1.01 * sum(num_bytes for _, num_bytes in adam)


def test_over_nccl_the_default_is_an_all_to_all() -> None:
    """native collectives would move equal shards, and are refused by name."""
    assert choose_exchange(None, "nccl", 0, has_owners=True) == "direct"
    assert choose_exchange("native", "nccl", 0, has_owners=True) == "native"
    with pytest.raises(ValueError, match='rule="muon" does not go with exchange="native"'):
        combinations.check({"rule": {'"muon"'}, "exchange": {'"native"'}})


def refused(rank: int, world_size: int) -> str:
    with pytest.raises(ValueError, match="unequal shares of a bucket") as raised:
        FusedShardedMuon([nn.Parameter(torch.ones(4, 4))], exchange="native")
    FusedShardedMuon([nn.Parameter(torch.ones(4, 4))], bucket_cap_mb=CAP_MB)
    return str(raised.value) if dist.get_rank() == rank else ""


def test_native_is_refused_by_name() -> None:
    for said in run_ranks(refused, 2):
        assert 'exchange="native"' in said
        assert 'Pass exchange="direct"' in said
