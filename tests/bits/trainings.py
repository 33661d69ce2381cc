"""Trainings whose bits are recorded: kinds of parameters and state, and ways to train."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.bits.model import Products, batch, ids_of
from tests.meshes import mesh_once
from tests.optimizer.models import KINDS as OF_TESTS
from zerox import FusedShardedAdam, GradScaler, ShardedOptimizer, Sparsity

STEPS = 4
LR = 2.0**-6
SMALL_CAP = 0.012  # MiB: several buckets
THREE_RULES: tuple[dict[str, Any], ...] = ({}, {"rule": "sgd", "momentum": 0.75}, {"rule": "lion", "weight_decay": 0.1})
Kind = tuple[torch.dtype, dict[str, Any]]
Way = Callable[["Training"], None]

# Those of other tests, but that rates here are powers of two.
KINDS: dict[str, Kind] = {
    **OF_TESTS,
    "three rules, 8-bit state": (torch.bfloat16, {"state_dtype": "8bit", "groups": THREE_RULES}),
    "three rules": (torch.float32, {"groups": THREE_RULES}),
    "L2 and maximize": (torch.float32, {"decoupled_weight_decay": False, "maximize": True}),
}


class Training:
    """One rank of one training, with its norms and what else it tells."""

    def __init__(self, rank: int, stage: int, kind: str, folder: Path) -> None:
        self.rank, self.stage, self.folder = rank, stage, folder
        self.dtype, self.options = KINDS[kind]
        self.told: list[float] = []
        self.has_table = False
        self.model, self.optimizer = self.fresh()

    def fresh(self, **more: Any) -> tuple[Products, Any]:
        model = Products(self.rank, self.has_table).to(self.dtype)  # the constructor gives everybody rank 0's
        options = {"lr": LR, "weight_decay": 0.1, "stage": self.stage, "bucket_cap_mb": SMALL_CAP}
        options |= self.options | more
        groups = options.pop("groups", ({},))
        if options.get("optimizer_class"):
            return model, ShardedOptimizer(model.named_parameters(), **options)
        named = [pair for pair in model.named_parameters() if "table" not in pair[0]]
        given = [{"params": named[i :: len(groups)], **each} for i, each in enumerate(groups)]
        if self.has_table:
            given.append({"params": [("table.weight", model.table.weight)], "sparse": True, "weight_decay": 0.0})
        return model, FusedShardedAdam(given, **options)

    def rebuild(self, **more: Any) -> None:
        del self.model, self.optimizer
        self.model, self.optimizer = self.fresh(**more)

    def loss(self, step: int, micro: int = 0, branch: bool | None = None) -> Tensor:
        taken = step == 1 if branch is None else branch
        ids = ids_of(self.rank, step) if self.has_table else None
        return self.model(batch(self.rank, step, micro), taken, ids)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_steps(self, first: int = 0, stop: int = STEPS) -> None:
        for step in range(first, stop):
            self.loss(step).backward()
            self.finish()


def plain(training: Training) -> None:
    training.plain_steps()


def one_bucket(training: Training) -> None:
    training.rebuild(bucket_cap_mb=25)
    training.plain_steps()


def clipped(training: Training) -> None:
    for step in range(STEPS):
        training.loss(step).backward()
        training.told.append(float(training.optimizer.clip_grad_norm_(0.5)))
        training.finish()


def accumulated(training: Training) -> None:
    for step in range(STEPS):
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else training.optimizer.no_sync():
                training.loss(step, micro).backward()
        training.told.append(float(training.optimizer.clip_grad_norm_(100.0, norm_type=1.0)))
        training.finish()


def synced_each_time(training: Training) -> None:
    for step in range(STEPS):
        for micro in range(2):
            training.loss(step, micro).backward()
        training.finish()


def hidden(training: Training) -> None:
    training.optimizer.overlap_gather(training.model)
    training.plain_steps()


def absent_on_some(training: Training) -> None:
    for step in range(STEPS):
        training.loss(step, branch=(training.rank + step) % 2 == 0).backward()
        training.finish()


def kept_gradients(training: Training) -> None:
    """zero_grad(set_to_none=False), and a gradient that the user assigns."""
    for step in range(STEPS):
        training.loss(step).backward()
        if step == 2:
            gain = training.model.gain
            gain.grad = torch.full_like(gain, 0.5 + training.rank)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=step == 1)


def scaled(training: Training) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(STEPS):
        loss = training.loss(step) * (float("inf") if step == 1 and training.rank == 0 else 1.0)
        scaler.scale(loss).backward()
        scaler.unscale_(training.optimizer)
        training.optimizer.clip_grad_norm_(1.0)
        scaler.step(training.optimizer)
        scaler.update()
        training.told.append(scaler.get_scale())
        training.optimizer.zero_grad()


def grouped(training: Training) -> None:
    half = {"lr": LR / 2, "betas": (0.8, 0.9)}
    training.rebuild(groups=({"weight_decay": 0.2}, half))
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    for step in range(STEPS):
        training.loss(step).backward()
        training.finish()
        schedule.step()


def unfrozen(training: Training) -> None:
    for param in training.model.inner.parameters():
        param.requires_grad_(False)
    training.plain_steps(0, 2)
    for param in training.model.inner.parameters():
        param.requires_grad_(True)
    training.plain_steps(2)


def grown(training: Training) -> None:
    extra = nn.Parameter(torch.ones(72, dtype=training.dtype))
    training.plain_steps(0, 2)
    training.optimizer.add_param_group({"params": [("extra", extra)], "lr": LR / 4})
    for step in range(2, STEPS):
        added = (batch(training.rank, step)[:72].to(extra.dtype) * extra * extra).float().sum()
        (training.loss(step) + added).backward()
        training.finish()
    with training.optimizer.whole():
        training.told += extra.detach().tolist()


def saved_and_loaded(training: Training) -> None:
    training.plain_steps(0, 2)
    zerox.save(training.folder / "checkpoint", training.model, training.optimizer, extra={"step": 2})
    training.rebuild()
    extra = zerox.load(training.folder / "checkpoint", training.model, training.optimizer)
    training.plain_steps(extra["step"])


def loaded(training: Training, weights: dict[str, Tensor], state: Any) -> None:
    training.rebuild()
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(state)
    training.plain_steps(2)


def weights_of(training: Training) -> dict[str, Tensor]:
    with training.optimizer.whole():
        return {name: value.clone() for name, value in training.model.state_dict().items()}


def state_in_memory(training: Training) -> None:
    training.plain_steps(0, 2)
    loaded(training, weights_of(training), training.optimizer.state_dict())


def whole_state_in_memory(training: Training) -> None:
    training.plain_steps(0, 2)
    weights = weights_of(training)
    whole = [training.optimizer.full_state_dict()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(whole)
    loaded(training, weights, whole[0])


def over(exchange: str) -> Way:
    def train(training: Training) -> None:
        os.environ["ZEROX_EXCHANGE"] = exchange
        try:
            training.rebuild()
        finally:
            del os.environ["ZEROX_EXCHANGE"]
        training.plain_steps()

    return train


def narrow_wire(training: Training) -> None:
    training.rebuild(reduce_dtype=torch.bfloat16)
    training.plain_steps()


def wide_sums(training: Training) -> None:
    training.rebuild(accumulate_dtype=torch.float32)
    accumulated(training)


def of_tokens(training: Training) -> None:
    for step in range(STEPS):
        training.loss(step).backward()
        training.optimizer.mean_over(3 + training.rank)
        training.finish()


def uneven(training: Training) -> None:
    """Higher ranks have fewer batches."""
    with training.optimizer.join():
        training.plain_steps(0, STEPS - min(training.rank, 2))


def with_table(training: Training) -> None:
    training.has_table = True
    training.rebuild()
    clipped(training)


def masked(training: Training) -> None:
    sparsity = Sparsity(training.optimizer, {"*.weight": 0.5}, schedule=zerox.rigl(0.3, every=2, until=8))
    for step in range(STEPS):
        training.loss(step).backward()
        training.optimizer.step()
        sparsity.step()
        training.optimizer.zero_grad()


def on_mesh(training: Training) -> None:
    mesh = mesh_once((2, dist.get_world_size() // 2), ("replicate", "shard"))
    training.rebuild(process_group=mesh)
    for step in range(STEPS):
        with training.optimizer.no_sync(outer=training.stage > 1):
            training.loss(step).backward()
        training.loss(step, 1).backward()
        training.told.append(float(training.optimizer.clip_grad_norm_(0.5)))
        training.finish()


def by_class_of_torch(training: Training) -> None:
    training.rebuild(optimizer_class=torch.optim.NAdam, master_weights="auto")
    training.plain_steps()


def wrapped(training: Training) -> None:
    """Gradients of a part of the model are torch's optimizer's, the rest's are zerox's."""
    del training.optimizer
    training.model = Products(training.rank).to(training.dtype)
    model = zerox.DistributedDataParallel(training.model)
    by_torch = torch.optim.SGD(training.model.inner.parameters(), lr=LR)
    rest = [pair for pair in training.model.named_parameters() if not pair[0].startswith("inner")]
    training.optimizer = FusedShardedAdam(rest, lr=LR, stage=training.stage, bucket_cap_mb=SMALL_CAP)
    for step in range(STEPS):
        model(batch(training.rank, step), (training.rank + step) % 2 == 0).backward()
        by_torch.step()
        by_torch.zero_grad()
        training.finish()


WAYS: dict[str, Way] = {
    "plain": plain,
    "one bucket": one_bucket,
    "clipped": clipped,
    "accumulated": accumulated,
    "synced each time": synced_each_time,
    "hidden": hidden,
    "absent on some": absent_on_some,
    "kept gradients": kept_gradients,
    "scaled": scaled,
    "grouped": grouped,
    "unfrozen": unfrozen,
    "grown": grown,
    "saved and loaded": saved_and_loaded,
    "state in memory": state_in_memory,
    "whole state in memory": whole_state_in_memory,
    "over messages": over("messages"),
    "over native": over("native"),
    "narrow wire": narrow_wire,
    "wide sums": wide_sums,
    "of tokens": of_tokens,
    "uneven": uneven,
    "with a table": with_table,
    "masked": masked,
    "by torch's class": by_class_of_torch,
    "wrapped": wrapped,
    "on a mesh": on_mesh,
}
OF_FEW = ("masked", "by torch's class", "grouped")  # these have one kind
