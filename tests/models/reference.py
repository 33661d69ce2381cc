"""One process that computes what all ranks together should: no hook of zerox's sees a gradient here.

Each rank has a replica, a plain module, for its gradients, its buffers and its random numbers. Their mean is put into
p.grad by hand, and FusedShardedAdam alone takes the step: so ranks must equal it bit for bit. torch.optim.AdamW takes
the same step beside it, from the same state.
"""

from __future__ import annotations

import copy
from collections import Counter
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.distributed import ProcessGroup

from tests.models.cases import ALL, Case
from tests.models.modules import SyncBatchNorm
from tests.optimizer.models import mean_in_rank_order, memory_order
from tests.ranks import run_threads
from tests.tolerances import assert_one_step_bound
from zerox import FusedShardedAdam
from zerox.grads.norm import clip_coefficient

STEPS = 5
LR = 1e-2


@dataclass
class Outcome:
    """``state``: each parameter's tensors, in memory order. ``buffers``: each rank's. ``seen``: how often a gradient
    was absent on "some" ranks or on "all", and how often a row of a 3-D one, an expert, was zero: "idle on some"."""

    params: list[Tensor]
    state: list[dict[str, Tensor]]
    buffers: list[list[Tensor]]
    norms: list[float]
    seen: Counter[str]


def reference(_: int, __: int, name: str, world_size: int) -> Outcome:
    case = ALL[name]
    model = case.model(seed=0)
    replicas = [case.compiled(copy.deepcopy(model)) for _ in range(world_size)]
    beside = TorchBeside(case, copy.deepcopy(model))
    optimizer = FusedShardedAdam(case.groups(model), lr=LR, **case.options)
    params = list(model.parameters())
    norms: list[float] = []
    seen: Counter[str] = Counter()
    for step in range(STEPS):
        gradients = local_gradients(case, replicas, step)
        look(model, gradients, seen)
        for param, *parts in zip(params, *gradients, strict=True):
            param.grad = mean_in_rank_order(parts, param)
        beside.take(model, optimizer)
        norm = None if case.clip is None else optimizer.clip_grad_norm_(case.clip)
        optimizer.step()
        optimizer.zero_grad()
        beside.compare(model, optimizer, norm)
        norms += [] if norm is None else [float(norm)]
        for replica in replicas:
            replica.zero_grad()
            for own, param in zip(replica.parameters(), params, strict=True):
                own.data.copy_(param)
    state = [{key: memory_order(optimizer.state[p][key]).clone() for key in optimizer.state[p]} for p in params]
    buffers = [list(replica.buffers()) for replica in replicas]
    return Outcome([p.detach().clone() for p in params], state, buffers, norms, seen)


def local_gradients(case: Case, replicas: list[nn.Module], step: int) -> list[list[Tensor | None]]:
    """Each rank's gradients. Where ranks wait for each other inside forward they are threads."""

    def run(rank: int) -> list[Tensor | None]:
        for micro in range(case.accumulate):
            case.loss(replicas[rank], rank, step, micro).backward()
        return [param.grad for param in replicas[rank].parameters()]

    def run_in_thread(group: ProcessGroup | None) -> list[Tensor | None]:
        torch.set_num_threads(1)
        rank = group.rank() if group else 0
        connect(replicas[rank], group)
        return run(rank)

    if case.has_sync_batch_norm(replicas[0]):
        return run_threads(run_in_thread, len(replicas))
    return [run(rank) for rank in range(len(replicas))]


def connect(model: nn.Module, group: ProcessGroup | None) -> None:
    """Tells the model's synchronised batch norms over which ranks."""
    for module in model.modules():
        if isinstance(module, SyncBatchNorm):
            module.group = group


def look(model: nn.Module, gradients: list[list[Tensor | None]], seen: Counter[str]) -> None:
    for (name, param), parts in zip(model.named_parameters(), zip(*gradients, strict=True), strict=True):
        absent = sum(grad is None for grad in parts)
        if absent:
            seen["all" if absent == len(parts) else "some"] += 1
        if name.endswith((".gate_up_proj", ".down_proj")) and param.ndim == 3:
            idle = torch.stack([(grad == 0).flatten(1).all(1) for grad in parts if grad is not None])
            seen["idle on some"] += int((idle.any(0) & ~idle.all(0)).sum())


class TorchBeside:
    """torch.optim.AdamW on a model of its own, which starts each step where ours does."""

    def __init__(self, case: Case, model: nn.Module) -> None:
        self.model = model
        self.optimizer = torch.optim.AdamW(case.groups(model), lr=LR, foreach=False)
        self.max_norm = case.clip
        # torch would keep moments of 16-bit parameters in 16 bits: nothing to compare with.
        self.applies = all(param.dtype is torch.float32 for param in model.parameters())

    def take(self, model: nn.Module, optimizer: FusedShardedAdam) -> None:
        if not self.applies:
            return
        for own, param in zip(self.model.parameters(), model.parameters(), strict=True):
            own.data.copy_(param)
            own.grad = None if param.grad is None else param.grad.clone()
            state = {key: value.clone() for key, value in optimizer.state[param].items()}
            self.optimizer.state[own] = {**state, "step": state["step"].float()}

    def compare(self, model: nn.Module, optimizer: FusedShardedAdam, norm: Tensor | None) -> None:
        if not self.applies:
            return
        before = [param.detach().clone() for param in self.model.parameters()]
        if norm is not None:
            assert self.max_norm is not None
            for own in self.model.parameters():
                if own.grad is not None:
                    own.grad.mul_(clip_coefficient(norm, self.max_norm))
        self.optimizer.step()
        for own, param, old in zip(self.model.parameters(), model.parameters(), before, strict=True):
            ours, theirs = optimizer.state[param], self.optimizer.state[own]
            assert int(ours["step"]) == int(theirs["step"])
            moments = {key: (ours[key], theirs[key]) for key in ("exp_avg", "exp_avg_sq")}
            assert_one_step_bound(old, param.detach(), own.detach(), moments)
