"""One rank of a script: python -m clients.rank SETTINGS.json SCRIPT ARGUMENTS, with what torchrun sets."""

from __future__ import annotations

import importlib
import json
import os
import random
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.nn.parallel import DistributedDataParallel

import zerox
from clients import faults, in_order, on_cpu
from clients.record import Record


def in_stage(stage: int) -> None:
    """Optimizers of zerox that are built from now on have this stage, where the script names none."""
    for name in ("FusedShardedAdam", "FusedShardedSGD", "FusedShardedLion", "ShardedOptimizer"):
        cls: Any = getattr(zerox, name)

        def init(self: Any, *args: Any, of: Any = cls.__init__, **kwargs: Any) -> None:
            of(self, *args, **{"stage": stage, **kwargs})

        cls.__init__ = init


def main() -> None:
    settings = json.loads(Path(sys.argv[1]).read_text())
    rank = int(os.environ["RANK"])
    torch.manual_seed(1000 + rank)  # unequal models, but where the script has seeds of its own
    np.random.seed(1000 + rank)
    random.seed(1000 + rank)
    torch.set_num_threads(1)
    on_cpu.stand_in()
    for cls in (DistributedDataParallel, zerox.DistributedDataParallel):
        on_cpu.without_devices(cls)
    if settings["in_order"]:
        in_order.average()
    record = Record(settings["num_backwards"])
    record.begin()
    if settings["stage"]:
        in_stage(settings["stage"])
    if settings["fault"]:
        faults.plant(settings["fault"])
    if settings["stand_ins"]:
        importlib.import_module(settings["stand_ins"])
    script = sys.argv[2]
    sys.argv = sys.argv[2:]
    sys.path[0] = str(Path(script).parent.absolute())
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        record.write(Path(settings["out"]) / f"rank{rank}")


if __name__ == "__main__":
    main()
