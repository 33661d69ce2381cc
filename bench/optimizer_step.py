"""Times a clipped optimizer step from given gradients beside peers at the same job, after a check of results.

    python -m bench.optimizer_step [--device cuda] [--quick] [--only bf16] [--threads N] [--json FILE] [--png FILE]

One process. Each backward only hands out gradients; what it takes where nobody updates anything is subtracted from all
("clip and step"). Jobs: fp32, and bf16 with fp32-quality state. "theirs/ours" is the time of another over that of zerox
with moments as wide as theirs. On a GPU times are the device's, and "host us" is what the host needs for clipping and
the step.
"""

from __future__ import annotations

import argparse
import contextlib
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.facts import cpu, write_result
from bench.jobs import WrongResult
from bench.kernels import KI
from bench.options import add_device
from bench.peers import HYPER, Skipped
from bench.plots import save_bars
from bench.shapes import MODELS, gpt2
from bench.steppers import BACKWARD, OURS, REFERENCE, SYSTEMS, Given, Stepper, System
from bench.timing import Call, Timing, time_in_turn

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
CHECKED_STEPS = 3
HOST_SAMPLES = 20
CHECKED_SHAPES = ((700, 300), (33,), (1,), (4096, 5), (64, 64))

Row = dict[str, Any]


def shapes_of(device: torch.device, quick: bool) -> dict[str, list[tuple[int, ...]]]:
    """By the name of what they are."""
    if quick:
        model = gpt2("gpt2-0.1m", 2, 64, 256, 64)
    elif device.type == "cuda":
        model = MODELS["gpt2-124m"]()
    else:
        model = gpt2("gpt2-21m", 4, 512, 16_384, 128)
    rng = random.Random(0)
    many: list[tuple[int, ...]] = [(rng.randrange(4 * KI, 64 * KI),) for _ in range(20 if quick else 1000)]
    return {model.name: [shape for _, shape in model.shapes], f"{len(many):,} params": many}


# ---- checks


def able(dtype: torch.dtype, device: torch.device) -> list[System]:
    """Those that run here and make the reference's steps; a line for each other. Raises WrongResult if it is ours."""
    given = Given.random(CHECKED_SHAPES, dtype, device)
    before, expected = joined(given.params), parameters_after(REFERENCE, given)
    found = [BACKWARD]
    for system in SYSTEMS[1:]:
        try:
            off = (parameters_after(system, given) - expected).abs()
        except Skipped as reason:
            print(f"skipped {system.name}: {reason}", flush=True)
            continue
        if system.state == "fp32":
            # A rounding of the parameter, and a thousandth of what the steps change.
            right = off <= torch.finfo(dtype).eps * expected.abs() + 1e-3 * CHECKED_STEPS * HYPER["lr"]
        else:
            right = off.mean() <= 0.1 * (expected - before).abs().mean()
        if right.all():
            found.append(system)
        elif system.is_ours:
            raise WrongResult(f"{system.name}, {dtype}: parameters are up to {float(off.max()):.3g} off")
        else:
            print(f"skipped {system.name}: its parameters are up to {float(off.max()):.3g} off", flush=True)
    return found


def parameters_after(system: System, given: Given) -> Tensor:
    stepper = system.build(given)
    for _ in range(CHECKED_STEPS):
        stepper.train(given.grads)
    return joined(stepper.values())


def joined(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([each.flatten().float() for each in tensors])


# ---- timing


@dataclass(frozen=True)
class Measured:
    """``host_us``: of clipping and the step, where a device does them."""

    timing: Timing
    host_us: float | None


def measure(systems: Sequence[System], given: Given, budget_s: float) -> dict[System, Measured]:
    device = given.params[0].device
    steppers = {system.name: system.build(given) for system in systems}

    def call(stepper: Stepper) -> Call:
        return lambda _: stepper.train(given.grads)

    calls = {name: call(stepper) for name, stepper in steppers.items()}
    timings = time_in_turn(calls, 1, device, budget_s)
    on_host = {name: host_us(each, given) if device.type == "cuda" else None for name, each in steppers.items()}
    return {system: Measured(timings[system.name], on_host[system.name]) for system in systems}


def host_us(stepper: Stepper, given: Given) -> float:
    """Each step begins when the device has done all before it, as in the worst case it has."""
    samples_us = []
    for _ in range(HOST_SAMPLES):
        stepper.loss(given.grads).backward()
        torch.cuda.synchronize()
        start = time.perf_counter()
        stepper.step()
        samples_us.append((time.perf_counter() - start) * 1e6)
        stepper.zero_grad()
    return statistics.median(samples_us)


def rows_of(measured: dict[System, Measured], dtype: str, model: str, given: Given) -> list[Row]:
    alone_ms = measured[BACKWARD].timing.p50_ms
    step_ms = {system: each.timing.p50_ms - alone_ms for system, each in measured.items()}
    rows = []
    for system, each in measured.items():
        ours = OURS[system.state]
        rows.append(
            {
                "dtype": dtype,
                "model": model,
                "params": len(given.params),
                "numel": sum(param.numel() for param in given.params),
                "who": system.name,
                "state": system.state,
                "step_ms": step_ms[system],
                "theirs_over_ours": None if system in (BACKWARD, ours) else step_ms[system] / step_ms[ours],
                "host_us": each.host_us,
                "spread": each.timing.spread,
                **asdict(each.timing),
            }
        )
    return rows


# ---- what is printed

HEADER = ("job", "model", "who", "with backward", "spread", "clip and step", "theirs/ours", "host us")
WIDTHS = (5, 13, 22, 14, 7, 14, 11, 8)


def line(texts: Sequence[str]) -> str:
    return "  ".join(f"{t:<{w}}" if i < 3 else f"{t:>{w}}" for i, (t, w) in enumerate(zip(texts, WIDTHS, strict=True)))


def cells(row: Row) -> tuple[str, ...]:
    late = " (host)" if row["host_bound"] else ""
    ratio = "" if row["theirs_over_ours"] is None else f"{row['theirs_over_ours']:.2f}x"
    host = "" if row["host_us"] is None else f"{row['host_us']:.0f}"
    numbers = (f"{row['p50_ms']:.3f}{late}", f"{row['spread']:.1%}", f"{row['step_ms']:.3f}", ratio, host)
    return (row["dtype"], row["model"], row["who"], *numbers)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()


def name_of(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else cpu()


def run(dtypes: Sequence[str], device: torch.device, quick: bool, seconds: float) -> list[Row]:
    models = shapes_of(device, quick)
    systems = {dtype: able(DTYPES[dtype], device) for dtype in dtypes}
    print(f"{name_of(device)}, torch {torch.__version__}, {torch.get_num_threads()} threads; results agree; ms")
    print(line(HEADER), flush=True)
    rows: list[Row] = []
    for dtype, usable in systems.items():
        for model, shapes in models.items():
            given = Given.random(shapes, DTYPES[dtype], device)
            measured = measure(usable, given, seconds / len(dtypes) / len(models))
            fresh = rows_of(measured, dtype, model, given)
            rows += fresh
            print("\n".join(line(cells(row)) for row in fresh), flush=True)
    return rows


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.optimizer_step",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_device(parser)
    parser.add_argument("--quick", action="store_true", help="small models: whether it works, and no numbers to quote")
    parser.add_argument("--only", choices=list(DTYPES), action="append", help="of the jobs; repeatable; default: all")
    parser.add_argument("--seconds", type=float, default=120.0, help="for all timing, about (default: %(default)s)")
    parser.add_argument("--threads", type=int, metavar="N", help="of the CPU (default: torch's)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    device = torch.device(args.device)
    with group_of_one(device):
        try:
            rows = run(args.only or list(DTYPES), device, args.quick, args.seconds)
        except WrongResult as error:
            print(error, file=sys.stderr)
            return 1
    own = {"device": name_of(device), "threads": torch.get_num_threads()}
    if args.json:
        write_result(args.json, "bench.optimizer_step", argv, rows, own)
    if args.png:
        groups = [(f"{row['dtype']}, {row['model']}", row["who"], row["step_ms"]) for row in rows if row["step_ms"]]
        save_bars(groups, f"clip and step, ms: {own['device']}", args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
