"""A rank that dies or stalls, at any moment: an error on the others, in time, that names it and what they wait for."""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL, SIGSTOP
from typing import Any

import pytest
import torch

import zerox.calls.grad_calls
import zerox.update.update
from tests.bucket_manager.killing import PLACES, kill_one
from tests.bucket_manager.training import Training
from tests.mortal_ranks import MortalRanks, fail_now, start_ranks
from zerox import FusedShardedAdam
from zerox.params.params import ParamGather
from zerox.ranks.group import Ranks

TIMEOUT_S = 5  # of the group: far above what a healthy wait takes, also on a busy machine
FAILING_STEP = 1  # the one before it has gone well
SOON_S = 10  # until all others have their error after a death, on a busy machine

A_BUCKET = r"bucket \d+ \(layers\.\d\.bias, layers\.\d\.weight\)"
GRADIENTS = rf"zerox: in (the end of backward|clip_grad_norm_)\(\) a rank did not answer: .*\n.*{A_BUCKET}"
NO_ANSWER = (
    r"zerox: in clip_grad_norm_\(\) a rank did not answer: .*\nno bucket is awaited: all gradients that were sent have"
)
PARAMETERS = rf"zerox: the updated parameters of {A_BUCKET} did not arrive from all ranks: "
MOMENTS = {
    "before it constructs": r"zerox: ranks \[\d\] did not come to the optimizer's constructor within 5 s",
    # Some ranks may still be connecting when the one that fails has done with it.
    "while ranks compare": "zerox: (a rank did not answer while ranks compared parameters|ranks .* could not connect)",
    "while it constructs": rf"zerox: the parameters of {A_BUCKET} did not arrive from rank 0 at all ranks: ",
    "in forward": GRADIENTS,
    "inside backward": GRADIENTS,
    "after backward": f"{GRADIENTS}|{NO_ANSWER}",  # its gradients may have left, or not
    "inside clip": NO_ANSWER,
    "inside step": PARAMETERS,
    "in the gather": f"{PARAMETERS}|{GRADIENTS}",  # its last messages may have left: then the next step is the first
    "in an overlapped gather": f"{PARAMETERS}|{GRADIENTS}",
}
PHASES = [
    ["before it constructs", "while ranks compare", "while it constructs"],
    ["in forward", "inside backward", "after backward"],
    ["inside clip", "inside step", "in the gather", "in an overlapped gather"],
]
SETUPS = [(1, 2, "native"), (2, 3, "native"), (2, 2, "direct"), (1, 3, "direct")]  # stage, ranks, exchange


def fail_at_call(owner: Any, name: str, nth: int, how: signal.Signals) -> None:
    """This process fails when ``owner.name`` is called for the nth time from now."""
    inside = getattr(owner, name)
    calls = iter(range(1, nth + 1))

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if next(calls, None) == nth:
            fail_now(how)
        return inside(*args, **kwargs)

    setattr(owner, name, wrapped)


def fail_while_constructing(moment: str, how: signal.Signals) -> None:
    if moment == "before it constructs":
        fail_now(how)
    elif moment == "while ranks compare":
        fail_at_call(Ranks, "check_same", 1, how)
    elif moment == "while it constructs":
        fail_at_call(Ranks, "broadcast", 2, how)


def fail_in_step(training: Training, moment: str, how: signal.Signals) -> None:
    if moment == "in forward":
        fail_now(how)
    elif moment == "inside backward":
        training.fail = lambda _: fail_now(how)  # type: ignore[method-assign]
    elif moment == "after backward":
        fail_at_call(training.optimizer, "clip_grad_norm_", 1, how)
    elif moment == "inside clip":
        fail_at_call(zerox.calls.grad_calls, "total_limbs", 1, how)
    elif moment == "inside step":
        fail_at_call(zerox.update.update, "update", 2, how)
    elif moment.endswith("gather"):
        fail_at_call(ParamGather, "end_step", 1, how)


def tells_of_parameters(call: Callable[[], Any]) -> bool:
    try:
        call()
    except RuntimeError as error:
        return re.match(PARAMETERS, str(error)) is not None
    return False


def train(
    rank: int, world_size: int, stage: int, exchange: str, moment: str, how: signal.Signals
) -> tuple[float, str] | None:
    """Seconds from the start of the step that raised, and what it raised."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    fails = rank == world_size - 1
    start = time.monotonic()
    try:
        if fails:
            fail_while_constructing(moment, how)
        training = Training(rank, stage)
        if moment == "in an overlapped gather":
            training.optimizer.overlap_gather(training.model)
        for step in range(4):
            start = time.monotonic()
            failing = fails and step == FAILING_STEP
            if failing:
                fail_in_step(training, moment, how)
            training.backward(step, fail_in=1 if failing and moment == "inside backward" else None)
            training.optimizer.clip_grad_norm_(1.0)
            training.optimizer.step()
            training.optimizer.zero_grad()
    except RuntimeError as error:
        seconds = time.monotonic() - start
        if moment == "in an overlapped gather" and re.match(PARAMETERS, str(error)):  # who goes on is told again
            torn = tells_of_parameters(training.model.state_dict)  # or it is the dead rank that has not read them
            assert tells_of_parameters(training.optimizer.synchronize)
            assert tells_of_parameters(training.model.state_dict) == torn
        return seconds, str(error)
    return None


@dataclass
class Case:
    moment: str
    how: signal.Signals
    stage: int
    ranks: int
    exchange: str

    def start(self, folder: Path) -> MortalRanks:
        args = (self.stage, self.exchange, self.moment, self.how)
        return start_ranks(train, self.ranks, *args, timeout_s=TIMEOUT_S, folder=folder)

    def check(self, run: MortalRanks) -> None:
        for rank in range(self.ranks - 1):
            answer = run.answer(rank, within_s=60)
            assert answer is not None, f"{self}: rank {rank} saw no error"
            seconds, message = answer
            # The kernel drops what a dead process had sent and nobody had read: the others may be a call behind it.
            expected = [MOMENTS[self.moment]] if self.how == SIGSTOP else MOMENTS.values()
            assert any(re.match(each, message) for each in expected), f"{self}: {message}"
            assert seconds < 3 * TIMEOUT_S, self
        if self.how == SIGSTOP:  # when it goes on it must not wait for the others, who are gone
            run.wake(self.ranks - 1)
            answer = run.answer(self.ranks - 1, within_s=60)
            assert answer is not None, f"{self}: the rank that had stalled saw no error"
            assert answer[1].startswith("zerox: "), f"{self}: {answer[1]}"


def cases(phase: list[str]) -> list[Case]:
    """At each moment two setups die and the two others stall; at the next one it is the other way round."""
    return [
        Case(moment, SIGKILL if (number + of_setup // 2) % 2 else SIGSTOP, *setup)
        for number, moment in enumerate(phase)
        for of_setup, setup in enumerate(SETUPS)
    ]


@pytest.mark.parametrize("phase", PHASES, ids=["constructing", "before the step", "in the step"])
def test_a_rank_that_dies_or_stalls_is_an_error_on_the_others_that_names_what_they_await(
    phase: list[str], tmp_path: Path
) -> None:
    runs = [(case, case.start(tmp_path / str(number))) for number, case in enumerate(cases(phase))]  # all wait at once
    try:
        for case, run in runs:
            case.check(run)
    finally:
        for _, run in runs:
            run.close()


def sleeps(rank: int, world_size: int) -> tuple[float, str] | None:
    training = Training(rank, stage=2)
    if rank == world_size - 1:  # what its threads have to send they still send
        training.fail = lambda _: time.sleep(5 * TIMEOUT_S)  # type: ignore[method-assign]
    start = time.monotonic()
    try:
        training.backward(0, fail_in=1 if rank == world_size - 1 else None)
        training.optimizer.step()
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


def test_a_rank_that_is_stuck_in_its_own_code_is_an_error_on_the_others(tmp_path: Path) -> None:
    run = start_ranks(sleeps, 3, timeout_s=TIMEOUT_S, folder=tmp_path / "run")
    try:
        for rank in (0, 1):
            seconds, message = run.answer(rank, within_s=60)
            assert seconds < 3 * TIMEOUT_S
            assert re.match(rf"zerox: in step\(\) a rank did not answer: .*\n.*{A_BUCKET}", message), message
            named = rf"rank 2 did not come within {TIMEOUT_S} s \(last seen in the optimizer's constructor"
            assert re.search(named, message), message
    finally:
        run.close()


def named_when_killed(args: tuple[str, int, str, Path]) -> None:
    place, number, exchange, folder = args
    world_size = 4 if place == "save" else 3  # DCP's collectives go over a tree: with 4 not all have one neighbour
    victim = number % world_size
    for seconds, message in kill_one(world_size, 1 + number % 2, place, victim, exchange, folder, limit_s=60):
        assert seconds < SOON_S, f"{place}: {message}"
        assert re.search(rf"^zerox: .* rank {victim} is gone", message, re.S), f"{place}: {message}"
        seen = "constructor" if place == "constructor" else r"\(\) of step \d+"
        assert re.search(rf"last seen in .*{seen}", message), f"{place}: {message}"


@pytest.mark.parametrize("exchange", ["direct", "messages", "native"])
def test_all_others_soon_have_an_error_that_names_a_killed_rank_also_those_that_wait_for_a_survivor(
    exchange: str, tmp_path: Path
) -> None:
    places = PLACES if exchange == "direct" else ("backward", "step", "between steps")
    cases = [(place, number, exchange, tmp_path / str(number)) for number, place in enumerate(places)]
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(named_when_killed, cases))


def breaks_off(rank: int, _: int, folder: str) -> tuple[float, str] | None:
    """Rank 1 dies while its gradient and rank 0's are on their way: neither socket takes more, as rank 0 is stopped."""
    os.environ["ZEROX_EXCHANGE"] = "messages"
    param = torch.nn.Parameter(torch.zeros(16 << 20))
    optimizer = FusedShardedAdam([param])
    ready = Path(folder, "ready")
    if rank == 1:
        while not ready.exists():
            time.sleep(0.01)
        time.sleep(0.2)  # until its workers have asked for what they receive
        os.kill(int(ready.read_text()), SIGSTOP)
        param.sum().backward()
        time.sleep(0.5)
        os.kill(int(ready.read_text()), signal.SIGCONT)
        fail_now(SIGKILL)
    param.sum().backward()
    ready.with_suffix(".part").write_text(f"{os.getpid()}")
    ready.with_suffix(".part").rename(ready)
    start = time.monotonic()
    try:
        optimizer.memory_bytes()  # waits for gradients that are on their way
    except RuntimeError as error:
        return time.monotonic() - start, str(error)
    return None


def test_a_message_that_breaks_off_is_an_error_long_before_the_timeout(tmp_path: Path) -> None:
    run = start_ranks(breaks_off, 2, str(tmp_path), timeout_s=50, folder=tmp_path / "run")
    try:
        seconds, message = run.answer(0, within_s=100)
        assert re.match(r"zerox: the gradients of bucket 0 .* did not arrive from all ranks: rank 1 is gone", message)
        assert seconds < SOON_S
    finally:
        run.close()
