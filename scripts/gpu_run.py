"""Programs with time limits, and the time that is left: what gpu.py runs its parts with.

As a program of its own (so the one that waits for tests holds no memory of the GPU) it prints what a result has to say
about the machine, as JSON; or, in its last line, why there is no GPU to use.
"""

from __future__ import annotations

import contextlib
import json
import os
import platform
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from gpu_report import FAILED, PASSED, TIMED_OUT, Part

ROOT = Path(__file__).resolve().parents[1]
LOGS = ROOT / "build" / "gpu"
running: set[subprocess.Popen[bytes]] = set()
T = TypeVar("T")


def limit_s(part: str, parts: Sequence[str], reserved_s: Mapping[str, float], end: float) -> float:
    """For this part of ``parts``, which starts now: what is left until ``end`` but for what those to come have."""
    to_come = parts[parts.index(part) + 1 :]
    return max(0.0, end - time.monotonic() - sum(reserved_s[later] for later in to_come))


@dataclass(frozen=True)
class Ended:
    status: int
    timed_out: bool
    text: str
    seconds: float = 0.0

    @property
    def outcome(self) -> str:
        return TIMED_OUT if self.timed_out else FAILED if self.status else PASSED

    @property
    def part(self) -> Part:
        """Of what did not pass, also how it ended."""
        return {"outcome": self.outcome, **({} if self.outcome == PASSED else {"tail": tail(self.text)})}


def environment(**more: str) -> dict[str, str]:
    """This tree first, wherever else there is a zerox."""
    path = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH", "")]))
    return {**os.environ, "PYTHONPATH": path, "PYTHONUNBUFFERED": "1", **more}


def run(command: list[str], log: str, limit_s: float, env: dict[str, str] | None = None) -> Ended:
    """What exceeds the limit is interrupted, so that it can say where it was, and then killed with all it started."""
    LOGS.mkdir(parents=True, exist_ok=True)
    path = LOGS / f"{log}.log"
    timed_out, started = False, time.monotonic()
    with path.open("wb") as output:
        process = subprocess.Popen(
            command, cwd=ROOT, env=env or environment(), stdout=output, stderr=subprocess.STDOUT, start_new_session=True
        )
        running.add(process)
        try:
            process.wait(limit_s)
        except subprocess.TimeoutExpired:
            timed_out = True
            os.killpg(process.pid, signal.SIGINT)
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(10)
        finally:
            kill(process)
            process.wait()
            running.discard(process)
    return Ended(process.returncode, timed_out, path.read_text(errors="replace"), time.monotonic() - started)


def kill(process: subprocess.Popen[bytes]) -> None:
    """With all that it started."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def side_by_side(calls: Sequence[Callable[[], T]], at_once: int) -> list[T]:
    """What ``calls`` returned, each of which may ``run`` something. An interruption kills what runs."""
    with ThreadPoolExecutor(at_once) as pool:
        try:
            return list(pool.map(lambda call: call(), calls))
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in list(running):
                kill(process)
            raise


def python(*arguments: str) -> list[str]:
    return [sys.executable, *arguments]


def tail(text: str, lines: int = 60) -> str:
    return "\n".join(text.splitlines()[-lines:])


# ---- the machine


def facts() -> dict[str, Any]:
    """Ends the program where there is no GPU to use; its last line says why."""
    import torch
    from torch.utils import collect_env

    if not torch.cuda.is_available():
        why = "finds no CUDA GPU" if torch.version.cuda else "is a build without CUDA"
        sys.exit(f"torch {torch.__version__} {why}")
    gpu = torch.cuda.get_device_properties(0)
    return {
        "device": gpu.name,
        "compute_capability": f"{gpu.major}.{gpu.minor}",
        "memory_gib": round(gpu.total_memory / 2**30, 1),
        "multiprocessors": gpu.multi_processor_count,
        "driver": collect_env.get_nvidia_driver_version(collect_env.run) or "unknown",
        "cuda": torch.version.cuda,
        "torch": str(torch.__version__),
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if torch.distributed.is_nccl_available() else "none",
        "nccl_preloaded_for_two_ranks": os.environ.get("ZEROX_NCCL_LIBRARY", "none"),
        "python": platform.python_version(),
        "cpu_cores": len(os.sched_getaffinity(0)),
        "platform": platform.platform(),
    }


if __name__ == "__main__":
    print(json.dumps(facts()))
