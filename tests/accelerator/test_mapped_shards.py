"""Sharded parameters whose shards ranks read in each other's devices' memory: bytes, order, and what changes."""

from __future__ import annotations

import ctypes
import gc
import os
import re
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import machine, run_fake_ranks
from tests.accelerator.sharded import (
    LIMITS,
    WAYS,
    WIDTH,
    Training,
    assert_as_in_stage_2,
    ranks_of_threads,
    stop_in_step,
)
from zerox.ranks.group import Ranks
from zerox.residency import residency as residency_module

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
BUSY_US = 3000  # for as long rank 0's device still works when its host waits for it


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    yield from ranks_of_threads(monkeypatch)


# ---- bytes


def one_step(training: Training) -> None:
    training.model(training.inputs).square().sum().backward()
    training.optimizer.step()
    training.optimizer.zero_grad()


def copied_in_stage_2(ranks: Ranks) -> tuple[int, int]:
    """Bytes to the host and to the device, in a step."""
    training = Training(ranks, 2)
    one_step(training)
    machine().take_copied(ranks.device.index)
    one_step(training)
    copied: tuple[int, int] = machine().take_copied(ranks.device.index)
    return copied


def copied_in_a_step(ranks: Ranks, limit: str) -> dict[str, int]:
    in_stage_2 = copied_in_stage_2(ranks)
    training = Training(ranks, 3, limit)
    one_step(training)
    with training.optimizer.whole():  # where nothing is on its way, ahead of its read
        before = training.residents.counts.fetched_bytes
        machine().take_copied(ranks.device.index)
    one_step(training)
    with training.optimizer.whole():
        to_host, to_device = machine().take_copied(ranks.device.index)
        fetched = training.residents.counts.fetched_bytes - before
        compared = 2 * training.residents.resident_bytes  # at the end of the first whole(), and before the second
    return {
        "to host": to_host - in_stage_2[0] - compared,
        "to device": to_device - in_stage_2[1],
        "fetched": fetched,
        "shards": training.shards_bytes(),
        "kept for others": training.residents.served_bytes,
        "parameters": training.optimizer.memory_bytes().parameters - training.residents.room_bytes,
    }


@pytest.mark.parametrize("limit", ["two buckets", "inf"])
@pytest.mark.parametrize("way", WAYS)
def test_a_step_copies_nothing_through_the_host(way: str, limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """That stage 2 does not copy. Where ranks read each other there, shards go down, and what is fetched comes up."""
    monkeypatch.setitem(os.environ, "ZEROX_DEVICE_READS", WAYS[way])
    for count in run_fake_ranks(copied_in_a_step, 3, "direct", limit):
        assert count["fetched"] >= 2 * count["shards"], "of two other ranks, each bucket at least once"
        through_host = way == "host"
        assert count["to host"] == count["kept for others"] == (count["shards"] if through_host else 0)
        assert count["to device"] == (count["fetched"] if through_host else 0)
        assert count["parameters"] == count["shards"], "copies in the host's memory take none of the device's"


# ---- order


def trained(ranks: Ranks, stage: int, limit: str) -> list[Tensor]:
    """All that reads and writes shards, with one device that is late: others wait for what its rank says."""
    machine().set_busy_us(0, BUSY_US)
    training = Training(ranks, stage, limit)
    layers = training.model.layers
    for step in range(3):
        training.step(step)
    with torch.no_grad():
        layers[1].weight.mul_(2)
    training.step(3)
    # step() reads these itself, before ranks synchronize there.
    layers[4].weight.data, layers[5].weight.data = layers[5].weight.data, layers[4].weight.data
    training.step(4)
    with training.optimizer.whole(), torch.no_grad():
        layers[0].weight.add_(1)
    training.step(5)
    return training.values()


@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize("world_size", [2, 3])
def test_no_shard_is_written_while_others_read_it(world_size: int, limit: str) -> None:
    assert_as_in_stage_2(world_size, "direct", trained, limit)


def at_its_end(ranks: Ranks, _: int, all_here: threading.Barrier, deleted: threading.Event) -> list[Tensor]:
    """Rank 0 deletes its optimizer and its model. The others read its shards later, and then delete theirs."""
    machine().set_busy_us(0, BUSY_US)
    training = Training(ranks, 3, "released at once")
    training.step(0)
    all_here.wait()
    residents = training.residents
    if ranks.rank == 0:
        buckets, before = len(residents.resident), machine().num_shared()
        del training.optimizer, training.residents, residents
        gc.collect()
        assert machine().num_shared() == before, "its parameters may still be read"
        del training.model
        gc.collect()
        assert machine().num_shared() == before - 2 * buckets, "it lets go of what it has mapped"
        # Memory that is freed is used at once.
        taken = [torch.zeros(numel, device=ranks.device) for numel in range(128, 1024, 64)]
        deleted.set()
    else:
        assert deleted.wait(30)
        before = residents.counts.fetches
        with torch.no_grad():
            training.model(training.batch(1))
        assert residents.counts.fetches > before
        del training.optimizer, training.residents, residents
        gc.collect()
        taken = []
    values = training.values() if ranks.rank else []
    del taken, training
    gc.collect()
    all_here.wait()
    return values


def test_a_deleted_optimizer_keeps_what_others_read() -> None:
    everyone = run_fake_ranks(at_its_end, 3, "direct", 3, threading.Barrier(3), threading.Event())
    assert all(torch.equal(one, other) for one, other in zip(*everyone[1:], strict=True))
    assert machine().num_shared() == 0, "whoever mapped a shard has let go of it"


def deleted_in_turn(ranks: Ranks, all_here: threading.Barrier) -> None:
    """The last that leaves had fetches under way when the others were gone: owners free what it has read."""
    machine().set_busy_us(0, BUSY_US)
    training = Training(ranks, 3, "released at once")
    training.step(0)
    all_here.wait()
    del training
    gc.collect()
    all_here.wait()
    # The next optimizer frees the shards of the one before, and its rooms take their memory.
    Training(ranks, 3, "inf").step(0)


def test_an_owner_frees_its_shards_when_others_have_read_them() -> None:
    run_fake_ranks(deleted_in_turn, 3, "direct", threading.Barrier(3))


# ---- what changes


def grown(ranks: Ranks, stage: int) -> list[Tensor]:
    """Buckets are added, by groups and by unfreezing, and a second optimizer comes after the first."""
    read = []
    for _ in range(2):
        training = Training(ranks, stage, "two buckets", frozen=True)
        training.step(0)
        added = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(1)
        for param in added.parameters():
            nn.init.uniform_(param, -0.2, 0.2, generator)
        training.model.layers.append(added.to(ranks.device))
        training.optimizer.add_param_group({"params": list(added.named_parameters())})
        training.step(1)
        training.model.layers[0].requires_grad_(True)
        training.step(2)
        training.model.load_state_dict({name: value / 2 for name, value in training.model.state_dict().items()})
        training.step(3)
        if stage == 3:
            assert training.residents.served_bytes == 0
            read += training.values()
            del training.optimizer, training.residents
        else:
            read += training.values()
    return read


@pytest.mark.parametrize("kind", ["direct", "via host"])
def test_what_is_added_is_read_where_it_lies(kind: str) -> None:
    assert_as_in_stage_2(2, kind, grown)


def replaced(ranks: Ranks) -> str:
    training = Training(ranks, 3)
    training.step(0)
    if ranks.rank == 1:
        own = training.optimizer.inside.gather.all[2].buffer.own
        own.data = own.clone()
    before = training.values()
    with pytest.raises(RuntimeError) as raised:
        training.step(1)
    assert all(torch.equal(one, other) for one, other in zip(before, training.values(), strict=True))
    return str(raised.value)


def test_a_shard_that_was_replaced_is_an_error_on_all_ranks() -> None:
    """Others would go on reading what lay there: no update is made with that."""
    for message in run_fake_ranks(replaced, 2, "direct"):
        assert re.search(r"this rank's shard of bucket 2 \(layers.3.bias.*lies in other memory", message), message
    machine().take_races()  # nobody orders what this test itself did to the shard


# ---- a rank that does not come


def misses_one(ranks: Ranks, all_here: threading.Barrier) -> tuple[str, list[Any]]:
    """Rank 1 stops in the midst of step(): what rank 0 reads then is an error, and NaN."""
    training = Training(ranks, 3)
    training.step(0)
    all_here.wait()
    if ranks.rank == 1:
        stop_in_step(training, all_here)
        return "", []
    training.step(1)
    start = time.perf_counter()
    with pytest.raises(RuntimeError) as raised, torch.no_grad():
        training.model(training.batch(2))
    took = time.perf_counter() - start
    all_here.wait()
    first = training.model.layers[0]
    # An operator that reads them would fetch them again.
    read = [(ctypes.c_float * each.numel()).from_address(each.data_ptr()) for each in (first.weight, first.bias)]
    return str(raised.value), [took, *(torch.tensor(list(each)) for each in read)]


def test_a_rank_that_stops_is_named_and_what_was_read_is_nan(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "time_of", lambda _: timedelta(seconds=1))
    message, (took, weight, bias) = run_fake_ranks(misses_one, 2, "direct", threading.Barrier(2))[0]
    assert re.search(r"parameters of bucket \d \(layers\.\d\.bias.*did not arrive from all ranks: .*rank 1", message)
    assert took < 10
    assert weight.isnan().all(), "rank 1 has it"
    assert bias.isfinite().all(), "this rank has it"
