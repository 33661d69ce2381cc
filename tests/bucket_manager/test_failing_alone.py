"""What one rank raises alone while all construct or adopt parameters: the others raise its reason at once. And one that
is interrupted ends."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist

from tests.bucket_manager.rig import Chain
from tests.programs import ROOT
from tests.ranks import TIMEOUT_S, run_ranks
from zerox import FusedShardedAdam

FAILS = 1  # this rank
NO_ROOM = "can't allocate 17 GiB"
SOON_S = 20  # of a timeout of 60
CONSTRUCTOR = {
    "while it connects": "zerox.ranks.own_groups._gloo",
    "while it looks for neighbours": "zerox.ranks.neighbours._reads",
    "before it compares": "zerox.optimizer.core.Grads",
    "while it makes a bucket": "zerox.optimizer.adoption.Bucket",
}


def attempt(rank: int, target: str, call: Callable[[], object]) -> tuple[float, str]:
    """Seconds that it took, and what was raised; on one rank ``target`` has no room."""
    start = time.monotonic()
    here = patch(target, side_effect=MemoryError(NO_ROOM)) if rank == FAILS else contextlib.nullcontext()
    said = "no error"
    with here:
        try:
            call()
        except (RuntimeError, MemoryError) as error:
            said = f"{type(error).__name__}: {error}"
    return time.monotonic() - start, said


def construct(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model = Chain(2)
    torch.optim.SGD(model.parameters())  # the first optimizer of a process imports dynamo: seconds
    seconds, said = attempt(rank, target, lambda: FusedShardedAdam(model.named_parameters()))
    for thread in threading.enumerate():
        if thread.name == "zerox connect":
            thread.join(1.0)
            assert not thread.is_alive(), "it would outlive Python"
    again = FusedShardedAdam(model.named_parameters())  # nothing of the first attempt is in its way
    model.layers[0](torch.ones(1, model.layers[0].in_features)).sum().backward()
    again.step()
    return seconds, said, True


def construct_over_tcp(rank: int, world_size: int, target: str) -> tuple[float, str, bool]:
    """With a store as torchrun's, whose one connection answers one call at a time."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True) if rank == 0 else None
    port = [server and server.port]
    dist.broadcast_object_list(port)
    dist.destroy_process_group()
    store = server or dist.TCPStore("127.0.0.1", port[0])
    in_time = timedelta(seconds=TIMEOUT_S)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world_size, timeout=in_time)
    return construct(rank, world_size, target)


def add_a_group(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model, added = Chain(2), Chain(1)
    optimizer = FusedShardedAdam(model.named_parameters())
    group = {"params": [(f"added.{name}", param) for name, param in added.named_parameters()]}
    return *attempt(rank, target, lambda: optimizer.add_param_group(group)), True


def unfreeze(rank: int, _: int, target: str) -> tuple[float, str, bool]:
    model = Chain(2)
    model.layers[1].requires_grad_(False)
    optimizer = FusedShardedAdam(model.named_parameters())
    model.layers[1].requires_grad_(True)
    return *attempt(rank, target, optimizer.step), True


def check(answers: list[tuple[float, str, bool]]) -> None:
    for rank, (seconds, said, _) in enumerate(answers):
        if rank == FAILS:
            assert said == f"MemoryError: {NO_ROOM}"
        else:
            assert said.startswith("RuntimeError: zerox: "), said
            assert f"rank {FAILS} raised MemoryError: {NO_ROOM}" in said
        assert seconds < SOON_S


@pytest.mark.parametrize("moment", CONSTRUCTOR)
def test_what_one_rank_raises_in_the_constructor_the_others_raise_at_once(moment: str) -> None:
    check(run_ranks(construct, 3, CONSTRUCTOR[moment]))


def test_so_they_do_over_a_store_of_one_connection() -> None:
    check(run_ranks(construct_over_tcp, 3, CONSTRUCTOR["while it connects"]))


INTERRUPTED = """
import os, signal, threading
import torch.distributed as dist
from zerox.ranks.polled_store import PolledStore
from zerox.ranks.roll_call import RollCall

signal.signal(signal.SIGINT, signal.default_int_handler)
store = dist.TCPStore("127.0.0.1", 0, is_master=True)
polled = PolledStore(dist.PrefixStore("group", store))
call = RollCall(store, 0, 2, dist.default_pg_timeout)
threading.Timer(0.3, os.kill, (os.getpid(), signal.SIGINT)).start()
call.unless_one_fails(lambda: dist.ProcessGroupGloo(polled, 0, 2, dist.default_pg_timeout), polled.close)
"""


def test_an_interrupted_wait_for_other_ranks_ends_the_process_as_python_does() -> None:
    # What a shell starts in the background ignores the signal, as all tests then do.
    ignoring = ["bash", "-c", 'trap "" INT; exec "$0" "$@"', sys.executable, "-c", INTERRUPTED]
    ended = subprocess.run(ignoring, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert "KeyboardInterrupt" in ended.stderr
    assert "terminate called" not in ended.stderr
    assert ended.returncode == -signal.SIGINT


@pytest.mark.parametrize("adopt", [add_a_group, unfreeze])
def test_what_one_rank_raises_where_parameters_are_added_the_others_raise_at_once(
    adopt: Callable[..., tuple[float, str, bool]],
) -> None:
    check(run_ranks(adopt, 3, "zerox.optimizer.adoption.Bucket"))
