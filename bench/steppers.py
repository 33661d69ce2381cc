"""The op "step" of bench.kernels: from given gradients to a clipped step, by zerox and by what people use today.

One process. Each backward only hands out gradients; what it takes where nobody updates anything is taken off. Of 16-bit
parameters everybody keeps fp32-quality values: peers as fp32 masters, which they copy gradients to and parameters from.
FSDP2 keeps fp32 parameters and casts them on their way into a forward.
"""

from __future__ import annotations

import contextlib
import functools
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.jobs import TRAINED, Job, Kind, WrongResult
from bench.peers import HYPER, PEERS, Peer, Skipped, make
from bench.plots import OURS
from bench.timing import Call, Timing, time_in_turn
from zerox import FusedShardedAdam

# zerox' own masters are remainders.
STEPPED = [kind for kind in TRAINED if kind.state != "bf16" and "+ fp32" not in kind.name]
MAX_NORM = 1.0
FSDP_GROUP = 12  # parameters: a block of a GPT
CHECKED_STEPS = 3
CHECKED_PARAMS = (210_000, 33, 1, 20_480, 4_096)
HOST_SAMPLES = 20


@dataclass(frozen=True)
class Given:
    """``params``: values of what is trained, fp32 that ``dtype`` holds exactly. ``grads``: of ``dtype``."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    dtype: torch.dtype

    @staticmethod
    def random(numels: Sequence[int], dtype: torch.dtype, device: torch.device) -> Given:
        generator = torch.Generator(device).manual_seed(0)

        def normal(numel: int, std: float) -> Tensor:
            return torch.empty(numel, device=device).normal_(std=std, generator=generator).to(dtype)

        return Given([normal(each, 0.02).float() for each in numels], [normal(each, 1.0) for each in numels], dtype)


class Spread(torch.autograd.Function):
    """A loss whose backward only hands out gradients that were made before: what is left are autograd and hooks."""

    @staticmethod
    def forward(ctx: Any, grads: list[Tensor], *params: Tensor) -> Tensor:
        ctx.grads = grads
        return params[0].new_zeros(())

    @staticmethod
    def backward(ctx: Any, *_: Tensor) -> Any:
        grads, ctx.grads = ctx.grads, None
        return (None, *grads)


class Stepper:
    """Nobody's: its backward hands out gradients, and its step does nothing."""

    def __init__(self, given: Given) -> None:
        self.given = given
        self.params: list[Tensor] = [nn.Parameter(each.to(given.dtype, copy=True)) for each in given.params]

    def train(self) -> None:
        self.loss().backward()
        self.step()
        self.zero_grad()

    def loss(self) -> Tensor:
        loss: Tensor = Spread.apply(list(self.given.grads), *self.params)
        return loss

    def step(self) -> None:
        """From gradients to updated parameters, clipped."""

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def values(self) -> list[Tensor]:
        """Parameters as a forward sees them."""
        return [param.detach() for param in self.params]


class Zerox(Stepper):
    def __init__(self, given: Given, state: str) -> None:
        super().__init__(given)
        state_dtype = "8bit" if state == "8bit" else torch.float32
        self.optimizer = FusedShardedAdam(self.params, **HYPER, state_dtype=state_dtype)

    def step(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class WithMasters(Stepper):
    """torch's interface; of 16-bit parameters it updates fp32 masters."""

    def __init__(self, given: Given, peer: Peer) -> None:
        super().__init__(given)
        self.masters = self.params
        if given.dtype != torch.float32:
            self.masters = [nn.Parameter(each.clone()) for each in given.params]
            for master in self.masters:
                master.grad = torch.empty_like(master)
        self.optimizer = make(peer, list(self.masters))

    @torch.no_grad()
    def step(self) -> None:
        if self.masters is not self.params:
            torch._foreach_copy_(grads_of(self.masters), grads_of(self.params))
        torch.nn.utils.clip_grad_norm_(self.masters, MAX_NORM)
        self.optimizer.step()
        if self.masters is not self.params:
            torch._foreach_copy_(self.params, self.masters)


def grads_of(params: Sequence[Tensor]) -> list[Tensor]:
    return [param.grad for param in params if param.grad is not None]


class FSDP2(Stepper):
    """At one rank: gathers and reduce-scatters are copies."""

    def __init__(self, given: Given) -> None:
        self.given = given
        policy = MixedPrecisionPolicy(param_dtype=given.dtype, reduce_dtype=given.dtype)
        mesh = init_device_mesh(given.params[0].device.type, (1,))
        params = [nn.Parameter(each.clone()) for each in given.params]
        self.blocks = [Block(params[start : start + FSDP_GROUP]) for start in range(0, len(params), FSDP_GROUP)]
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.params = [param for block in self.blocks for param in block.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, fused=True, lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])

    def loss(self) -> Tensor:
        x = self.given.grads[0].new_zeros((), requires_grad=True)
        for index, block in enumerate(self.blocks):
            x = block(x, list(self.given.grads[FSDP_GROUP * index : FSDP_GROUP * (index + 1)]))
        return x

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.params]
        return [p.detach().to(self.given.dtype) for p in found]


class Block(nn.Module):
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor, grads: list[Tensor]) -> Tensor:
        loss: Tensor = x + Spread.apply(grads, *self.params)
        return loss


Build = Callable[[Given], Stepper]  # raises Skipped
BACKWARD = "backward alone"
FOREACH: dict[str, Any] = {**HYPER, "foreach": True}
REFERENCE = Peer("torch AdamW(foreach)", "torch.optim", "fp32", lambda optim, leaves: optim.AdamW(leaves, **FOREACH))


def systems(state: str) -> dict[str, Build]:
    """Who stores moments in ``state``, by name."""
    found: dict[str, Build] = {OURS: partial(Zerox, state=state)}
    found |= {peer.name: partial(WithMasters, peer=peer) for peer in (REFERENCE, *PEERS) if peer.state == state}
    return found | ({"FSDP2, AdamW(fused)": FSDP2} if state == "fp32" else {})


@functools.cache
def able(kind: Kind, device: torch.device) -> dict[str, Build]:
    """Those that run here and make the reference's steps; a line for each other. Raises WrongResult if it is ours."""
    given = Given.random(CHECKED_PARAMS, kind.dtype, device)
    before, expected = torch.cat(list(given.params)), parameters_after(partial(WithMasters, peer=REFERENCE), given)
    found = {}
    for name, build in systems(kind.state).items():
        try:
            off = (parameters_after(build, given) - expected).abs()
        except Skipped as reason:
            print(f"skipped {name}: {reason}", flush=True)
            continue
        # A rounding of the parameter, and a thousandth of what the steps change. In 8 bits: a tenth in the mean.
        exact = off <= torch.finfo(kind.dtype).eps * expected.abs() + 1e-3 * CHECKED_STEPS * HYPER["lr"]
        right = exact.all() if kind.state == "fp32" else off.mean() <= 0.1 * (expected - before).abs().mean()
        if right:
            found[name] = build
        elif name == OURS:
            raise WrongResult(f"step, {kind.name}, {kind.state}: parameters are up to {float(off.max()):.3g} off")
        else:
            print(f"skipped {name}: its parameters are up to {float(off.max()):.3g} off", flush=True)
    return found


def parameters_after(build: Build, given: Given) -> Tensor:
    stepper = build(given)
    for _ in range(CHECKED_STEPS):
        stepper.train()
    return torch.cat([each.flatten().float() for each in stepper.values()])


def time_steps(job: Job, device: torch.device, budget_s: float) -> dict[str, Timing]:
    """What clipping and the step take beyond backward; on a GPU the device's time, and the host's beside it."""
    given = Given.random(job.params, job.kind.dtype, device)
    steppers = {name: build(given) for name, build in {BACKWARD: Stepper, **able(job.kind, device)}.items()}

    def call(stepper: Stepper) -> Call:
        return lambda _: stepper.train()

    timings = time_in_turn({name: call(each) for name, each in steppers.items()}, 1, device, budget_s)
    alone_ms = timings.pop(BACKWARD).p50_ms
    return {
        name: replace(
            timing,
            p50_ms=timing.p50_ms - alone_ms,
            p25_ms=timing.p25_ms - alone_ms,
            p75_ms=timing.p75_ms - alone_ms,
            host_us=host_us(steppers[name]) if device.type == "cuda" else None,
        )
        for name, timing in timings.items()
    }


def host_us(stepper: Stepper) -> float:
    """Each step begins when the device has done all before it, as in the worst case it has."""
    samples_us = []
    for _ in range(HOST_SAMPLES):
        stepper.loss().backward()
        torch.cuda.synchronize()
        start = time.perf_counter()
        stepper.step()
        samples_us.append((time.perf_counter() - start) * 1e6)
        stepper.zero_grad()
    return statistics.median(samples_us)


@contextlib.contextmanager
def group_of_one(device: torch.device) -> Iterator[None]:
    with tempfile.TemporaryDirectory() as folder:
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
        dist.init_process_group(backend, init_method=f"file://{folder}/store", rank=0, world_size=1)
        try:
            yield
        finally:
            dist.destroy_process_group()
