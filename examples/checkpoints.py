"""A training's checkpoints: saved now and then, found again, and gone on from with any number of ranks."""

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from corpus import BadInput, Corpus, RandomWindows

import zerox

NUM_KEPT = 2  # the one before the last is for whoever finds the last one damaged
# What a training can't change on its way and still be the same one.
FIXED = ("seed", "steps", "lr", "weight_decay", "eps", "clip", "text")


class Checkpoints:
    """In ``--save-dir``, a folder for each step that was saved; without it nothing is ever saved or found."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, rank: int) -> None:
        self.folder: Path | None = options.save_dir
        self.every, self.last_step = options.save_every, options.steps
        self.resumes = options.resume
        self.fixed = {name: str(corpus) if name == "text" else getattr(options, name) for name in FIXED}
        self.rank = rank

    def is_due(self, step: int) -> bool:
        return self.folder is not None and (step % self.every == 0 or step == self.last_step)

    def save(self, trainer: Any, draws: RandomWindows, losses: list[float]) -> None:
        """Everything that the next steps depend on. Collective. ``losses``: one a step, averaged over the ranks."""
        assert self.folder is not None
        extra = {
            "losses": losses,
            "draws": draws.generator.get_state(),
            "scheduler": trainer.scheduler.state_dict(),
            "fixed": self.fixed,
        }
        zerox.save(self.folder / f"step-{len(losses):06}", trainer.module, trainer.optimizer, extra=extra)
        if self.rank == 0:
            for old in sorted(self.folder.glob("step-*"))[:-NUM_KEPT]:
                shutil.rmtree(old, ignore_errors=True)

    def resume(self, trainer: Any, draws: RandomWindows) -> Path | None:
        """Puts everything where the last checkpoint had it, and returns that one, if there is one. Collective."""
        path = zerox.latest(self.folder) if self.resumes and self.folder else None
        if path is None:
            return None
        try:
            extra = zerox.load(path, trainer.module, trainer.optimizer)
        except zerox.CheckpointError as error:
            raise BadInput(" ".join(str(error).splitlines()[:2])) from error
        for name, now in self.fixed.items():
            if (then := extra["fixed"][name]) != now:
                option = "--data" if name == "text" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{path} was trained with {option} {then}, not {now}: go on with the same, or anew")
        trainer.scheduler.load_state_dict(extra["scheduler"])
        trainer.past_losses = extra["losses"]
        draws.generator.set_state(extra["draws"].to(torch.uint8))
        return path
