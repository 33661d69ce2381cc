"""Adam and AdamW: hyper-parameters of param groups to a kernel call per bucket."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import ops
from zerox.bucket import Bucket


def check_hyper_parameters(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """ValueError for what torch.optim.AdamW refuses, in its words."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not float(lr) >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index, beta in enumerate(betas):
        if not 0.0 <= float(beta) < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def options_table(groups: Sequence[dict[str, Any]]) -> Tensor:
    """float64 ``[groups, 8]`` on the CPU, a row a param group; see ``AdamOptions`` in ``csrc/math/adam.h``."""
    rows = [
        [
            float(group["lr"]),
            float(group["betas"][0]),
            float(group["betas"][1]),
            float(group["eps"]),
            float(group["weight_decay"]),
            float(group["maximize"]),
            float(group["decoupled_weight_decay"]),
            float(group["amsgrad"]),
        ]
        for group in groups
    ]
    return torch.tensor(rows, dtype=torch.float64)


def update(bucket: Bucket, grad: Tensor, present: Tensor, options: Tensor, grad_scale: Tensor | None) -> None:
    """One step on this rank's shard: state, master and parameters in place, in one pass."""
    ops.adam_(
        bucket.param_shard,
        bucket.master,
        grad,
        bucket.moments,
        bucket.segments,
        present,
        bucket.steps,
        options,
        grad_scale,
    )
