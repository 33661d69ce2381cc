"""Runs a program with zerox, ranks as threads, and writes down what every rank saw."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.optimizer.masters import join
from tests.optimizer.models import memory_order
from tests.properties.programs import LIMITS, Program, shaped
from tests.ranks import run_threads
from zerox import FusedShardedAdam, MemoryBytes
from zerox.residency.residency import Residency


@dataclass(frozen=True)
class Part:
    """What one rank owns of one parameter: elements ``[start, start + values.numel())`` in memory order."""

    param: int
    start: int
    values: Tensor
    exact: Tensor  # the master's values, where one is kept; else `values`
    state: dict[str, Tensor]

    @property
    def key(self) -> tuple[int, int]:
        return self.param, self.start


@dataclass(frozen=True)
class StepSeen:
    before: list[Part]
    after: list[Part]
    values: list[Tensor]  # of all parameters, after the step
    norm: Tensor | None


@dataclass
class RankSeen:
    start: list[Tensor] = field(default_factory=list)
    memory: MemoryBytes | None = None
    steps: list[StepSeen] = field(default_factory=list)


def run(program: Program) -> list[RankSeen]:
    return run_threads(_run_rank, program.world_size, program, timeout_s=20)


def make_params(program: Program, rank: int) -> list[nn.Parameter]:
    return [
        nn.Parameter(shaped(values, param), requires_grad=param.trained_from == 0)
        for values, param in zip(program.values(rank), program.params, strict=True)
    ]


def make_groups(program: Program, params: list[nn.Parameter]) -> list[dict[str, Any]]:
    groups = [
        {**options, "params": [p for p, spec in zip(params, program.params, strict=True) if spec.group == index]}
        for index, options in enumerate(program.groups)
    ]
    return [group for group in groups if group["params"]]


def _run_rank(group: dist.ProcessGroup | None, program: Program) -> RankSeen:
    torch.set_num_threads(1)
    rank = 0 if group is None else group.rank()
    params = make_params(program, rank)
    optimizer = FusedShardedAdam(make_groups(program, params), process_group=group, **program.options)
    optimizer.inside.manager.flights.hold_back(program.hold)
    seen = RankSeen(_values(params), optimizer.memory_bytes())
    for number, step in enumerate(program.steps):
        _limit(optimizer, program.residency)  # again: a parameter that was unfrozen brought its bucket
        for index, param in enumerate(params):
            param.requires_grad_(program.is_trained(index, number))
        for micro, syncs in enumerate(step.micros):
            with contextlib.nullcontext() if syncs else optimizer.no_sync():
                _backward(program, params, rank, number, micro)
        before = _parts(optimizer, params)
        norm = None if step.clip is None else optimizer.clip_grad_norm_(*step.clip)
        optimizer.step()
        seen.steps.append(StepSeen(before, _parts(optimizer, params), _values(params), norm))
        if step.zero is not None:
            optimizer.zero_grad(set_to_none=step.zero)
    return seen


def _limit(optimizer: FusedShardedAdam, residency: str) -> None:
    """In stages 1 and 2, and alone, everything is whole whatever the program says."""
    gather = optimizer.inside.gather
    if residency == LIMITS[0] or not isinstance(gather, Residency):
        return
    if residency == "two buckets":
        gather.residents.set_limit(sum(sorted(each.nbytes for each in gather.all)[-2:]))
    else:
        gather.residents.set_hostile(True)
    gather.residents.release_all()


def _backward(program: Program, params: list[nn.Parameter], rank: int, step: int, micro: int) -> None:
    """A loss whose gradients are the program's, to the bit: half of them laid out as their parameter, half densely."""
    losses = []
    for index, values in enumerate(program.gradients(rank, step, micro)):
        if program.has_gradient(rank, step, micro, index):
            grad = shaped(values, program.params[index])
            losses.append((params[index] * (grad if index % 2 else grad.contiguous())).sum())
    if losses:
        torch.autograd.backward(losses)


def _values(params: list[nn.Parameter]) -> list[Tensor]:
    return [memory_order(param).clone() for param in params]


def _parts(optimizer: FusedShardedAdam, params: list[nn.Parameter]) -> list[Part]:
    index_of = {id(param): index for index, param in enumerate(params)}
    found = []
    for bucket in optimizer.inside.buckets:
        for segment, (param, views) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
            place = slice(segment.span.start, segment.span.stop)
            values = bucket.param_shard[place].clone()
            state = {key: (t if key == "step" else memory_order(t)).clone() for key, t in views.items()}
            found.append(Part(index_of[id(param)], segment.param_start, values, exact_values(values, state), state))
    return found


def exact_values(values: Tensor, state: dict[str, Tensor]) -> Tensor:
    if "master" in state:
        return state["master"]
    return join(values, state["remainder"]) if "remainder" in state else values
