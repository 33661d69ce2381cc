"""Times calls that are rivals, in turn within one process: medians, and how far the samples spread.

On a GPU the clock is the device's own, and the host hurries ahead: before each sample the device sleeps until all calls
of the sample wait in its queue, so that neither Python nor launches are in the numbers. On the CPU it is the wall's.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

Call = Callable[[int], object]  # takes the number of a set of buffers

WARM_UP = 3  # samples that don't count
LEAST_SAMPLES = 5
MOST_SAMPLES = 50
CALLS = 8  # in a sample, where calls are short
SHORT_MS = 1.0
MOST_SLEEP = 400_000_000  # cycles, some 0.2 s: a host that needs more is what one waits for


@dataclass(frozen=True)
class Timing:
    """Of one call, in milliseconds. ``host_bound``: the host could not get ahead of the device."""

    p50_ms: float
    p25_ms: float
    p75_ms: float
    samples: int
    host_bound: bool = False

    @property
    def spread(self) -> float:
        """The middle half of the samples, as a share of the median."""
        return (self.p75_ms - self.p25_ms) / self.p50_ms

    @staticmethod
    def of(samples_ms: list[float], host_bound: bool = False) -> Timing:
        p25, p50, p75 = statistics.quantiles(samples_ms, n=4, method="inclusive")
        return Timing(p50, p25, p75, len(samples_ms), host_bound)


@dataclass
class Contender:
    call: Call
    calls: int  # in a sample
    sleep_cycles: int = 1_000_000
    host_bound: bool = False
    samples_ms: list[float] = field(default_factory=list)


def time_in_turn(calls: Mapping[str, Call], num_sets: int, device: torch.device, budget_s: float) -> dict[str, Timing]:
    """Samples each call in turn for ``budget_s`` in all; a sample goes through the sets of buffers at least once."""
    contenders = {name: Contender(call, num_sets) for name, call in calls.items()}
    for contender in contenders.values():
        for _ in range(WARM_UP):
            ms = sample_ms(contender, num_sets, device)
        if ms < SHORT_MS:
            contender.calls = max(CALLS, num_sets)
    end = time.monotonic() + budget_s
    order = list(contenders.values())
    for turn in range(MOST_SAMPLES):
        if turn >= LEAST_SAMPLES and time.monotonic() > end:
            break
        for contender in order:
            contender.samples_ms.append(sample_ms(contender, num_sets, device))
        order.append(order.pop(0))  # nobody is always behind the same rival
    return {name: Timing.of(each.samples_ms, each.host_bound) for name, each in contenders.items()}


def sample_ms(contender: Contender, num_sets: int, device: torch.device) -> float:
    """Of one call, in the mean."""
    while True:
        if device.type == "cuda":
            torch.cuda._sleep(contender.sleep_cycles)
        start = mark(device.type)
        for index in range(contender.calls):
            contender.call(index % num_sets)
        stop = mark(device.type)
        # The device woke up before all of it was in the queue.
        contender.host_bound = device.type == "cuda" and start.query()
        took_ms = elapsed_ms(start, stop)
        if not contender.host_bound or contender.sleep_cycles >= MOST_SLEEP:
            return took_ms / contender.calls
        contender.sleep_cycles *= 2


def mark(device: str) -> Any:
    """Now: on a GPU where its current stream is then."""
    if device == "cpu":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def elapsed_ms(start: Any, stop: Any) -> float:
    if isinstance(start, float):
        return (stop - start) * 1e3
    stop.synchronize()
    return float(start.elapsed_time(stop))


def cache_bytes(device: torch.device) -> int:
    """Of the largest cache in front of the memory."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).L2_cache_size)
    sizes = [path.read_text().strip() for path in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size")]
    return max((int(size[:-1]) * 2**10 for size in sizes if size.endswith("K")), default=64 * 2**20)


def num_sets_for(set_bytes: int, device: torch.device) -> int:
    """So many sets of buffers that a call finds nothing of its own in the cache when its turn comes again."""
    return min(16, max(1, -(-4 * cache_bytes(device) // set_bytes)))
