"""What benchmarks share: result files, options and tables, ranks, and C++ of their own."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import platform
import re
import shlex
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils import cpp_extension

from bench.systems import ALL_SYSTEMS, DTYPES, Training
from zerox._ext import cuda_refusal

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def commit(results: str = "bench/results") -> str:
    """The commit that ran, with -dirty where files that git tracks differ from it, other than results themselves."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", f":(exclude){results}")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor()


def facts(command: str) -> dict[str, Any]:
    return {
        "command": command,
        "commit": commit(),
        "cpu": cpu(),
        "cores": len(os.sched_getaffinity(0)),
        "isa": torch.backends.cpu.get_cpu_capability(),
        "torch": str(torch.__version__),
        "python": platform.python_version(),
        "platform": platform.platform(),
    }


def write_result(args: argparse.Namespace, rows: list[Row], **more: Any) -> None:
    """What the command that ``args`` are of has found, with its facts and ``more``, as JSON, if a file was named."""
    if args.json is not None:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps({**facts(args.command), **more, "rows": rows}, indent=1) + "\n")


# ---- options, and tables of rows


def cuda_unusable() -> str | None:
    return (cuda_refusal() or None) if torch.cuda.is_available() else "torch finds no CUDA GPU"


def usable_device(name: str) -> str:
    if name == "cuda" and (reason := cuda_unusable()):
        raise argparse.ArgumentTypeError(reason)
    return name


Option = dict[str, Any]  # as add_argument() takes it
OPTIONS: dict[str, Option] = {
    "dtype": {"choices": list(DTYPES), "default": "fp32"},
    "clip": {"action": "store_const", "const": 1.0, "dest": "max_norm", "help": "clip the norm to 1"},
    "layers": {"type": int, "default": Training.layers, "help": "of a small GPT"},
    "width": {"type": int, "default": Training.width, "help": "of its layers: a multiple of 64"},
    "batch": {"type": int, "default": Training.batch, "help": "sequences of 128 tokens a rank"},
    "device": {"type": usable_device, "choices": ("cpu", "cuda")},
    "ranks": {"type": int, "nargs": "+", "metavar": "N", "default": [2], "help": "world sizes"},
    "seconds": {"type": float, "default": 120.0, "help": "for all timing, about"},
    "rounds": {"type": int, "metavar": "N", "help": "samples of each"},
    "systems": {"nargs": "+", "metavar": "WORD", "help": f"those with a word in: {'; '.join(ALL_SYSTEMS)}"},
    "png": {"type": Path, "metavar": "FILE", "help": "draw them there"},
    "json": {"type": Path, "metavar": "FILE", "help": "write all numbers there"},
}
TRAINING = ("dtype", "clip", "layers", "width")


def new_parser(module: str, description: str | None, *shared: str, **own: Any) -> argparse.ArgumentParser:
    """With --json and the ``shared`` ones of OPTIONS. ``own``: defaults of OPTIONS, and Options that others lack."""
    options = {name: OPTIONS[name] for name in (*shared, "json")}
    options |= {
        name: each if isinstance(each, dict) else {**OPTIONS[name], "default": each} for name, each in own.items()
    }
    if "device" in options:
        options["device"] = {**options["device"], "default": "cpu" if cuda_unusable() else "cuda"}
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, option in options.items():
        text = [option["help"]] if "help" in option else []
        text += ["(default: %(default)s)"] if option.get("default") else []
        parser.add_argument(f"--{name.replace('_', '-')}", **{**option, "help": " ".join(text)})
    return parser


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """With ``command``, for write_result(). Ends the process, as argparse does, with a line for numbers under 1."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and not isinstance(each, bool) and each < 1 for each in numbers):
            parser.error(f"--{name} takes numbers from 1 on")
    args.command = f"{parser.prog} {shlex.join(argv if argv is not None else sys.argv[1:])}".rstrip()
    return args


def training_of(args: argparse.Namespace, **more: Any) -> Training:
    """What the options say, and ``more``."""
    names = {each.name for each in dataclasses.fields(Training)}
    return Training(**{**{name: value for name, value in vars(args).items() if name in names}, **more})


def for_world_sizes(args: argparse.Namespace, columns: Mapping[str, str], rows_at: Callable[[int], list[Row]]) -> None:
    """Prints and writes what is found with each number of ranks."""
    rows: list[Row] = []
    for world_size in args.ranks:
        found = rows_at(world_size)
        print_rows(found, columns, header=not rows)
        rows += found
    write_result(args, rows)


def print_rows(rows: Iterable[Row], columns: Mapping[str, str], header: bool = False) -> None:
    """``columns``: keys of rows, and their formats; "<20" is text of that width. What is None is left empty."""
    lines = [list(columns)] if header else []
    lines += [["" if row[key] is None else format(row[key], kind) for key, kind in columns.items()] for row in rows]
    widths = [kind if kind[:1] == "<" else f">{max(9, len(key))}" for key, kind in columns.items()]
    for line in lines:
        print("  ".join(f"{text:{width}}" for text, width in zip(line, widths, strict=True)).rstrip(), flush=True)


# ---- ranks that are processes of one machine, each with one thread


TIMEOUT = timedelta(minutes=5)
# Ranks are forked from a process that has imported these, the first of which an optimizer imports when it is made: each
# rank would take 4 s for it.
PRELOADED = ["torch._dynamo", "bench.systems"]


def on_ranks(function: Callable[..., Any], world_size: int, *args: Any) -> Any:
    """What ``function(*args)`` returns on rank 0. Raises what a rank raised; then all ranks are gone."""
    with tempfile.TemporaryDirectory() as folder:
        multiprocessing.set_forkserver_preload(PRELOADED)
        start_processes(_serve, (world_size, folder, function, args), world_size, start_method="forkserver")
        return pickle.loads(Path(folder, "result").read_bytes())


def _serve(rank: int, world_size: int, folder: str, function: Callable[..., Any], args: tuple[Any, ...]) -> None:
    torch.set_num_threads(1)
    # NCCL takes one rank a GPU; gloo takes several, for copies through the host.
    backend = "cpu:gloo,cuda:nccl" if world_size == 1 and torch.cuda.is_available() else "gloo"
    dist.init_process_group(
        backend, init_method=f"file://{folder}/store", rank=rank, world_size=world_size, timeout=TIMEOUT
    )
    try:
        result = function(*args)
        if rank == 0:
            Path(folder, "result").write_bytes(pickle.dumps(result))
        dist.barrier()
    finally:
        dist.destroy_process_group()


def largest(values: list[float]) -> list[float]:
    """Each one's maximum over the ranks. Collective."""
    tensor = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(tensor, dist.ReduceOp.MAX)
    return tensor.tolist()


# ---- C++ that benchmarks bring along


@functools.cache
def library(source: Path, flags: tuple[str, ...]) -> Path:
    """A library for ctypes. ``flags``: of the compiler.

    Call it before ranks do. Raises OSError or CalledProcessError where there is no compiler, or it finds an error.
    """
    key = hashlib.sha256(" ".join([*flags, torch.__version__]).encode() + source.read_bytes()).hexdigest()[:16]
    found = ROOT / "build" / f"{source.stem.replace('_', '-')}-{key}.so"
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        made = found.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = [cpp_extension.get_cxx_compiler(), "-std=c++20", "-fPIC", "-shared", abi, *flags]
        command += [*(f"-I{folder}" for folder in cpp_extension.include_paths()), str(source), "-o", str(made)]
        command += [*(f"-L{folder}" for folder in cpp_extension.library_paths()), "-lc10", "-ltorch_cpu"]
        subprocess.run(command, check=True)
        made.replace(found)
    return found
