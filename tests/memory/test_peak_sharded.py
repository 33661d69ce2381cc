"""The most bytes of a step with sharded parameters, from the allocator and the rooms of whole buckets."""

from __future__ import annotations

import gc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from bench.allocator import Allocator, build
from tests.lingering import await_lingering
from tests.memory.test_peak import WITHIN
from tests.mesh.test_two_levels import mesh_of
from tests.ranks import run_ranks
from tests.residency.rig import residents
from zerox import FusedShardedAdam, estimate, sparse_params
from zerox._C import most_room_bytes, room_bytes

MIB = 2**20
WIDTH, LAYERS = 512, 60
CAP_MB = 1  # the matrix of a layer, in float32: whether the wire keeps up is less than 2% then


class Deep(nn.Module):
    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=dtype) for _ in range(LAYERS))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x


class Tied(nn.Module):
    """The embedding, which is the head as well, has a third of the parameters."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.embedding = nn.Embedding(LAYERS // 2 * WIDTH, WIDTH, dtype=dtype)
        self.body = Deep(dtype)

    def forward(self, x: Tensor) -> Tensor:
        words = torch.arange(len(x))
        return F.linear(self.body(self.embedding(words)), self.embedding.weight)


class Behind(Tied):
    """The same, as the last parameter: what it leaves is more than the next buckets take."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__(dtype)
        self.embedding = self._modules.pop("embedding")  # type: ignore[assignment]


def frozen(dtype: torch.dtype) -> nn.Module:
    model = Deep(dtype)
    for layer in model.layers[:-1]:
        layer.requires_grad_(False)
    return model


MODELS: dict[str, Callable[[torch.dtype], nn.Module]] = {"deep": Deep, "tied": Tied, "99% frozen": frozen}


def free_what_is_left() -> None:
    """Shards of a deleted optimizer are freed when the next one is built, once all ranks have deleted theirs."""
    gc.collect()
    await_lingering()
    FusedShardedAdam([nn.Parameter(torch.ones(1))], stage=3)
    dist.barrier()


def peaks(rank: int, world_size: int, library: Path, name: str, dtype: torch.dtype) -> list[tuple[str, int, int, int]]:
    """For each limit the peak of a step, and the estimate's bounds."""
    allocator = Allocator(library)
    found = []
    sizes = [param.nbytes / MIB for param in MODELS[name](dtype).parameters()]
    least = max(*sizes, CAP_MB)
    for limit in (least, max(least, sum(sizes) / 4), sum(sizes) / 2, float("inf")):
        free_what_is_left()
        base = allocator.now
        torch.manual_seed(0)
        model = MODELS[name](dtype)
        options: dict[str, Any] = {"stage": 3, "resident_mb": limit, "bucket_cap_mb": CAP_MB}
        optimizer = FusedShardedAdam(model.named_parameters(), **options)

        def step(model: nn.Module = model, optimizer: FusedShardedAdam = optimizer) -> None:
            model(torch.ones(1, WIDTH, dtype=dtype)).float().square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()

        step()
        most_room_bytes()
        peak = allocator.peak_of(step) - base + most_room_bytes()
        formula = estimate(model.parameters(), world_size, **options)
        found.append((f"{limit:.1f} MiB", peak, formula.typical_peak, formula.peak))
        del model, optimizer, step
    return found


def rows(dtype: torch.dtype) -> nn.Module:
    """A third of the parameters are a table."""
    model = Tied(dtype)
    model.embedding.sparse = True
    return model


CONSTRUCTED = {**MODELS, "rows": rows, "the largest behind": Behind}


def peaks_of_constructor(
    rank: int, world_size: int, library: Path, name: str, options: dict[str, Any], *mesh: int
) -> list[tuple[str, int, float, int, float]]:
    """For each limit the most bytes of rooms, and the limit; the allocator's peak, and what it may be at most."""
    allocator = Allocator(library)
    dtype = options["dtype"]
    given = {key: value for key, value in options.items() if key != "dtype"}
    if mesh:
        given["process_group"] = mesh_of(*mesh)
    found = []
    sizes = [param.nbytes / MIB for param in CONSTRUCTED[name](dtype).parameters()]
    least = max(CAP_MB, *(0 if name == "rows" and size == max(sizes) else size for size in sizes))
    for limit in (least, max(least, sum(sizes) / 4), float("inf")):
        free_what_is_left()
        base = allocator.now
        torch.manual_seed(rank)
        model = CONSTRUCTED[name](dtype)
        before = allocator.now - base
        tables = sparse_params(model)
        groups = [{"params": [p for p in model.parameters() if not any(p is t for t in tables)]}]
        groups += [{"params": tables, "sparse": True, "weight_decay": 0.0}] if tables else []
        made = []

        def make(groups: Any = groups, made: Any = made, limit: float = limit) -> None:
            made.append(FusedShardedAdam(groups, stage=3, resident_mb=limit, bucket_cap_mb=CAP_MB, **given))

        rooms = room_bytes()
        most_room_bytes()
        peak = allocator.peak_of(make) - base
        whole = most_room_bytes() - rooms
        bytes_of = made[0].memory_bytes()
        own = bytes_of.parameters - residents(made[0]).room_bytes
        of_tables = sum(each.nbytes for table in made[0].inside.tables for each in table.kept.values())
        # State of a bucket comes when its parameters have gone; of a table before.
        most = max(before, bytes_of.master + bytes_of.moments) + of_tables + own + 2 * max(CAP_MB, least) * MIB
        found.append((f"{limit:.1f} MiB", whole, limit * MIB, peak, most))
        del model, tables, groups, made, make
    return found


CONSTRUCTIONS: list[tuple[str, dict[str, Any], tuple[int, ...]]] = [
    ("deep", {"dtype": torch.float32}, ()),
    ("deep", {"dtype": torch.bfloat16, "state_dtype": "8bit"}, ()),
    ("tied", {"dtype": torch.float32}, ()),
    ("99% frozen", {"dtype": torch.float32}, ()),
    ("rows", {"dtype": torch.float32}, ()),
    ("the largest behind", {"dtype": torch.float32}, ()),
    ("deep", {"dtype": torch.float32}, (2, 2)),
]


@pytest.mark.parametrize(("name", "options", "mesh"), CONSTRUCTIONS)
def test_the_limit_holds_in_the_constructor_too(name: str, options: dict[str, Any], mesh: tuple[int, ...]) -> None:
    """Beside the model, which is there before."""
    for told in run_ranks(peaks_of_constructor, 4 if mesh else 2, build(), name, options, *mesh)[0]:
        limit, whole, allowed, peak, most = told
        assert whole <= allowed, limit
        assert peak <= (1 + WITHIN) * most, f"{limit}: {peak / MIB:.1f} MiB, and not {most / MIB:.1f}"


KINDS = [("deep", torch.float32), ("deep", torch.bfloat16), ("tied", torch.float32), ("99% frozen", torch.float32)]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_the_peak_of_a_step_is_the_estimate_at_every_limit(name: str, dtype: torch.dtype) -> None:
    """Of a tied weight autograd holds both gradients and their sum, of which the estimate knows one. By the time that
    the shard is there, the others are gone."""
    tied = MODELS[name](dtype).embedding.weight.nbytes if name == "tied" else 0  # type: ignore[union-attr]
    for limit, peak, typical, most in run_ranks(peaks, 2, build(), name, dtype)[0]:
        low, high = typical + 2 * tied - tied // 2, most + 2 * tied
        told = f"{limit}: {peak / MIB:.1f} MiB, and not {low / MIB:.1f} to {high / MIB:.1f}"
        assert (1 - WITHIN) * low <= peak <= (1 + WITHIN) * high, told
        assert most <= (1 + WITHIN) * typical or tied
