"""What --log-dir writes for TensorBoard: zerox's figures of each step, and rank 0's loss now and then."""

import argparse
from typing import Any

import torch

from zerox.integrations.watch import Watch


class Log:
    """Writes on rank 0; elsewhere, or without --log-dir, it does nothing. `done`: steps before this run."""

    def __init__(self, options: argparse.Namespace, optimizer: torch.optim.Optimizer, rank: int, done: int) -> None:
        self.writer = None
        if options.log_dir and rank == 0:
            from torch.utils.tensorboard import SummaryWriter

            self.writer = SummaryWriter(options.log_dir)
            self.watch = Watch(optimizer)
            self.done = done

    def after(self, step: int, trainer: Any, shows_loss: bool) -> None:
        """`shows_loss` not at every step, since it waits for the device."""
        if self.writer is None:
            return
        self.watch.write_to(self._add)
        if shows_loss:
            count = trainer.tokens[-1] if trainer.weighs_tokens else 1
            self.writer.add_scalar("loss", float(trainer.losses[-1]) / count, step)

    def close(self) -> None:
        if self.writer is not None:
            self.watch.write_to(self._add, wait=True)
            self.writer.close()

    def _add(self, name: str, value: float, step: int) -> None:
        self.writer.add_scalar(name, value, self.done + step)
