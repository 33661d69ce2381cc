"""A rank that waits long for another says so on stderr: once a wait, what for, for whom, and until when."""

from __future__ import annotations

import functools
import os
import re
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.ranks import Pool, run_ranks
from zerox import FusedShardedAdam
from zerox.ranks.calls import VARIABLE, say_after

SAY_S, LATE_S = 3.0, 8.0  # a busy machine is late by a second or two anyway
LINE = r"zerox: rank (\d) has waited (\d+) s in (.*) for (.*); it gives up after 60 s \(init_process_group\(timeout"


@contextmanager
def stderr_in(path: Path) -> Iterator[None]:
    """All of this process's, C++'s too."""
    sys.stderr.flush()
    kept = os.dup(2)
    with path.open("wb") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            sys.stderr.flush()
            os.dup2(kept, 2)
            os.close(kept)


def make(**options: Any) -> tuple[nn.Module, FusedShardedAdam]:
    torch.manual_seed(0)
    model = nn.Linear(8, 8)
    return model, FusedShardedAdam(model.named_parameters(), **options)


def train(model: nn.Module, ours: FusedShardedAdam, late: Callable[[], None] = lambda: None) -> None:
    loss = model(torch.ones(2, 8)).sum()
    late()
    loss.backward()
    late()
    ours.step()
    ours.zero_grad()


def construct(late: Callable[[], None]) -> None:
    late()
    make()


def step(late: Callable[[], None], **options: Any) -> None:
    model, ours = make(**options)
    train(model, ours)
    late()
    train(model, ours)


def fetch(late: Callable[[], None]) -> None:
    """Rank 1 publishes its shard late."""
    model, ours = make(stage=3)
    model(torch.ones(2, 8)).sum().backward()
    ours.step()
    late()
    ours.zero_grad()
    train(model, ours)


def save(late: Callable[[], None], folder: str) -> None:
    model, ours = make()
    late()
    zerox.save(f"{folder}/saved", model, ours)


def consolidate(late: Callable[[], None]) -> None:
    _, ours = make()
    late()
    ours.consolidate_state_dict()


def along_a_model_axis(late: Callable[[], None]) -> None:
    """Both ranks train alone, and have one norm."""
    model = nn.Linear(8, 8)
    ours = FusedShardedAdam(model.named_parameters(), process_group="alone", norm_group=dist.group.WORLD)
    model(torch.ones(2, 8)).sum().backward()
    late()
    ours.clip_grad_norm_(1.0)


PLACES: dict[str, tuple[Callable[..., None], str]] = {
    "the constructor": (construct, r"the optimizer's constructor for ranks \[1\] to come"),
    "step() in stage 2": (
        step,
        r"(step\(\)|the exchange of the gradients of bucket 0 .*) for (rank 1|the other ranks), last seen in",
    ),
    "the end of backward in stage 1": (
        lambda late: step(late, stage=1),
        r"(the end of backward\(\)|the exchange of the gradients of bucket 0 .*) for rank 1, last seen in step\(\)",
    ),
    "forward or step in stage 3": (fetch, r".* for rank 1, last seen in step\(\) of step 1"),
    "zerox.save()": (save, r"zerox\.save\(\) for rank 1, last seen in the optimizer's constructor"),
    "consolidate_state_dict()": (consolidate, r"consolidate_state_dict\(\) for rank 1"),
    "a model axis": (along_a_model_axis, r".*for the other ranks of the model axis"),
}


def wait_somewhere(rank: int, world_size: int, place: str, exchange: str, say_s: float, folder: str) -> str:
    function, _ = PLACES[place]
    args = (folder,) if function is save else ()
    os.environ |= {VARIABLE: f"{say_s}", "ZEROX_EXCHANGE": exchange}
    said = Path(folder, f"stderr of {rank}")
    try:
        with stderr_in(said):
            function(lambda: time.sleep(LATE_S if rank == 1 else 0.0), *args)
    finally:
        del os.environ[VARIABLE], os.environ["ZEROX_EXCHANGE"]
    return said.read_text()


OVER = [*((place, "direct") for place in PLACES), *(("step() in stage 2", other) for other in ("messages", "native"))]
UNASKED = ("step() in stage 2", "direct", 0.0)
WAITS = [*((place, exchange, SAY_S) for place, exchange in OVER), UNASKED]


def stand_by(rank: int, world_size: int) -> None:
    """What ranks import and start would make them late."""
    train(*make())


@functools.cache
def said_in_all() -> dict[tuple[str, str, float], Future[list[str]]]:
    """What both ranks said in each wait. All wait at the same time, by ranks of their own: each sleeps for seconds."""
    pools = [Pool() for _ in WAITS]
    try:
        with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(len(pools)) as threads:
            for pool in pools:  # one by one: they are forked
                pool.run(stand_by, 2)
            asked = []
            for pool, (index, wait) in zip(pools, enumerate(WAITS), strict=True):
                own = Path(folder, str(index))
                own.mkdir()
                asked.append(threads.submit(pool.run, wait_somewhere, 2, *wait, str(own)))
            threads.shutdown()
        return dict(zip(WAITS, asked, strict=True))
    finally:
        for pool in pools:
            pool.close()


@pytest.mark.parametrize(("place", "exchange"), OVER)
def test_a_rank_that_waits_says_where_and_for_whom_and_once(place: str, exchange: str) -> None:
    waits, is_waited_for = said_in_all()[place, exchange, SAY_S].result()
    lines = [line for line in waits.splitlines() if "has waited" in line]
    assert lines, waits
    found = [re.match(LINE, line) for line in lines]
    assert all(found), lines
    assert re.search(f"in {PLACES[place][1]}", lines[0]), lines
    assert len(lines) == 1, "rank 1 is late once"
    assert {each[1] for each in found if each} == {"0"}
    assert "has waited" not in is_waited_for


def test_who_asks_for_no_such_lines_gets_none() -> None:
    for said in said_in_all()[UNASKED].result():
        assert "has waited" not in said


def test_by_default_it_is_a_minute_and_what_is_no_number_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    assert say_after().total_seconds() == 60.0
    for wrong in ("soon", "-1", "nan", "1e30"):
        monkeypatch.setenv(VARIABLE, wrong)
        with pytest.raises(ValueError, match=f"{VARIABLE} must be a number of seconds, or 0 for never, got '{wrong}'"):
            say_after()


def refuse(rank: int, world_size: int) -> str:
    os.environ[VARIABLE] = "soon" if rank == 1 else "60"
    try:
        make()
    except ValueError as error:
        return str(error)
    finally:
        del os.environ[VARIABLE]
    return "no error"


def test_a_wrong_number_on_one_rank_is_an_error_on_all() -> None:
    for said in run_ranks(refuse, 2):
        assert "must be a number of seconds" in said


def test_one_rank_alone_says_nothing(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv(VARIABLE, "0.5")
    with stderr_in(tmp_path / "said"):
        model, ours = make()
        train(model, ours, lambda: time.sleep(1.0))
    assert (tmp_path / "said").read_text() == ""
    assert not [thread for thread in threading.enumerate() if "connect" in thread.name]
