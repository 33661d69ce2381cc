"""Which ranks read their neighbours' shards in the devices' memory: all that can, or none on any machine."""

from __future__ import annotations

import gc
import os
import re
import warnings
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor

from tests.accelerator.fake import FakeMemory, machine, run_fake_ranks
from tests.accelerator.sharded import HERE, Training, assert_as_in_stage_2, ranks_of_threads
from zerox.ranks import neighbours as neighbours_module
from zerox.ranks.group import Ranks
from zerox.residency.device_memory import BY_TYPE

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    gc.collect()
    yield from ranks_of_threads(monkeypatch)


# ---- who can't


class Refusing(FakeMemory):
    """As a device whose memory can't be shared, or opened by a rank, or is not what it seems."""

    def __init__(self, what: str, token: int = 0) -> None:
        self.what = what
        self.tokens_left = token

    def share(self, tensor: Tensor) -> str:
        if self.what == "share" and HERE.ranks.rank == 1:
            raise RuntimeError("this device shares nothing")
        return super().share(tensor)

    def open(self, token: str, device: torch.device) -> Tensor:
        if HERE.ranks.rank != 1:
            return super().open(token, device)
        self.tokens_left -= 1
        if self.what == "open" and self.tokens_left < 0:
            raise RuntimeError("no peer access")
        opened = super().open(token, device)
        return torch.zeros_like(opened) if self.what == "other memory" else opened


def fallen_back(ranks: Ranks, stage: int, limit: str) -> list[Tensor]:
    training = Training(ranks, stage, limit)
    for step in range(2):
        training.step(step)
    if stage == 3:
        assert training.residents.served_bytes == training.shards_bytes(), "all ranks keep copies for the others"
    return training.values()


REFUSALS = {
    "share": (Refusing("share"), r"rank 1 can't share its device's memory: .*this device shares nothing"),
    "open": (Refusing("open"), r"rank 1 can't read another rank's memory from its device: .*no peer access"),
    "open a later one": (Refusing("open", 4), r"rank 1 can't read another rank's memory .*no peer access"),
    "other memory": (Refusing("other memory"), r"rank 1 can't read another .*: rank \d has \d+ where 0 was read"),
}


@pytest.mark.parametrize("what", REFUSALS)
def test_where_one_rank_can_t_all_read_through_the_host(what: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """And say so, once. No memory stays shared that nobody reads."""
    memory, expected = REFUSALS[what]
    monkeypatch.setitem(BY_TYPE, "fake", memory)
    gc.collect()
    before = machine().num_shared()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        assert_as_in_stage_2(3, "direct", fallen_back, "two buckets")
    found = [str(each.message) for each in caught if "through the host's memory" in str(each.message)]
    assert len(found) == 1, found
    assert re.search(expected, found[0]), found
    assert "ZEROX_DEVICE_READS=0" in found[0]
    gc.collect()
    assert machine().num_shared() == before


def switched_off(ranks: Ranks) -> tuple[int, int]:
    training = Training(ranks, 3)
    training.step(0)
    return training.residents.served_bytes, training.shards_bytes()


def test_it_is_off_on_all_ranks_where_one_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("zerox.residency.mapped_shards._is_wanted", lambda: HERE.ranks.rank != 1)
    before = machine().num_shared()
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        for served, shards in run_fake_ranks(switched_off, 3, "direct"):
            assert served == shards > 0
    gc.collect()
    assert machine().num_shared() == before


def test_another_value_of_the_switch_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(os.environ, "ZEROX_DEVICE_READS", "yes")
    with pytest.raises(AssertionError, match="ZEROX_DEVICE_READS must be 'auto' or '0', got 'yes'"):
        run_fake_ranks(switched_off, 2, "direct")


# ---- several machines


def on_two_machines(ranks: Ranks, stage: int, limit: str) -> list[Tensor]:
    training = Training(ranks, stage, limit)
    for step in range(2):
        training.step(step)
    if stage == 3:
        batch = training.batch(2)
        with training.optimizer.whole():  # where nothing is on its way
            before = training.residents.counts.fetched_bytes
            machine().take_copied(ranks.device.index)
        with torch.no_grad():
            training.model(batch)
        with training.optimizer.whole():
            _, to_device = machine().take_copied(ranks.device.index)
            fetched = training.residents.counts.fetched_bytes - before
        assert to_device * 3 == fetched * 2, "two of three other ranks are on the other machine"
        assert fetched > 0 or limit == "inf"
        assert training.residents.served_bytes == training.shards_bytes(), "they ask for a copy of it"
    return training.values()


@pytest.mark.parametrize("limit", ["released at once", "inf"])
def test_other_machines_are_asked_beside_it(limit: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(neighbours_module, "name_of_machine", lambda: f"machine{HERE.ranks.rank // 2}")
    assert_as_in_stage_2(4, "direct", on_two_machines, limit)
