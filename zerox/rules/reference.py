"""The rule in plain torch, in the precision of its arguments: the reference for the kernels.

Source: Loshchilov and Hutter, "Decoupled Weight Decay Regularization" (2019), algorithm 2, as written in torch.optim's
single-tensor path (torch/optim/adam.py): eps is added outside the bias-corrected root, and decay multiplies the
parameter before the update.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass
class AdamState:
    """``step`` counts the updates made. Tensors of one shape and dtype."""

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
    """One update, in place, in the dtype of ``state``."""
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
