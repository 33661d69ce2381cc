"""What each rank of test_two_hosts.py runs: FOLDER, and "slow" if the last rank stops in the middle."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
import torch.nn.functional as F

import zerox
from tests.meta.rig import on_meta, twin
from tests.meta.test_values import Net
from zerox import FusedShardedAdam

TIMEOUT_S = 10


def digest(model: torch.nn.Module) -> str:
    found = hashlib.sha256()
    for param in model.parameters():
        found.update(param.detach().clone().numpy().tobytes())
    return found.hexdigest()


def main(folder: Path, case: str) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=TIMEOUT_S))
    rank, told = dist.get_rank(), {}
    torch.manual_seed(11 + rank)
    model = on_meta(Net)
    optimizer = FusedShardedAdam(
        model.named_parameters(), stage=3, model=model, bucket_cap_mb=0.02, resident_mb=0.05, lr=1e-2
    )
    told["neighbours"] = sum(map(bool, optimizer.inside.ranks.neighbours.processes))
    told["born"] = digest(model) == digest(twin(Net))
    zerox.save_weights(optimizer, folder / "weights")
    with torch.no_grad():
        for param in model.parameters():
            param.zero_()
    zerox.load_weights(optimizer, folder / "weights")
    told["loaded"] = digest(model) == digest(twin(Net))
    generator = torch.Generator().manual_seed(rank)
    for _ in range(3):
        words = torch.randint(60, (8, 5), generator=generator)
        F.cross_entropy(model(words), torch.randint(60, (8,), generator=generator)).backward()
        optimizer.step()
        optimizer.zero_grad()
    told["trained"] = digest(model)
    if case == "slow" and rank == 0:
        dist.barrier()
        time.sleep(1)  # until the last rank has stopped
        optimizer.inside.gather.residents.release_all()
        try:
            digest(model)
        except RuntimeError as error:
            told["error"] = str(error)
    (folder / f"{rank}.json").write_text(json.dumps(told))
    if case != "slow" or rank > 0:
        dist.barrier()
    if case == "slow" and rank == dist.get_world_size() - 1:
        os.kill(os.getpid(), signal.SIGSTOP)
    while case == "slow" and not (folder / "0.json").exists():
        time.sleep(0.1)
    if case == "slow":
        os._exit(0)  # nobody waits for the rank that has stopped


if __name__ == "__main__":
    main(Path(sys.argv[1]), sys.argv[2])
