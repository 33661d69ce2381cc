"""Times the kernels on the CPU or a GPU beside torch's own, after a check of their results.

    python -m bench.kernels [--device cuda] [--quick] [--only adam] [--threads N] [--json FILE]

Rates count each byte that has to be read or written once. "of_roof" is the share of what the memory gives at most, by a
large copy (on the CPU an addition in place) in the same run; "of_ceiling", for updates on the CPU, the share of what a
loop reaches that moves as many bytes as an update, timed in turn with it. Floors are the least times that our kernel
could take: for its bytes at the roof's rate, and on a Hopper GPU for its instructions, all of them at once and each
kind at its own rate. "theirs_over_ours" is the time of another way to do the same job over ours. The spread is the
middle half of the samples. "late": the time is the host's, who could not keep up.
"""

from __future__ import annotations

import argparse
import platform
import random
from dataclasses import asdict
from functools import partial

import torch

from bench.common import Row, new_parser, parse, print_rows, write_result
from bench.jobs import CEILING, OPS, OURS, WIDE, Job, WrongResult, kinds_of, missing_peers
from bench.limits import Gpu, gpu_of, roof_gb_per_s
from bench.shard import UPDATES
from bench.timing import Timing, num_sets_for, time_in_turn
from zerox import _C

KI, MI = 2**10, 2**20
CHECK_PARAMS = (MI + 77, 1, 3000)  # ends in a part of everything
CUDA_SIZES = {"4 Mi": 4 * MI, "64 Mi": 64 * MI, "256 Mi": 256 * MI}
CPU_SIZES = {"1 Mi": MI, "32 Mi": 32 * MI}
NUM_SLICES = (2, 8)  # of reduce


def sizes_for(device: torch.device, quick: bool) -> dict[str, tuple[int, ...]]:
    """Elements of each parameter, by the name of the size."""
    sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    found: dict[str, tuple[int, ...]] = {name: (numel,) for name, numel in list(sizes.items())[: 1 if quick else None]}
    rng = random.Random(0)
    # Multiples of 256, at which large parameters begin in a bucket (zerox/plan/layout.py).
    many = {"1,000 params": tuple(256 * rng.randrange(16, 256) for _ in range(1000))}
    return found | (many if device.type == "cuda" else {})


def jobs_for(ops: list[str], device: torch.device, quick: bool) -> list[Job]:
    return [
        Job(op, kind, size, params, num_slices)
        for op in ops
        for kind in kinds_of(op)
        for num_slices in (NUM_SLICES if op == "reduce" else (1,))
        for size, params in sizes_for(device, quick).items()
    ]


def check(jobs: list[Job], device: torch.device) -> None:
    """Each op on each kind once, at a size of its own. Raises WrongResult."""
    for op, kind, num_slices in dict.fromkeys((job.op, job.kind, job.num_slices) for job in jobs):
        job = Job(op, kind, "check", CHECK_PARAMS, num_slices)
        if not OPS[op].is_right(job, device):
            raise WrongResult(f"{job.title}, {kind.name}: the result is wrong")


def rows_of(job: Job, timings: dict[str, Timing], roof: float, gpu: Gpu | None) -> list[Row]:
    floors_ms = (job.nbytes / roof / 1e6, gpu.instructions_ms(job.name, job.numel) if gpu else None)
    rows = []
    for who, timing in timings.items():
        moved = (job.wide if who == WIDE else job).nbytes
        rate = moved / timing.p50_ms / 1e6
        rows.append(
            {
                "op": job.title,
                "kind": job.kind.name,
                "state": job.kind.state if job.op in UPDATES else "",
                "size": job.size,
                "numel": job.numel,
                "who": who,
                "bytes": moved,
                "gb_per_s": rate,
                "of_roof": rate / roof,
                "of_ceiling": timings[CEILING].p50_ms / timing.p50_ms if CEILING in timings else None,
                "bytes_floor_ms": floors_ms[0] if who == OURS else None,
                "instructions_floor_ms": floors_ms[1] if who == OURS else None,
                "theirs_over_ours": None if who == OURS else timing.p50_ms / timings[OURS].p50_ms,
                "spread": timing.spread,
                **asdict(timing),
            }
        )
    return rows


COLUMNS = {"op": "<13", "kind": "<17", "state": "<6", "size": "<13", "who": "<21", "p50_ms": ".4f", "spread": ".1%"}
COLUMNS |= {"gb_per_s": ".1f", "of_roof": ".0%", "of_ceiling": ".0%", "bytes_floor_ms": ".4f"}
COLUMNS |= {"instructions_floor_ms": ".4f", "theirs_over_ours": ".2f", "late": "<4"}


def run(device: torch.device, ops: list[str], args: argparse.Namespace) -> None:
    """Prints rows as they come, and keeps the file up to date, so that nothing is lost where time runs out."""
    torch.manual_seed(0)
    jobs = jobs_for(ops, device, args.quick)
    check(jobs, device)
    budget_s = args.seconds / (len(jobs) + 1)
    large = (256 if device.type == "cuda" else 64) * MI // (4 if args.quick else 1)
    roof = roof_gb_per_s(device, large, budget_s)
    is_gpu = device.type == "cuda"
    name = torch.cuda.get_device_name(device) if is_gpu else f"{platform.machine()} CPU, {_C.isa()}"
    print(f"{name}, torch {torch.__version__}, {torch.get_num_threads()} threads; results are right")
    print(f"the roof is {roof:.1f} GB/s, read and written", flush=True)
    gpu = gpu_of(device)
    own = {"device": name, "zerox_isa": _C.isa(), "threads": torch.get_num_threads(), "roof_gb_per_s": roof}
    own |= asdict(gpu) if gpu else {}
    rows: list[Row] = []
    skipped = missing_peers(device) if UPDATES.keys() & set(ops) else []
    for each in skipped:
        print(f"skipped {each}", flush=True)
    print_rows([], COLUMNS, header=True)
    for job in jobs:
        try:
            num_sets = num_sets_for(job.nbytes, device)
            timings = time_in_turn(OPS[job.op].calls(job, num_sets, device), num_sets, device, budget_s)
            fresh = rows_of(job, timings, roof, gpu)
            rows += fresh
            print_rows(({**row, "late": "late" if row["host_bound"] else ""} for row in fresh), COLUMNS)
        except torch.OutOfMemoryError:
            skipped.append(f"{job.title}, {job.kind.name}, {job.kind.state} state, {job.size}: too little memory")
            print(f"skipped {skipped[-1]}", flush=True)
        if is_gpu:
            torch.cuda.empty_cache()
        write_result(args, rows, **own, skipped=skipped)


ONLY = {"action": "append", "choices": OPS, "metavar": "OP", "help": f"{', '.join(OPS)}; repeatable"}
QUICK = {"action": "store_true", "help": "the smallest size, and on a GPU 1,000 parameters"}
THREADS = {"type": int, "metavar": "N", "help": "of torch, on the CPU (default: torch's own)"}
make_parser = partial(
    new_parser, "bench.kernels", __doc__, "device", seconds=60.0, only=ONLY, quick=QUICK, threads=THREADS
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    if args.threads:
        torch.set_num_threads(args.threads)
    run(torch.device(args.device), args.only or list(OPS), args)


if __name__ == "__main__":
    main()
