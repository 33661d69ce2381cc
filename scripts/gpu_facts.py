"""Prints what a result of gpu.py has to say about the machine, as JSON; or one line, why there is no GPU to use.

Runs as a process of its own, so that the one that waits for the tests holds no memory of the GPU.
"""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any


def driver() -> str:
    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    found = subprocess.run(query, capture_output=True, text=True, check=False).stdout if shutil.which(query[0]) else ""
    return (found.split() or ["unknown"])[0]


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
    return {
        "device": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "multiprocessors": gpu.multi_processor_count,
        "driver": driver(),
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
        "nccl_preloaded_for_two_ranks": os.environ.get("ZEROX_NCCL_LIBRARY", "none"),
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
    }


if __name__ == "__main__":
    why_not = refusal()
    if why_not:
        sys.exit(why_not)
    print(json.dumps(facts()))
