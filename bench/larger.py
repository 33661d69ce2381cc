"""What a model that is larger than a rank takes there, from the meta device on.

    python -m bench.larger [--ranks 4] [--mib 1536] [--resident-mib 64] [--steps 20] [--folder FOLDER] [--json FILE]

Of float32 parameters in layers of 16 MiB, trained by SGD without momentum, so that a rank keeps no more than its shard
of them. In turn the model is built, evaluated, saved and loaded (what the number of ranks before saved, if there was
one), its weights are written and read, and a second optimizer takes over when the first is gone. "peak_mib" is what a
rank's memory (VmHWM) has grown by at most, the most of all ranks, and "bound_mib" the shard, the limit, the bucket of a
layer and 2%.

"trained" is another run, in which a rank may have half of the parameters' bytes, or --allowed-mib: a memory cgroup of
its own says so, where one can be made (else it is left out, as with fewer than four ranks). Gradients are sent and kept
in bfloat16. The parameters must have the same bits as after the same steps of stage 2, without a limit. glibc is told
to give freed memory back (MALLOC_MMAP_THRESHOLD_).
"""

from __future__ import annotations

import contextlib
import gc
import hashlib
import os
import shutil
import statistics
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from bench.common import Row, for_world_sizes, largest, new_parser, on_ranks, parse
from bench.jobs import WrongResult

MIB = 2**20
WIDTH, LAYER_MIB = 2048, 16
BATCH = 4
LEAST_RANKS = 4  # for half of the parameters' bytes: with fewer, shards and gradients are more
CGROUPS = Path("/sys/fs/cgroup/memory")
WITHIN = 1.02
# Else glibc keeps what gradients had, and a process grows by up to all of them: what counts here is what is in use.
FREED_AT_ONCE = "MALLOC_MMAP_THRESHOLD_", str(MIB)


class Deep(nn.Module):
    def __init__(self, layers: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(layers))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + torch.tanh(layer(x))
        return x


def built(mib: int, stage: int, resident_mib: float | None, **options: Any) -> tuple[Deep, zerox.FusedShardedSGD]:
    torch.manual_seed(1)
    with torch.device("meta"):
        model = Deep(mib // LAYER_MIB)
    limit: dict[str, Any] = {"resident_mb": resident_mib} if stage == 3 else {}
    named = model.named_parameters()
    return model, zerox.FusedShardedSGD(named, stage=stage, model=model, lr=0.1, **limit, **options)


def resident_kib(what: str) -> int:
    """VmRSS, or VmHWM, of this process."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:"))


def grown_mib(job: Callable[[], object], base_kib: int) -> float:
    """By how much this process was larger than ``base_kib`` at most while ``job`` ran, of all ranks."""
    dist.barrier()
    Path("/proc/self/clear_refs").write_text("5")
    job()
    dist.barrier()
    return largest([(resident_kib("VmHWM") - base_kib) / 1024])[0]


@torch.no_grad()
def evaluate(model: Deep) -> float:
    return float(model(torch.ones(BATCH, WIDTH)).sum())


def memory(mib: int, resident_mib: float, folder: Path) -> list[Row]:
    """On each rank."""
    warm, _ = built(LAYER_MIB, 3, None)  # what each process has once
    evaluate(warm)
    del warm, _
    gc.collect()
    base = resident_kib("VmRSS")
    made: list[tuple[Deep, zerox.FusedShardedSGD]] = []
    own = folder / f"of {dist.get_world_size()} ranks"
    last = min([each for each in folder.iterdir() if each != own], default=own)

    def take_over() -> None:
        model, _ = made.pop()
        del _
        gc.collect()
        options: dict[str, Any] = {"stage": 3, "lr": 0.1, "resident_mb": resident_mib}
        made.append((model, zerox.FusedShardedSGD(model.named_parameters(), **options)))

    jobs: dict[str, Callable[[], object]] = {
        "built": lambda: made.append(built(mib, 3, resident_mib)),
        "evaluated": lambda: evaluate(made[0][0]),
        "saved": lambda: zerox.save(own / "checkpoint", *made[0]),
        f"loaded, {last.name}": lambda: zerox.load(last / "checkpoint", *made[0]),
        "weights written": lambda: zerox.save_weights(made[0][1], own / "weights", "200MB"),
        "weights read": lambda: zerox.load_weights(made[0][1], last / "weights"),
        "another optimizer": take_over,
        "evaluated again": lambda: evaluate(made[0][0]),
    }
    bound = (mib / dist.get_world_size() + resident_mib + LAYER_MIB) * WITHIN
    rows = []
    for name, job in jobs.items():
        start = time.perf_counter()
        peak = grown_mib(job, base)
        rows.append(row_of(name, mib, peak, bound, time.perf_counter() - start))
    return rows


def row_of(what: str, mib: int, peak: float, bound: float, seconds: float) -> Row:
    numbers = {"peak_mib": peak, "bound_mib": bound, "share": peak / bound, "seconds": seconds}
    return {"ranks": dist.get_world_size(), "what": what, "mib": mib, **numbers}


# ---- training under a limit


@contextlib.contextmanager
def limited(nbytes: int) -> Iterator[None]:
    """Inside, memory that this process takes is at most so many bytes: the kernel kills it for more."""
    group = CGROUPS / f"zerox-{os.getpid()}"
    group.mkdir()
    try:
        (group / "memory.limit_in_bytes").write_text(str(nbytes))
        (group / "cgroup.procs").write_text(str(os.getpid()))  # with all its threads
        yield
    finally:
        (CGROUPS / "cgroup.procs").write_text(str(os.getpid()))
        (group / "memory.force_empty").write_text("0")
        group.rmdir()


def can_limit() -> bool:
    return os.access(CGROUPS, os.W_OK) and (CGROUPS / "memory.limit_in_bytes").exists()


def trained(mib: int, stage: int, resident_mib: float, steps: int) -> tuple[str, list[float]]:
    """A digest of all parameters after these steps, and the seconds of each step."""
    model, optimizer = built(mib, stage, resident_mib, reduce_dtype=torch.bfloat16)
    generator = torch.Generator().manual_seed(dist.get_rank())
    seconds = []
    for _ in range(steps):
        start = time.perf_counter()
        model(torch.randn(BATCH, WIDTH, generator=generator)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - start)
    digest = hashlib.sha256()
    with torch.no_grad():
        for param in model.parameters():
            digest.update(param.reshape(-1)[:].numpy().tobytes())
    dist.barrier()
    return digest.hexdigest(), seconds


def training(mib: int, resident_mib: float, steps: int, allowed: int) -> list[Row]:
    """On each rank."""
    trained(LAYER_MIB, 3, LAYER_MIB, 1)
    gc.collect()
    base = resident_kib("VmRSS")
    found: list[tuple[str, list[float]]] = []
    with limited(allowed * MIB):
        peak = grown_mib(lambda: found.append(trained(mib, 3, resident_mib, steps)), base)
    gc.collect()
    if trained(mib, 2, resident_mib, steps)[0] != found[0][0]:
        raise WrongResult("stage 3 under a limit has other bits than stage 2")
    return [row_of(f"trained, {steps} steps", mib, peak, allowed, statistics.median(found[0][1]))]


COLUMNS = {
    "ranks": "",
    "what": "<20",
    "mib": ",.0f",
    "peak_mib": ",.1f",
    "bound_mib": ",.1f",
    "share": ".3f",
    "seconds": ".2f",
}
OPTIONS = {
    "mib": {"type": int, "default": 1536, "help": "of the parameters"},
    "resident_mib": {"type": int, "default": 64, "help": "of parameters that may be whole on a rank"},
    "steps": {"type": int, "default": 20, "help": "under the limit"},
    "allowed_mib": {"type": int, "help": "that a rank may take in training (default: half of the parameters)"},
    "folder": {"type": Path, "default": Path("larger-than-a-rank"), "help": "to write in, and to remove at the end"},
}


def main(argv: list[str] | None = None) -> None:
    args = parse(new_parser("bench.larger", __doc__, ranks=[4], **OPTIONS), argv)
    os.environ.setdefault(*FREED_AT_ONCE)

    def rows_at(world_size: int) -> list[Row]:
        rows: list[Row] = on_ranks(partial(memory, args.mib, args.resident_mib, args.folder), world_size)
        if can_limit() and (args.allowed_mib or world_size >= LEAST_RANKS):
            asked = args.mib, args.resident_mib, args.steps, args.allowed_mib or args.mib // 2
            rows += on_ranks(partial(training, *asked), world_size)
        return rows

    args.folder.mkdir()
    try:
        for_world_sizes(args, COLUMNS, rows_at)
    finally:
        shutil.rmtree(args.folder)


if __name__ == "__main__":
    main()
