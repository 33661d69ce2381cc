"""The optimizer that --optimizer names: sharded by zerox, and torch's own to compare with."""

import argparse
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
from corpus import BadInput

from zerox import (
    FusedShardedAdam,
    FusedShardedLion,
    FusedShardedMuon,
    FusedShardedSGD,
    ShardedOptimizer,
    muon_groups,
)

STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "8bit": "8bit"}
BETAS = (0.9, 0.95)
MOMENTUM = 0.9
MUON_LR = 0.02
# By the name of --optimizer: zerox's class, the rule by which zerox.estimate() knows it, and how many times as large as
# AdamW's its learning rate should be: SGD divides by no second moment, and each of Lion's updates is as large as lr.
# Muon's updates are orthogonal whatever the width is: its learning rate is MUON_LR.
FUSED: dict[str, tuple[Callable[..., torch.optim.Optimizer], str, float]] = {
    "adamw": (FusedShardedAdam, "adam", 1.0),
    "sgd": (FusedShardedSGD, "sgd", 50.0),
    "lion": (FusedShardedLion, "lion", 0.2),
    "muon": (FusedShardedMuon, "muon", 1.0),
}


def checked(name: str) -> str:
    """BadInput unless it is a rule with kernels of its own, or a class of torch.optim."""
    kind = getattr(torch.optim, name, None)
    is_class = isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer) and kind is not torch.optim.Optimizer
    if name not in FUSED and not is_class:
        raise BadInput(f"--optimizer {name} is none of {', '.join(FUSED)}, nor a class of torch.optim")
    return name


def default_lr(name: str, width: int) -> float:
    """Wider models want smaller steps. A class of torch.optim may want another one: it is given with --lr."""
    if name == "muon":
        return MUON_LR
    return 0.4 / width * (FUSED[name][2] if name in FUSED else 1.0)


def _own_options(options: argparse.Namespace) -> dict[str, Any]:
    """What zerox's class and torch's both take. Any other class of torch.optim keeps its defaults."""
    if options.optimizer == "adamw":
        return {"lr": options.lr, "betas": BETAS, "eps": options.eps, "weight_decay": options.weight_decay}
    if options.optimizer == "sgd":
        return {"lr": options.lr, "momentum": MOMENTUM}
    if options.optimizer == "lion":
        return {"lr": options.lr, "betas": BETAS, "weight_decay": options.weight_decay}
    if options.optimizer == "muon":
        return {"weight_decay": options.weight_decay}
    return {"lr": options.lr}


def _of_stage(options: argparse.Namespace) -> dict[str, Any]:
    return {"stage": options.stage, "resident_mb": options.resident_mb}


def params_of(module: torch.nn.Module, options: argparse.Namespace, verbose: bool = False) -> Any:
    """What the optimizer and zerox.estimate() get. With Muon groups: of matrices, and of all else, which is AdamW's."""
    if options.optimizer != "muon":
        return module.named_parameters()
    return muon_groups(
        module,
        lr=options.lr,
        adamw_lr=options.adamw_lr,
        weight_decay=options.weight_decay,
        adamw_weight_decay=options.weight_decay,
        adamw_betas=BETAS,
        adamw_eps=options.eps,
        verbose=verbose,
    )


class MuonAndAdamW(torch.optim.Optimizer):
    """torch's two as one, whose param groups are theirs: a scheduler sets the learning rates of both."""

    def __init__(self, module: torch.nn.Module, options: argparse.Namespace):
        muon, adamw = params_of(module, options)
        for group in (muon, adamw):
            del group["rule"]
        self.both = torch.optim.Muon([muon]), torch.optim.AdamW([adamw])
        super().__init__([group for each in self.both for group in each.param_groups], {})

    def step(self, closure: None = None) -> None:
        for each in self.both:
            each.step()
            self.state.update(each.state)


def sharded(module: torch.nn.Module, options: argparse.Namespace) -> torch.optim.Optimizer:
    """Raises ValueError for a class that can't be sharded."""
    params, own = params_of(module, options, verbose=not options.quiet), _own_options(options)
    if options.meta:  # parameters get their memory here, and the values that init gives them
        own |= {"model": module, "init": module.init_weights}
    with options.device if options.meta else nullcontext():
        if options.optimizer not in FUSED:
            return ShardedOptimizer(params, getattr(torch.optim, options.optimizer), **_of_stage(options), **own)
        kind = FUSED[options.optimizer][0]
        return kind(params, **_of_stage(options), state_dtype=STATE_DTYPES[options.state_dtype], **own)


def torchs(module: torch.nn.Module, options: argparse.Namespace, fused: bool) -> tuple[str, torch.optim.Optimizer]:
    """Its name with the way it is computed, and itself. ``fused``: if there is such a way, else as torch chooses."""
    if options.optimizer == "muon":
        return "Muon + AdamW", MuonAndAdamW(module, options)
    names = {"adamw": "AdamW", "sgd": "SGD"}
    name = names.get(options.optimizer, options.optimizer)
    ways = {} if options.optimizer not in names else {"fused": fused, "foreach": False}
    way = "" if not ways else "(fused)" if fused else "(foreach=False)"
    return name + way, getattr(torch.optim, name)(module.parameters(), **_own_options(options), **ways)


def estimate_options(options: argparse.Namespace) -> dict[str, Any]:
    """For zerox.estimate(). It knows no class of torch.optim: the state of one may come on top of this."""
    if options.optimizer not in FUSED:
        return {**_of_stage(options), "rule": "sgd"}
    rule = FUSED[options.optimizer][1]
    momentum = {"momentum": MOMENTUM} if rule == "sgd" else {}
    return {**_of_stage(options), "state_dtype": STATE_DTYPES[options.state_dtype], "rule": rule, **momentum}
