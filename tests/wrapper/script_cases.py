"""More of them, as public scripts have them: evaluation, accumulation, scaler and norm, clip, frozen layers.

The scripts themselves are in clients/."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from tests.wrapper.cases import case
from tests.wrapper.odd_cases import normed
from tests.wrapper.twins import Script, values_of


@case
def imagenet_s_evaluation(script: Script) -> Sequence[Tensor]:
    """Each epoch ends with one over the wrapper, and with counts that are added up over the ranks."""
    model = script.wrap(normed(script))
    optimizer = script.optimizer(model.parameters(), lr=0.01, weight_decay=1e-4)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
    losses = []
    for epoch in range(2):
        model.train()
        script.train(model, optimizer, seed=4 * epoch)
        model.eval()
        with torch.no_grad():
            found = torch.stack([script.loss(model, 50 + step) for step in range(2)]).sum()
        torch.distributed.all_reduce(found)
        losses.append(found)
        schedule.step()
    return [*losses, *values_of(model)]


@case
def nanogpt_s_accumulation(script: Script) -> Sequence[Tensor]:
    """Rank 0 alone evaluates between steps; learning rates are written, and the scaler is off."""
    net = script.net()
    named = list(net.named_parameters())
    groups = [
        {"params": [param for _, param in named if param.dim() >= 2], "weight_decay": 0.1},
        {"params": [param for _, param in named if param.dim() < 2], "weight_decay": 0.0},
    ]
    optimizer = script.optimizer(groups, lr=0.01, betas=(0.9, 0.95))
    model = script.wrap(net)
    scaler = torch.amp.GradScaler("cpu", enabled=False)
    for step in range(3):
        for group in optimizer.param_groups:
            group["lr"] = 0.01 / (1 + step)
        if script.rank == 0:
            model.eval()
            with torch.no_grad():
                script.loss(model, 70 + step)
            model.train()
        for micro in range(3):
            model.require_backward_grad_sync = micro == 2
            scaler.scale(script.loss(model, 3 * step + micro) / 3).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 0.05)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad(set_to_none=True)
    return values_of(model)


@case
def mae_s_scaler_and_norm(script: Script) -> Sequence[Tensor]:
    """A norm of norms for the log, of what the scaler has unscaled; the clip is only where one is asked for."""
    model = script.wrap(script.net(), find_unused_parameters=True)
    optimizer = script.optimizer(model.parameters(), lr=0.01, betas=(0.9, 0.95))
    scaler, norms = torch.amp.GradScaler("cpu", init_scale=16.0), []
    optimizer.zero_grad()
    for step in range(6):
        loss = script.loss(model, step) / 2
        assert math.isfinite(loss.item())
        scaler.scale(loss).backward()
        if step % 2:
            scaler.unscale_(optimizer)
            grads = [param.grad for param in model.parameters() if param.grad is not None]
            norms.append(torch.norm(torch.stack([torch.norm(grad.detach(), 2.0) for grad in grads]), 2.0))
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
    return [*norms, *values_of(model)]


@case
def dino_s_clip(script: Script) -> Sequence[Tensor]:
    """Each parameter by its own norm, the last layer frozen for a while, and a teacher that follows the student."""
    net = script.net()
    teacher = copy.deepcopy(net)
    student = script.wrap(net)
    teacher.load_state_dict(student.module.state_dict())
    for param in teacher.parameters():
        param.requires_grad = False
    optimizer = script.optimizer(student.parameters(), lr=0.01)
    norms = []
    for step in range(3):
        optimizer.zero_grad()
        x = script.data(step)
        (student(x) - teacher(x).detach()).square().mean().add(script.loss(student, step)).backward()
        for name, param in student.named_parameters():
            if param.grad is not None:
                norms.append(param.grad.data.norm(2))
                factor = 0.02 / (norms[-1] + 1e-6)
                if factor < 1:
                    param.grad.data.mul_(factor)
            if step == 0 and name.startswith("module.2."):
                param.grad = None
        optimizer.step()
        with torch.no_grad():
            for ours, theirs in zip(student.module.parameters(), teacher.parameters(), strict=True):
                theirs.data.mul_(0.9).add_(0.1 * ours.detach().data)
    return [*norms, *values_of(student), *values_of(teacher)]


class Detector(nn.Module):
    """A backbone that starts with layers nobody trains, and buffers in place of a norm's statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 16))
        self.register_buffer("scale", torch.rand(16))
        self.head = nn.Linear(16, 1)
        for param in self.backbone[0].parameters():
            param.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.head(self.backbone(x) * self.scale)
        return found


@case
def detr_s_frozen_layers(script: Script) -> Sequence[Tensor]:
    """Each rank begins with frozen layers of its own, and only the others are in the optimizer, at two rates."""
    torch.manual_seed(script.rank)
    net = Detector()
    model = script.wrap(net)
    trained = [(name, param) for name, param in net.named_parameters() if param.requires_grad]
    groups = [
        {"params": [param for name, param in trained if "backbone" not in name]},
        {"params": [param for name, param in trained if "backbone" in name], "lr": 0.001},
    ]
    optimizer = script.optimizer(groups, lr=0.01, weight_decay=1e-4)
    for step in range(3):
        optimizer.zero_grad()
        script.loss(model, step).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.1)
        optimizer.step()
    return values_of(model)
