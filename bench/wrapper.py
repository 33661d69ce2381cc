"""Times what a wrapper costs: zerox' DistributedDataParallel beside torch's, and the first look at all parameters.

    python -m bench.wrapper [--ranks 2] [--rounds 400] [--seconds 120] [--backend inductor] [--json FILE]

"forward adds" is what a training forward takes beside that of the module alone, of 40 small layers: the median over the
rounds of the difference, with the buffers of batch norm and without. "constructor" is what goes over the loopback
interface while all ranks build one, so nothing else may use it. "compiled step" is a step of a GPT inside
torch.compile. "first look" is the comparison of 1 GiB of parameters in an optimizer's first step(), and "torchs" there
is a sum of the same memory. ``ratio`` is zerox' over torch's: the median over the rounds.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from bench.common import TRAINING, Row, for_world_sizes, new_parser, on_ranks, parse, training_of
from bench.step import take_turns
from bench.systems import DDP, System, Training, WordGPT, Zerox
from zerox import DistributedDataParallel, FusedShardedAdam
from zerox.optimizer.first_look import digest_of_params

COLUMNS = {"ranks": "d", "what": "<28", "unit": "<4", "torchs": ".2f", "zerox": ".2f", "ratio": ".3f"}
MIB = 2**20
WIDTH = 16
LOOKED_AT = 64  # tensors, of 16 MiB each
COUNTERS = Path("/proc/net/dev")


def row(what: str, unit: str, torchs: list[float], ours: list[float]) -> Row:
    """The same index is the same round."""
    ratio = statistics.median(own / other for own, other in zip(ours, torchs, strict=True))
    medians = {"torchs": statistics.median(torchs), "zerox": statistics.median(ours)}
    return {"what": what, "unit": unit, **medians, "ratio": ratio}


# ---- what a forward adds


def small_model(has_buffers: bool) -> nn.Module:
    layers = [nn.Linear(WIDTH, WIDTH) for _ in range(40)]
    return nn.Sequential(*layers, *([nn.BatchNorm1d(WIDTH)] if has_buffers else []))


def forwards(has_buffers: bool, rounds: int) -> Row:
    alone, torchs, ours = (small_model(has_buffers) for _ in range(3))
    trained: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {
        "alone": (alone, torch.optim.AdamW(alone.parameters(), fused=True)),
        "torchs": (OfTorch(torchs), torch.optim.AdamW(torchs.parameters(), fused=True)),
        "zerox": (DistributedDataParallel(ours), FusedShardedAdam(ours.parameters())),
    }
    inputs, samples_us = torch.randn(8, WIDTH), {name: [0.0] * rounds for name in trained}
    turn = list(trained)
    for index in range(-10, rounds):  # the first ones warm up
        for name in turn:
            module, optimizer = trained[name]
            dist.barrier()
            start = time.perf_counter_ns()
            outputs = module(inputs)
            samples_us[name][index] = (time.perf_counter_ns() - start) / 1e3
            outputs.sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        turn.append(turn.pop(0))
    adds = {name: [a - b for a, b in zip(samples_us[name], samples_us["alone"], strict=True)] for name in trained}
    found = row(f"forward adds{', with buffers' if has_buffers else ''}", "us", adds["torchs"], adds["zerox"])
    return found | {"ratio": found["zerox"] / found["torchs"]}  # single differences may be 0


# ---- what a constructor sends


def loopback_mib() -> float:
    """What this machine has sent to itself."""
    line = next(line for line in COUNTERS.read_text().splitlines() if line.strip().startswith("lo:"))
    return int(line.split()[9]) / MIB


def constructors(training: Training) -> Row:
    def sent_mib(wrapper: Callable[[nn.Module], object]) -> float:
        model = training.model()
        dist.barrier()
        before = loopback_mib()
        dist.barrier()
        kept = wrapper(model)
        dist.barrier()
        found = loopback_mib() - before
        dist.barrier()
        del kept
        return found

    return row("constructor", "MiB", [sent_mib(OfTorch)], [sent_mib(DistributedDataParallel)])


# ---- a compiled step


def compiled(kind: type[System], wrapper: Callable[[nn.Module], nn.Module], training: Training, backend: str) -> System:
    class Compiled(kind):  # type: ignore[valid-type, misc]
        def build(self, model: WordGPT) -> Any:
            _, optimizer = super().build(model)
            return torch.compile(wrapper(model), backend=backend), optimizer

    return Compiled(training)


class TorchsAdam(DDP):
    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        return model, self.build_optimizer(model)


def compiled_steps(training: Training, seconds: float, backend: str) -> Row:
    torchs = partial(OfTorch, gradient_as_bucket_view=True)
    systems = [
        compiled(TorchsAdam, torchs, training, backend),
        compiled(Zerox, DistributedDataParallel, training, backend),
    ]
    for index in range(2):
        for system in systems:
            system.step(training.tokens(index, dist.get_rank()))
    samples = take_turns(systems, training, seconds)
    return row("compiled step", "ms", *([step_ms for step_ms, _ in samples[each.name]] for each in systems))


# ---- the first look


def first_look(rounds: int, numel: int) -> Row:
    params = [nn.Parameter(torch.randn(numel)) for _ in range(LOOKED_AT)]
    optimizer = FusedShardedAdam(params)
    flats = [bucket.buffer.flat for bucket in optimizer.inside.buckets]

    def read() -> None:
        for flat in flats:
            flat.sum()

    def look() -> None:
        digest_of_params(optimizer.inside)

    samples_ms: dict[Callable[[], None], list[float]] = {read: [], look: []}
    for _ in range(rounds):
        for call, samples in samples_ms.items():
            dist.barrier()
            start = time.perf_counter()
            call()
            samples.append((time.perf_counter() - start) * 1e3)
    return row("first look", "ms", *samples_ms.values())


def measured(training: Training, rounds: int, seconds: float, backend: str, numel: int) -> Iterator[Row]:
    yield forwards(False, rounds)
    yield forwards(True, rounds)
    yield constructors(training)
    yield first_look(max(3, rounds // 20), numel)
    yield compiled_steps(training, seconds, backend)


def measure_on_ranks(*args: Any) -> list[Row]:
    return [{"ranks": dist.get_world_size(), **found} for found in measured(*args)]


make_parser = partial(
    new_parser,
    "bench.wrapper",
    __doc__,
    *TRAINING,
    "ranks",
    "rounds",
    "seconds",
    rounds=400,
    backend={"default": "inductor", "help": "of torch.compile"},
    looked_at_mib={"type": int, "default": 1024, "help": "parameters in the first look"},
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    numel = args.looked_at_mib * MIB // 4 // LOOKED_AT
    work = (training_of(args), args.rounds, args.seconds, args.backend, numel)
    for_world_sizes(args, COLUMNS, lambda world_size: on_ranks(measure_on_ranks, world_size, *work))


if __name__ == "__main__":
    main()
