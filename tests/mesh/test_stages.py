"""Checkpoints of pipelines: each stage has parameters of its own, and one checkpoint has those of all."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.mesh.test_checkpoints import contents, differing
from tests.optimizer.combined import outcome
from tests.ranks import Once
from zerox import FusedShardedAdam

LAYERS, WIDTH = 4, 20


class Layer(nn.Module):
    """``table``: a buffer that is the same in all layers of one name, unless it is told otherwise."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.register_buffer("table", torch.arange(5.0))

    def forward(self, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(x))


def layers() -> list[Layer]:
    torch.manual_seed(0)
    return [Layer() for _ in range(LAYERS)]


def groups(model: nn.Module, lr: float = 1e-2) -> list[dict[str, Any]]:
    named = list(model.named_parameters())
    return [
        {"params": [each for each in named if each[1].dim() > 1], "lr": lr},
        {"params": [each for each in named if each[1].dim() < 2], "lr": lr, "weight_decay": 0.0},
    ]


def step(model: nn.Module, optimizer: FusedShardedAdam, seed: int) -> None:
    """Without a schedule: what a stage gets is of no matter here."""
    for layer in model.children():
        layer(torch.randn(3, WIDTH, generator=torch.Generator().manual_seed(seed))).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def stage_of(numbers: list[int]) -> nn.ModuleDict:
    whole = layers()
    return nn.ModuleDict({str(number): whole[number] for number in numbers})


def trained(folder: Path, rank: int) -> dict[str, Any]:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    options: dict[str, Any] = {"process_group": mesh["dp"], "norm_group": mesh["pp"]}
    found: dict[str, Any] = {}

    own = stage_of([place, place + 2])  # interleaved
    optimizer = FusedShardedAdam(groups(own), **options)
    step(own, optimizer, 1)
    zerox.save(folder / "stages", own, optimizer, extra=7)

    whole = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers())})
    flat = FusedShardedAdam(groups(whole))
    found["extra"] = zerox.load(folder / "stages", whole, flat)
    zerox.save(folder / "whole", whole, flat)

    others = stage_of([2 * place, 2 * place + 1])
    again = FusedShardedAdam(groups(others), **options)
    step(others, again, 2)
    zerox.load(folder / "whole", others, again)
    zerox.save(folder / "again", others, again)
    if rank == 0:
        first = contents(folder / "stages")
        found["tensors"] = len(first)
        found["groups"] = len(torch.load(folder / "stages.pt", weights_only=True)["optimizer"]["param_groups"])
        found["differ"] = differing(first, contents(folder / "whole")) + differing(first, contents(folder / "again"))

    found["missing"] = outcome(lambda: zerox.load(folder / "stages", *with_one_more(place, options)))
    alike = nn.ModuleList(stage_of([place]).values())
    clash = FusedShardedAdam(groups(alike), **options)
    found["clash"] = outcome(lambda: zerox.save(folder / "clash", alike, clash))
    apart = folder / f"apart {place}"
    zerox.save(apart, alike, clash, process_group=mesh["dp"])
    zerox.load(apart, alike, clash, process_group=mesh["dp"])

    same = nn.ModuleDict({"shared": nn.BatchNorm1d(3, affine=False), f"own {place}": nn.Linear(3, 3)})
    normed = FusedShardedAdam(same.named_parameters(), **options)
    zerox.save(folder / "same buffers", same, normed)
    same["shared"].running_mean.add_(place)  # type: ignore[operator, union-attr]
    found["buffers"] = outcome(lambda: zerox.save(folder / "other buffers", same, normed))

    rates = FusedShardedAdam(groups(own, lr=1e-2 * (place + 1)), **options)
    zerox.save(folder / "rates", own, rates)
    zerox.load(folder / "rates", own, rates)
    found["rates"] = outcome(lambda: zerox.load(folder / "rates", whole, flat))
    return found


def with_one_more(place: int, options: dict[str, Any]) -> tuple[nn.Module, FusedShardedAdam]:
    model = stage_of([place, place + 2])
    model[f"late {place}"] = Layer()
    return model, FusedShardedAdam(groups(model), **options)


def run(rank: int, world_size: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        found = trained(Path(names[0]), rank)
        dist.barrier()
        return found


results = Once(run, 4, timeout_s=120)


def test_one_checkpoint_has_all_stages_and_any_others_load_it() -> None:
    found = results()[0]
    assert found["differ"] == []
    assert found["tensors"] == LAYERS * (3 + 2 * 3)  # a buffer and two parameters, each with a step and two moments
    assert found["groups"] == 2
    assert [each["extra"] for each in results()] == [7] * 4


@pytest.mark.parametrize(
    ("what", "message"),
    {
        "missing": "CheckpointError.*missing: model.late [01].linear.bias",
        "clash": "CheckpointError.*stages have 0.linear.bias, 0.linear.weight: .*whole model.*process_group=",
        "buffers": "CheckpointError.*stages have shared.running_mean: give each",
        "rates": r"CheckpointError.*parameters of param group 0 were saved in groups \[0, 1\]: their options differ",
    }.items(),
)
def test_what_would_be_lost_is_refused_on_all_ranks(what: str, message: str) -> None:
    for found in results():
        with pytest.raises(AssertionError, match=f"(?s){message}"):
            raise AssertionError(found[what])
