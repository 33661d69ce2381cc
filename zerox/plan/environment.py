"""Every environment variable of the project: the one table, printed by `python -m zerox env` and in docs/install.md."""

from __future__ import annotations

import os
from dataclasses import dataclass

__all__ = ["EXCHANGE", "STATE_PULL", "VARIABLES", "Variable", "is_state_pulled", "rows"]

EXCHANGE = "ZEROX_EXCHANGE"
STATE_PULL = "ZEROX_STATE_PULL"


@dataclass(frozen=True)
class Variable:
    """``when`` it is read: in a ``build`` (pip, setup.py), by ``make``, in a ``run`` (by zerox), or in a ``test``."""

    name: str
    when: str
    meaning: str  # in Markdown

    @property
    def value(self) -> str:
        return os.environ.get(self.name, "(not set)")


VARIABLES = (
    Variable(
        "ZEROX_CUDA",
        "build",
        "CUDA kernels: `auto` (default) where torch is a CUDA build and nvcc is found; `0` never; `1`, also beside a "
        "CPU build of torch, or fail",
    ),
    Variable("FORCE_CUDA", "build", "`1`: as `ZEROX_CUDA=1`, where that is not set"),
    Variable("ZEROX_ANY_TORCH", "build", "`1`: also for a torch newer than 2.14, which nobody has tried"),
    Variable("CUDA_HOME", "build", "the CUDA toolkit; default: `CUDA_PATH`, nvcc on the `PATH`, `/usr/local/cuda`"),
    Variable("CUDA_PATH", "build", "the CUDA toolkit, where `CUDA_HOME` is not set"),
    Variable(
        "TORCH_CUDA_ARCH_LIST",
        "build",
        'GPUs to build for, as in torch (`"9.0;10.0+PTX"`, or names such as Hopper); default: `8.0 9.0 10.0+PTX`',
    ),
    Variable("NVCC_PREPEND_FLAGS", "build", "flags that nvcc reads itself; a change compiles again"),
    Variable("NVCC_APPEND_FLAGS", "build", "flags that nvcc reads itself; a change compiles again"),
    Variable("CXX", "build", "the C++ compiler, also of several words (`ccache g++`); default: c++, g++ or clang++"),
    Variable("MAX_JOBS", "build", "compilers at a time, about 2 GB of memory each; default: all cores"),
    Variable("ZEROX_WERROR", "build", "`1`: compiler warnings are errors, nvcc's too"),
    Variable("ZEROX_TORCH_INDEX", "make", "package index to take torch from when `make` creates `./.venv`"),
    Variable(
        "ZEROX_ENV",
        "make",
        "folder of the environment that `make` uses, and installs zerox and tools into, such as `$VIRTUAL_ENV`; "
        "default: `./.venv`",
    ),
    Variable("WORKERS", "make", "test processes at a time; default: all cores, at most 8"),
    Variable("ARGS", "make", "what `make test` and others pass on, such as `'-k layout -x'`"),
    Variable("ZEROX_ISA", "run", "`scalar`, `avx2`, `avx512` or `avx512vbmi` instead of the fastest that the CPU runs"),
    Variable(
        EXCHANGE,
        "run",
        "`direct` (default on gloo: sums in rank order, the same bits everywhere; ranks of one machine read each "
        "other's memory, and synchronize there; over NCCL one all-to-all), `messages` (the same, but nobody is read) "
        "or `native` (default on NCCL: the backend's collectives); wins over the constructor's `exchange`",
    ),
    Variable(
        "ZEROX_DEVICE_READS",
        "run",
        "with `stage=3` on GPUs, `auto` (default): ranks of one machine read each other's shards in the GPUs' memory, "
        "if all can; `0`: in the host's memory",
    ),
    Variable(
        "ZEROX_FAULTS",
        "run",
        "with `stage=3` on CPUs, `1` (default): a read of a released parameter that no operator shows faults, and a "
        "handler of SIGSEGV fetches it; `0`: no handler, such reads raise, or end the process",
    ),
    Variable(
        STATE_PULL,
        "run",
        "`1` (default): a rank that saves or reads `optimizer.state_dict()` alone reads the other ranks' part, in "
        "their memory or by message; `0`: it has its own share only",
    ),
    Variable(
        "ZEROX_SAY_WAIT_S",
        "run",
        "seconds after which a rank that waits for others says so on stderr, once a wait; default: 60; `0`: never",
    ),
    Variable("OMP_NUM_THREADS", "run", "threads of a rank, as for torch; torchrun sets 1 unless told otherwise"),
    Variable("CUDA_VISIBLE_DEVICES", "run", "the GPUs that torch sees"),
    Variable("GLOO_SOCKET_IFNAME", "run", "the network interface of gloo; default: the one of the host's name"),
    Variable("ZEROX_FRESH_ROOT", "test", "folder of `scripts/fresh_machine.sh`; default: one in `/var/tmp`"),
    Variable("ZEROX_TEST_DEVICE", "test", "`cpu`: run `tests/gpu` without a GPU"),
    Variable("ZEROX_TEST_SEED", "test", "number of an earlier run of `tests/gpu`, whose random data it repeats"),
    Variable("ZEROX_NCCL_LIBRARY", "test", "an NCCL 2.30 for `make gpu`, which puts two ranks on one GPU"),
)


def rows() -> str:
    """The table in Markdown, without the variables of tests (`zerox env` prints those too)."""
    found = [f"| `{each.name}` | {each.when} | {each.meaning} |" for each in VARIABLES if each.when != "test"]
    return "\n".join(["| variable | when | means |", "|---|---|---|", *found])


def is_state_pulled() -> bool:
    """Whether ranks read each other's optimizer state. ValueError."""
    value = os.environ.get(STATE_PULL) or "1"
    if value not in ("0", "1"):
        raise ValueError(f"{STATE_PULL} must be '0' or '1', got '{value}'")
    return value == "1"
