"""What zerox does on the host, where nothing is large and nothing is sent: over parameters, buckets and ranks.

Over parameters and buckets one process trains alone. Over ranks rank 0 packs, posts every message and sums, over
torch's fake group, where each message is done as it is posted: what is left is the host's own work.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from torch import nn
from torch._C._distributed_c10d import FakeProcessGroup
from torch.optim import AdamW
from torch.testing._internal.distributed.fake_pg import FakeStore

from bench.jobs import WrongResult
from bench.spread import Spread
from bench.timing import Timing
from zerox import FusedShardedAdam
from zerox.plan.buckets import MIB
from zerox.ranks.group import Ranks

Row = dict[str, Any]
NUMEL = 16
OURS, THEIRS, BARE = "zerox", "torch fused", "no optimizer"
UNSENT = "zerox, in no_sync()"  # what the hooks do, without packing what they saw
PHASES = ("backward", "step", "zero_grad")
WARM_UP = 3
PARAMS_IN_BUCKETS = 1_000


@dataclass
class Contender:
    """Trains parameters of its own."""

    params: list[nn.Parameter]
    optimizer: torch.optim.Optimizer | None
    construct_ms: float = 0.0
    sends: bool = True

    def sample(self) -> list[float]:
        """Milliseconds of each phase."""
        loss = Spread.apply([torch.ones_like(param) for param in self.params], *self.params)
        times = [time.perf_counter()]
        with nullcontext() if self.sends else self.optimizer.no_sync():  # type: ignore[union-attr]
            loss.backward()
        times.append(time.perf_counter())
        if isinstance(self.optimizer, FusedShardedAdam):
            self.optimizer.synchronize()  # what is packed beside backward is not step()'s
        times.append(time.perf_counter())
        if self.optimizer is not None:
            self.optimizer.step()
        times.append(time.perf_counter())
        for param in self.params if self.optimizer is None else ():
            param.grad = None
        if self.optimizer is not None:
            self.optimizer.zero_grad()
        times.append(time.perf_counter())
        # What synchronize() waits for is work of backward's that another thread does.
        return [(times[i + 1] - times[i]) * 1e3 for i in (0, 2, 3)] + [(times[2] - times[1]) * 1e3]

    def step_again_us(self, rounds: int) -> float:
        """step() on the same gradients, again and again: everything that it needs is in the core's cache."""
        assert self.optimizer is not None
        self.sample()
        Spread.apply([torch.ones_like(param) for param in self.params], *self.params).backward()
        samples_us = []
        for _ in range(WARM_UP + rounds):
            start = time.perf_counter()
            self.optimizer.step()
            samples_us.append((time.perf_counter() - start) * 1e6)
        return statistics.median(samples_us[WARM_UP:])


def build(num_params: int, numel: int, make: Callable[[list[nn.Parameter]], torch.optim.Optimizer] | None) -> Contender:
    params = [nn.Parameter(torch.ones(numel)) for _ in range(num_params)]
    start = time.perf_counter()
    optimizer = make(params) if make else None
    return Contender(params, optimizer, (time.perf_counter() - start) * 1e3)


def sample_phases(contenders: dict[str, Contender], rounds: int) -> dict[str, dict[str, list[float]]]:
    """In turn: contender -> phase -> milliseconds. ``landing``: of the gradients' way what is left after backward."""
    samples: dict[str, list[list[float]]] = {name: [] for name in contenders}
    for _ in range(WARM_UP + rounds):
        for name, contender in contenders.items():
            samples[name].append(contender.sample())
    return {
        name: dict(zip((*PHASES, "landing"), map(list, zip(*each[WARM_UP:], strict=True)), strict=True))
        for name, each in samples.items()
    }


def time_phases(contender: Contender, rounds: int) -> dict[str, Timing]:
    return {phase: Timing.of(ms) for phase, ms in sample_phases({"": contender}, rounds)[""].items()}


def over_params(num_params: int, rounds: int) -> Row:
    fused = build(num_params, NUMEL, lambda params: AdamW(params, fused=True))
    contenders = {BARE: build(num_params, NUMEL, None), THEIRS: fused, OURS: build(num_params, NUMEL, FusedShardedAdam)}
    contenders[UNSENT] = replace(build(num_params, NUMEL, FusedShardedAdam), sends=False)
    samples = sample_phases(contenders, rounds)
    ours = {phase: Timing.of(ms) for phase, ms in samples[OURS].items()}

    def more_us_a_param(name: str) -> float:
        more = [a - b for a, b in zip(samples[name]["backward"], samples[BARE]["backward"], strict=True)]
        return statistics.median(more) * 1e3 / num_params

    return {
        "part": "host",
        "params": num_params,
        "construct_ms": contenders[OURS].construct_ms,
        "step_us": ours["step"].p50_ms * 1e3,
        "zero_grad_us": ours["zero_grad"].p50_ms * 1e3,
        "hook_us_a_param": more_us_a_param(UNSENT),
        "backward_us_a_param": more_us_a_param(OURS),
        "landing_us": ours["landing"].p50_ms * 1e3,
        "torch_fused_step_us": statistics.median(samples[THEIRS]["step"]) * 1e3,
        "step_again_us": contenders[OURS].step_again_us(rounds),
        "torch_fused_step_again_us": contenders[THEIRS].step_again_us(rounds),
        "spread": ours["step"].spread,
    }


def over_buckets(num_buckets: int, num_params: int, rounds: int) -> Row:
    """The same parameters in so many buckets."""
    cap_mb = NUMEL * 4 * num_params / num_buckets / MIB
    ours = build(num_params, NUMEL, lambda params: FusedShardedAdam(params, bucket_cap_mb=cap_mb))
    assert isinstance(ours.optimizer, FusedShardedAdam)
    made = len(ours.optimizer.inside.buckets)
    found = time_phases(ours, rounds)
    return {
        "part": "host",
        "params": num_params,
        "buckets": made,
        "construct_ms": ours.construct_ms,
        **{f"{phase}_us": timing.p50_ms * 1e3 for phase, timing in found.items()},
    }


def fake_ranks(world_size: int, exchange: str) -> Ranks:
    """Rank 0 of so many: messages are done as they are posted, and what arrives is whatever was there."""
    group = dist.ProcessGroup(FakeStore(), 0, world_size)
    group._register_backend(
        torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, FakeProcessGroup._create_internal(0, world_size)
    )
    group._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return Ranks(0, world_size, "gloo", exchange, data=group, control=None)


def over_fake_ranks(world_size: int, exchange: str) -> Contender:
    with patch("zerox.engine.find_ranks", lambda *_: fake_ranks(world_size, exchange)):
        return build(1, 256 * world_size, FusedShardedAdam)


def over_ranks(world_size: int, exchange: str, rounds: int) -> Row:
    """One bucket of one parameter, of 256 elements a rank."""
    ours = over_fake_ranks(world_size, exchange)
    found = time_phases(ours, rounds)
    host_us = 1e3 * sum(found[phase].p50_ms for phase in ("backward", "landing", "step"))
    return {
        "part": "host",
        "ranks": world_size,
        "exchange": exchange,
        "construct_ms": ours.construct_ms,
        "step_and_backward_us": host_us,
        **{f"{phase}_us": timing.p50_ms * 1e3 for phase, timing in found.items()},
    }


def slope(rows: Sequence[Row], over: str, of: str) -> tuple[float, float]:
    """(at zero, a unit more) of the line through the points."""
    line = statistics.linear_regression([row[over] for row in rows], [row[of] for row in rows])
    return line.intercept, line.slope


def check() -> None:
    """One step of small parameters against torch's. Raises WrongResult."""
    contenders = [build(100, NUMEL, FusedShardedAdam), build(100, NUMEL, lambda params: AdamW(params, fused=True))]
    for contender in contenders:
        contender.sample()
    ours, theirs = (torch.cat([param.detach() for param in each.params]) for each in contenders)
    if not torch.allclose(ours, theirs, rtol=0, atol=1e-6):
        raise WrongResult(f"a step of small parameters is {float((ours - theirs).abs().max())} from torch's")


def run(num_params: Sequence[int], num_buckets: Sequence[int], world_sizes: Sequence[int], rounds: int) -> list[Row]:
    check()
    print(f"Host work, one process, parameters of {NUMEL} elements (results agree with torch's):")
    by_params = [over_params(count, rounds) for count in num_params]
    print_table(by_params, {"params": "", "construct_ms": ".1f", "hook_us_a_param": ".2f", "backward_us_a_param": ".2f",
                            "step_us": ".0f", "torch_fused_step_us": ".0f", "step_again_us": ".0f",
                            "torch_fused_step_again_us": ".0f", "zero_grad_us": ".0f"})  # fmt: skip
    by_buckets = [over_buckets(count, PARAMS_IN_BUCKETS, rounds) for count in num_buckets]
    flight = {"backward_us": ".0f", "landing_us": ".0f", "step_us": ".0f"}
    print_table(by_buckets, {"params": "", "buckets": "", "construct_ms": ".1f", **flight})
    by_ranks = [over_ranks(count, exchange, rounds) for exchange in ("messages", "native") for count in world_sizes]
    print("One bucket, over ranks that nothing is sent to:")
    print_table(by_ranks, {"ranks": "", "exchange": "", **flight})
    rows = [*by_params, *by_buckets, *by_ranks, extrapolated(by_params, by_buckets, by_ranks)]
    print(said(rows[-1]), flush=True)
    return rows


def print_table(rows: Sequence[Row], columns: dict[str, str]) -> None:
    """``columns``: key -> format."""
    print("  ".join(f"{key.replace('_', ' '):>{max(9, len(key))}}" for key in columns))
    for row in rows:
        print("  ".join(f"{format(row[key], kind):>{max(9, len(key))}}" for key, kind in columns.items()))


def extrapolated(by_params: Sequence[Row], by_buckets: Sequence[Row], by_ranks: Sequence[Row]) -> Row:
    """Straight lines through what was measured."""
    flights = [{**row, "flight_us": row["backward_us"] + row["landing_us"]} for row in by_buckets]
    messages = [row for row in by_ranks if row["exchange"] == "messages"]
    return {
        "part": "host-lines",
        "construct_us_a_param": 1e3 * slope(by_params, "params", "construct_ms")[1],
        "step_us_a_param": slope(by_params, "params", "step_us")[1],
        "backward_us_a_param": by_params[-1]["backward_us_a_param"],
        "step_us_a_bucket": slope(by_buckets, "buckets", "step_us")[1],
        "flight_us_a_bucket": slope(flights, "buckets", "flight_us")[1],
        "bucket_us_a_rank": slope(messages, "ranks", "step_and_backward_us")[1],
    }


def said(row: Row, params: int = 291, buckets: int = 66, world_size: int = 1_024) -> str:
    """The default is an 8 B Llama's plan."""
    a_bucket_us = row["flight_us_a_bucket"] + row["step_us_a_bucket"] + world_size * row["bucket_us_a_rank"]
    a_step_us = params * (row["backward_us_a_param"] + row["step_us_a_param"]) + buckets * a_bucket_us
    return (
        f"A parameter: {row['construct_us_a_param']:.0f} us of construction, {row['backward_us_a_param']:.2f} us in "
        f"backward, {row['step_us_a_param']:.2f} us in step().\n"
        f"A bucket: {row['flight_us_a_bucket']:.0f} us in flight, {row['step_us_a_bucket']:.0f} us in step(), "
        f"and for each rank {row['bucket_us_a_rank']:.1f} us, which are 4 messages to post.\n"
        f"In straight lines from there, {params:,} parameters in {buckets} buckets over {world_size:,} ranks: "
        f"{a_step_us / 1e3:,.0f} ms of host work a step."
    )
