"""How ranks reach what others have at any time, without their taking part: in their memory (Note [Neighbours] in
csrc/peers/neighbours.h), or by message (Note [Questions] in csrc/peers/questions.h)."""

from __future__ import annotations

import os
import secrets
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from zerox import _C as C

Gather = Callable[[str], list[str]]


@dataclass(frozen=True)
class Questions:
    """State that other ranks are asked for, and this one's. ``group``: over gloo, for nothing else."""

    group: dist.ProcessGroup
    server: C.StateServer
    asked: C.StateQuestions

    @staticmethod
    def over(group: dist.ProcessGroup, device: torch.device) -> Questions:
        return Questions(group, C.StateServer(group, device.type == "cuda"), C.StateQuestions(group))


@dataclass(frozen=True)
class Neighbours:
    """``processes``: of each rank whose memory can be read, else 0; empty if none is to be read. ``linger``: tells who
    may still read. ``questions``: None if all of a rank's state is read in memory, or none."""

    processes: tuple[int, ...] = ()
    linger: C.Linger | None = None
    questions: Questions | None = None


def find_neighbours(all_gather: Gather, rank: int) -> tuple[int, ...]:
    """The process of each rank on this machine, else 0; 0 everywhere if any rank there can't read another.

    Collective: ``all_gather`` returns every rank's text by rank. The machine's name is only a hint, since containers
    may share it; the proof is a random number, read at the address that its rank gives.
    """
    C.let_siblings_read()
    secret = torch.tensor([secrets.randbits(62)], device="cpu")
    told = all_gather(f"{name_of_machine()} {os.getpid()} {secret.data_ptr()} {int(secret)}")
    everyone = [line.split(" ") for line in told]
    here = everyone[rank][0]
    pids = tuple(int(pid) if machine == here else 0 for machine, pid, *_ in everyone)
    can = all(_reads(pid, int(address), int(number)) for machine, pid, address, number in everyone if machine == here)
    # Also the barrier that keeps the secret in place until all have read it.
    refused = {
        machine
        for machine, answer in zip((each[0] for each in everyone), all_gather(f"{can}"), strict=True)
        if answer != "True"
    }
    return pids if here not in refused else (0,) * len(pids)


def _reads(pid: str, address: int, number: int) -> bool:
    found = torch.zeros(1, dtype=torch.int64, device="cpu")
    return C.read_memory(int(pid), address, found) and int(found) == number


def name_of_machine() -> str:
    """A name for this boot of this machine and its process numbers; a random one if there is no /proc."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    namespace = Path("/proc/self/ns/pid")
    try:
        return f"{boot.read_text().strip()}/{namespace.readlink()}"
    except OSError:
        return secrets.token_hex(16)
