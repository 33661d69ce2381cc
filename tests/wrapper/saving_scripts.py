"""How public scripts save by rank 0 and go on: imagenet's, nanoGPT's, MAE's, DINO's, DETR's and timm's.

The scripts themselves are in clients/."""

from __future__ import annotations

import copy
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from tests.wrapper.script_cases import Detector
from tests.wrapper.twins import Script

BEGUN, MORE = 3, 3  # steps before the save, and after


class Training:
    """One script. ``kept``: what has a state of its own beside the model and the optimizer."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.kept: dict[str, Any] = {}
        self.build()

    def build(self) -> None:
        self.model = self.script.wrap(self.script.net())
        self.optimizer = self.script.optimizer(self.model.parameters(), lr=0.01)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.script.loss(self.model, number).backward()
        self.optimizer.step()

    def save(self, folder: Path) -> None:
        raise NotImplementedError

    def load(self, folder: Path) -> None:
        raise NotImplementedError

    def run(self, first: int, steps: int) -> None:
        for number in range(first, first + steps):
            self.step(number)


class Imagenet(Training):
    """Under torchrun each rank is its machine's first, and all write the same file. A schedule goes with it."""

    def build(self) -> None:
        super().build()
        self.kept["scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, step_size=2, gamma=0.5)

    def step(self, number: int) -> None:
        super().step(number)
        self.kept["scheduler"].step()

    def save(self, folder: Path) -> None:
        saved = {"epoch": 1, "state_dict": self.model.state_dict(), "optimizer": self.optimizer.state_dict()}
        path = folder / f"rank{self.script.rank}.pth.tar"  # of a file that several write at once nothing can be said
        torch.save({**saved, "scheduler": self.kept["scheduler"].state_dict()}, path)
        if self.script.rank == 0:
            shutil.copyfile(path, folder / "checkpoint.pth.tar")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "checkpoint.pth.tar", map_location="cpu")
        self.model.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.kept["scheduler"].load_state_dict(saved["scheduler"])


class NanoGpt(Training):
    """The module's state, without the wrapper's prefix, and two groups; rank 0 evaluates before it saves."""

    def build(self) -> None:
        net = self.script.net()
        decayed = [param for param in net.parameters() if param.dim() >= 2]
        groups = [
            {"params": decayed, "weight_decay": 0.1},
            {"params": [param for param in net.parameters() if param.dim() < 2], "weight_decay": 0.0},
        ]
        self.optimizer = self.script.optimizer(groups, lr=0.01, betas=(0.9, 0.95))
        self.model = self.script.wrap(net)

    def step(self, number: int) -> None:
        for group in self.optimizer.param_groups:
            group["lr"] = 0.01 / (1 + number)
        for micro in range(2):
            self.model.require_backward_grad_sync = micro == 1
            (self.script.loss(self.model, 2 * number + micro) / 2).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.05)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)

    def save(self, folder: Path) -> None:
        if self.script.rank == 0:
            with torch.no_grad():
                self.script.loss(self.model.module, 70)
            saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "iter_num": 3}
            torch.save(saved, folder / "ckpt.pt")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "ckpt.pt", map_location="cpu")
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])


class Mae(Training):
    """A scaler's state beside them."""

    def build(self) -> None:
        super().build()
        self.kept["scaler"] = torch.amp.GradScaler("cpu", init_scale=16.0)

    def step(self, number: int) -> None:
        scaler = self.kept["scaler"]
        scaler.scale(self.script.loss(self.model, number)).backward()
        scaler.unscale_(self.optimizer)
        scaler.step(self.optimizer)
        scaler.update()
        self.optimizer.zero_grad()

    def save(self, folder: Path) -> None:
        saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict(), "epoch": 0}
        saved["scaler"] = self.kept["scaler"].state_dict()
        if self.script.rank == 0:
            torch.save(saved, folder / "checkpoint-0.pth")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "checkpoint-0.pth", map_location="cpu")
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.kept["scaler"].load_state_dict(saved["scaler"])


class Dino(Training):
    """A teacher that follows the student; both are saved by name, and all that has a state is loaded by name."""

    def build(self) -> None:
        super().build()
        self.kept["teacher"] = copy.deepcopy(self.script.net()).requires_grad_(False)
        self.kept["teacher"].load_state_dict(self.model.module.state_dict())

    def step(self, number: int) -> None:
        x, teacher = self.script.data(number), self.kept["teacher"]
        self.optimizer.zero_grad()
        (self.model(x) - teacher(x)).square().mean().add(self.script.loss(self.model, number)).backward()
        self.optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(self.model.module.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(0.9).add_(0.1 * ours.detach().data)

    def save(self, folder: Path) -> None:
        saved = {"student": self.model.state_dict(), "teacher": self.kept["teacher"].state_dict()}
        saved["optimizer"] = self.optimizer.state_dict()
        if self.script.rank == 0:
            torch.save(saved, folder / "checkpoint.pth")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "checkpoint.pth", map_location="cpu")
        for key, each in {"student": self.model, "teacher": self.kept["teacher"], "optimizer": self.optimizer}.items():
            each.load_state_dict(saved[key])


class Detr(Training):
    """Frozen layers are in the model and not in the optimizer, which has two rates."""

    def build(self) -> None:
        torch.manual_seed(self.script.rank)
        net = Detector()
        self.model = self.script.wrap(net)
        trained = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
        groups = [
            {"params": [param for name, param in trained if "backbone" not in name]},
            {"params": [param for name, param in trained if "backbone" in name], "lr": 0.001},
        ]
        self.optimizer = self.script.optimizer(groups, lr=0.01, weight_decay=1e-4)
        self.kept["lr_scheduler"] = torch.optim.lr_scheduler.StepLR(self.optimizer, 2)

    def step(self, number: int) -> None:
        self.optimizer.zero_grad()
        self.script.loss(self.model, number).backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 0.1)
        self.optimizer.step()
        self.kept["lr_scheduler"].step()

    def save(self, folder: Path) -> None:
        for name in ("checkpoint.pth", "checkpoint0000.pth"):
            saved = {"model": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            saved["lr_scheduler"] = self.kept["lr_scheduler"].state_dict()
            if self.script.rank == 0:
                torch.save(saved, folder / name)

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "checkpoint.pth", map_location="cpu")
        self.model.module.load_state_dict(saved["model"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.kept["lr_scheduler"].load_state_dict(saved["lr_scheduler"])


class Timm(Training):
    """Rank 0's saver has an average of the weights too, and links the best file."""

    def build(self) -> None:
        super().build()
        self.kept["average"] = copy.deepcopy(self.model.module).requires_grad_(False)

    def step(self, number: int) -> None:
        super().step(number)
        with torch.no_grad():
            for theirs, ours in zip(self.kept["average"].parameters(), self.model.module.parameters(), strict=True):
                theirs.lerp_(ours.detach(), 0.2)

    def save(self, folder: Path) -> None:
        if self.script.rank == 0:
            saved = {"state_dict": self.model.module.state_dict(), "optimizer": self.optimizer.state_dict()}
            saved["state_dict_ema"] = self.kept["average"].state_dict()
            torch.save(saved, folder / "tmp.pth.tar")
            (folder / "tmp.pth.tar").replace(folder / "last.pth.tar")
            (folder / "model_best.pth.tar").hardlink_to(folder / "last.pth.tar")

    def load(self, folder: Path) -> None:
        saved = torch.load(folder / "model_best.pth.tar", map_location="cpu")
        self.model.module.load_state_dict(saved["state_dict"])
        self.optimizer.load_state_dict(saved["optimizer"])
        self.kept["average"].load_state_dict(saved["state_dict_ema"])


SCRIPTS: dict[str, Callable[[Script], Training]] = {
    each.__name__: each for each in (Imagenet, NanoGpt, Mae, Dino, Detr, Timm)
}
