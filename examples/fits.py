"""Whether a training fits in memory, by a lower bound of its bytes. Asked before anything is allocated."""

import argparse
import os
from pathlib import Path

import torch
from corpus import BadInput
from gpt_model import GPT, NUM_BYTES, Shape
from optimizers import estimate_options, params_of
from options import DTYPES

from zerox import estimate

CGROUP = Path("/sys/fs/cgroup")  # of a container, or absent


def check_fits(options: argparse.Namespace) -> None:
    """BadInput names --batch and both numbers of bytes. An unknown stage, which zerox itself detects, is one too."""
    num_ranks = int(os.environ.get("WORLD_SIZE", options.ranks or 1))
    num_local = int(os.environ.get("LOCAL_WORLD_SIZE", num_ranks))
    with torch.device("meta"):
        module = GPT(options.shape).to(DTYPES[options.dtype])
    try:
        kept = estimate(params_of(module, options), num_ranks, **estimate_options(options))
    except ValueError as error:  # an option that zerox knows better than the command line
        raise BadInput(str(error)) from error
    backward = options.batch * backward_bytes_of_window(options.shape, DTYPES[options.dtype].itemsize)
    needed = kept.lasting + backward
    room = free_bytes(options.device) // (num_local if options.device.type == "cpu" else 1)
    if needed > room:
        raise BadInput(
            f"--batch {options.batch} and this model take {needed / 1e9:,.1f} GB or more on each rank, "
            f"{backward / 1e9:,.1f} of them for the batch, and {room / 1e9:,.1f} GB are free: "
            "take a smaller --batch, with a larger --accumulate for the same steps"
        )


def backward_bytes_of_window(shape: Shape, itemsize: int) -> int:
    """The least that a backward needs of a window. Each token has, in widths of each block, the inputs of its two norms
    (2), four linear layers (1 + 1 + 1 + 4) and GELU (4), and its queries, keys and values (3); and the logits in
    fp32."""
    values_of_token = shape.layers * 16 * shape.width * itemsize + NUM_BYTES * 4
    return shape.context * values_of_token


def free_bytes(device: torch.device) -> int:
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for line in Path("/proc/meminfo").read_text().splitlines() if Path("/proc/meminfo").exists() else ():
        if line.startswith("MemAvailable:"):
            free = int(line.split()[1]) * 1024  # with memory that the file cache would give back
    try:
        limit, used = ((CGROUP / name).read_text().strip() for name in ("memory.max", "memory.current"))
        statistics = dict(line.split() for line in (CGROUP / "memory.stat").read_text().splitlines())
    except OSError:
        return free
    return free if limit == "max" else min(free, int(limit) - int(used) + int(statistics["inactive_file"]))
