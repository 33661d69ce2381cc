"""Runs a script on ranks of this machine, and reads what they recorded."""

from __future__ import annotations

import json
import os
import random
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from clients.client import HERE, Client

RANKS = 2
TIMEOUT_S = 600
GRACE_S = 5


class Failed(Exception):
    """A rank ended with an error; the text ends as its output does."""


@dataclass(frozen=True)
class Result:
    """Losses and evaluations by rank."""

    losses: list[list[float]]
    evaluations: list[list[float]]
    num_steps: int
    num_backwards: int | None
    grads: list[Tensor | None]


def run(
    client: Client,
    where: Path,
    out: Path,
    stage: int = 0,
    fault: str = "",
    num_backwards: int | None = None,
    arguments: Sequence[str] = (),
    num_ranks: int = RANKS,
    in_order: bool = False,
) -> Result:
    """``stage``: of zerox's optimizers; ``fault``: one of faults.py; ``num_backwards``: before the first step();
    ``arguments``: behind those of the command; ``in_order``: torch's wrapper averages as in in_order.py."""
    out.mkdir(parents=True)
    settings = out / "settings.json"
    told = {"stage": stage, "fault": fault, "num_backwards": num_backwards, "in_order": in_order, "out": str(out)}
    settings.write_text(json.dumps({**told, "stand_ins": client.stand_ins}))
    command = [sys.executable, "-m", "clients.rank", str(settings), *client.command, *arguments]
    port = _free_port()
    processes = []
    for rank in range(num_ranks):
        own = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        own |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "OMP_NUM_THREADS": 1}
        paths = os.pathsep.join([str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])])
        environment = {**os.environ, **client.environment, "PYTHONPATH": paths}
        environment |= {name: str(value) for name, value in own.items()}
        with (out / f"rank{rank}.log").open("w") as log:
            processes.append(subprocess.Popen(command, cwd=where, env=environment, stdout=log, stderr=log))
    if any(code != 0 for code in _codes(processes)):
        logs = [(out / f"rank{rank}.log").read_text()[-1500:] for rank in range(num_ranks)]
        raise Failed("\n".join(f"rank {rank}: {text}" for rank, text in enumerate(logs)))
    read = [json.loads((out / f"rank{rank}.json").read_text()) for rank in range(num_ranks)]
    path = out / "rank0.grads"
    return Result(
        [each["losses"] for each in read],
        [each["evaluations"] for each in read],
        read[0]["num_steps"],
        read[0]["num_backwards"],
        torch.load(path) if path.exists() else [],
    )


def _free_port() -> int:
    """Below those that the system gives out by itself, which it may give to others before rank 0 listens."""
    while True:
        port = random.randrange(20_000, 30_000)
        with socket.socket() as probe, suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def _codes(processes: Sequence[subprocess.Popen[bytes]]) -> list[int | None]:
    """Exit statuses; None of a rank that did not end, since time was up or another one had failed."""
    last = time.monotonic() + TIMEOUT_S
    try:
        while time.monotonic() < last:
            codes = [process.poll() for process in processes]
            if None not in codes or any(codes):
                time.sleep(GRACE_S if None in codes else 0)  # the others may have something to say
                return [process.poll() for process in processes]
            time.sleep(0.1)
        return [None for _ in processes]
    finally:
        for process in processes:
            process.kill()
