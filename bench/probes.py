"""What goes into the model of a step, measured on ranks that all do the same at once."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.spread import Spread
from bench.systems import NoCommunication, Training
from zerox import FusedShardedAdam

MIB = 2**20


@contextmanager
def exchange_chosen(exchange: str) -> Iterator[None]:
    """For optimizers that are constructed inside."""
    before = os.environ.get("ZEROX_EXCHANGE")
    os.environ["ZEROX_EXCHANGE"] = exchange
    try:
        yield
    finally:
        del os.environ["ZEROX_EXCHANGE"]
        if before is not None:
            os.environ["ZEROX_EXCHANGE"] = before


class Probe:
    """One bucket, and nothing else to do."""

    def __init__(self, nbytes: int, group: dist.ProcessGroup | None) -> None:
        self.param = nn.Parameter(torch.zeros(nbytes // 4))
        self.optimizer = FusedShardedAdam([self.param], process_group=group, bucket_cap_mb=nbytes / MIB)

    def sample(self) -> dict[str, float]:
        """Seconds of a flight and of step(), without the ranks' agreement ("settle"); and of CPU, of all threads."""
        loss = Spread.apply([torch.ones_like(self.param)], self.param)
        self.optimizer.synchronize()
        meet()
        times = [(time.perf_counter(), time.process_time())]
        for part in (loss.backward, self.optimizer.synchronize, self.optimizer.synchronize, self.optimizer.step):
            part()
            times.append((time.perf_counter(), time.process_time()))
        self.optimizer.zero_grad()
        wall, cpu = ([after - before for before, after in pairwise(clock)] for clock in zip(*times, strict=True))
        return {
            "flight": wall[0] + wall[1] - wall[2],
            "flight_cpu": cpu[0] + cpu[1] - cpu[2],
            "settle": wall[2],
            "step": wall[3] - wall[2],
            "step_cpu": cpu[3] - cpu[2],
        }


@dataclass(frozen=True)
class Compute:
    """Of one step where nothing is sent: seconds from its start until each gradient is there, and in all."""

    arrivals_s: list[float]
    end_s: float


class ComputeProbe:
    def __init__(self, training: Training) -> None:
        self.system = NoCommunication(training)
        self.seen: dict[int, float] = {}
        self.params = list(self.system.module.parameters())
        for index, param in enumerate(self.params):
            param.register_post_accumulate_grad_hook(partial(self._note, index))

    def _note(self, index: int, _: Tensor) -> None:
        self.seen[index] = time.perf_counter()

    def sample(self, tokens: Tensor) -> tuple[Compute, float]:
        """And the seconds of the whole step."""
        self.system.module.zero_grad()
        self.system.optimizer.zero_grad()
        meet()
        start = time.perf_counter()
        self.system.module(tokens[:, :-1], tokens[:, 1:]).backward()
        end = time.perf_counter()
        self.system.optimizer.step()
        whole = time.perf_counter() - start
        return Compute([self.seen[index] - start for index in range(len(self.params))], end - start), whole


def meet() -> None:
    dist.barrier()
