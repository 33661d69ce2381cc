"""Tables in stage 3 on an accelerator: lookups fetch the rows that they name, into memory that goes when they end."""

from __future__ import annotations

import gc
import os
import re
import threading
from collections.abc import Iterator
from contextlib import suppress
from datetime import timedelta

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import machine, on_stream, run_fake_ranks
from tests.accelerator.sharded import HERE, WAYS, assert_as_in_stage_2, ranks_of_threads, stop_in_step
from tests.kernels.shards import same_bits
from zerox import FusedShardedAdam
from zerox.plan.plan import BLOCK_ROWS
from zerox.ranks.group import Ranks
from zerox.residency import residency as residency_module
from zerox.rows.device_table import Rows, Table

ROWS, WIDTH = 300, 6  # five blocks, the last one not whole
ROW = 4 * WIDTH
BUSY_US = 1000  # for as long rank 0's device still works when its host waits for it
ONE_AT_A_TIME = threading.Lock()
pytestmark = [
    pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match"),
    pytest.mark.filterwarnings("ignore:zerox. aten.*is no lookup"),
]


def rows_of_dense(table: Table) -> Rows:
    """The device has no sparse tensors, so its modules give dense gradients: their rows that are not 0."""
    grad = table.param.grad
    if grad is None:
        return table.none()
    rows = grad.abs().sum(1).nonzero()[:, 0]
    return Rows(rows, grad[rows].float())


@pytest.fixture(autouse=True, params=WAYS)
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(Table, "gradient", rows_of_dense)
    for _ in ranks_of_threads(monkeypatch, request.param):
        yield
        gc.collect()  # the end of an optimizer is part of its test


class Model(nn.Module):
    """Two tables, of which one is looked up twice, the second time on its own stream if one is given."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.words = nn.Embedding(ROWS, WIDTH)
        self.more = nn.Embedding(70, WIDTH)
        self.head = nn.Linear(WIDTH, WIDTH)
        generator = torch.Generator().manual_seed(0)
        for param in self.parameters():
            nn.init.uniform_(param, -0.5, 0.5, generator)
        self.to(dtype)

    def forward(self, ids: Tensor, side: int = 0) -> Tensor:
        index = ids.device.index
        hidden = self.head(self.words(ids))
        machine().wait_stream(index, side, 0)
        with on_stream(side, index):
            hidden = hidden + self.more(ids % 70) + self.words(ids + 1)
        machine().wait_stream(index, 0, side)
        return hidden


class Training:
    def __init__(self, ranks: Ranks, stage: int, dtype: torch.dtype = torch.float32, is_frozen: bool = False) -> None:
        """``is_frozen``: the first table is."""
        HERE.ranks, self.ranks = ranks, ranks
        self.model = Model(dtype).to(ranks.device)
        self.model.words.requires_grad_(not is_frozen)
        tables = [self.model.words.weight, self.model.more.weight]
        groups = [
            {"params": self.model.head.parameters()},
            {"params": tables, "sparse": True, "weight_decay": 0.0},
        ]
        self.optimizer = FusedShardedAdam(groups, lr=0.05, stage=stage)
        self.tables = self.optimizer.inside.tables
        if stage == 3:
            self.residents = self.optimizer.inside.gather.residents
            self.of_tables = [self.optimizer.inside.gather.tables[table.member.number] for table in self.tables]
            self.through_host = os.environ["ZEROX_DEVICE_READS"] == "0"

    def is_resident(self) -> list[bool]:
        """The tables."""
        return [self.residents.resident[index] for index in self.of_tables]

    def foreign(self, rows: list[int]) -> int:
        """How many of the first table's rows others own."""
        return sum(int(self.tables[0].owners.of_block[row // BLOCK_ROWS]) != self.ranks.rank for row in rows)

    def ids(self, step: int, count: int = 20) -> Tensor:
        generator = torch.Generator().manual_seed(100 * step + self.ranks.rank)
        return torch.randint(0, ROWS - 1, (count,), generator=generator).to(self.ranks.device)

    def step(self, step: int, side: int = 0) -> None:
        self.model(self.ids(step), side).float().square().sum().backward()
        self.optimizer.step()
        machine().wait_stream(self.ranks.device.index, side, 0)  # the gradients of its lookups are its memory
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        with self.optimizer.whole():
            return [param.detach().cpu() for param in self.model.parameters()]


def trained(ranks: Ranks, stage: int, two_streams: bool, dtype: torch.dtype) -> list[Tensor]:
    machine().set_busy_us(0, BUSY_US)
    training = Training(ranks, stage, dtype)
    side = machine().new_stream(ranks.device.index) if two_streams else 0
    read = []
    for step in range(3):
        training.step(step, side)
        if ranks.rank == step % 2:  # one rank alone evaluates
            with torch.no_grad():
                read.append(training.model(training.ids(step)).detach().cpu())
    return [*read, *training.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("two_streams", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_training_has_the_bits_of_stage_2(world_size: int, two_streams: bool, dtype: torch.dtype) -> None:
    assert_as_in_stage_2(world_size, "via host", trained, two_streams, dtype)


def look_up(ranks: Ranks) -> None:
    training = Training(ranks, 3)
    words, residents, index = training.model.words, training.residents, ranks.device.index
    rows = [5, 6, 130, 290]
    ids = torch.tensor([[5, 290], [5, 130], [6, 6]], dtype=torch.int64 if ranks.rank else torch.int32)
    expected, ids = words.weight.detach().cpu()[ids.long()], ids.to(ranks.device)
    foreign = training.foreign(rows)
    residents.release_all()
    residents.take_most_bytes()
    for _ in range(2):
        before = residents.counts
        machine().take_copied(index)
        assert same_bits(words(ids).detach().cpu(), expected)
        to_host, to_device = machine().take_copied(index)
        after = residents.counts
        assert (after.fetches - before.fetches, after.fetched_bytes - before.fetched_bytes) == (1, foreign * ROW)
        assert to_host == ids.nbytes + expected.nbytes, "the host asks which rows"
        assert to_device == 2 * 8 * len(rows) + foreign * ROW * training.through_host, "their places, and rows"
        assert not any(training.is_resident())
        assert residents.resident_bytes == residents.room_bytes == 0, "they go when the lookup ends"
    assert words(ids[:0]).numel() == 0
    assert residents.take_most_bytes() == ROWS * ROW, "but all of it has memory while it runs"


def test_a_lookup_fetches_the_rows_that_it_names() -> None:
    run_fake_ranks(look_up, 2, "via host")


def of_little_room(ranks: Ranks) -> str:
    HERE.ranks = ranks
    words = nn.Embedding(ROWS, WIDTH).to(ranks.device)
    before = words.weight.data_ptr()
    group = {"params": [("words", words.weight)], "sparse": True, "weight_decay": 0.0}
    with pytest.raises(ValueError) as raised:  # noqa: PT011
        FusedShardedAdam([group], stage=3, resident_mb=(ROWS * ROW - 1) / 2**20)
    assert words.weight.data_ptr() == before
    FusedShardedAdam([group], stage=3, resident_mb=ROWS * ROW / 2**20)
    return str(raised.value)


def test_room_for_less_than_a_table_is_refused() -> None:
    for said in run_fake_ranks(of_little_room, 2, "via host"):
        assert "is less than table 'words', which is whole while it is read" in said


def serve_rows(ranks: Ranks) -> None:
    """Of what others read in the host's memory a step brings only the rows there that it has updated."""
    training = Training(ranks, 3)
    training.step(0)
    copied = []
    for count in (1, 20):
        training.model.words(training.ids(1, count)).square().sum().backward()
        machine().take_copied(ranks.device.index)
        training.optimizer.step()
        copied.append(machine().take_copied(ranks.device.index)[0])
        training.optimizer.zero_grad()
    whole = sum(table.own.nbytes for table in training.tables)
    assert training.residents.served_bytes >= whole * training.through_host
    assert copied[1] - copied[0] < whole


def test_a_step_serves_the_rows_that_it_has_updated() -> None:
    run_fake_ranks(serve_rows, 2, "via host")


def read_otherwise(ranks: Ranks, stage: int) -> list[Tensor]:
    training = Training(ranks, stage)
    training.step(0)
    words = training.model.words
    found = []
    for _ in range(2):
        with torch.no_grad():
            words(training.ids(1))
            found += [words.weight.sum().cpu(), words.weight.t().contiguous().cpu(), words(training.ids(2)).cpu()]
        if stage == 3:
            assert training.is_resident() == [True, False]
            training.residents.release_all()
    return [*found, *training.values()]


def test_whatever_else_reads_a_table_fetches_all_of_it_and_says_so() -> None:
    with pytest.warns(UserWarning, match=r"aten::sum reads table .*words.weight.*is no lookup"):
        assert_as_in_stage_2(2, "via host", read_otherwise)


def in_a_region(ranks: Ranks, stage: int) -> list[Tensor]:
    """Code that shows none of what it reads."""
    training = Training(ranks, stage)
    training.step(0)
    with ONE_AT_A_TIME, machine().CompiledRegion():  # which concerns all optimizers of a process: ranks are threads
        assert stage == 2 or all(training.is_resident())
        return list(machine().read_by_address([training.model.words.weight, training.model.more.weight]))


def test_a_region_that_shows_no_inputs_has_whole_tables() -> None:
    assert_as_in_stage_2(2, "via host", in_a_region)


def write(ranks: Ranks, stage: int) -> list[Tensor]:
    """By operators, inside whole(), and from a state dict."""
    training = Training(ranks, stage)
    words, more = training.model.words, training.model.more
    training.step(0)
    with torch.no_grad():
        words.weight.mul_(2)
        more.weight[7].fill_(3.0)
        read = [training.model(training.ids(1)).cpu()]
    training.step(1)
    with training.optimizer.whole():
        with torch.no_grad():
            words.weight.add_(1)
        training.step(2)
        with torch.no_grad():
            more.weight.add_(1)
    with suppress(ZeroDivisionError), training.optimizer.whole(), torch.no_grad():
        words.weight.add_(0 if stage == 2 else 7)  # taken back
        raise ZeroDivisionError
    training.step(3)
    training.model.load_state_dict({name: value / 2 for name, value in training.model.state_dict().items()})
    training.step(4)
    return [*read, *training.values()]


def test_what_is_written_counts_as_in_stage_2() -> None:
    assert_as_in_stage_2(2, "via host", write)


def unfreeze(ranks: Ranks, stage: int) -> list[Tensor]:
    training = Training(ranks, stage, is_frozen=True)
    training.step(0)
    training.model.words.requires_grad_(True)
    training.step(1)
    training.step(2)
    return training.values()


def test_a_table_that_was_frozen_trains_as_in_stage_2() -> None:
    assert_as_in_stage_2(2, "via host", unfreeze)


def outlive(ranks: Ranks, stage: int) -> list[Tensor]:
    training = Training(ranks, stage)
    training.step(0)
    model, ids = training.model, training.ids(1)
    del training
    with torch.no_grad():
        return [model(ids).cpu(), *(param.detach().cpu() for param in model.parameters())]


def test_tables_outlive_their_optimizer() -> None:
    assert_as_in_stage_2(2, "via host", outlive)


def look_up_at_once(ranks: Ranks) -> None:
    """Threads, each on its own stream, that look up rows of one table."""
    training = Training(ranks, 3)
    words, index = training.model.words, ranks.device.index
    expected = words.weight.detach().cpu()
    training.residents.release_all()
    training.residents.take_most_bytes()
    wrong: list[int] = []

    def look(thread: int) -> None:
        with on_stream(machine().new_stream(index), index), torch.no_grad():
            for step in range(20):
                rows = torch.arange(thread, ROWS, 7 + step % 3)
                found = words(rows.to(ranks.device)).cpu()
                if not same_bits(found, expected[rows]):
                    wrong.append(thread)

    threads = [threading.Thread(target=look, args=(thread,)) for thread in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not wrong
    assert training.residents.resident_bytes == 0
    assert training.residents.take_most_bytes() == ROWS * ROW, "they share the table's memory"


def test_threads_may_look_up_at_once() -> None:
    run_fake_ranks(look_up_at_once, 2, "via host")


def miss_one(ranks: Ranks, all_here: threading.Barrier) -> list[str]:
    """Rank 1 stops in the midst of step(): rank 0 can't look up its rows, before its optimizer is gone and after."""
    training = Training(ranks, 3)
    training.step(0)
    all_here.wait()
    if ranks.rank == 1:
        stop_in_step(training, all_here)
        return []
    training.step(1)
    foreign = next(row for row in range(ROWS) if training.foreign([row]))
    words = training.model.words
    with pytest.raises(RuntimeError) as before, torch.no_grad():
        words(torch.tensor([foreign], device=ranks.device))
    all_here.wait()
    assert training.residents.resident_bytes == 0
    del training
    with pytest.raises(RuntimeError) as after, torch.no_grad():
        words(torch.tensor([foreign], device=ranks.device))
    return [str(before.value), str(after.value)]


def test_a_rank_that_stops_is_named_by_who_looks_up_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(residency_module, "time_of", lambda _: timedelta(seconds=1))
    messages = run_fake_ranks(miss_one, 2, "via host", threading.Barrier(2))[0]
    for message in messages:
        assert re.search(r"rows of table .*words.weight.*did not arrive from all ranks: .*rank 1", message), message
    assert len(messages) == 2
