"""Other people's updates, of the same values: those that are installed, and run on the device."""

from __future__ import annotations

import contextlib
import importlib
import io
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from bench.systems import HYPER


@dataclass(frozen=True)
class Peer:
    """``make(leaves)`` gives an optimizer, from ``module``, for jobs of ``op``; ``state``: how it stores states of fp32
    parameters."""

    name: str
    module: str
    state: str
    make: Callable[[Any, list[Tensor]], torch.optim.Optimizer]
    devices: tuple[str, ...] = ("cpu", "cuda")
    op: str = "adam"


PEERS = (
    Peer("torch AdamW(fused)", "torch.optim", "fp32", lambda optim, leaves: optim.AdamW(leaves, fused=True, **HYPER)),
    Peer(
        "DeepSpeed CPUAdam",
        "deepspeed.ops.adam",
        "fp32",
        lambda adam, leaves: adam.DeepSpeedCPUAdam(leaves, adamw_mode=True, **HYPER),
        devices=("cpu",),
    ),
    Peer(
        "DeepSpeed FusedAdam",
        "deepspeed.ops.adam",
        "fp32",
        lambda adam, leaves: adam.FusedAdam(leaves, adam_w_mode=True, **HYPER),
        devices=("cuda",),
    ),
    Peer("torchao AdamW8bit", "torchao.optim", "8bit", lambda optim, leaves: optim.AdamW8bit(leaves, **HYPER)),
    Peer("bitsandbytes 8-bit", "bitsandbytes.optim", "8bit", lambda optim, leaves: optim.AdamW8bit(leaves, **HYPER)),
    Peer(
        "torch SGD(fused)",
        "torch.optim",
        "fp32",
        lambda optim, leaves: optim.SGD(leaves, fused=True, **HYPER),
        op="sgd",
    ),
    Peer(
        "torch SGD(fused)",
        "torch.optim",
        "fp32",
        lambda optim, leaves: optim.SGD(leaves, fused=True, momentum=0.9, **HYPER),
        op="sgd momentum",
    ),
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
            optimizer = peer.make(importlib.import_module(peer.module), leaves)
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
