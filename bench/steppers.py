"""Who turns given gradients into a clipped step: zerox and what people use today, at the same job on one device.

Of 16-bit parameters everybody keeps fp32-quality values: peers as fp32 masters, which they copy gradients to and
parameters from. FSDP2 keeps fp32 parameters and casts them on their way into a forward.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from bench.peers import HYPER, PEERS, Peer, make
from bench.spread import Spread
from zerox import FusedShardedAdam

MAX_NORM = 1.0
FSDP_GROUP = 12  # parameters: a block of a GPT


@dataclass(frozen=True)
class Given:
    """``params``: values of what is trained, fp32 that ``dtype`` holds exactly. ``grads``: of ``dtype``."""

    params: Sequence[Tensor]
    grads: Sequence[Tensor]
    dtype: torch.dtype

    @staticmethod
    def random(shapes: Sequence[tuple[int, ...]], dtype: torch.dtype, device: torch.device) -> Given:
        generator = torch.Generator(device).manual_seed(0)

        def normal(shape: tuple[int, ...], std: float) -> Tensor:
            return torch.empty(shape, device=device).normal_(std=std, generator=generator).to(dtype)

        return Given([normal(each, 0.02).float() for each in shapes], [normal(each, 1.0) for each in shapes], dtype)


class Stepper(ABC):
    def train(self, grads: Sequence[Tensor]) -> None:
        self.loss(grads).backward()
        self.step()
        self.zero_grad()

    @abstractmethod
    def loss(self, grads: Sequence[Tensor]) -> Tensor:
        """Its backward gives ``grads``."""

    @abstractmethod
    def step(self) -> None:
        """From gradients to updated parameters, clipped."""

    @abstractmethod
    def zero_grad(self) -> None: ...

    @abstractmethod
    def values(self) -> list[Tensor]:
        """Parameters as a forward sees them."""


class BackwardOnly(Stepper):
    def __init__(self, given: Given) -> None:
        self.params: list[Tensor] = [nn.Parameter(each.to(given.dtype, copy=True)) for each in given.params]

    def loss(self, grads: Sequence[Tensor]) -> Tensor:
        loss: Tensor = Spread.apply(list(grads), *self.params)
        return loss

    def step(self) -> None:
        pass

    def zero_grad(self) -> None:
        for param in self.params:
            param.grad = None

    def values(self) -> list[Tensor]:
        return [param.detach() for param in self.params]


class Zerox(BackwardOnly):
    def __init__(self, given: Given, **options: Any) -> None:
        super().__init__(given)
        self.optimizer = FusedShardedAdam(self.params, **HYPER, **options)

    def step(self) -> None:
        self.optimizer.clip_grad_norm_(MAX_NORM)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()


class WithMasters(BackwardOnly):
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
        policy = MixedPrecisionPolicy(param_dtype=given.dtype, reduce_dtype=given.dtype)
        mesh = init_device_mesh(given.params[0].device.type, (1,))
        params = [nn.Parameter(each.clone()) for each in given.params]
        self.blocks = [Block(params[start : start + FSDP_GROUP]) for start in range(0, len(params), FSDP_GROUP)]
        for block in self.blocks:
            fully_shard(block, mesh=mesh, mp_policy=policy, reshard_after_forward=False)
        self.dtype, self.params = given.dtype, [param for block in self.blocks for param in block.parameters()]
        self.optimizer = torch.optim.AdamW(self.params, fused=True, lr=HYPER["lr"], weight_decay=HYPER["weight_decay"])

    def loss(self, grads: Sequence[Tensor]) -> Tensor:
        x = grads[0].new_zeros((), requires_grad=True)
        for index, block in enumerate(self.blocks):
            x = block(x, list(grads[FSDP_GROUP * index : FSDP_GROUP * (index + 1)]))
        return x

    def step(self) -> None:
        torch.nn.utils.clip_grad_norm_(self.params, MAX_NORM)
        self.optimizer.step()

    def zero_grad(self) -> None:
        self.optimizer.zero_grad()

    def values(self) -> list[Tensor]:
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.params]
        return [p.detach().to(self.dtype) for p in found]


class Block(nn.Module):
    def __init__(self, params: Sequence[nn.Parameter]) -> None:
        super().__init__()
        self.params = nn.ParameterList(params)

    def forward(self, x: Tensor, grads: list[Tensor]) -> Tensor:
        loss: Tensor = x + Spread.apply(grads, *self.params)
        return loss


@dataclass(frozen=True)
class System:
    """``state``: what moments are stored in, a key of bench.jobs.STATES. ``build`` raises Skipped."""

    name: str
    state: str
    build: Callable[[Given], Stepper]

    @property
    def is_ours(self) -> bool:
        return self.name.startswith("zerox")


FOREACH = Peer(
    "torch AdamW(foreach)", "torch.optim", "fp32", lambda optim, leaves: optim.AdamW(leaves, foreach=True, **HYPER)
)
BACKWARD = System("backward alone", "fp32", BackwardOnly)
OURS = {  # by state
    "fp32": System("zerox", "fp32", Zerox),
    "8bit": System("zerox, 8-bit state", "8bit", partial(Zerox, state_dtype="8bit")),
}
STAGE1 = System("zerox, stage 1", "fp32", partial(Zerox, stage=1))
REFERENCE, *PEER_SYSTEMS = [
    System(peer.name, peer.state, partial(WithMasters, peer=peer)) for peer in (FOREACH, *PEERS)
]
SYSTEMS = [BACKWARD, *OURS.values(), STAGE1, REFERENCE, *PEER_SYSTEMS, System("FSDP2, AdamW(fused)", "fp32", FSDP2)]
