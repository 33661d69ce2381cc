"""Prints what a result of gpu.py has to say about the machine, as JSON; or one line, why there is no GPU to use.

Runs as a process of its own, so that the one that waits for the tests holds no memory of the GPU.
"""

from __future__ import annotations

import ctypes
import json
import os
import platform
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any


def nccl_of(library: str) -> str:
    version = ctypes.c_int()
    try:
        ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    except (OSError, AttributeError) as error:
        return f"unknown: {error}"
    return f"{version.value // 10000}.{version.value // 100 % 100}.{version.value % 100}"


def driver() -> str:
    if shutil.which("nvidia-smi"):
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        lines = subprocess.run(query, capture_output=True, text=True, check=False).stdout.split()
        if lines:
            return lines[0]
    version = Path("/proc/driver/nvidia/version")
    return version.read_text().partition("\n")[0] if version.exists() else "unknown"


def refusal() -> str | None:
    """Why there is no GPU to use."""
    try:
        import torch
    except ImportError as error:
        return f"torch does not import: {error}"
    if torch.version.cuda is None:
        return f"torch {torch.__version__} is a build without CUDA"
    if not torch.cuda.is_available():
        return f"torch {torch.__version__} finds no CUDA GPU"
    return None


def facts() -> dict[str, Any]:
    import torch

    gpu = torch.cuda.get_device_properties(0)
    library = os.environ.get("ZEROX_NCCL_LIBRARY")
    return {
        "device": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "multiprocessors": gpu.multi_processor_count,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
        "nccl_preloaded_for_two_ranks": nccl_of(library) if library else "none",
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
    }


if __name__ == "__main__":
    why_not = refusal()
    if why_not:
        sys.exit(why_not)
    print(json.dumps(facts()))
