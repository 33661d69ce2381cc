"""Records the bits of many trainings, and compares them with those that another commit recorded on the same machine.

    python -m tests.bits record FILE [--only TEXT]
    python -m tests.bits compare FILE [--only TEXT]

For moving code about: parameters, whole state, norms and losses of each training are hashed on every rank, and its
messages are counted. Only :func:`messages_of` uses more of zerox than its public names.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import itertools
import json
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from bench.common import facts
from tests.optimizer.models import KINDS, Mixed, backward, batch, make_model, make_optimizer
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler

STEPS = 4
LR = 1e-2
SMALL_CAP = 0.03  # MiB: several buckets
WORLDS = (1, 2, 3, 4)
STAGES = (1, 2)
SAME_MACHINE = ("cpu", "torch", "isa")
Way = Callable[["Training"], None]


class Training:
    """One rank of one training, with its norms and losses."""

    def __init__(self, rank: int, stage: int, kind: str, folder: Path) -> None:
        self.rank, self.stage, self.kind, self.folder = rank, stage, kind, folder
        self.dtype, self.options = KINDS[kind]
        self.heard: list[float] = []
        self.model, self.optimizer = self.fresh()

    def fresh(self, **more: Any) -> tuple[Mixed, FusedShardedAdam]:
        model = make_model(self.dtype, seed=self.rank)  # the constructor gives everybody rank 0's
        named = more.pop("params", None) or model.named_parameters()
        options = {"lr": LR, "weight_decay": 0.1, "stage": self.stage, "bucket_cap_mb": SMALL_CAP, **self.options}
        return model, make_optimizer(named, **(options | more))

    def rebuild(self, **more: Any) -> None:
        del self.model, self.optimizer
        self.model, self.optimizer = self.fresh(**more)

    def backward(self, step: int, micro: int = 0, branch: bool | None = None) -> None:
        x = batch(self.rank, step, micro, self.dtype)
        backward(self.model, x, branch=step == 1 if branch is None else branch)

    def finish(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()

    def plain_steps(self, first: int = 0, stop: int = STEPS) -> None:
        for step in range(first, stop):
            self.backward(step)
            self.finish()


def plain(training: Training) -> None:
    training.plain_steps()


def one_bucket(training: Training) -> None:
    training.rebuild(bucket_cap_mb=25)
    training.plain_steps()


def clipped(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step)
        training.heard.append(float(training.optimizer.clip_grad_norm_(0.05)))
        training.finish()


def accumulated(training: Training) -> None:
    for step in range(STEPS):
        for micro in range(3):
            with contextlib.nullcontext() if micro == 2 else training.optimizer.no_sync():
                training.backward(step, micro)
        training.heard.append(float(training.optimizer.clip_grad_norm_(10.0, norm_type=1.0)))
        training.finish()


def synced_each_time(training: Training) -> None:
    for step in range(STEPS):
        for micro in range(2):
            training.backward(step, micro)
        training.finish()


def hidden(training: Training) -> None:
    training.optimizer.overlap_gather(training.model)
    training.plain_steps()


def absent_on_some(training: Training) -> None:
    for step in range(STEPS):
        training.backward(step, branch=(training.rank + step) % 2 == 0)
        training.finish()


def kept_gradients(training: Training) -> None:
    """zero_grad(set_to_none=False), and a gradient that the user assigns."""
    for step in range(STEPS):
        training.backward(step)
        if step == 2:
            gain = training.model.gain
            gain.grad = torch.full_like(gain, 0.5 + training.rank)
        training.optimizer.step()
        training.optimizer.zero_grad(set_to_none=step == 1)


def scaled(training: Training) -> None:
    scaler = GradScaler("cpu", init_scale=2.0**8, growth_interval=2)
    for step in range(STEPS):
        loss = training.model(batch(training.rank, step, dtype=training.dtype)).float().square().mean()
        scaler.scale(loss * (float("inf") if step == 1 and training.rank == 0 else 1.0)).backward()
        scaler.unscale_(training.optimizer)
        training.optimizer.clip_grad_norm_(0.1)
        scaler.step(training.optimizer)
        scaler.update()
        training.heard.append(scaler.get_scale())
        training.optimizer.zero_grad()


def grouped(training: Training) -> None:
    model = make_model(training.dtype, seed=training.rank)
    named = list(model.named_parameters())
    decayed = [pair for pair in named if pair[1].dim() > 1]
    others = [pair for pair in named if pair[1].dim() <= 1]
    groups = [{"params": decayed, "weight_decay": 0.2}, {"params": others, "lr": LR / 2, "betas": (0.8, 0.9)}]
    training.rebuild(params=groups)
    training.model = model
    schedule = torch.optim.lr_scheduler.StepLR(training.optimizer, 2)
    for step in range(STEPS):
        training.backward(step)
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
        out = training.model(batch(training.rank, step, dtype=training.dtype)) * extra
        out.float().square().mean().backward()
        training.finish()
    training.heard += extra.detach().tolist()


def saved_and_loaded(training: Training) -> None:
    training.plain_steps(0, 2)
    zerox.save(training.folder / "checkpoint", training.model, training.optimizer, extra={"step": 2})
    training.rebuild()
    extra = zerox.load(training.folder / "checkpoint", training.model, training.optimizer)
    training.plain_steps(extra["step"])


def state_in_memory(training: Training) -> None:
    training.plain_steps(0, 2)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    own = training.optimizer.state_dict()
    training.rebuild()
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(own)
    training.plain_steps(2)


def whole_state_in_memory(training: Training) -> None:
    training.plain_steps(0, 2)
    weights = {name: value.clone() for name, value in training.model.state_dict().items()}
    whole = [training.optimizer.full_state_dict()]
    if dist.get_world_size() > 1:
        dist.broadcast_object_list(whole)
    training.rebuild()
    training.model.load_state_dict(weights)
    training.optimizer.load_state_dict(whole[0])
    training.plain_steps(2)


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
}


EVERY_KIND = ("plain", "clipped", "saved and loaded")
EVERY_WAY = ("fp32", "bf16 remainder", "amsgrad, 8-bit moments")


def digest(values: Iterator[tuple[str, Any]]) -> str:
    """A hash of names and values; of a tensor its dtype, shape and elements."""
    found = hashlib.sha256()
    for name, value in values:
        found.update(name.encode())
        if isinstance(value, Tensor):
            found.update(f"{value.dtype} {tuple(value.shape)}".encode())
            found.update(bytes(value.detach().cpu().contiguous().view(-1).view(torch.uint8).tolist()))
        else:
            found.update(repr(value).encode())
    return found.hexdigest()[:16]


def named_state(optimizer: FusedShardedAdam) -> Iterator[tuple[str, Any]]:
    """The whole state, on rank 0."""
    whole = optimizer.full_state_dict()
    for number, state in sorted(whole.get("state", {}).items()):
        for key, value in sorted(state.items()):
            yield f"{number} {key}", value


def messages_of(optimizer: FusedShardedAdam) -> tuple[int, int]:
    """The number of messages that this rank has sent, and their bytes."""
    return optimizer.inside.manager.traffic if dist.is_initialized() and dist.get_world_size() > 1 else (0, 0)


def train(rank: int, world_size: int, stage: int, kind: str, way: str, folder: str) -> dict[str, Any]:
    training = Training(rank, stage, kind, Path(folder))
    WAYS[way](training)
    training.optimizer.synchronize()
    messages = messages_of(training.optimizer)
    return {
        "params": digest(iter(training.model.named_parameters())),
        "state": digest(named_state(training.optimizer)),
        "heard": [each.hex() for each in training.heard],
        "messages": list(messages),
    }


def cases() -> Iterator[tuple[int, int, str, str]]:
    """(ranks, stage, kind, way): every kind in some ways, and every way with the kinds that differ most."""
    for world_size, stage, kind, way in itertools.product(WORLDS, STAGES, KINDS, WAYS):
        if way in EVERY_KIND or kind in EVERY_WAY:
            yield world_size, stage, kind, way


def record(only: str) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for world_size, stage, kind, way in cases():
        name = f"{world_size} ranks, stage {stage}, {kind}, {way}"
        if only not in name:
            continue
        with tempfile.TemporaryDirectory() as folder:
            found[name] = run_ranks(train, world_size, stage, kind, way, folder)
    return found


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.bits", description=__doc__.partition("\n")[0])
    parser.add_argument("what", choices=("record", "compare"))
    parser.add_argument("file", type=Path)
    parser.add_argument("--only", default="", help="trainings whose name has this in it")
    args = parser.parse_args(argv)
    here = facts("python -m tests.bits")
    found = record(args.only)
    if args.what == "record":
        args.file.write_text(json.dumps({**here, "trainings": found}, indent=0) + "\n")
        print(f"{len(found)} trainings")
        return 0
    before = json.loads(args.file.read_text())
    if other := [f"{key}: {before[key]}, here {here[key]}" for key in SAME_MACHINE if before[key] != here[key]]:
        print("recorded on another machine, whose matrix products may give other bits:", *other, sep="\n  ")
        return 2
    then = {name: told for name, told in before["trainings"].items() if args.only in name}
    differ = sorted(name for name in then.keys() | found.keys() if then.get(name) != found.get(name))
    for name in differ:
        print(f"differs: {name}\n  then {then.get(name)}\n  now  {found.get(name)}")
    print(f"{len(found) - len(differ)} of {len(found)} are as recorded at {before['commit']}")
    return 1 if differ else 0


if __name__ == "__main__":
    from tests import bits  # its functions are run in other processes: they need a name that is the same there

    sys.exit(bits.main())
