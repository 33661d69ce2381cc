"""A training step as events: when buckets leave, cross the wire and land, and what of that backward does not hide.

All ranks do the same at the same time, so one is looked at. Its threads share ``cores`` (what its share of the machine
is worth beside the time that its compute was measured on): with one, whatever packs, copies and sums takes from
backward what it needs; with more, or where a device computes, workers run beside it. The wire moves one message after
the other. What this leaves out: ranks that are late, memory bandwidth that threads share, and congestion. Held beside
steps of 2 and 4 ranks on one machine it was 3% to 12% above them (bench.scale --only step of commit 926bc67).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

CORE, WIRE, DELAY = "core", "wire", "delay"


@dataclass(frozen=True)
class Flight:
    """One bucket. Seconds that each part of its way takes where nothing else runs on this rank.

    ``ready_s``: of the rank's compute when its last gradient is there. ``pack_s``: copies, and posting messages.
    ``scatter_s``: on the wire. ``land_s``: waiting done, reading and summing. ``update_s`` of the shard. ``gather_s``:
    on the wire. ``take_s``: reading what others have updated.
    """

    ready_s: float
    pack_s: float = 0.0
    scatter_s: float = 0.0
    land_s: float = 0.0
    update_s: float = 0.0
    gather_s: float = 0.0
    take_s: float = 0.0


@dataclass(frozen=True)
class Place:
    """Where it runs. ``latency_s`` of a message; ``settle_s``: ranks' agreement in step()."""

    compute_s: float
    latency_s: float = 0.0
    settle_s: float = 0.0
    cores: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """Seconds from the start of forward. ``left`` and ``landed`` by bucket, in launch order."""

    step_s: float
    backward_end_s: float
    left_s: tuple[float, ...]
    landed_s: tuple[float, ...]
    alone_s: float  # what compute and the updates of the own shards take

    @property
    def exposed_s(self) -> float:
        return self.step_s - self.alone_s


@dataclass
class Task:
    resource: str
    remaining_s: float
    after: tuple[str, ...] = ()
    done_s: float | None = field(default=None)


def simulate(tasks: dict[str, Task], cores: float) -> None:
    """Runs tasks, which start once all they come after are done. Cores are shared evenly; the wire serves in order."""
    awaited = {name: len(set(task.after)) for name, task in tasks.items()}
    followers: dict[str, list[str]] = {name: [] for name in tasks}
    for name, task in tasks.items():
        for other in set(task.after):
            followers[other].append(name)
    now = 0.0
    started = [name for name, count in awaited.items() if count == 0]
    active: dict[str, list[str]] = {CORE: [], WIRE: [], DELAY: []}
    num_done = 0
    while True:
        for name in started:
            active[tasks[name].resource].append(name)
        share = min(1.0, cores / max(1, len(active[CORE])))
        rates = dict.fromkeys(active[CORE], share) | dict.fromkeys([*active[DELAY], *active[WIRE][:1]], 1.0)
        if not rates:
            break
        elapsed = min(tasks[name].remaining_s / rate for name, rate in rates.items())
        now += elapsed
        started = []
        for name, rate in rates.items():
            task = tasks[name]
            if task.remaining_s > elapsed * rate * (1 + 1e-12):
                task.remaining_s -= elapsed * rate
                continue
            task.done_s = now
            num_done += 1
            active[task.resource].remove(name)
            for follower in followers[name]:
                awaited[follower] -= 1
                if awaited[follower] == 0:
                    started.append(follower)
    if num_done < len(tasks):
        raise ValueError(f"tasks wait for each other: {sorted(name for name, count in awaited.items() if count)}")


def predict(place: Place, flights: Sequence[Flight]) -> Outcome:
    """``flights`` in launch order: a bucket leaves once it is ready and those before it have left.

    As Note [Two workers] has it: one thread packs, one lands, and two flights at most have buffers. step() starts when
    all have landed, updates bucket by bucket and gathers behind; it ends when all parameters are there.
    """
    tasks: dict[str, Task] = {}
    moments = sorted({flight.ready_s for flight in flights} | {place.compute_s})
    last_moment = 0.0
    last_compute: tuple[str, ...] = ()
    for index, moment in enumerate(moments):
        tasks[f"compute {index}"] = Task(CORE, moment - last_moment, last_compute)
        last_moment, last_compute = moment, (f"compute {index}",)
    compute_until = {moment: f"compute {index}" for index, moment in enumerate(moments)}

    def before(kind: str, index: int, back: int = 1) -> tuple[str, ...]:
        return (f"{kind} {index - back}",) if index >= back else ()

    count = len(flights)
    for i, flight in enumerate(flights):
        ready = (compute_until[flight.ready_s], *before("pack", i), *before("land", i, 2))
        tasks[f"pack {i}"] = Task(CORE, flight.pack_s, ready)
        tasks[f"scatter {i}"] = Task(WIRE, flight.scatter_s, (f"pack {i}",))
        tasks[f"travel {i}"] = Task(DELAY, place.latency_s, (f"scatter {i}",))
        tasks[f"land {i}"] = Task(CORE, flight.land_s, (f"travel {i}", *before("land", i)))
    tasks["settle"] = Task(DELAY, place.settle_s, (*last_compute, *before("land", count)))
    for i, flight in enumerate(flights):
        tasks[f"update {i}"] = Task(CORE, flight.update_s, ("settle", *before("update", i)))
        tasks[f"gather {i}"] = Task(WIRE, flight.gather_s, (f"update {i}",))
        tasks[f"return {i}"] = Task(DELAY, place.latency_s, (f"gather {i}",))
    for i, flight in enumerate(flights):
        arrived = (f"return {i}", *before("update", count), *before("take", i))
        tasks[f"take {i}"] = Task(CORE, flight.take_s, arrived)
    simulate(tasks, place.cores)
    done = {name: task.done_s or 0.0 for name, task in tasks.items()}
    return Outcome(
        step_s=max(done.values()),
        backward_end_s=done[last_compute[0]],
        left_s=tuple(done[f"pack {i}"] for i in range(count)),
        landed_s=tuple(done[f"land {i}"] for i in range(count)),
        alone_s=place.compute_s + sum(flight.update_s for flight in flights),
    )
