"""A training's checkpoints: saves them now and then, finds them, and resumes from them with any number of ranks."""

import argparse
import contextlib
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from corpus import BadInput, Corpus, RandomWindows

import zerox

NUM_KEPT = 2  # the one before the last, in case the last is damaged
# Options that a training can't change on its way and still be the same one.
FIXED = ("optimizer", "seed", "steps", "lr", "weight_decay", "eps", "clip", "heads", "text")


class Checkpoints:
    """In ``--save-dir``, a folder for each step that was saved; without it nothing is ever saved or found."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, rank: int, world_size: int) -> None:
        self.folder: Path | None = options.save_dir
        self.every, self.last_step = options.save_every, options.steps
        self.resumes = options.resume
        # No parameter has another shape with other heads, so zerox.load() would not see them.
        found = vars(options) | {"text": str(corpus), "heads": options.shape.heads}
        self.fixed = {name: found[name] for name in FIXED}
        self.step_windows = options.batch * options.accumulate * world_size
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
            "step_windows": self.step_windows,
        }
        path = self.folder / f"step-{len(losses):06}"
        try:
            zerox.save(path, trainer.module, trainer.optimizer, extra=extra)
        except zerox.CheckpointError as error:  # a full disk; the checkpoint before is as it was
            raise BadInput(" ".join(str(error).split())) from error
        if self.rank == 0:
            # Only earlier steps: later ones are of another run, beside which the one just saved would count as old.
            names = [path.name.removeprefix("step-") for path in self.folder.glob("step-*")]
            earlier = sorted((int(name), name) for name in names if name.isdecimal() and int(name) < len(losses))
            for _, name in earlier[: 1 - NUM_KEPT]:
                # A folder that is no checkpoint, or has somebody's notes in it, stays.
                with contextlib.suppress(zerox.CheckpointError, OSError):
                    zerox.remove(self.folder / f"step-{name}")

    def resume(self, trainer: Any, draws: RandomWindows) -> str | None:
        """Puts everything where the last checkpoint had it, and says which that was, if there is one. Collective."""
        path = self.find()
        if path is None:
            return None
        try:
            extra = zerox.load(path, trainer.module, trainer.optimizer)
        except zerox.CheckpointError as error:
            raise BadInput(" ".join(str(error).splitlines()[:2])) from error
        for name, now in self.fixed.items():
            if (
                then := extra["fixed"].get(name, "adamw")
            ) != now:  # which was the only optimizer before there were others
                option = "--data" if name == "text" else f"--{name.replace('_', '-')}"
                raise BadInput(f"{path} was trained with {option} {then}, not {now}: go on with the same, or anew")
        trainer.scheduler.load_state_dict(extra["scheduler"])
        trainer.past_losses = extra["losses"]
        draws.generator.set_state(extra["draws"].to(torch.uint8))
        step_windows = extra["step_windows"]
        change = f", {self.step_windows} windows a step instead of {step_windows}"
        return f"{path} (step {len(trainer.past_losses)})" + change * (self.step_windows != step_windows)

    def find(self) -> Path | None:
        """As rank 0 sees it: others may see a shared disk a moment later, and would start anew by themselves."""
        if not (self.resumes and self.folder):
            return None
        found = [zerox.latest(self.folder)]
        if dist.is_initialized():
            dist.broadcast_object_list(found)
        return found[0]
