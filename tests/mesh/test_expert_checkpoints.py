"""One checkpoint has the experts of all ranks, by the names that they have in the whole model."""

from __future__ import annotations

import warnings
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
        optimizer.join,
    ):
        try:
            call()
        except Exception as error:
            found.append(f"{type(error).__name__}: {error}")
    dist.barrier()
    return found


def test_experts_of_one_name_are_refused_and_so_is_join(tmp_path: Path) -> None:
    for saved, joined in run_ranks(collides, 4, tmp_path / "saved"):
        assert saved.startswith("CheckpointError: ")
        assert "expert.bias" in saved
        assert "give each the name that it has in the whole model" in saved
        assert joined.startswith(
            "NotImplementedError: zerox: inside join() does not go with a param group on a sub-group"
        )
    assert not (tmp_path / "saved").exists()


def in_full(rank: int, world_size: int, path: Path) -> dict[str, Any]:
    """What calls for whole tensors say of a rank's own experts, beside the same of the whole model on each rank."""
    places = places_of()
    model, _ = twins(places)
    optimizer = FusedShardedAdam(groups(model, places.edp), **OPTIONS)
    for number in range(2):
        step(model, optimizer, number, *map(own_part, batch(number)))
    zerox.save(path, model, optimizer)
    whole = Mixture()
    plain = FusedShardedAdam(whole.named_parameters(), process_group="alone", **OPTIONS)
    zerox.load(path, whole, plain)
    params, theirs = dict(model.dense + model.own), dict(whole.named_parameters())
    found: dict[str, Any] = {"same": []}

    def compare(name: str, state: dict[str, Any]) -> None:
        of_whole = plain.full_state(theirs[name])
        found["same"] += [state.keys() == of_whole.keys()]
        found["same"] += [torch.equal(state[key].reshape(of_whole[key].shape), of_whole[key]) for key in of_whole]

    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        dicts = [optimizer.full_state_dict(to=each) for each in range(world_size)]
    found["said"] = [str(each.message) for each in said]
    found["where"] = [Path(each.filename).name for each in said]
    found["dicts"] = [bool(each) for each in dicts]
    for name, state in zip(params, dicts[rank]["state"].values(), strict=True):
        compare(name, state)
    for name, p in params.items():
        compare(name, optimizer.full_state(p))
    again = FusedShardedAdam(groups(twins(places)[0], places.edp), **OPTIONS)
    again.load_state_dict(dicts[rank])
    found["same"].append(states(again) == states(optimizer))
    # Gradients and setters, of the last expert of each rank.
    x, y = batch(2)
    loss_of(model, own_part(x), own_part(y)).backward()
    loss_of(whole, x, y).backward()
    name, expert = model.own[-1]
    torch.testing.assert_close(optimizer.full_grad(expert), plain.full_grad(theirs[name]), rtol=1e-5, atol=1e-7)
    value = torch.full_like(expert, 1.0 + int(name.split(".")[1]))
    optimizer.set_full_grad_(expert, value)
    optimizer.set_full_state_(expert, exp_avg=value, step=7)
    found["same"] += [torch.equal(optimizer.full_grad(expert), value)]
    found["same"] += [torch.equal(optimizer.full_state(expert)["exp_avg"], value)]
    found["same"] += [int(optimizer.full_state(expert)["step"]) == 7]
    for wrong in (
        lambda: optimizer.full_grad(expert if rank else model.dense[0][1]),
        lambda: optimizer.set_full_grad_(expert, value + (rank == 3)),
    ):
        try:
            wrong()
        except ValueError as error:
            found.setdefault("errors", []).append(str(error))
    return found


def test_calls_for_whole_tensors_have_the_experts_of_the_rank_that_asks(tmp_path: Path) -> None:
    for rank, found in enumerate(run_ranks(in_full, 4, tmp_path / "saved")):
        assert all(found["same"]), found["same"]
        assert found["dicts"] == [each == rank for each in range(4)]
        (said,) = found["said"]
        assert found["where"] == [Path(__file__).name]
        assert f"whole state of rank {rank} has its own experts only" in said
        assert f"for the ranks [{1 - rank % 2}] has the others'" in said
        other, values = found["errors"]
        assert "full_grad() of parameter" in other
        assert "full_grad() of a parameter of param group 1" in other
        assert "with values of digest" in values
