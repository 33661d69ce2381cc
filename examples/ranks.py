"""The ranks of a training, as torchrun starts them, and starts them again."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist


@contextmanager
def process_group(device: torch.device) -> Iterator[tuple[int, int]]:
    """(rank, number of ranks); without torchrun there is one rank and no group."""
    if "RANK" not in os.environ:
        yield 0, 1
        return
    where = {"store": store_of_restart(), "rank": int(os.environ["RANK"]), "world_size": int(os.environ["WORLD_SIZE"])}
    if device.type == "cuda":
        torch.cuda.set_device(device)
        dist.init_process_group("nccl", device_id=device, **where)
    else:
        dist.init_process_group("gloo", **where)
    try:
        yield dist.get_rank(), dist.get_world_size()
    finally:
        dist.destroy_process_group()


def store_of_restart() -> dist.Store | None:
    """After a restart by torchrun, a part of its store that the ranks before have not used; None: torch's own choice.

    torchrun keeps one store over all restarts, in which ranks find the addresses of those that died and wait for them
    (https://github.com/pytorch/pytorch/issues/135712). Every node counts restarts for itself, so the count is a name
    that all ranks agree on only on a single node; on several, set TORCH_DISABLE_SHARE_RDZV_TCP_STORE=1 for torchrun.
    """
    restarts = int(os.environ.get("TORCHELASTIC_RESTART_COUNT", 0))
    is_shared = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    if restarts == 0 or not is_shared or os.environ.get("GROUP_WORLD_SIZE") != "1":
        return None
    store = dist.TCPStore(os.environ["MASTER_ADDR"], int(os.environ["MASTER_PORT"]), is_master=False)
    return dist.PrefixStore(f"restart {restarts}", store)
