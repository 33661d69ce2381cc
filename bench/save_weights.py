"""What zerox.save_weights() costs beside ranks that write as many bytes and wait for the disk as it does.

    python -m bench.save_weights [--ranks 2] [--mib 1024] [--stage 3] [--folder FOLDER] [--json FILE]

In turn in each round: weights in one file, in files of an eighth of them, and in one file from parameters whose
dimensions lie in memory in the other order; and a plain write by each rank of its share, to a file of its own. Each
file is a new one, and the last one's room is free before. "ratio" is to the plain write. FOLDER must be on the disk
that is meant. What was written is compared with the parameters first, by the package safetensors.
"""

from __future__ import annotations

import shutil
import statistics
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from bench.checkpoint import FOLDER, MIB, in_folders, write_plainly
from bench.common import Row, largest, new_parser, on_ranks, parse
from bench.jobs import WrongResult
from zerox import FusedShardedAdam, save_weights

PARAM_MIB = 16
WIDTH = 2048


def built(mib: int, stage: int, turned: bool) -> tuple[nn.Module, FusedShardedAdam]:
    """Of float32 parameters. ``turned``: columns lie together in memory."""
    torch.manual_seed(0)
    rows = PARAM_MIB * MIB // 4 // WIDTH
    params = [torch.randn(WIDTH, rows).t() if turned else torch.randn(rows, WIDTH) for _ in range(mib // PARAM_MIB)]
    model = nn.ParameterList(map(nn.Parameter, params))
    return model, FusedShardedAdam(model.named_parameters(), stage=stage)


def check(model: nn.Module, optimizer: FusedShardedAdam, folder: Path) -> None:
    """Raises WrongResult unless the files have the parameters."""
    found = {name: each for file in folder.glob("*.safetensors") for name, each in load_file(file).items()}
    with optimizer.whole():
        params = dict(model.named_parameters())
        if found.keys() != params.keys() or not all(torch.equal(found[name], each) for name, each in params.items()):
            raise WrongResult("the files do not have the parameters")


def seconds(job: Callable[[], object], written: Path) -> float:
    """The largest rank's. What was ``written`` is gone afterwards."""
    dist.barrier()
    start = time.perf_counter()
    job()
    took = largest([time.perf_counter() - start])[0]
    if written.is_dir():
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(written)
    else:
        written.unlink()
    dist.barrier()
    return took


def measure(mib: int, stage: int, folder: Path, rounds: int) -> list[Row]:
    """On each rank."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    usual, turned = built(mib, stage, False), built(mib, stage, True)
    path, plain = folder / "weights", folder / f"plain-{rank}"
    most = max(mib * MIB // 8, PARAM_MIB * MIB)
    for one in (usual, turned):
        save_weights(one[1], path, most)
        check(*one, path)
        dist.barrier()
    if rank == 0:
        shutil.rmtree(path)
    nbytes = mib // PARAM_MIB * PARAM_MIB * MIB
    jobs: dict[str, tuple[Callable[[], object], Path]] = {
        "one file": (partial(save_weights, usual[1], path, 2 * nbytes), path),
        "eight files": (partial(save_weights, usual[1], path, most), path),
        "other order": (partial(save_weights, turned[1], path, 2 * nbytes), path),
        "plain write": (partial(write_plainly, plain, nbytes // world_size), plain),
    }
    samples: dict[str, list[float]] = {name: [] for name in jobs}
    for _ in range(rounds):
        for name, (job, written) in jobs.items():
            samples[name].append(seconds(job, written))
    medians = {name: statistics.median(each) for name, each in samples.items()}
    row = {"ranks": world_size, "stage": stage, "mib": nbytes / MIB}
    return [
        {**row, "what": name, "seconds": median, "ratio": median / medians["plain write"]}
        for name, median in medians.items()
    ]


COLUMNS = {"ranks": "", "stage": "", "what": "<12", "mib": ",.0f", "seconds": ".3f", "ratio": ".2f"}
SIZE = {"type": int, "default": 1024, "help": "of the parameters, in MiB"}
STAGE = {"type": int, "default": 3, "help": "the optimizer's"}
make_parser = partial(
    new_parser, "bench.save_weights", __doc__, "ranks", "rounds", rounds=5, folder=FOLDER, mib=SIZE, stage=STAGE
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)

    def rows_in(folder: Path, world_size: int) -> list[Row]:
        return on_ranks(measure, world_size, args.mib, args.stage, folder, args.rounds)

    in_folders(args, "save-weights-", COLUMNS, rows_in)


if __name__ == "__main__":
    main()
