"""What these tests share: zerox's gradients without its optimizer, models with awkward parameters, bits to compare."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from zerox import _C as C
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket, Member
from zerox.plan.buckets import ParamSpec, plan_buckets
from zerox.plan.stage import stage_of
from zerox.ranks.group import Ranks
from zerox.rules.adam import ADAM
from zerox.rules.rule import Rule

WHOLE = 1 << 40  # a bucket cap that everything fits in
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def bits_of(tensor: Tensor) -> Tensor:
    """The bit patterns of the elements in logical order, as integers: signs of zero and NaNs count."""
    return tensor.detach().contiguous().reshape(-1).view(BITS[tensor.element_size()])


def same_bits(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(bits_of(a), bits_of(b))


class GradsOfModel:
    """``Grads`` of some parameters, planned into buckets: what FusedShardedAdam builds, without the optimizer."""

    def __init__(
        self,
        ranks: Ranks,
        params: Sequence[nn.Parameter],
        cap_bytes: int,
        stage: int = 2,
        reduce_dtype: torch.dtype | None = None,
        rule: Rule = ADAM,
        group: Mapping[str, Any] = ADAM.defaults,
    ) -> None:
        self.grads = Grads(ranks, stage_of(stage), reduce_dtype)
        self.manager = self.grads.manager
        specs = [ParamSpec("", p.numel(), str(p.dtype), p.element_size()) for p in params]
        self.buckets = []
        for plan in plan_buckets(specs, ranks.size, cap_bytes):
            members = [Member(f"param {index}", params[index], 0, index) for index in plan.params]
            self.buckets.append(Bucket(plan, members, ranks.rank, rule, rule.wanted_states([group])))
            self.grads.add_bucket(self.buckets[-1])

    def sync(self) -> None:
        self.grads.sync(C.SyncPoint.STEP)

    def expect(self, expected: Sequence[Tensor | None]) -> None:
        """Asserts that the mean gradient of each parameter is the expected one, or that it has none.

        Looks at this rank's share; sync() first. Gradients of other kernels differ in rounding: 1e-6.
        """
        reduced = self.reduced()
        for index, bucket in enumerate(self.buckets):
            for segment in bucket.own_segments:
                want = expected[bucket.plan.params[segment.slot]]
                have = reduced.get((index, segment.slot))
                where = f"{bucket.members[segment.slot].name} {segment}"
                assert (have is None) == (want is None), f"{where}: {have} instead of {want}"
                if have is not None and want is not None:
                    part = want.reshape(-1)[segment.param_start : segment.param_start + segment.span.numel]
                    torch.testing.assert_close(
                        have.cpu(), part, rtol=1e-5, atol=1e-6, msg=lambda m, w=where: f"{w}: {m}"
                    )

    def reduced(self) -> dict[tuple[int, int], Tensor]:
        return reduced(self.grads, self.buckets)


def reduced(grads: Grads, buckets: Sequence[Bucket]) -> dict[tuple[int, int], Tensor]:
    """(bucket, slot) -> this rank's part of the mean gradient, for parameters that have one on any rank."""
    found = {}
    for index, bucket in enumerate(buckets):
        shard = grads.shard(index)
        present = grads.present(index).tolist()
        for row, segment in enumerate(bucket.own_segments):
            if present[row]:
                assert shard is not None
                found[index, segment.slot] = shard[segment.span.start : segment.span.stop].clone()
    return found


class Awkward(nn.Module):
    """Parameters that are tied, used twice, zero-dimensional, empty, transposed, channels-last, large, sometimes and
    never used. ``forward(x, extra)``: ``extra`` says whether the branch with ``sometimes`` is taken."""

    def __init__(self, dtype: torch.dtype, seed: int = 0) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)

        def values(*shape: int) -> Tensor:
            return torch.randn(*shape, generator=generator, dtype=torch.float64).mul(0.5).to(dtype)

        self.embedding = nn.Parameter(values(12, 10))  # tied: also the output's weight
        self.unused = nn.Parameter(values(7))
        self.wide = nn.Parameter(values(431, 10))  # 4,310 elements: may span shards
        self.narrow = nn.Parameter(values(10, 431))
        self.bias = nn.Parameter(values(431))
        self.twice = nn.Parameter(values(10, 10))
        self.transposed = nn.Parameter(values(10, 10).t())
        self.conv = nn.Parameter(values(2, 3, 2, 2).to(memory_format=torch.channels_last))
        self.scalar = nn.Parameter(values(1)[0])
        self.empty = nn.Parameter(values(0, 4))
        self.sometimes = nn.Parameter(values(10))

    def forward(self, x: Tensor, extra: bool) -> Tensor:
        hidden = self.embedding[x]
        hidden = F.linear(F.linear(hidden, self.wide, self.bias).sigmoid(), self.narrow)
        hidden = F.linear(F.linear(hidden, self.twice), self.twice)
        hidden = hidden @ self.transposed * self.scalar
        if extra:
            hidden = hidden + self.sometimes
        images = hidden.reshape(-1)[:75].reshape(1, 3, 5, 5).contiguous(memory_format=torch.channels_last)
        # Convolution by hand: not every dtype has one on the CPU.
        windows = images.unfold(2, 2, 1).unfold(3, 2, 1)
        convolved = torch.einsum("nchwij,ocij->nohw", windows, self.conv)
        return F.linear(hidden.tanh(), self.embedding).logsumexp(-1).sum() + convolved.sum() + self.empty.sum()


WIDTH = 64  # a weight of 4,096 elements: spread over ranks
LAYER_CAP = WIDTH * WIDTH * 4 + WIDTH * 4  # bytes: each layer of a Chain is a bucket


class Chain(nn.Module):
    """Linear layers in a row, each a bucket of its own under a small cap; registered first to last unless reversed."""

    def __init__(
        self, num_layers: int = 4, width: int = WIDTH, registered_backwards: bool = False, seed: int = 0
    ) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)  # not the global one: ranks may be threads
        layers = [nn.Linear(width, width) for _ in range(num_layers)]
        for layer in layers:
            for param in layer.parameters():
                param.data = torch.randn(param.shape, generator=generator) / width**0.5
        self.layers = nn.ModuleList(layers[::-1] if registered_backwards else layers)
        self.registered_backwards = registered_backwards
        self.width = width

    @property
    def in_execution_order(self) -> list[nn.Module]:
        return list(self.layers)[:: -1 if self.registered_backwards else 1]

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.in_execution_order:
            x = layer(x).tanh()
        return x


def input_of(rank: int, seed: int = 0, rows: int = 5, width: int = WIDTH) -> Tensor:
    generator = torch.Generator().manual_seed(1000 * seed + rank)
    return torch.randn(rows, width, generator=generator)


def mean_of(gradients: Sequence[Sequence[Tensor | None]]) -> list[Tensor | None]:
    """The ranks' gradients, absent ones as zero; None where all ranks have none."""
    means = []
    for per_rank in zip(*gradients, strict=True):
        there = [grad for grad in per_rank if grad is not None]
        means.append(torch.stack(there).sum(0) / len(per_rank) if there else None)
    return means


def gradients_of(model: nn.Module, *losses: Tensor) -> list[Tensor | None]:
    """What autograd alone gives for the sum of the losses."""
    grads = torch.autograd.grad(sum(losses), list(model.parameters()), allow_unused=True)
    return list(grads)


def message_of(function: Callable[[], object]) -> str:
    """The message of the RuntimeError that ``function`` raises, or "no error": to be compared by the test."""
    try:
        function()
    except RuntimeError as error:
        return str(error)
    return "no error"
