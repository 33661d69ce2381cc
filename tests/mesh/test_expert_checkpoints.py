"""One checkpoint has the experts of all ranks, by the names that they have in the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.mesh.expert_models import Mixture, Places, batch, groups, loss_of, own_part, twins
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

OPTIONS = {"lr": 1e-2, "weight_decay": 0.05}


def places_of() -> Places:
    return Places(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))


def step(model: nn.Module, optimizer: Any, number: int, x: Any, y: Any) -> None:
    loss_of(model, x, y).backward()
    optimizer.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()


def states(optimizer: Any) -> list[Any]:
    return [
        [value.own.tolist() for key, value in sorted(state.items())]
        for _, state in sorted(optimizer.state_dict()["state"].items())
    ]


def goes_on(rank: int, _: int, path: Path) -> list[bool]:
    places = places_of()
    model, _ = twins(places)
    optimizer = FusedShardedAdam(groups(model, places.edp), **OPTIONS)
    for number in range(3):
        step(model, optimizer, number, *map(own_part, batch(number)))
    zerox.save(path, model, optimizer, extra={"steps": 3})
    other, _ = twins(places)
    again = FusedShardedAdam(groups(other, places.edp), **OPTIONS)
    assert zerox.load(path, other, again) == {"steps": 3}
    same = [states(optimizer) == states(again)]
    for number in range(3, 5):
        for each, its in ((model, optimizer), (other, again)):
            step(each, its, number, *map(own_part, batch(number)))
    same += [torch.equal(p, q) for p, q in zip(model.parameters(), other.parameters(), strict=True)]
    # The whole model on each rank: experts are averaged over all ranks there.
    whole = Mixture()
    plain = FusedShardedAdam(whole.named_parameters(), **OPTIONS)
    zerox.load(path, whole, plain)
    zerox.save(path.with_name("whole"), whole, plain)
    back, _ = twins(places)
    optimizer = FusedShardedAdam(groups(back, places.edp), **OPTIONS)
    zerox.load(path.with_name("whole"), back, optimizer)
    zerox.load(path, model, again := FusedShardedAdam(groups(model, places.edp), **OPTIONS))
    same.append(states(optimizer) == states(again))
    theirs = dict(whole.named_parameters())
    same += [
        torch.equal(p, theirs[name]) and torch.equal(p, q)
        for (name, p), q in zip(model.named_parameters(), back.parameters(), strict=True)
    ]
    return same


def test_one_checkpoint_has_all_experts_and_any_division_loads_it(tmp_path: Path) -> None:
    for same in run_ranks(goes_on, 4, tmp_path / "saved"):
        assert all(same), same


def collides(rank: int, _: int, path: Path) -> list[str]:
    places = places_of()
    model = nn.ModuleDict({"expert": nn.Linear(4, 4)})  # which has another meaning on ranks 0 and 1
    optimizer = FusedShardedAdam([{"params": list(model.named_parameters()), "process_group": places.edp}])
    found = []
    for call in (
        lambda: zerox.save(path, model, optimizer),
        optimizer.full_state_dict,
        lambda: optimizer.full_state(next(model.parameters())),
        optimizer.join,
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return found


def test_experts_of_one_name_are_refused_and_so_is_what_has_one_parameter_of_a_number(tmp_path: Path) -> None:
    for saved, full, one, joined in run_ranks(collides, 4, tmp_path / "saved"):
        assert saved.startswith("CheckpointError: ")
        assert "expert.bias" in saved
        assert "give each the name that it has in the whole model" in saved
        assert full.startswith("NotImplementedError: zerox: full_state_dict()")
        assert one.startswith("NotImplementedError: zerox: full_grad(), full_state()")
        assert joined.startswith("NotImplementedError: inside join() does not go with a sub-group as process_group of")
    assert not (tmp_path / "saved").exists()
