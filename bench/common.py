"""What benchmarks share: result files, options and tables, ranks, and C++ of their own."""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import pickle
import platform
import re
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.multiprocessing.spawn import start_processes
from torch.utils import cpp_extension

from bench.systems import DTYPES, Training
from zerox._ext import cuda_refusal

ROOT = Path(__file__).parents[1]
Row = dict[str, Any]


def commit() -> str:
    """The commit that ran, with -dirty where files that git tracks differ from it, other than results themselves."""

    def git(*command: str) -> str:
        return subprocess.run(["git", *command], cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()

    changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":(exclude)bench/results")
    return (git("rev-parse", "--short=12", "HEAD") or "unknown") + ("-dirty" if changed else "")


def cpu() -> str:
    info = Path("/proc/cpuinfo")
    model = re.search(r"model name\s*: (.*)", info.read_text()) if info.exists() else None
    return model[1] if model else platform.processor()


def write_result(
    path: Path | None, module: str, argv: list[str] | None, rows: list[Row], more: Row | None = None
) -> None:
    """What ``python -m module argv`` (None: this process' own) has found, with its facts and ``more``, as JSON."""
    if path is None:
        return
    command = " ".join([f"python -m {module}", *(argv if argv is not None else sys.argv[1:])])
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps({**facts(command), **(more or {}), "rows": rows}, indent=1) + "\n")


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


# ---- options, and tables of rows


def new_parser(module: str, description: str | None, picture: bool = False) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    if picture:
        parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    return parser


def training_parser(module: str, description: str | None, picture: bool = False) -> argparse.ArgumentParser:
    """What is trained."""
    parser = new_parser(module, description, picture)
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="default: %(default)s")
    parser.add_argument("--clip", action="store_const", const=1.0, dest="max_norm", help="clip the norm to 1")
    parser.add_argument("--layers", type=int, default=Training.layers, help="of width 512 (default: %(default)s)")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, of what this machine can do."""
    refusal = (cuda_refusal() or None) if torch.cuda.is_available() else "torch finds no CUDA GPU"

    def usable(name: str) -> str:
        if name == "cuda" and refusal:
            raise argparse.ArgumentTypeError(refusal)
        return name

    default = "cpu" if refusal else "cuda"
    parser.add_argument("--device", type=usable, choices=("cpu", "cuda"), default=default, help=f"default: {default}")


def parse(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Ends the process, as argparse does, with a line for numbers under 1."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and not isinstance(each, bool) and each < 1 for each in numbers):
            parser.error(f"--{name} takes numbers from 1 on")
    return args


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
def library(source: Path, flags: Sequence[str] = (), linked: Sequence[str] = ("-lc10",)) -> Path:
    """A library for ctypes. ``flags`` and ``linked`` are tuples: of the compiler, and of the linker in torch's folder.

    Call it before ranks do. Raises OSError or CalledProcessError where there is no compiler, or it finds an error.
    """
    key = hashlib.sha256(" ".join([*flags, *linked, torch.__version__]).encode() + source.read_bytes()).hexdigest()[:16]
    found = ROOT / "build" / f"{source.stem.replace('_', '-')}-{key}.so"
    if not found.exists():
        found.parent.mkdir(exist_ok=True)
        made = found.with_suffix(f".{os.getpid()}")
        abi = f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"
        command = [cpp_extension.get_cxx_compiler(), "-std=c++20", "-fPIC", "-shared", abi, *flags]
        command += [*(f"-I{folder}" for folder in cpp_extension.include_paths()), str(source), "-o", str(made)]
        command += [*(f"-L{folder}" for folder in cpp_extension.library_paths()), *linked]
        subprocess.run(command, check=True)
        made.replace(found)
    return found
