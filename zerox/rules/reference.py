"""The rules in plain torch, in the precision of their arguments: the references for the kernels.

Each ``..._step`` makes one update, in place, in the dtype of its ``state``, whose tensors have one shape and dtype.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AdamState:
    """``step`` counts the updates made."""

    param: Tensor
    exp_avg: Tensor
    exp_avg_sq: Tensor
    max_exp_avg_sq: Tensor | None = None
    step: int = 0


@torch.no_grad()
def adam_step(
    state: AdamState,
    grad: Tensor,
    *,
    lr: float = 1e-3,
    betas: tuple[float, float] = (0.9, 0.999),
    eps: float = 1e-8,
    weight_decay: float = 1e-2,
    maximize: bool = False,
    decoupled_weight_decay: bool = True,
) -> None:
    """Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, as written in
    torch.optim's single-tensor path (torch/optim/adam.py): eps is added outside the bias-corrected root, and decay
    multiplies the parameter before the update.
    """
    state.step += 1
    grad = grad.to(state.param.dtype)
    if maximize:
        grad = -grad
    if decoupled_weight_decay:
        state.param.mul_(1 - lr * weight_decay)
    else:
        grad = grad + weight_decay * state.param
    state.exp_avg.mul_(betas[0]).add_(grad, alpha=1 - betas[0])
    state.exp_avg_sq.mul_(betas[1]).addcmul_(grad, grad, value=1 - betas[1])
    second = state.exp_avg_sq
    if state.max_exp_avg_sq is not None:
        torch.maximum(state.max_exp_avg_sq, second, out=state.max_exp_avg_sq)
        second = state.max_exp_avg_sq
    denom = second.sqrt() / (1 - betas[1] ** state.step) ** 0.5 + eps
    state.param.sub_(lr / (1 - betas[0] ** state.step) * state.exp_avg / denom)


@dataclass
class SgdState:
    """``momentum_buffer``: None before the first update with momentum."""

    param: Tensor
    momentum_buffer: Tensor | None = None


@torch.no_grad()
def sgd_step(
    state: SgdState,
    grad: Tensor,
    *,
    lr: float = 1e-3,
    momentum: float = 0.0,
    dampening: float = 0.0,
    weight_decay: float = 0.0,
    nesterov: bool = False,
    maximize: bool = False,
) -> None:
    """Source: torch.optim's single-tensor path (torch/optim/sgd.py): the first gradient becomes the buffer, and
    dampening starts with the second.
    """
    grad = grad.to(state.param.dtype)
    if maximize:
        grad = -grad
    if weight_decay != 0:
        grad = grad.add(state.param, alpha=weight_decay)
    if momentum != 0:
        if state.momentum_buffer is None:
            state.momentum_buffer = grad.clone()
        else:
            state.momentum_buffer.mul_(momentum).add_(grad, alpha=1 - dampening)
        grad = grad.add(state.momentum_buffer, alpha=momentum) if nesterov else state.momentum_buffer
    state.param.add_(grad, alpha=-lr)


@dataclass
class LionState:
    param: Tensor
    exp_avg: Tensor


@torch.no_grad()
def lion_step(
    state: LionState,
    grad: Tensor,
    *,
    lr: float = 1e-4,
    betas: tuple[float, float] = (0.9, 0.99),
    weight_decay: float = 0.0,
    maximize: bool = False,
) -> None:
    """Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2. A NaN stays one:
    torch.sign would make 0 of it.
    """
    grad = grad.to(state.param.dtype)
    if maximize:
        grad = -grad
    average = (state.exp_avg * betas[0]).add(grad, alpha=1 - betas[0])
    state.exp_avg.mul_(betas[1]).add_(grad, alpha=1 - betas[1])
    state.param.mul_(1 - lr * weight_decay).add_(torch.where(average.isnan(), average, average.sign()), alpha=-lr)
