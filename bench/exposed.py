"""How much of the exchange of gradients stays exposed under a backward that it fits under, ranks on one machine.

    python -m bench.exposed [--device cuda] [--ranks 2] [--layers 64] [--json FILE] [--png FILE]

Backward is emulated: each layer waits (on a GPU the device does, on the CPU the thread sleeps, which leaves the cores
to the exchange) and hands out its gradient of 8 MiB. All waits together are 1.5 times the exchange. Each round has in
turn the backward alone, the exchange alone, under a backward that doesn't wait, and both together. Exposed is what of
both comes after the end of backward, as a share of the exchange. The last bucket leaves when backward is over: its
share of the exchange is the least there can be. What backward itself takes longer than alone is told beside it: packing
gradients, which is its own thread's work.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench.common import Row, add_device, largest, new_parser, on_ranks, parse, write_result
from bench.jobs import WrongResult
from bench.plots import save_bars
from zerox import FusedShardedAdam

MIB = 2**20
LAYER_NUMEL = 8 * MIB // 4
COMPUTE = 1.5  # times the exchange
BARS = {"backward alone": "backward_ms", "exchange alone": "exchange_ms", "both together": "together_ms"}
CALIBRATION_CYCLES = 20_000_000


class Clock:
    """Waits on ``device``, and tells time there: a GPU's current stream, or the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.on_gpu = device.type == "cuda"
        self.cycles_a_second = 0.0
        for _ in range(2 if self.on_gpu else 0):  # the first warms up
            marks = [self.now(), torch.cuda._sleep(CALIBRATION_CYCLES), self.now()]
            self.cycles_a_second = CALIBRATION_CYCLES / self.between(marks[0], marks[2])

    def wait(self, seconds: float) -> None:
        if self.on_gpu:
            torch.cuda._sleep(int(seconds * self.cycles_a_second))
        else:
            time.sleep(seconds)

    def now(self) -> Any:
        """A mark for between(): where the current stream is then, or the thread."""
        if not self.on_gpu:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Seconds, once the device is there."""
        if not self.on_gpu:
            return stop - start
        stop.synchronize()
        return start.elapsed_time(stop) / 1e3


class Layer(torch.autograd.Function):
    """Its backward waits, then hands out a gradient that was made before."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, param: Tensor, grad: Tensor, wait: Callable[[], None]) -> Tensor:
        ctx.grad, ctx.wait = grad, wait
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        ctx.wait()
        return grads[0], ctx.grad, None, None


@dataclass
class Backward:
    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    clock: Clock

    def __call__(self, seconds: float) -> None:
        """All waits together take ``seconds``."""
        x = self.params[0].new_zeros((), requires_grad=True)
        for param, grad in zip(self.params, self.grads, strict=True):
            x = Layer.apply(x, param, grad, partial(self.clock.wait, seconds / len(self.params)))
        x.backward()


def measure(device_name: str, num_layers: int, numel: int, rounds: int) -> Row:
    """On each rank. Seconds are the slowest rank's, and medians over the rounds. Raises WrongResult."""
    device = torch.device(device_name)
    clock = Clock(device)
    grads = [torch.full((numel,), float(index + dist.get_rank()), device=device) for index in range(num_layers)]
    ours = [nn.Parameter(torch.zeros(numel, device=device)) for _ in range(num_layers)]
    # Nobody takes their gradients: autograd would copy them, which it need not where zerox takes them first.
    bare = [torch.zeros((), device=device) for _ in range(num_layers)]
    optimizer = FusedShardedAdam(ours)
    backward, exchanged = Backward(bare, grads, clock), Backward(ours, grads, clock)

    def timed(function: Backward, seconds: float) -> tuple[float, float]:
        """From where all ranks are there: the whole, and what of it came after backward."""
        clock.between(clock.now(), clock.now())
        dist.barrier()
        marks = [clock.now()]
        function(seconds)
        marks.append(clock.now())
        if function is exchanged:
            optimizer.synchronize()
        marks.append(clock.now())
        found = clock.between(marks[0], marks[2]), clock.between(marks[1], marks[2])
        optimizer.zero_grad()
        return found

    def alone(seconds: float) -> float:
        return timed(backward, seconds)[0]

    def together(seconds: float) -> tuple[float, float]:
        return timed(exchanged, seconds)

    check(optimizer, ours, exchanged)
    for _ in range(3):
        exchange_s = together(0.0)[0] - alone(0.0)
    # As long on all ranks; what it is now may change, and is measured again in each round.
    waits_s = COMPUTE * max(largest([exchange_s])[0], 1e-4)
    samples = [[alone(waits_s), alone(0.0), together(0.0)[0], *together(waits_s)] for _ in range(rounds)]
    waited, nothing, empty, both, exposed = (largest(list(column)) for column in zip(*samples, strict=True))
    exchange = [a - b for a, b in zip(empty, nothing, strict=True)]
    longer = [a - b - c for a, b, c in zip(both, waited, exposed, strict=True)]
    seconds = {"backward": waited, "exchange": exchange, "together": both, "longer": longer, "exposed": exposed}
    return {
        "ranks": dist.get_world_size(),
        "device": device_name,
        "layers": num_layers,
        "mib": num_layers * numel * 4 / MIB,
        "buckets": len(optimizer.inside.buckets),
        **{f"{name}_ms": statistics.median(each) * 1e3 for name, each in seconds.items()},
        "exposed": statistics.median(a / b for a, b in zip(exposed, exchange, strict=True)),
        "least": 1 / len(optimizer.inside.buckets),
    }


def check(optimizer: FusedShardedAdam, params: Sequence[Tensor], backward: Backward) -> None:
    """The norm of the mean gradient, which is the same number all over each layer."""
    backward(0.0)
    norm = float(optimizer.clip_grad_norm_(1e30))
    optimizer.zero_grad()
    world_size, numel = dist.get_world_size(), params[0].numel()
    means = [index + (world_size - 1) / 2 for index in range(len(params))]
    expected = (numel * sum(mean**2 for mean in means)) ** 0.5
    if abs(norm - expected) > 1e-6 * expected:
        raise WrongResult(f"the norm of the mean gradient is {norm}, and should be {expected}")


def make_parser() -> argparse.ArgumentParser:
    parser = new_parser("bench.exposed", __doc__)
    add_device(parser)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="2 at least (default: %(default)s)")
    parser.add_argument("--layers", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: %(default)s")
    return parser


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    row = on_ranks(measure, args.ranks, args.device, args.layers, LAYER_NUMEL, args.rounds)
    title = f"an exchange under an emulated backward, {row['ranks']} ranks on {row['device']}"
    print(f"{title}: {row['mib']:.0f} MiB of gradients in {row['buckets']} buckets; results are right")
    print(", ".join(f"{name} {row[key]:.1f} ms" for name, key in BARS.items()))
    print(f"backward took {row['longer_ms']:.1f} ms longer with it")
    print(f"exposed {row['exposed_ms']:.1f} ms, {row['exposed']:.1%} of the exchange; the least is {row['least']:.1%}")
    write_result(args.json, "bench.exposed", argv, [row])
    save_bars([(f"{row['mib']:.0f} MiB", name, row[key]) for name, key in BARS.items()], f"{title}, ms", args.png)


if __name__ == "__main__":
    main()
