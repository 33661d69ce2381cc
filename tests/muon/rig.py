"""A training by Muon beside torch.optim.Muon's, which steps on the same mean gradients of matrices of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.optimizer.masters import half_away
from tests.optimizer.models import mean_over_ranks
from zerox import FusedShardedAdam, FusedShardedMuon
from zerox.engine import Engine

SHAPES: dict[str, tuple[int, ...]] = {
    "wide": (20, 36),
    "tall": (40, 12),
    "large": (66, 65),  # of 4,096 elements or more
    "one": (24, 24),
    "other": (24, 24),
    "transposed": (18, 30),
    "qkv": (36, 12),
    "heads": (24, 16),
    "experts": (3, 20, 16),
    "flat_experts": (2, 9, 14),
    "divided": (7, 32, 24),  # whose slices lie on all ranks
    "row": (1, 17),
    "unused": (5, 6),
    "bias": (7,),
}
OF_ADAM = ("bias",)
PARTS: dict[str, dict[str, Any]] = {"qkv": {"split_sizes": (12, 16, 8)}, "heads": {"num_heads": 4}}
CAP_MB = 0.01  # several buckets
OPTIONS: dict[str, Any] = {"lr": 0.03, "weight_decay": 0.2}


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            value = torch.randn(shape, generator=generator).to(dtype)
            self.register_parameter(name, nn.Parameter(value.t().contiguous().t() if name == "transposed" else value))

    def backward(self, rank: int, number: int) -> dict[str, Tensor]:
        """Returns the gradients of this rank. Some parameters have none, on this rank or on all."""
        found: dict[str, Tensor] = {}
        terms = []
        for index, (name, param) in enumerate(self.named_parameters()):
            generator = torch.Generator().manual_seed(1000 * rank + 20 * number + index)
            factor = torch.randn(param.shape, generator=generator).to(param)
            is_used = number == 2 if name == "unused" else not (name == "one" and (rank + number) % 2)
            if is_used:
                found[name] = factor
                terms.append((param * factor).float().sum())
        torch.stack(terms).sum().backward()
        return found


def groups_of(named: Sequence[tuple[str, Tensor]], options: Mapping[str, Any]) -> list[dict[str, Any]]:
    """By FusedShardedMuon or with "rule": "muon", in any case of Muon but for OF_ADAM."""
    whole = [(name, param) for name, param in named if name not in (*PARTS, *OF_ADAM)]
    parts = [{"params": [(name, param)], **PARTS[name], **options} for name, param in named if name in PARTS]
    rest = [(name, param) for name, param in named if name in OF_ADAM]
    adam = [{"params": rest, "rule": "adam", "lr": 0.01}] if rest else []
    return [{"params": whole, **options}, *parts, *adam]


def build(model: Model, by_rule: bool, options: Mapping[str, Any], **more: Any) -> Engine:
    groups = groups_of(list(model.named_parameters()), options)
    if by_rule:
        return FusedShardedAdam([{"rule": "muon", **group} for group in groups], bucket_cap_mb=CAP_MB, **more)
    return FusedShardedMuon(groups, bucket_cap_mb=CAP_MB, **more)


def matrices(name: str, tensor: Tensor) -> list[Tensor]:
    """Views: what Muon sees of a parameter, by itself."""
    stack = list(tensor) if tensor.dim() == 3 else [tensor]
    parts = PARTS.get(name, {})
    sizes = parts.get("split_sizes") or tensor.shape[-2] // parts.get("num_heads", 1)
    return [part for each in stack for part in each.split(sizes)]


def apart(ours: Tensor, theirs: Tensor) -> str:
    off, largest = (float(each.abs().max()) for each in (ours.double() - theirs.double(), theirs))
    return f"up to {off:.3g} apart, with values of up to {largest:.3g}"


class Twin:
    """torch's class on copies, of what 16-bit parameters have in float32.

    ``half_away``: from these they are rounded as those are that have a remainder, which shows in ties.
    """

    def __init__(self, model: Model, options: Mapping[str, Any], half_away: bool = False) -> None:
        self.half_away = half_away
        self.whole = {
            name: param.detach().float() if param.itemsize == 2 else param.detach().clone()
            for name, param in model.named_parameters()
            if name not in OF_ADAM
        }
        self.params = {name: [nn.Parameter(m.clone()) for m in matrices(name, p)] for name, p in self.whole.items()}
        self.optimizer = torch.optim.Muon([p for each in self.params.values() for p in each], **options)

    def step(
        self, grads: Mapping[str, Tensor], model: Model, world_size: int, clip: tuple[float, Tensor] | None
    ) -> None:
        """``clip``: as the norm was clipped, and what it was."""
        for name, param in model.named_parameters():
            mean = mean_over_ranks(grads.get(name), param, world_size)
            if mean is not None and name in self.params:
                for twin, part in zip(self.params[name], matrices(name, mean), strict=True):
                    twin.grad = part.to(twin.dtype).clone()
        of_all = [p for each in self.params.values() for p in each]
        if clip is not None:
            nn.utils.clip_grads_with_norm_(of_all, *clip)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def check(self, model: Model, where: str) -> None:
        params = dict(model.named_parameters())
        for name, twins in self.params.items():
            for ours, twin in zip(matrices(name, params[name].detach()), twins, strict=True):
                theirs = half_away(twin.detach()) if self.half_away else twin.detach().to(ours.dtype)
                assert same_bits(ours.contiguous(), theirs.contiguous()), f"{where}: {name}, {apart(ours, theirs)}"

    def state(self, name: str) -> Tensor:
        """The momenta of a parameter's matrices, one below the other."""
        states = [self.optimizer.state[param]["momentum_buffer"] for param in self.params[name]]
        return torch.cat([each.reshape(-1, each.shape[-1]) for each in states])


def train(
    rank: int, world_size: int, model: Model, twin: Twin, optimizer: Engine, steps: range, clip: float | None = None
) -> None:
    for number in steps:
        grads = model.backward(rank, number)
        norm = None if clip is None else optimizer.clip_grad_norm_(clip)
        optimizer.step()
        twin.step(grads, model, world_size, None if clip is None or norm is None else (clip, norm))
        with optimizer.whole():
            twin.check(model, f"step {number}")
        optimizer.zero_grad()
