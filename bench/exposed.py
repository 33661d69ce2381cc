"""How much of the exchange of gradients stays exposed under a backward that it fits under, ranks on one machine.

    python -m bench.exposed [--device cuda] [--ranks 2] [--layers 64] [--layer-mib 8] [--json FILE]

Backward is emulated: each layer waits (on a GPU the device does, on the CPU the thread sleeps, which leaves the cores
to the exchange) and hands out its gradient. All waits together are so many times the exchange as --compute says. Each
round has in turn the backward alone, the exchange alone, under a backward that doesn't wait, and both together.
Exposed is what of both comes after the end of backward, as a share of the exchange. The last bucket leaves when
backward is over: its share of the exchange is the least there can be. What backward itself takes longer than alone is
told beside it: packing gradients, which is its own thread's work.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.multiprocessing.spawn import ProcessRaisedException

from bench.facts import write_result
from bench.jobs import WrongResult
from bench.options import add_device
from bench.plots import save_bars
from bench.ranks import largest, on_ranks
from zerox import FusedShardedAdam

Row = dict[str, Any]
MIB = 2**20
BARS = {"backward alone": "backward_ms", "exchange alone": "exchange_ms", "both together": "together_ms"}
CALIBRATION_CYCLES = 20_000_000


class Wait:
    """Occupies ``device`` for a time: a GPU's current stream, or the calling thread."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.cycles_a_second = 0.0
        if device.type == "cuda":
            torch.cuda._sleep(CALIBRATION_CYCLES)
            self.cycles_a_second = CALIBRATION_CYCLES / self._seconds(partial(torch.cuda._sleep, CALIBRATION_CYCLES))

    def __call__(self, seconds: float) -> None:
        if self.device.type == "cuda":
            torch.cuda._sleep(int(seconds * self.cycles_a_second))
        else:
            time.sleep(seconds)

    def finish(self) -> None:
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)

    def now(self) -> Any:
        """A mark for between(): where the current stream is then, or the thread."""
        if self.device.type != "cuda":
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def between(self, start: Any, stop: Any) -> float:
        """Seconds; the device is done with both."""
        return stop - start if self.device.type != "cuda" else start.elapsed_time(stop) / 1e3

    def _seconds(self, function: Callable[[], object]) -> float:
        self.finish()
        start = time.perf_counter()
        function()
        self.finish()
        return time.perf_counter() - start

    def seconds(self, function: Callable[[], object]) -> float:
        """From where all ranks are there to where the device is done."""
        self.finish()
        dist.barrier()
        return self._seconds(function)


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
    wait: Wait

    def __call__(self, seconds: float) -> None:
        """All waits together take ``seconds``."""
        x = self.params[0].new_zeros((), requires_grad=True)
        for param, grad in zip(self.params, self.grads, strict=True):
            x = Layer.apply(x, param, grad, partial(self.wait, seconds / len(self.params)))
        x.backward()


def measure(device_name: str, num_layers: int, numel: int, compute: float, rounds: int) -> Row:
    """On each rank. Seconds are the slowest rank's, and medians over the rounds. Raises WrongResult."""
    device = torch.device(device_name)
    wait = Wait(device)
    grads = [torch.full((numel,), float(index + dist.get_rank()), device=device) for index in range(num_layers)]
    ours = [nn.Parameter(torch.zeros(numel, device=device)) for _ in range(num_layers)]
    # Nobody takes their gradients: autograd would copy them, which it need not where zerox takes them first.
    bare = [torch.zeros((), device=device) for _ in range(num_layers)]
    optimizer = FusedShardedAdam(ours)
    backward, exchanged = Backward(bare, grads, wait), Backward(ours, grads, wait)

    def alone(seconds: float) -> float:
        return wait.seconds(partial(backward, seconds))

    def together(seconds: float) -> tuple[float, float]:
        """The whole, and what of it came after backward."""
        marks: list[Any] = []

        def run() -> None:
            exchanged(seconds)
            marks.append(wait.now())
            optimizer.synchronize()
            marks.append(wait.now())

        took = wait.seconds(run)
        optimizer.zero_grad()
        return took, wait.between(*marks)

    check(optimizer, ours, exchanged)
    for _ in range(3):
        exchange_s = together(0.0)[0] - alone(0.0)
    # As long on all ranks; what it is now may change, and is measured again in each round.
    [exchange_s] = largest([exchange_s])
    waits_s = compute * max(exchange_s, 1e-4)
    samples = [[alone(waits_s), alone(0.0), together(0.0)[0], *together(waits_s)] for _ in range(rounds)]
    waited, nothing, empty, both, exposed = (largest(list(column)) for column in zip(*samples, strict=True))
    exchange = [a - b for a, b in zip(empty, nothing, strict=True)]
    longer = [a - b - c for a, b, c in zip(both, waited, exposed, strict=True)]
    median = statistics.median
    return {
        "ranks": dist.get_world_size(),
        "device": device_name,
        "layers": num_layers,
        "mib": num_layers * numel * 4 / MIB,
        "buckets": len(optimizer.inside.buckets),
        "backward_ms": median(waited) * 1e3,
        "exchange_ms": median(exchange) * 1e3,
        "together_ms": median(both) * 1e3,
        "longer_ms": median(longer) * 1e3,
        "exposed_ms": median(exposed) * 1e3,
        "exposed": median(a / b for a, b in zip(exposed, exchange, strict=True)),
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


def said(row: Row) -> str:
    what = f"{row['mib']:.0f} MiB of gradients in {row['buckets']} buckets"
    times = [f"{name} {row[key]:.1f} ms" for name, key in BARS.items()]
    return (
        f"{row['ranks']} ranks on {row['device']}, {what}; results are right\n{', '.join(times)}\n"
        f"backward took {row['longer_ms']:.1f} ms longer with it\n"
        f"exposed {row['exposed_ms']:.1f} ms, {row['exposed']:.1%} of the exchange; "
        f"one bucket's share, the least there can be: {row['least']:.1%}"
    )


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.exposed", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add_device(parser)
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="default: %(default)s")
    parser.add_argument("--layers", type=int, default=64, metavar="N", help="default: %(default)s")
    parser.add_argument("--layer-mib", type=float, default=8.0, help="of gradients, fp32 (default: %(default)s)")
    parser.add_argument("--compute", type=float, default=1.5, help="times the exchange (default: %(default)s)")
    parser.add_argument("--rounds", type=int, default=15, metavar="N", help="default: %(default)s")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    args = parser.parse_args(argv)
    if args.ranks < 2:
        parser.error("--ranks: one rank alone has nothing to hide")
    return args


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    numel = int(args.layer_mib * MIB / 4)
    try:
        row = on_ranks(measure, args.ranks, args.device, args.layers, numel, args.compute, args.rounds)
    except ProcessRaisedException as error:
        print(error, file=sys.stderr)
        return 1
    print(said(row))
    if args.json:
        write_result(args.json, "bench.exposed", argv, [row])
    if args.png:
        numbers = [(f"{row['mib']:.0f} MiB", name, row[key]) for name, key in BARS.items()]
        save_bars(numbers, f"an exchange under an emulated backward, {args.ranks} ranks on {args.device}, ms", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
