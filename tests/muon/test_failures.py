"""Muon when things go wrong: an owner that dies or raises while it updates, and gradients that are no numbers."""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from pathlib import Path
from signal import SIGKILL
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor

import zerox
from tests.mortal_ranks import fail_now, start_ranks
from tests.muon.rig import OPTIONS, Model, build
from tests.muon.test_around import ahead, digests
from tests.ranks import run_ranks
from zerox.update.newton_schulz import Iteration, orthogonalize

NO_ROOM = "can't allocate 17 GiB"
LOAD = "Build the optimizer anew on all ranks, and give it the last state that was saved: zerox.load()"
TIMEOUT_S = 60  # of the group: what a rank waits that nothing wakes
SOON_S = 20


def failing(fail: Callable[[], Any], nth: int = 2) -> Any:
    """Inside, this rank fails in its ``nth`` call of Newton-Schulz: it has updated some of its matrices."""
    calls = iter(range(1, nth + 1))

    def instead(matrices: Sequence[Tensor], by: Iteration) -> list[Tensor]:
        if next(calls, None) == nth:
            fail()
        return orthogonalize(matrices, by)

    return patch("zerox.update.matrices.orthogonalize", instead)


def no_room() -> None:
    raise torch.OutOfMemoryError(NO_ROOM)


def says(call: Callable[[], Any]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


# ---- an owner that dies


def killed(rank: int, world_size: int, stage: int, exchange: str) -> tuple[float, str] | None:
    """Seconds until the others' error, and what it says."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    model = Model()
    optimizer = build(model, False, OPTIONS, stage=stage)
    ahead(model, optimizer, range(1))
    start = time.monotonic()
    try:
        if rank == world_size - 1:
            with failing(lambda: fail_now(SIGKILL)):
                ahead(model, optimizer, range(1, 2))
        ahead(model, optimizer, range(1, 3))
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


@pytest.mark.parametrize(("stage", "exchange"), [(2, "direct"), (1, "messages"), (3, "direct")])
def test_an_owner_that_is_killed_in_newton_schulz_is_named_by_all_others(
    stage: int, exchange: str, tmp_path: Path
) -> None:
    run = start_ranks(killed, 3, stage, exchange, timeout_s=TIMEOUT_S, folder=tmp_path / "run")
    try:
        for rank in range(2):
            answer = run.answer(rank, within_s=2 * TIMEOUT_S)
            assert isinstance(answer, tuple), answer
            seconds, message = answer
            assert re.match("zerox: .*rank 2 is gone", message, re.S), message
            assert seconds < SOON_S, message
            if stage < 3:  # there others read the parameters only when they need them
                assert re.match(r"zerox: the updated parameters of bucket \d+ \(.*\) did not arrive", message), message
    finally:
        run.close()


# ---- an owner that raises


def raised(
    rank: int, world_size: int, stage: int, exchange: str, folder: str
) -> tuple[list[str], float, bool, tuple[str, str]]:
    """What two steps say, and how long it took; whether the second one changed nothing; what came of another try."""
    model = Model()
    optimizer = build(model, False, OPTIONS, stage=stage, exchange=exchange)
    ahead(model, optimizer, range(1))
    zerox.save(Path(folder) / "x", model, optimizer)
    start = time.monotonic()
    model.backward(0, 1)
    with failing(no_room) if rank == world_size - 1 else nullcontext():
        said = [says(optimizer.step)]
    if stage == 3 and said == ["no error"]:  # the others' parameters are read when they are needed
        said = []
    said.append(says(optimizer.step))
    before = [bucket.param_shard.clone() for bucket in optimizer.inside.buckets]
    said.append(says(optimizer.step))
    seconds = time.monotonic() - start
    shards = [bucket.param_shard for bucket in optimizer.inside.buckets]
    is_same = all(torch.equal(one, other) for one, other in zip(before, shards, strict=True))
    del optimizer, shards
    model = Model()
    again = build(model, False, OPTIONS, stage=stage, exchange=exchange)
    zerox.load(Path(folder) / "x", model, again)
    ahead(model, again, range(1, 3))
    return said, seconds, is_same, digests(model, again)


def unharmed(_: int, __: int) -> tuple[str, str]:
    model = Model()
    optimizer = build(model, False, OPTIONS)
    ahead(model, optimizer, range(3))
    return digests(model, optimizer)


@pytest.mark.parametrize(("stage", "exchange"), [(1, "direct"), (2, "messages"), (2, "direct"), (3, "direct")])
def test_what_an_owner_raises_all_others_raise_at_once_and_a_new_optimizer_goes_on(
    stage: int, exchange: str, tmp_path: Path
) -> None:
    by_rank = run_ranks(raised, 3, stage, exchange, str(tmp_path))
    for rank, (said, seconds, is_same, _) in enumerate(by_rank):
        if rank == 2:
            assert said.pop(0) == f"OutOfMemoryError: {NO_ROOM}"
        for each in said:
            assert each.startswith("RuntimeError: zerox: "), each
            assert f"rank 2 raised OutOfMemoryError: {NO_ROOM} in step(), which had updated a part" in each
            assert LOAD in each
        assert is_same
        assert seconds < SOON_S
    assert [each[3] for each in by_rank] == run_ranks(unharmed, 3)


def test_alone_the_error_comes_through_and_nothing_goes_on_before_a_load(tmp_path: Path) -> None:
    model = Model()
    optimizer = build(model, False, OPTIONS)
    ahead(model, optimizer, range(1))
    zerox.save(tmp_path / "x", model, optimizer)
    model.backward(0, 1)
    with failing(no_room), pytest.raises(torch.OutOfMemoryError, match=NO_ROOM):
        optimizer.step()
    before = digests(model, optimizer)[0]
    for call in (optimizer.step, optimizer.step, lambda: zerox.save(tmp_path / "y", model, optimizer)):
        with pytest.raises(RuntimeError, match=rf"rank 0 raised OutOfMemoryError: {NO_ROOM} in .*zerox\.load\(\)"):
            call()
    assert digests(model, optimizer)[0] == before
    optimizer.zero_grad()
    zerox.load(tmp_path / "x", model, optimizer)
    ahead(model, optimizer, range(1, 3))
    assert digests(model, optimizer) == unharmed(0, 1)


# ---- gradients that are no numbers


def clipped(rank: int, _: int) -> tuple[set[str], bool]:
    """What is NaN where one gradient is, and the norm is clipped; whether a clip that raises changes nothing."""
    model = Model()
    optimizer = build(model, False, OPTIONS)
    ahead(model, optimizer, range(1))
    before = digests(model, optimizer)
    for raises in (True, False):
        optimizer.zero_grad()
        found = model.backward(0, 1)
        (model.wide[3, 4] * (float("nan") if rank == 1 else 0.0)).backward()
        if raises:
            with pytest.raises(RuntimeError, match="non-finite"):
                optimizer.clip_grad_norm_(1.0, error_if_nonfinite=True)
            optimizer.zero_grad()
            is_same = digests(model, optimizer) == before
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    spoiled = {name for name, param in model.named_parameters() if param.isnan().any()}
    assert spoiled == set(found)
    return spoiled, is_same


def test_a_nan_under_a_clip_spoils_all_that_has_gradients_and_a_clip_that_raises_nothing() -> None:
    """As torch's clip does."""
    for spoiled, is_same in run_ranks(clipped, 2):
        assert is_same
        assert "unused" not in spoiled
