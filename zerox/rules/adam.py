"""Adam and AdamW: hyper-parameters of param groups as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.bucket import Bucket

KIND = "decoupled_weight_decay"  # AdamW, or Adam with L2


def check_hyper_parameters(lr: Any, betas: Any, eps: Any, weight_decay: Any) -> None:
    """ValueError for what torch.optim.AdamW refuses, in its words; TypeError for what is no number."""
    if isinstance(lr, Tensor) and lr.numel() != 1:
        raise ValueError("Tensor lr must be 1-element")
    if not lr >= 0.0:
        raise ValueError(f"Invalid learning rate: {lr}")
    if not eps >= 0.0:
        raise ValueError(f"Invalid epsilon value: {eps}")
    for index in (0, 1):
        beta = betas[index]
        if isinstance(beta, Tensor) and beta.numel() != 1:
            raise ValueError(f"Tensor betas[{index}] must be 1-element")
        if not 0.0 <= beta < 1.0:
            raise ValueError(f"Invalid beta parameter at index {index}: {beta}")
    if not weight_decay >= 0.0:
        raise ValueError(f"Invalid weight_decay value: {weight_decay}")


def check_flags(flags: Mapping[str, Any]) -> None:
    """foreach and fused say how torch computes the same, and mean nothing here. Raises as torch, and for
    differentiable=True ValueError."""
    if flags.get("fused") and flags.get("differentiable"):
        raise RuntimeError("`fused` does not support `differentiable`")
    if flags.get("fused") and flags.get("foreach"):
        raise RuntimeError("`fused` and `foreach` cannot be `True` together.")
    if flags.get("differentiable"):
        raise ValueError("differentiable=True: zerox updates parameters below autograd; use torch.optim.AdamW for that")


def check_group(group: dict[str, Any]) -> None:
    check_flags(group)
    check_hyper_parameters(group["lr"], group["betas"], group["eps"], group["weight_decay"])


def kept_betas(betas: Any) -> tuple[Any, ...]:
    """As torch.optim.AdamW keeps them: two floats, or two tensors without dimensions. ValueError for a mixture."""
    if not any(all(isinstance(beta, kind) for beta in betas[:2]) for kind in (float, Tensor)):
        raise ValueError("betas must be either both floats or both Tensors")
    return tuple(beta.reshape(()) if isinstance(beta, Tensor) else beta for beta in betas)


def defaults(
    lr: Any,
    betas: Any,
    eps: Any,
    weight_decay: Any,
    amsgrad: bool,
    maximize: bool,
    decoupled_weight_decay: bool,
    flags: Mapping[str, Any],
) -> dict[str, Any]:
    """What a param group has unless it says otherwise. Raises as check_hyper_parameters() and check_flags().

    ``flags`` that are set are kept, for torch.optim.AdamW to find in a state_dict().
    """
    check_hyper_parameters(lr, betas, eps, weight_decay)
    check_flags(flags)
    return {
        "lr": lr,
        "betas": kept_betas(betas),
        "eps": eps,
        "weight_decay": weight_decay,
        "amsgrad": amsgrad,
        "maximize": maximize,
        KIND: decoupled_weight_decay,
        **{name: value for name, value in flags.items() if value},
    }


class OptionsTable:
    """Every param group's hyper-parameters as the kernels read them, a row of ``AdamOptions`` (csrc/math/adam.h) each.

    ``keeps_place``: at one address from step to step, for CUDA graphs.
    """

    def __init__(self, device: torch.device, keeps_place: bool = False) -> None:
        self.device = device
        self.keeps_place = keeps_place
        self.rows: list[list[float]] = []
        self.table = torch.empty(0, 8, dtype=torch.float64, device=device)

    def refresh(self, groups: Sequence[dict[str, Any]], capturing: bool = False) -> Tensor:
        """float64 ``[groups, 8]`` on the device, from what the groups say now; never waits for the device.

        While a CUDA graph is captured (``capturing``) numbers become part of the graph; a tensor lr on the device is
        read anew by every replay.
        """
        on_device = [(i, g["lr"]) for i, g in enumerate(groups) if _is_on_accelerator(g["lr"])]
        rows = [_row(group) for group in groups]
        if rows != self.rows:
            self._write(rows, capturing)
        for index, lr in on_device:
            self.table[index, 0].copy_(lr.reshape(()), non_blocking=True)
        return self.table

    def _write(self, rows: list[list[float]], capturing: bool) -> None:
        if capturing:  # from memory of the host a replay would read whatever lies there then
            if len(rows) != len(self.rows):
                raise RuntimeError("param groups were added: call step() or synchronize() once before capturing it")
            for index, row in enumerate(rows):
                for column, number in enumerate(row):
                    if number != self.rows[index][column]:
                        self.table[index, column].fill_(number)
        else:
            host = torch.tensor(rows, dtype=torch.float64, device="cpu", pin_memory=self.device.type == "cuda")
            if self.keeps_place and len(rows) == len(self.rows):
                self.table.copy_(host, non_blocking=True)
            else:
                self.table = host.to(self.device, non_blocking=True)
        self.rows = rows


def _is_on_accelerator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"


def _row(group: dict[str, Any]) -> list[float]:
    return [
        0.0 if _is_on_accelerator(group["lr"]) else float(group["lr"]),
        float(group["betas"][0]),
        float(group["betas"][1]),
        float(group["eps"]),
        float(group["weight_decay"]),
        float(group["maximize"]),
        float(group["decoupled_weight_decay"]),
        float(group["amsgrad"]),
    ]


def start_amsgrad(buckets: Sequence[Bucket], groups: Sequence[dict[str, Any]], capturing: bool = False) -> bool:
    """Gives buckets of groups with amsgrad their third moment, all zero; returns whether one had none yet."""
    if not any(group["amsgrad"] for group in groups):
        return False
    without = [b for b in buckets if not b.moments.has_maximum and any(groups[m.group]["amsgrad"] for m in b.members)]
    if without and capturing:  # each replay would set it to zero
        raise RuntimeError("amsgrad was turned on: call step() once before capturing it")
    for bucket in without:
        bucket.moments.start_maximum()
    return bool(without)
