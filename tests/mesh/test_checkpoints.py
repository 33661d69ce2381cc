"""Checkpoints of parameters that are DTensors, by global names and shapes: saved in one layout, loaded in another.

All cases are run by the same four processes.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import tempfile
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict
from torch.distributed.device_mesh import DeviceMesh

import zerox
from tests.mesh.parallel_models import Net, batch, cut, loss_of, whole
from tests.ranks import Once, run_ranks
from zerox import FusedShardedAdam
from zerox.checkpoint.convert import convert_file

# (data-parallel ranks, tensor-parallel ranks); one tensor-parallel rank has a plain model.
LAYOUTS = {"2x2": (2, 2), "4x1": (4, 1), "1x2": (1, 2), "1x4": (1, 4), "1x1": (1, 1)}


@dataclass(frozen=True)
class Case:
    sequence: bool = True
    model: dict[str, Any] = field(default_factory=lambda: {"scaled": False, "bias": True})
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


CASES = {
    "plain": Case(),
    "uneven": Case(sequence=False, model={"hidden": 7}),
    "empty on some": Case(sequence=False, model={"hidden": 3}),
    "masters": Case(dtype=torch.bfloat16),
    "float32 masters": Case(dtype=torch.bfloat16, options={"master_weights": "fp32"}),
    "stage 1, small buckets": Case(options={"stage": 1, "bucket_cap_mb": 0.001}),
    "stage 3": Case(options={"stage": 3, "bucket_cap_mb": 0.001}),
    "amsgrad": Case(options={"amsgrad": True}),
}
CODED = Case(model={"scaled": False, "hidden": 1056}, options={"state_dtype": "8bit"})


@dataclass
class Built:
    net: Net
    optimizer: FusedShardedAdam
    dp: DeviceMesh | None


@functools.cache
def mesh_of(layout: str) -> DeviceMesh:
    size = LAYOUTS[layout]
    return DeviceMesh("cpu", torch.arange(size[0] * size[1]).view(size), mesh_dim_names=("dp", "tp"))


def built(layout: str, case: Case) -> Built | None:
    """None on a rank that the layout does not have."""
    dp, tp = LAYOUTS[layout]
    mesh = mesh_of(layout)
    if dist.get_rank() >= dp * tp:
        return None
    torch.manual_seed(0)
    net = Net(**case.model).to(case.dtype)
    if tp > 1:
        cut(net, mesh["tp"], case.sequence)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="zerox: .* replicated over axis")
        optimizer = FusedShardedAdam(net.named_parameters(), lr=1e-2, process_group=mesh["dp"], **case.options)
    return Built(net, optimizer, mesh["dp"])


def trained(made: Built, steps: range) -> None:
    assert made.dp is not None
    for step in steps:
        part = batch(step).chunk(made.dp.size())[made.dp.get_local_rank()]
        loss_of(made.net, part, with_idle=step == 1).backward()
        made.optimizer.clip_grad_norm_(0.5)
        made.optimizer.step()
        made.optimizer.zero_grad()


def contents(checkpoint: Path) -> dict[str, Tensor]:
    """All of the model's and the optimizer's tensors, whole, by name."""
    target = checkpoint.with_suffix(".pt")
    target.unlink(missing_ok=True)
    convert_file(checkpoint, target, weights=False, fp32=False, keys=("model", "optimizer"))
    found = torch.load(target, weights_only=True)
    named = dict(enumerate(name for group in found["optimizer"]["param_groups"] for name in group["param_names"]))
    state = {f"{named[n]}.{key}": value for n, own in found["optimizer"]["state"].items() for key, value in own.items()}
    return {**found["model"], **state}


def differing(one: dict[str, Tensor], other: dict[str, Tensor]) -> list[str]:
    return [
        name
        for name in sorted(one.keys() | other.keys())
        if name not in one or name not in other or not torch.equal(one[name], other[name])
    ]


@contextlib.contextmanager
def shared_folder() -> Iterator[Path]:
    """Meshes are forgotten at its end: these processes run other tests, with other groups."""
    mesh_of.cache_clear()
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        try:
            yield Path(names[0])
            dist.barrier()
        finally:
            mesh_of.cache_clear()


def saved(folder: Path, layout: str, case: Case) -> Path:
    """A checkpoint after two steps, and beside it one after two more steps."""
    path = folder / f"saved {layout}"
    if made := built(layout, case):
        trained(made, range(2))
        zerox.save(path, made.net, made.optimizer, extra={"layout": layout})
        trained(made, range(2, 4))
        zerox.save(folder / f"later {layout}", made.net, made.optimizer)
    dist.barrier()
    return path


def reloaded(folder: Path, source: Path, layout: str, case: Case, later: bool = False) -> Path:
    """What is saved again by ranks of another layout, which had trained something else."""
    path = folder / f"{source.name} in {layout}{' later' * later}"
    if made := built(layout, case):
        trained(made, range(7, 8))
        assert zerox.load(source, made.net, made.optimizer)["layout"] in LAYOUTS
        if later:
            trained(made, range(2, 4))
        zerox.save(path, made.net, made.optimizer)
    dist.barrier()
    return path


def ways_of(name: str) -> list[tuple[str, str]]:
    """From which layout to which. In the plain case one that is cut on both axes loads each and is loaded by each, each
    loads its own, and those that are cut by all ranks on one axis load each other's, of which no cut is the same. In
    others each is saved and loaded once, in turn."""
    if name == "plain":
        pairs = itertools.product(LAYOUTS, LAYOUTS)
        return [(a, b) for a, b in pairs if "2x2" in (a, b) or a == b or {a, b} == {"4x1", "1x4"}]
    return [("2x2", "4x1"), ("4x1", "1x2"), ("1x2", "2x2")]


def matrix(rank: int, world_size: int, asked: dict[str, Case]) -> dict[str, dict[str, list[str]]]:
    """By case and "from to to": names of tensors that are not bit-equal."""
    found: dict[str, dict[str, list[str]]] = {}
    with shared_folder() as shared:
        for number, (name, case) in enumerate(asked.items()):
            layouts = list(dict.fromkeys(source for source, _ in ways_of(name)))
            folder = shared / str(number)
            folder.mkdir(exist_ok=True)
            first = {layout: saved(folder, layout, case) for layout in layouts}
            again = {way: reloaded(folder, first[way[0]], way[1], case) for way in ways_of(name)}
            going_on = layouts if name == "plain" else layouts[:1]
            later = {layout: reloaded(folder, first[layout], layout, case, later=True) for layout in going_on}
            if rank == 0:
                known = {layout: contents(path) for layout, path in first.items()}
                found[name] = {f"{a} to {b}": differing(known[a], contents(path)) for (a, b), path in again.items()}
                for layout, path in later.items():
                    kept = contents(folder / f"later {layout}")
                    found[name][f"{layout} goes on"] = differing(kept, contents(path))
                assert len(known[layouts[0]]) > 20
    return found


results = Once(matrix, 4, CASES, timeout_s=300)  # three minutes on slow cores


@pytest.mark.parametrize("name", CASES)
def test_any_layout_loads_what_another_saved_bit_for_bit(name: str) -> None:
    found = results()[0]
    assert {way: names for way, names in found[name].items() if names} == {}
    assert len(found[name]) == len(ways_of(name)) + (len(LAYOUTS) if name == "plain" else 1)


def coded(rank: int, world_size: int) -> dict[str, Any]:
    """8-bit state: rows are cut between its blocks, columns through them."""
    found: dict[str, Any] = {}
    with shared_folder() as folder:
        first = {layout: saved(folder, layout, CODED) for layout in ("2x2", "4x1")}
        for source, target in itertools.product(first, ("2x2", "4x1", "1x2")):
            with warnings.catch_warnings(record=True) as said:
                warnings.simplefilter("always")
                path = reloaded(folder, first[source], target, CODED)
            everyone: list[Any] = [None] * world_size
            dist.all_gather_object(everyone, [str(each.message) for each in said if "rounded" in str(each.message)])
            if rank == 0:
                one, other = contents(first[source]), contents(path)
                far = {name: float((one[name] - other[name]).abs().max() / one[name].abs().max()) for name in one}
                found[f"{source} to {target}"] = any(everyone), differing(one, other), max(far.values())
    return found


def test_blocks_that_are_cut_are_encoded_anew_and_others_stay() -> None:
    found = run_ranks(coded, 4, timeout_s=120)[0]
    cut_ones = {f"blocks.{n}.down.weight.{key}" for n in (0, 1) for key in ("exp_avg", "exp_avg_sq")}
    assert found.keys() == {f"{a} to {b}" for a in ("2x2", "4x1") for b in ("2x2", "4x1", "1x2")}
    for case in ("2x2 to 2x2", "2x2 to 1x2", "4x1 to 4x1"):
        assert found[case] == (False, [], 0.0), case
    for case in ("2x2 to 4x1", "4x1 to 2x2", "4x1 to 1x2"):
        rounded, differ, far = found[case]
        assert rounded, case
        assert set(differ) == cut_ones, case
        assert 0 < far < 0.02, (case, far)


# ---- torch's own form


def full(rank: int, world_size: int) -> list[str]:
    """full_state_dict(), state_dict() and one parameter's calls, beside a checkpoint's whole tensors."""
    wrong = []
    case = CASES["plain"]
    with shared_folder() as folder:
        made = built("2x2", case)
        assert made is not None
        trained(made, range(2))
        loss_of(made.net, batch(2).chunk(2)[rank // 2]).backward()
        net, optimizer = made.net, made.optimizer
        wrong += check_grads(net, optimizer)
        optimizer.clip_grad_norm_(0.5)
        optimizer.step()
        zerox.save(folder / "x", net, optimizer)
        found = [optimizer.full_state_dict(to) for to in (0, 1)]
        here = [bool(each) for each in found]
        if here != [rank == 0, rank == 2]:
            wrong.append(f"rank {rank} has {here}")
        optimizer.consolidate_state_dict()
        if rank == 0:
            found.append(optimizer.state_dict())
        for param in net.parameters():
            state = optimizer.full_state(param)
            optimizer.set_full_state_(param, exp_avg=state["exp_avg"].clone(), step=int(state["step"]))
        states = {name: optimizer.full_state(param) for name, param in net.named_parameters()}
        known = contents(folder / "x") if rank == 0 else {}
        everyones: list[Any] = [known]
        dist.broadcast_object_list(everyones)
        known = everyones[0]
        for name, state in states.items():
            wrong += [
                f"full_state of {name}.{key}" for key in state if not torch.equal(state[key], known[f"{name}.{key}"])
            ]
        for state in (each for each in found if each):
            for group in state["param_groups"]:
                for number, name in zip(group["params"], group["param_names"], strict=True):
                    own = state["state"][number]
                    wrong += [f"{name}.{key}" for key in own if not torch.equal(own[key].cpu(), known[f"{name}.{key}"])]
        # Into another model that is cut, from whole tensors and from this rank's own.
        of_rank_0: list[Any] = [found[0]]
        dist.broadcast_object_list(of_rank_0)
        for index, state in enumerate((of_rank_0[0], optimizer.state_dict())):
            other = built("2x2", case)
            assert other is not None
            trained(other, range(7, 8))
            other.net.load_state_dict(net.state_dict())
            other.optimizer.load_state_dict(state)
            zerox.save(path := folder / f"other {index}", other.net, other.optimizer)
            if rank == 0:
                wrong += differing(known, contents(path))
    return wrong


def by_torch(rank: int, world_size: int) -> list[str]:
    """torch.distributed.checkpoint saves what its own getters return at 2x2, and loads it into whole parameters."""
    wrong = []
    with shared_folder() as folder:
        for layout in ("2x2", "4x1"):
            made = built(layout, CASES["plain"])
            assert made is not None
            trained(made, range(2) if layout == "2x2" else range(7, 8))
            state = {"optimizer": get_optimizer_state_dict(made.net, made.optimizer), "model": made.net.state_dict()}
            if layout == "2x2":
                dcp.save(state, checkpoint_id=folder / "dcp")
            else:
                dcp.load(state, checkpoint_id=folder / "dcp")
                set_optimizer_state_dict(made.net, made.optimizer, state["optimizer"])
                made.net.load_state_dict(state["model"])
            zerox.save(folder / layout, made.net, made.optimizer)
        if rank == 0:
            wrong = differing(contents(folder / "2x2"), contents(folder / "4x1"))
    return wrong


def test_torchs_own_checkpoints_hold_it_too() -> None:
    assert run_ranks(by_torch, 4, timeout_s=120)[0] == []


def check_grads(net: Net, optimizer: FusedShardedAdam) -> list[str]:
    """Beside those of the whole model."""
    twin = Net(**CASES["plain"].model)
    twin.load_state_dict({name: whole(tensor) for name, tensor in net.state_dict().items()})
    loss_of(twin, batch(2)).backward()
    wrong = []
    for (name, param), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        grad = optimizer.full_grad(param)
        if grad is None or other.grad is None:
            wrong += [name] * (grad is not other.grad)
        elif not torch.allclose(grad, other.grad, rtol=1e-4, atol=1e-6):
            wrong.append(f"full_grad of {name} is off by {float((grad - other.grad).abs().max())}")
    return wrong


def test_whole_state_and_gradients_in_torchs_form() -> None:
    assert run_ranks(full, 4, timeout_s=120) == [[]] * 4
