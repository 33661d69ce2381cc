"""What tests under Lightning and Fabric share: small modules, and trainers and ranks that take little time."""

from __future__ import annotations

import logging
import traceback
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import lightning.pytorch as pl
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import zerox.integrations.lightning  # noqa: F401  registers strategy="zerox"
from tests.mortal_ranks import FORKSERVER
from tests.ranks import run_ranks

ROWS = 24

for name in ("lightning.pytorch", "lightning.fabric"):
    logging.getLogger(name).setLevel(logging.ERROR)
warnings.filterwarnings("ignore", module="lightning")


class MadeRanks:
    """The ranks that tests/ranks.py has made, for whichever package's ClusterEnvironment comes after it."""

    creates_processes_externally = True
    main_address = "127.0.0.1"
    main_port = 0

    def __init__(self, rank: int, world_size: int) -> None:
        self.rank, self.world = rank, world_size

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self.world

    def set_world_size(self, size: int) -> None:
        assert size == self.world

    def global_rank(self) -> int:
        return self.rank

    def set_global_rank(self, rank: int) -> None:
        assert rank == self.rank

    def local_rank(self) -> int:
        return self.rank

    def node_rank(self) -> int:
        return 0


class Ranks(MadeRanks, ClusterEnvironment):
    pass


class Module(pl.LightningModule):
    """``make``: builds the optimizer, as a LightningModule of a user's does."""

    def __init__(self, make: Callable[..., torch.optim.Optimizer] | None = None, norm: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        # No bias before the norm: its gradient is 0 but for rounding, of which AdamW would make steps.
        layers = [nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16)] if norm else [nn.Linear(6, 16)]
        self.net = nn.Sequential(*layers, nn.Tanh(), nn.Linear(16, 5), nn.Linear(5, 1))
        self.make = make or (lambda params: torch.optim.AdamW(params, lr=0.01, weight_decay=0.1))
        self.losses: list[float] = []

    def forward(self, x: Tensor) -> Tensor:
        return self.net(x)

    def loss(self, batch: Sequence[Tensor]) -> Tensor:
        x, y = batch
        return (self(x).float() - y).square().mean()

    def training_step(self, batch: Sequence[Tensor], _: int) -> Tensor:
        loss = self.loss(batch)
        self.losses.append(float(loss.detach()))
        return loss

    def configure_optimizers(self) -> Any:
        return self.make(self.parameters())


def run(function: Callable[..., Any], world_size: int, *args: Any) -> list[Any]:
    """``function(rank, world_size, *args)`` on ranks; 0: in plain Python, where nobody has made a process group."""
    if world_size:
        return run_ranks(function, world_size, *args)
    here, there = FORKSERVER.Pipe()
    process = FORKSERVER.Process(target=_alone, args=(there, function, args), daemon=True)
    process.start()
    assert here.poll(60), "no answer"
    done, value = here.recv()
    here.send(None)  # tensors are shared memory, which is there for as long as the process
    process.join()
    assert done, value
    return [value]


def _alone(pipe: Any, function: Callable[..., Any], args: Any) -> None:
    torch.set_num_threads(1)
    try:
        pipe.send((True, function(0, 0, *args)))
    except BaseException:
        pipe.send((False, traceback.format_exc()))
    pipe.recv()


def data(rows: int = ROWS, batch: int = 2) -> DataLoader:
    torch.manual_seed(1)
    x = torch.randn(rows, 6)
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=batch)


def trainer(rank: int, world_size: int, strategy: Any, **options: Any) -> pl.Trainer:
    common = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False, "max_epochs": 1}
    common |= {"enable_checkpointing": False, "accelerator": "cpu", "devices": max(world_size, 1)}
    plugins = [*options.pop("plugins", []), *([Ranks(rank, world_size)] if world_size else [])]
    return pl.Trainer(strategy=strategy, plugins=plugins, **(common | options))


def values(module: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in module.parameters()]


def difference(one: Sequence[Tensor], other: Sequence[Tensor]) -> float:
    assert len(one) == len(other)
    return max(float((a - b).abs().max()) for a, b in zip(one, other, strict=True))


def as_on_rank_0(tensors: Sequence[Tensor]) -> bool:
    """Collective where there are ranks."""
    if not dist.is_initialized():
        return True
    same = True
    for tensor in tensors:
        first = tensor.clone()
        dist.broadcast(first, 0)
        same = same and torch.equal(first, tensor)
    return same
