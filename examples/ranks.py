"""The ranks of a training, which torchrun starts and restarts."""

import os
import socket
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from corpus import BadInput
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.run import main as torchrun

LOOPBACK = "127.0.0.1"
BAD_INPUT = 2  # the exit status of ranks whose options or files can't be used
MEETING_S = 20  # how long to try to reach rank 0


def start(num_ranks: int) -> int:
    """Runs this very command line under torchrun; returns the exit status of the first rank that failed, or 0.

    Ranks of one machine meet at the loopback address: torchrun's own choice is the machine's name, and if that does not
    resolve, as in many containers, it waits for five minutes and more.
    """
    launcher = ["--standalone", f"--local-addr={LOOPBACK}", f"--nproc-per-node={num_ranks}"]
    try:
        torchrun([*launcher, *sys.argv])
    except ChildFailedError as error:
        _, failure = error.get_first_failure()
        if failure.exitcode != BAD_INPUT:
            raise
        return BAD_INPUT  # the rank has said why: no 40 lines of torchrun's below it
    return 0


def am_rank() -> bool:
    return "RANK" in os.environ


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, number of ranks); without torchrun there is one rank and no group."""
    if not am_rank():
        yield 0, 1
        return
    find_rank_0()
    where = {"store": store_of_restart(), "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if os.environ.get("GROUP_WORLD_SIZE") == "1":
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")  # or gloo too looks up the machine's name, in each group
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **where)
    else:
        dist.init_process_group("gloo", **where)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def find_rank_0() -> None:
    """Reports soon why ranks can't synchronize: torch would try for minutes, and then print 80 lines.

    BadInput if waiting is useless: the host's name does not resolve, or torchrun, which started first, does not answer.
    A rank 0 that was started otherwise may only be late.
    """
    rank, host, port = os.environ["RANK"], os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"])
    under_torchrun = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    end = time.monotonic() + MEETING_S
    while True:
        try:
            if rank == "0" and not under_torchrun:
                socket.getaddrinfo(host, port)  # this rank will listen itself
            else:
                socket.create_connection((host, port), timeout=5).close()
            return
        except OSError as error:
            reason = error
        if time.monotonic() > end:
            break
        time.sleep(0.2)
    line = (
        f"rank {rank} found no way to rank 0 at {host}:{port} in {MEETING_S} s ({reason}): "
        f"on one machine start ranks with --ranks N, or torchrun --local-addr {LOOPBACK}; "
        "on several, MASTER_ADDR has to be a name or an address of rank 0's that all of them know"
    )
    if under_torchrun or isinstance(reason, socket.gaierror):
        raise BadInput(line)
    print(f"{line}; still trying", file=sys.stderr, flush=True)


def store_of_restart() -> dist.Store | None:
    """After a restart by torchrun, a part of its store that earlier ranks have not used; None: torch's own choice.

    torchrun keeps one store over all restarts, in which ranks find the addresses of dead ranks and wait for them
    (https://github.com/pytorch/pytorch/issues/135712). Each node counts restarts for itself, so all ranks agree on the
    count on a single node only; on several, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == 0 or not is_shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"restart {restarts}", store)
