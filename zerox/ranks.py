"""The data-parallel ranks, and the group of zerox's own over which they talk."""

from __future__ import annotations

import datetime
import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

EXCHANGES = ("direct", "native")


@dataclass(frozen=True)
class Ranks:
    """``data`` moves gradients and parameters, ``control`` small CPU tensors; both None for one rank alone."""

    rank: int
    size: int
    backend: str
    exchange: str
    data: dist.ProcessGroup | None
    control: dist.ProcessGroup | None

    @staticmethod
    def alone() -> Ranks:
        return Ranks(0, 1, "none", "direct", None, None)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        if self.control is not None:
            options = dist.AllreduceOptions()
            options.reduceOp = op  # type: ignore[assignment]
            self.control.allreduce([values], options).wait()

    def broadcast(self, values: Tensor) -> None:
        """From rank 0, in place."""
        if self.data is not None:
            self.data.broadcast(values, 0).wait()

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        if self.control is None:
            return [text]
        data = torch.frombuffer(bytearray(text.encode() or b" "), dtype=torch.uint8)
        length = torch.tensor([data.numel()])
        self.all_reduce(length, dist.ReduceOp.MAX)
        padded = torch.full((int(length),), ord(" "), dtype=torch.uint8)
        padded[: data.numel()] = data
        received = [torch.empty_like(padded) for _ in range(self.size)]
        self.control.allgather([received], [padded]).wait()
        return [bytes(each.tolist()).decode().rstrip(" ") for each in received]

    def check_same(self, lines: Sequence[str]) -> None:
        """ValueError on every rank, naming the first line that differs, unless all ranks pass the same lines.

        Collective. Ranks compare a digest; the lines themselves travel only when it differs.
        """
        digest = hashlib.sha256("\n".join(lines).encode()).digest()
        number = int.from_bytes(digest[:7], "big")
        extremes = torch.tensor([number, -number])
        self.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            return
        everyone = [text.split("\n") for text in self.all_gather_text("\n".join(lines))]
        for rank, theirs in enumerate(everyone):
            for index in range(max(len(everyone[0]), len(theirs))):
                first, other = (each[index] if index < len(each) else "nothing" for each in (everyone[0], theirs))
                if first != other:
                    raise ValueError(f"ranks must agree: rank 0 has {first}; rank {rank} has {other}")


def find_ranks(process_group: dist.ProcessGroup | DeviceMesh | None) -> Ranks:
    """Makes the group of our own over the ranks of ``process_group`` (default: all; alone without torch.distributed).

    Collective over these ranks. Raises ValueError for a mesh of more than one dimension, or a group that this process
    is not in.
    """
    if isinstance(process_group, DeviceMesh):
        if process_group.ndim != 1:
            raise ValueError(f"process_group: a DeviceMesh must have 1 dimension, got {process_group.ndim}")
        process_group = process_group.get_group()
    if process_group is None:
        if not (dist.is_available() and dist.is_initialized()):
            return Ranks.alone()
        process_group = dist.group.WORLD
    if not isinstance(process_group, dist.ProcessGroup):
        raise ValueError(f"process_group must be a ProcessGroup this process is in, got {process_group!r}")
    if process_group.size() == 1:
        return Ranks.alone()
    backend = process_group.name()
    exchange = os.environ.get("ZEROX_EXCHANGE") or ("direct" if backend == "gloo" else "native")
    if exchange not in EXCHANGES:
        raise ValueError(f"ZEROX_EXCHANGE must be one of {EXCHANGES}, got '{exchange}'")
    if process_group not in dist.distributed_c10d._world.pg_map:
        # A group that somebody built by hand (ranks as threads of one process, in tests): it can't be doubled.
        return Ranks(process_group.rank(), process_group.size(), backend, exchange, process_group, process_group)
    data = _same_ranks(process_group, backend)
    # Collectives on one gloo group pair up by order: those of native exchange come from other threads.
    control = data if backend == "gloo" and exchange == "direct" else _same_ranks(process_group, "gloo")
    return Ranks(process_group.rank(), process_group.size(), backend, exchange, data, control)


def _same_ranks(group: dist.ProcessGroup, backend: str) -> dist.ProcessGroup:
    made = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=_timeout(group),
        backend=backend,
        use_local_synchronization=True,
        group_desc="zerox",
    )
    assert isinstance(made, dist.ProcessGroup)
    return made


def _timeout(group: dist.ProcessGroup) -> datetime.timedelta | None:
    """The group's own; None (the backend's default) where the backend doesn't tell."""
    device = torch.device("cpu" if group.name() == "gloo" else "cuda")
    options = getattr(group._get_backend(device), "options", None)
    return getattr(options, "_timeout", None)
