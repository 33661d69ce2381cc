"""A weight that two pipeline stages share: Note [Tied pipeline stages] in zerox/ranks/ties.py."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from tests.ranks import Once, run_ranks
from zerox import FusedShardedAdam

VOCABULARY, WIDTH = 40, 300


def stage(place: int, seed: int, **modules: nn.Module) -> nn.ModuleDict:
    torch.manual_seed(seed)
    return nn.ModuleDict({"layer": nn.Linear(WIDTH, WIDTH), "norm": nn.LayerNorm(WIDTH), **modules})


def embedding(seed: int = 9) -> nn.Embedding:
    torch.manual_seed(seed)
    return nn.Embedding(VOCABULARY, WIDTH)


def frozen(module: nn.Module) -> nn.Module:
    return module.requires_grad_(False)


def counted(width: int) -> nn.ParameterList:
    """By a formula, as some rules of decay and some tables of positions start."""
    return nn.ParameterList(nn.Parameter(torch.arange(1.0, width)) for _ in range(2))


# What each stage has, as of its place; zeros and ones are in all of them.
STAGES: dict[str, Callable[[int], nn.ModuleDict]] = {
    "tied": lambda place: stage(place, place, **{("embed", "head")[place]: embedding()}),
    "tied under one name": lambda place: stage(place, place, embed=embedding()),
    "tied and unequal in the end": lambda place: stage(place, place, embed=embedding(place)),
    "seeded alike": lambda place: stage(place, 3),
    "frozen on one": lambda place: stage(place, place, embed=frozen(embedding()) if place else embedding()),
    "of a formula": lambda place: stage(place, place, decay=counted(WIDTH)),
    "of other shapes": lambda place: stage(place, place, one=nn.Embedding(2 + place, WIDTH)),
}
SAID = {
    "tied": "parameter 'embed.weight' of rank 0 has the values of 'head.weight' of rank 2. If",
    "tied under one name": "parameter 'embed.weight' of rank 0 has the values of 'embed.weight' of rank 2. If",
    "seeded alike": "'layer.weight' of rank 0 has the values of 'layer.weight' of rank 2, and 1 more have others'",
}


def mesh_of() -> DeviceMesh:
    return init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))


def build(mesh: DeviceMesh, model: nn.Module) -> FusedShardedAdam:
    return FusedShardedAdam(model.named_parameters(), process_group=mesh["dp"], norm_group=mesh["pp"])


def warnings_of(rank: int, _: int) -> dict[str, list[str]]:
    mesh = mesh_of()
    found = {}
    for name, make in STAGES.items():
        model = make(mesh["pp"].get_local_rank())
        with torch.no_grad():
            for param in model.parameters():
                param.add_(rank % 2)  # rank 0 of each stage says what it is
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            build(mesh, model)
        found[name] = [str(each.message) for each in caught if "zerox" in str(each.message)]
    return found


found = Once(warnings_of, 4)


@pytest.mark.parametrize("name", STAGES)
def test_a_weight_of_two_stages_is_named_once(name: str) -> None:
    of_first, *of_others = (of_rank[name] for of_rank in found())
    assert of_others == [[], [], []]
    if name in SAID:
        assert len(of_first) == 1
        assert SAID[name] in of_first[0]
        assert "keep it on one stage, or add p.grad up over both inside no_sync()" in of_first[0]
    else:
        assert of_first == []


def distance_from_one_weight(rank: int, _: int, adds: bool) -> float:
    """Of a tied weight from AdamW's, where both stages' gradients are added up by hand, as the warning says."""
    mesh = mesh_of()
    place = mesh["pp"].get_local_rank()
    model = embedding()
    whole = embedding()
    optimizer = build(mesh, model)
    reference = torch.optim.AdamW(whole.parameters(), lr=1e-3)
    for step in range(4):
        torch.manual_seed(step)
        x = torch.randn(4, VOCABULARY, WIDTH)  # what each rank multiplies the weight by
        with optimizer.no_sync():
            (model.weight * x[rank]).sum().backward()
            if adds:
                dist.all_reduce(model.weight.grad, group=mesh.get_group("pp"))
        optimizer.step()
        optimizer.zero_grad()
        whole.weight.grad = x.sum(0) / 2
        reference.step()
    assert place == rank // 2
    return float((model.weight - whole.weight).detach().abs().max())


def test_gradients_added_up_by_hand_train_one_weight() -> None:
    assert max(run_ranks(distance_from_one_weight, 4, True)) < 1e-6
    assert min(run_ranks(distance_from_one_weight, 4, False)) > 1e-3
