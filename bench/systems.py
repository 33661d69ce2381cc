"""The same training done by zerox and by what people use today, each a system with a step() over the ranks.

Every system starts from the same parameters, takes the same batches, and averages gradients over the ranks.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim import AdamW

from bench.trace import phase
from examples.gpt_model import GPT, Shape
from zerox import FusedShardedAdam, GradScaler

HYPER: dict[str, Any] = {"lr": 1e-3, "weight_decay": 0.01}  # of all
MOST_NORM = 1e6  # clips nothing
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


@dataclass(frozen=True)
class Training:
    """What is trained, and how. ``max_norm``: of clipping, None: off.

    ``tied``: the last layer's weight is the embedding's. ``device``: "cpu" or "cuda".
    """

    layers: int = 8
    width: int = 512
    vocabulary: int = 16_384
    context: int = 128
    batch: int = 2
    dtype: str = "fp32"
    max_norm: float | None = None
    tied: bool = True
    device: str = "cpu"

    def model(self) -> WordGPT:
        torch.manual_seed(0)
        shape = Shape(self.layers, self.width, self.width // 64, self.context)
        return WordGPT(shape, self.vocabulary, self.tied).to(self.device, DTYPES[self.dtype])

    def tokens(self, step: int, rank: int) -> Tensor:
        """A batch: int64 ``[batch, context + 1]``."""
        generator = torch.Generator().manual_seed(1 + 1_000_003 * step + rank)
        return torch.randint(self.vocabulary, (self.batch, self.context + 1), generator=generator).to(self.device)


class WordGPT(GPT):
    """The example's GPT with a vocabulary of its own."""

    def __init__(self, shape: Shape, vocabulary: int, tied: bool) -> None:
        super().__init__(shape)
        self.token_embedding = nn.Embedding(vocabulary, shape.width)
        nn.init.normal_(self.token_embedding.weight, std=shape.width**-0.5)
        if tied:
            self.to_logits.weight = self.token_embedding.weight
        else:
            self.to_logits = nn.Linear(shape.width, vocabulary, bias=False)


class System(ABC):
    """``module`` is called for the loss; ``optimizer`` has torch's interface. A profiler sees the phases of a step."""

    name: str
    communicates = True

    def __init__(self, training: Training) -> None:
        self.training = training
        self.module, self.optimizer = self.build(training.model())

    @abstractmethod
    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]: ...

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)

    def step(self, tokens: Tensor) -> None:
        self.backward(tokens)
        self.update()

    def backward(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        with phase("forward"):
            loss = self.module(tokens[:, :-1], tokens[:, 1:])
        with phase("backward"):
            loss.backward()

    def update(self) -> None:
        if self.training.max_norm is not None:
            with phase("clip"):
                self.clip(self.training.max_norm)
        with phase("step"):
            self.optimizer.step()

    def parameters(self) -> list[Tensor]:
        """Whole, in the model's order. Collective."""
        found = [p.full_tensor() if isinstance(p, DTensor) else p for p in self.module.parameters()]
        return [p.detach() for p in found]


class NoCommunication(System):
    """The floor: each rank trains alone, and updates no more than its share of the parameters."""

    name = "no communication"
    communicates = False

    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        world_size = dist.get_world_size() if dist.is_initialized() else 1
        total = sum(p.numel() for p in model.parameters())
        share: list[nn.Parameter] = []
        for param in model.parameters():
            if sum(p.numel() for p in share) * world_size < total:
                share.append(param)
        return model, AdamW(share, fused=True, **HYPER)

    def backward(self, tokens: Tensor) -> None:
        self.module.zero_grad()
        super().backward(tokens)


class DDP(System):
    name = "DDP + AdamW(fused)"

    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        return DistributedDataParallel(model, gradient_as_bucket_view=True), self.build_optimizer(model)

    def build_optimizer(self, model: WordGPT) -> torch.optim.Optimizer:
        return AdamW(model.parameters(), fused=True, **HYPER)


class ZeroRedundancy(DDP):
    name = "DDP + ZeroRedundancyOptimizer"

    def build_optimizer(self, model: WordGPT) -> torch.optim.Optimizer:
        return ZeroRedundancyOptimizer(model.parameters(), optimizer_class=AdamW, fused=True, **HYPER)


class FSDP2(System):
    name = "FSDP2, not resharded"
    reshard = False

    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        mesh = init_device_mesh(self.training.device, (dist.get_world_size(),))
        for part in (*model.blocks, model):
            fully_shard(part, mesh=mesh, reshard_after_forward=self.reshard)
        return model, AdamW(model.parameters(), fused=True, **HYPER)


class FSDP2Resharded(FSDP2):
    name = "FSDP2, resharded"
    reshard = True


class Zerox(System):
    """``cap_mib``: of a bucket; None: what zerox chooses. ``overlap``: step() leaves the gather to the next forward."""

    name = "zerox, stage 2"
    stage = 2
    resident_mb: float | None = None
    overlap = False

    def __init__(self, training: Training, cap_mib: float | None = None) -> None:
        self.cap_mib = cap_mib
        if cap_mib is not None:
            self.name = f"zerox, buckets of {cap_mib:g} MiB"
        super().__init__(training)

    def build(self, model: WordGPT) -> tuple[nn.Module, torch.optim.Optimizer]:
        own: dict[str, Any] = {"stage": self.stage, "resident_mb": self.resident_mb, "bucket_cap_mb": self.cap_mib}
        self.ours = FusedShardedAdam(model.named_parameters(), **own, **HYPER)
        if self.overlap:
            self.ours.overlap_gather(model)
        return model, self.ours

    def clip(self, max_norm: float) -> None:
        self.ours.clip_grad_norm_(max_norm)


class ZeroxScaled(Zerox):
    """With a scaled loss, by the optimizer's own calls. It is always clipped."""

    name = "zerox, own clip and scaler"
    make_scaler: Callable[..., torch.amp.GradScaler] = GradScaler

    def __init__(self, training: Training, cap_mib: float | None = None) -> None:
        super().__init__(training, cap_mib)
        self.scaler = self.make_scaler(training.device)

    def backward(self, tokens: Tensor) -> None:
        self.optimizer.zero_grad()
        with phase("forward"):
            loss = self.module(tokens[:, :-1], tokens[:, 1:])
        with phase("backward"):
            self.scaler.scale(loss).backward()

    def update(self) -> None:
        with phase("clip"):
            self.scaler.unscale_(self.optimizer)
            self.clip(MOST_NORM if self.training.max_norm is None else self.training.max_norm)
        with phase("step"):
            self.scaler.step(self.optimizer)
            self.scaler.update()


class ZeroxTorchsCalls(ZeroxScaled):
    """As a script written for DistributedDataParallel does it."""

    name = "zerox, torch's clip and scaler"
    make_scaler = torch.amp.GradScaler

    def clip(self, max_norm: float) -> None:
        torch.nn.utils.clip_grad_norm_(self.module.parameters(), max_norm)


class ZeroxStage1(Zerox):
    name = "zerox, stage 1"
    stage = 1


class ZeroxStage3(Zerox):
    name = "zerox, stage 3"
    stage = 3
    resident_mb: float | None = 64.0


class ZeroxOverlapped(Zerox):
    name = "zerox, gather hidden"
    overlap = True


OURS = (Zerox, ZeroxOverlapped, ZeroxStage1)  # in the tables of docs/benchmarks.md
SYSTEMS: dict[str, Callable[[Training], System]] = {
    kind.name: kind for kind in (NoCommunication, DDP, ZeroRedundancy, FSDP2, FSDP2Resharded, *OURS, ZeroxStage3)
}
ALL_SYSTEMS = SYSTEMS | {kind.name: kind for kind in (ZeroxScaled, ZeroxTorchsCalls)}  # these where asked for
