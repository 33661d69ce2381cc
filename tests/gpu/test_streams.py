"""Several streams, and memory that crosses them: late gradients are waited for, and nothing is reused too early.

Each schedule is run as it comes, with sleeping streams and with NaN written into whatever memory can be had again, and
once more with the device idle between all steps: the bits must be the same.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Delay, Lines, Scales, batch_of, cpu_copies, scribble, sleep
from tests.gpu.twins import DEVICE
from zerox import FusedShardedAdam

NUMEL = 200_000 if DEVICE.type == "cuda" else 1000  # elements a layer: enough for kernels to overlap
LAYERS = 5
STEPS = 4
SLEEP = 20_000_000  # cycles: ten milliseconds, and everything else takes less


@dataclass(frozen=True)
class Schedule:
    """Streams are numbered; None is the one that is current. The optimizer is always built on the default stream.

    ``main``: where backward is called. ``arms``: where each half of the model runs, forward and back. ``late``: the arm
    whose gradients come late. ``step_on``: where clipping, step and zero_grad run. ``own_accumulators``: each arm's
    gradients are accumulated where they are computed, as in a model that was used before the optimizer was built; else
    autograd hands all of them to the stream on which that happened.
    """

    main: int | None = None
    arms: tuple[int | None, int | None] = (None, None)
    late: int = 1
    step_on: int | None = None
    own_accumulators: bool = False

    @property
    def used(self) -> list[int]:
        return sorted({index for index in (self.main, *self.arms, self.step_on) if index is not None})


SCHEDULES = {
    "one stream": Schedule(),
    "not the stream it was built on": Schedule(main=0),
    "two producers": Schedule(arms=(0, 1)),
    "two producers, the other late": Schedule(arms=(0, 1), late=0),
    "two that accumulate": Schedule(arms=(0, 1), own_accumulators=True),
    "two that accumulate, the other late": Schedule(arms=(0, 1), late=0, own_accumulators=True),
    "one of two on the main stream": Schedule(arms=(None, 1), own_accumulators=True),
    "backward and step apart": Schedule(main=0, step_on=2),
    "all apart": Schedule(main=3, arms=(0, 1), step_on=2, own_accumulators=True),
}


class TwoArms(nn.Module):
    """Layers of the two arms lie in turn, so that a bucket of two has one of each."""

    def __init__(self) -> None:
        super().__init__()
        scales = [Scales(1, NUMEL, seed) for seed in range(2 * LAYERS)]
        self.layers = nn.ModuleList(scales)
        self.arms = (scales[0::2], scales[1::2])

    def loss_of_arm(self, index: int, x: Tensor, sleep_cycles: int) -> Tensor:
        for position, layer in enumerate(self.arms[index]):
            x = layer(x)
            if position % 2:
                x = Delay.apply(x, sleep_cycles)
        return (x * x).sum()


def pin_accumulators(model: TwoArms, streams: tuple[int | None, ...], lines: Lines) -> list[Any]:
    """AccumulateGrad runs on the stream that was current when it was made, and lives as long as what is returned."""
    made = []
    for layers, stream in zip(model.arms, streams, strict=True):
        with lines.on(stream):
            made += [param.expand_as(param).grad_fn for layer in layers for param in layer.parameters()]
    return made


class Run:
    """``idle``: the device finishes before each next thing is given to it, so nothing can be late or too early."""

    def __init__(self, schedule: Schedule, device: torch.device, layers_in_bucket: int, idle: bool, **options: Any):
        self.schedule, self.device, self.idle = schedule, device, idle
        self.lines = Lines(device, 4)
        self.model = TwoArms().to(device)
        self.made = pin_accumulators(self.model, schedule.arms, self.lines) if schedule.own_accumulators else []
        cap_mb = layers_in_bucket * NUMEL * 4 / MIB
        self.optimizer = FusedShardedAdam(self.model.parameters(), lr=1e-2, bucket_cap_mb=cap_mb, **options)
        self.norms: list[Tensor] = []

    def train(self) -> tuple[list[Tensor], list[float]]:
        """Parameters and norms after some steps."""
        self.lines.after_current(self.schedule.used)
        with self.lines.on(self.schedule.main):
            for step in range(STEPS):
                self.step(batch_of(0, step, NUMEL).to(self.device))
        self.lines.synchronize()
        return cpu_copies(self.model.parameters()), [float(norm) for norm in self.norms]

    def step(self, x: Tensor) -> None:
        lines, schedule = self.lines, self.schedule
        arms = [index for index in schedule.arms if index is not None]
        lines.after_current(arms)
        losses = []  # alive until they are added, wherever that is
        for arm, stream in enumerate(schedule.arms):
            with lines.on(stream):
                losses.append(self.model.loss_of_arm(arm, x, SLEEP * (arm == schedule.late and not self.idle)))
        lines.current_after(arms)
        loss = losses[0] + losses[1]
        self.pause()
        loss.backward()
        self.scribble()
        after = [] if schedule.step_on is None else [schedule.step_on]
        lines.after_current(after)
        with lines.on(schedule.step_on):
            self.norms.append(self.optimizer.clip_grad_norm_(0.05))
            self.optimizer.step()
            self.scribble()
            self.optimizer.zero_grad()
        self.scribble()
        lines.current_after(after)

    def pause(self) -> None:
        if self.idle:
            self.lines.synchronize()

    def scribble(self) -> None:
        self.pause()
        for index in [None, *self.schedule.used]:
            with self.lines.on(index):
                scribble(self.device, NUMEL, 2 * LAYERS)
        self.pause()


def assert_same_as_idle(schedule: Schedule, device: torch.device, layers_in_bucket: int, **options: Any) -> None:
    params, norms = Run(schedule, device, layers_in_bucket, idle=False, **options).train()
    expected, expected_norms = Run(schedule, device, layers_in_bucket, idle=True, **options).train()
    assert all(same_bits(p, q) for p, q in zip(params, expected, strict=True))
    assert norms == expected_norms
    assert all(torch.isfinite(p).all() for p in params)


@pytest.mark.parametrize("layers_in_bucket", [1, 2, 2 * LAYERS])
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_streams_change_no_bit(device: torch.device, schedule: Schedule, layers_in_bucket: int) -> None:
    assert_same_as_idle(schedule, device, layers_in_bucket)


@pytest.mark.parametrize("schedule", ["two that accumulate", "all apart"])
def test_nor_where_shards_are_cast(device: torch.device, schedule: str) -> None:
    assert_same_as_idle(SCHEDULES[schedule], device, 2, reduce_dtype=torch.bfloat16)


@pytest.mark.parametrize("schedule", ["two that accumulate", "all apart"])
def test_nor_where_shards_keep_their_place(cuda: torch.device, schedule: str) -> None:
    assert_same_as_idle(SCHEDULES[schedule], cuda, 2, capturable=True)


@pytest.mark.parametrize("schedule", ["one stream", "not the stream it was built on"])
def test_nor_where_gradients_stay_whole(device: torch.device, schedule: str) -> None:
    assert_same_as_idle(SCHEDULES[schedule], device, 2, stage=1)


def test_a_late_gradient_that_nobody_waits_for_would_be_seen(cuda: torch.device) -> None:
    """What the tests above rely on: without an order, a sleeping stream's work is not there yet."""
    sleeper = torch.cuda.Stream(cuda, priority=-1)
    values = torch.zeros(NUMEL, device=cuda)
    assert float(values.sum()) == 0.0  # loads modules, which may wait for the device
    torch.cuda.synchronize(cuda)
    with torch.cuda.stream(sleeper):
        sleep(cuda, 10 * SLEEP)
        values.fill_(1.0)
    seen_early = values.sum()
    torch.cuda.current_stream(cuda).wait_stream(sleeper)
    assert float(seen_early) == 0.0
    assert float(values.sum()) == NUMEL
