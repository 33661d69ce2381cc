"""Other people's updates, of the same values: those that are installed, and run on the device."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from bench.systems import HYPER


@dataclass(frozen=True)
class Peer:
    """An optimizer, ``kind`` of ``module``, for jobs of ``op``; ``state``: how it stores states of fp32 parameters.

    ``options``: beside HYPER.
    """

    name: str
    module: str
    kind: str
    state: str = "fp32"
    options: Mapping[str, Any] = field(default_factory=dict)
    devices: tuple[str, ...] = ("cpu", "cuda")
    op: str = "adam"


FUSED = {"fused": True}
PEERS = (
    Peer("torch AdamW(fused)", "torch.optim", "AdamW", options=FUSED),
    Peer("DeepSpeed CPUAdam", "deepspeed.ops.adam", "DeepSpeedCPUAdam", "fp32", {"adamw_mode": True}, ("cpu",)),
    Peer("DeepSpeed FusedAdam", "deepspeed.ops.adam", "FusedAdam", "fp32", {"adam_w_mode": True}, ("cuda",)),
    Peer("torchao AdamW8bit", "torchao.optim", "AdamW8bit", "8bit"),
    Peer("bitsandbytes 8-bit", "bitsandbytes.optim", "AdamW8bit", "8bit"),
    Peer("torch SGD(fused)", "torch.optim", "SGD", options=FUSED, op="sgd"),
    Peer("torch SGD(fused)", "torch.optim", "SGD", options={**FUSED, "momentum": 0.9}, op="sgd momentum"),
)


class Skipped(Exception):
    """Why a peer can't take part."""


def optimizer_of(peer: Peer, values: Tensor, grad: Tensor, params: Sequence[int]) -> torch.optim.Optimizer:
    """On copies of ``values`` and ``grad``, a leaf for each of ``params``. Has made a step. Raises Skipped."""
    if values.device.type not in peer.devices:
        raise Skipped(f"not for {values.device.type}")
    leaves: list[Tensor] = [torch.nn.Parameter(each) for each in values.clone().split(list(params))]
    for leaf, part in zip(leaves, grad.clone().split(list(params)), strict=True):
        leaf.grad = part
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # what they print of their builds belongs in no table
            kind = getattr(importlib.import_module(peer.module), peer.kind)
            optimizer: torch.optim.Optimizer = kind(leaves, **{**HYPER, **peer.options})
            optimizer.step()
    except ModuleNotFoundError as error:
        raise Skipped(f"{error.name} is not installed") from None
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # of builds at first use, of devices: each has its own
        raise Skipped(f"{type(error).__name__}: {str(error).strip().partition(chr(10))[0][:200]}") from None
    if all(torch.equal(leaf, part) for leaf, part in zip(leaves, values.split(list(params)), strict=True)):
        raise Skipped("its step changes nothing")
    return optimizer
