"""Buckets of a new optimizer are filled one after the other, within its limit: Note [A new bucket is filled]."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.mesh.test_two_levels import mesh_of
from tests.ranks import run_ranks
from tests.residency.models import Gpt, entropy
from tests.residency.rig import WAYS, assert_same, batch, build, residents, run_by_way, train, values
from zerox import FusedShardedAdam
from zerox._C import most_room_bytes, room_bytes
from zerox.memory.bucket import Bucket
from zerox.memory.flat import ShardedBuffer
from zerox.ranks.group import Ranks

LEAST = 0.017  # MiB: less than two of the largest buckets
FAILS = 1  # this rank
SOON_S = 30  # of a timeout of 60
LATE_S = 2


def seeded(seed: int) -> Gpt:
    torch.manual_seed(seed)
    model = Gpt()
    model.blocks[1].requires_grad_(False)
    return model


# ---- values


def rank_0s(rank: int, world_size: int, *mesh: int) -> None:
    for limit in (LEAST, None, float("inf")):
        model = seeded(rank)
        options: dict[str, Any] = {"process_group": mesh_of(*mesh)} if mesh else {}
        optimizer = build(model, resident_mb=limit, **options)
        assert_same(values(model), values(seeded(0)))
        residents(optimizer).release_all()
        assert not any(residents(optimizer).resident)
        assert_same(values(model), values(seeded(0)))


@pytest.mark.parametrize(("way", "world_size"), [*((way, 4) for way in WAYS), ("memory", 3), ("messages", 2)])
def test_every_rank_has_rank_0_s_values_at_each_limit(way: str, world_size: int) -> None:
    run_ranks(run_by_way, world_size, way, rank_0s)


def test_on_a_mesh_too() -> None:
    run_ranks(rank_0s, 4, 2, 2)


class Odd(nn.Module):
    """Buckets of several large pages: the first have no gaps, and between the parameters of the last there are some."""

    def __init__(self) -> None:
        super().__init__()
        self.gaps = nn.ParameterList(torch.full((150_001,), 3.0) for _ in range(10))
        self.full = nn.ParameterList(torch.full((1 << 20,), float("nan")) for _ in range(3))


def gaps(rank: int, world_size: int) -> tuple[int, int]:
    """How many elements of buckets belong to no parameter, and how many of these are not 0."""
    model = Odd()
    optimizer = build(model, bucket_cap_mb=6, resident_mb=8)
    found = 0, 0
    for each in optimizer.inside.gather.all:
        layout = each.buffer.layout
        with optimizer.whole():
            flat = each.buffer.flat.clone()
        outside = torch.ones(layout.numel, dtype=torch.bool)
        for offset, numel in zip(layout.offsets, layout.numels, strict=True):
            outside[offset : offset + numel] = False
        found = found[0] + int(outside.sum()), found[1] + int(flat[outside].count_nonzero())
    return found


def test_what_lies_between_parameters_is_0_in_pages_that_were_used_before() -> None:
    for outside, not_zero in run_ranks(gaps, 2):
        assert outside > 0
        assert not_zero == 0


# ---- memory


BUCKET = 1 / 64  # MiB


def layers(seed: int) -> nn.ModuleList:
    """Each is a bucket, the last one the first."""
    torch.manual_seed(seed)
    return nn.ModuleList(nn.Linear(64, 64, bias=False) for _ in range(8))


def bytes_of_constructor(rank: int, world_size: int, limit: float) -> tuple[int, int, int, int]:
    """The most bytes of rooms while it ran, those at its end, all parameters', and the fetches of a read of each."""
    model = layers(rank)
    before = room_bytes()
    most_room_bytes()
    optimizer = build(model, bucket_cap_mb=BUCKET, resident_mb=limit * BUCKET)
    most = most_room_bytes() - before
    at_end = residents(optimizer).resident_bytes
    fetches = residents(optimizer).counts.fetches
    for layer in model:
        layer.weight.sum()
    return most, at_end, sum(p.nbytes for p in model.parameters()), residents(optimizer).counts.fetches - fetches


@pytest.mark.parametrize(("limit", "fetches"), [(1, 7), (3, 5), (float("inf"), 0)])
def test_a_constructor_has_as_many_buckets_whole_as_its_limit_allows(limit: float, fetches: int) -> None:
    for most, at_end, whole, fetched in run_ranks(bytes_of_constructor, 2, limit):
        assert most == at_end == min(limit * whole / 8, whole)
        assert fetched == fetches, "the last that were filled are there, and are read first"


def calls(rank: int, world_size: int) -> list[dict[str, int]]:
    """For each limit, how often a constructor's ranks communicate, and how many bytes they tell each other."""
    broadcast, gather = Ranks.broadcast, Ranks.all_gather_text
    count: dict[str, int] = {}

    def counted(self: Ranks, values: Tensor, what: str, root: int = 0) -> None:
        count["broadcasts"] += 1
        count["bytes"] += values.nbytes
        broadcast(self, values, what, root)

    def gathered(self: Ranks, text: str) -> list[str]:
        count["gathers"] += 1
        return gather(self, text)

    found = []
    for limit in (LEAST, None, float("inf")):
        count |= {"broadcasts": 0, "bytes": 0, "gathers": 0}
        model = seeded(0)
        with patch.object(Ranks, "broadcast", counted), patch.object(Ranks, "all_gather_text", gathered):
            optimizer = build(model, resident_mb=limit)
        assert count["broadcasts"] == len(optimizer.inside.gather.all)
        assert count["bytes"] == sum(each.nbytes for each in optimizer.inside.gather.all)
        found.append(dict(count))
        del optimizer
    return found


def test_a_limit_costs_no_call_of_all_ranks() -> None:
    first, *others = run_ranks(calls, 2)[0]
    assert all(each == first for each in others)


# ---- ranks that are late, or fail


@contextmanager
def sleeping(rank: int, at: int) -> Iterator[list[Bucket]]:
    """One rank is late with its part of one bucket. Inside, which buckets have come so far here."""
    begun: list[Bucket] = []
    start = Bucket.start

    def slow(self: Bucket) -> None:
        begun.append(self)
        if rank == FAILS and len(begun) == at:
            time.sleep(LATE_S)
        start(self)

    with patch.object(Bucket, "start", slow):
        yield begun


def read_early(rank: int, world_size: int) -> None:
    """By message a rank releases what another one has not filled yet."""
    model, whole = layers(rank), values(layers(0))
    fill, seconds = ShardedBuffer.fill, 0.0

    def then_read(self: ShardedBuffer, residents: Any, index: int) -> None:
        nonlocal seconds
        fill(self, residents, index)
        if rank != FAILS and index == 3:
            start_s = time.monotonic()
            assert torch.equal(model[5].weight, whole[5]), "the third bucket, of which a half is the other rank's"
            seconds = time.monotonic() - start_s

    with sleeping(rank, at=3), patch.object(ShardedBuffer, "fill", then_read):
        optimizer = build(model, bucket_cap_mb=BUCKET, resident_mb=BUCKET)
    assert rank == FAILS or seconds > LATE_S / 2
    assert_same(values(model), whole)
    assert not residents(optimizer).failure


def test_a_read_of_a_bucket_that_another_rank_has_not_filled_waits_for_it() -> None:
    run_ranks(run_by_way, 2, "messages", read_early)


def stays(rank: int, world_size: int) -> list[float]:
    """How long each bucket waited for room."""
    model, waited = layers(rank), []
    fill = ShardedBuffer.fill

    def timed(self: ShardedBuffer, residents: Any, index: int) -> None:
        start_s = time.monotonic()
        fill(self, residents, index)
        waited.append(time.monotonic() - start_s)

    with sleeping(rank, at=3), patch.object(ShardedBuffer, "fill", timed):
        build(model, bucket_cap_mb=BUCKET, resident_mb=BUCKET)
    assert_same(values(model), values(layers(0)))
    return waited


def test_a_bucket_stays_until_neighbours_have_filled_it() -> None:
    """One may be whole: the fourth takes the place of the third."""
    waited = run_ranks(stays, 2)[0]
    assert waited[3] > LATE_S / 2 > max(waited[:3])


class Failing:
    """Raises on one rank, at one call of a function."""

    def __init__(self, rank: int, at: int, function: Callable[..., Any]) -> None:
        self.rank, self.at, self.function, self.count = rank, at, function, 0

    def made(self) -> Callable[..., Any]:
        def called(*args: Any, **kwargs: Any) -> Any:
            self.count += 1
            if self.rank == FAILS and self.count == self.at:
                raise MemoryError("can't allocate 17 GiB")
            return self.function(*args, **kwargs)

        return called


WHERE: dict[str, tuple[Any, str]] = {
    "while it is laid out": (Bucket, "__init__"),
    "before it has rank 0's values": (ShardedBuffer, "fill"),
    "while it gets rank 0's values": (Ranks, "broadcast"),
    "before the shard has its part": (Bucket, "start"),
    "before others may read it": (ShardedBuffer, "share_out"),
}


def fails(rank: int, world_size: int, where: str, at: int) -> None:
    model = seeded(0)
    whole = values(model)
    target, name = WHERE[where]
    start_s = time.monotonic()
    with (
        patch.object(target, name, Failing(rank, at, getattr(target, name)).made()),
        pytest.raises((RuntimeError, MemoryError), match="17 GiB"),
    ):
        build(model, resident_mb=LEAST)
    assert time.monotonic() - start_s < SOON_S
    assert_same(values(model), whole)  # while all ranks live
    with torch.no_grad():
        model.head.weight.mul_(1)  # what has come into a bucket that is not filled is a parameter as any
    torch.distributed.barrier()
    for options in ({"resident_mb": LEAST}, {"bucket_cap_mb": 0.5}):
        again = FusedShardedAdam(model.named_parameters(), stage=3, **{"bucket_cap_mb": 0.005, **options})
        assert_same(values(model), whole)
        train(model, again, rank, entropy, steps=1)
        whole = values(model)
        dist.barrier()
        del again


@pytest.mark.parametrize("at", [1, 3, 6])
@pytest.mark.parametrize("where", WHERE)
def test_a_constructor_that_fails_leaves_every_parameter_readable(where: str, at: int) -> None:
    run_ranks(fails, 2, where, at)


def fails_inside_whole(rank: int, world_size: int) -> None:
    model = seeded(0)
    optimizer = build(model, resident_mb=LEAST)
    whole, more = values(model), nn.ModuleList(nn.Linear(40, 40, bias=False) for _ in range(3))
    expected = values(more)
    start_s = time.monotonic()
    with (
        patch.object(Bucket, "start", Failing(rank, 2, Bucket.start).made()),
        pytest.raises((RuntimeError, MemoryError), match="17 GiB"),
        optimizer.whole(),
    ):
        optimizer.add_param_group({"params": list(more.named_parameters())})
    assert_same([*values(model), *values(more)], [*whole, *expected])
    if rank == FAILS:  # there it was on its way, and is a parameter as any
        with torch.no_grad():
            more[1].weight.mul_(2)
        assert torch.equal(more[1].weight, 2 * expected[1])
    with pytest.raises(RuntimeError), optimizer.whole():
        pass
    assert time.monotonic() - start_s < SOON_S


def test_what_fails_inside_whole_leaves_every_parameter_readable() -> None:
    run_ranks(fails_inside_whole, 2)


# ---- later


def added(rank: int, world_size: int, stage: int) -> list[Tensor]:
    model = seeded(0)
    optimizer = build(model, stage, resident_mb=LEAST if stage == 3 else None)
    seen = train(model, optimizer, rank, entropy, steps=1)
    torch.manual_seed(rank)
    model.added = nn.Linear(8, 8)
    model.register_forward_hook(lambda module, _, out: out + module.added.weight.sum() * 1e-3)
    with optimizer.whole():
        optimizer.add_param_group({"params": list(model.added.named_parameters()), "lr": 0.5})
        model.blocks[1].requires_grad_(True)
        if stage == 3:
            assert all(residents(optimizer).resident)
            assert not residents(optimizer).written_inside()
        with torch.no_grad():
            model.added.bias.fill_(0.25)  # inside whole(), and taken over at its end
    seen += values(model)
    seen += train(model, optimizer, rank, entropy)
    entropy(model, batch(7, rank)).backward()
    with optimizer.whole():
        model.blocks[1].norm.requires_grad_(False)
        optimizer.step()  # takes in what was thawed
    return [*seen, *values(model)]


def as_in_stage_2(rank: int, world_size: int) -> None:
    assert_same(added(rank, world_size, 2), added(rank, world_size, 3))


@pytest.mark.parametrize("way", WAYS[:2])
def test_what_is_added_inside_whole_is_whole_there(way: str) -> None:
    run_ranks(run_by_way, 2, way, as_in_stage_2)


def table_added(rank: int, world_size: int, stage: int) -> list[Tensor]:
    model = seeded(0)
    optimizer = build(model, stage)
    torch.manual_seed(rank)
    table = nn.Embedding(40, 6, sparse=True)
    with optimizer.whole():
        optimizer.add_param_group({"params": [("table", table.weight)], "sparse": True, "weight_decay": 0.0})
        seen = [table.weight.detach().clone()]
        if stage == 3:
            assert residents(optimizer).resident[-1]
            with torch.no_grad():
                table.weight[3] = 0.5
    if stage == 2:
        with torch.no_grad():
            table.weight[3] = 0.5
    for step in range(2):
        (entropy(model, batch(step, rank)) + table(torch.tensor([3, 4 + rank])).square().sum()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return [*seen, table.weight.detach().clone(), *values(model)]


def table_as_in_stage_2(rank: int, world_size: int) -> None:
    assert_same(table_added(rank, world_size, 2), table_added(rank, world_size, 3))


def test_a_table_that_is_added_inside_whole_is_whole_there() -> None:
    run_ranks(table_as_in_stage_2, 2)
