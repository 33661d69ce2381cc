"""State of a class of torch's kind: into checkpoints and out of them, at any number of ranks, and to torch and back."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    set_optimizer_state_dict,
)

import zerox
from tests.kernels.shards import same_bits
from tests.local_optimizers.classes import PythonNumbers
from tests.local_optimizers.test_bits import ALL, Pair
from tests.optimizer.models import backward, batch, make_model
from tests.ranks import run_ranks
from zerox import ShardedOptimizer
from zerox.checkpoint.entries import entries
from zerox.checkpoint.names import parameter_names

# What is kept: nothing, tensors, tensors and numbers, state that begins in the constructor, numbers of every kind.
KINDS = [
    ("SGD", torch.float32),
    ("SGD, momentum", torch.bfloat16),
    ("NAdam", torch.float32),
    ("Adagrad", torch.float32),
    ("ASGD", torch.bfloat16),
    ("Python's numbers", torch.float32),
    ("counting", torch.float32),
]
Kind = tuple[str, torch.dtype]


def shared(value: Any) -> Any:
    """Rank 0's, on all ranks."""
    found = [value]
    dist.broadcast_object_list(found)
    return found[0]


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor) and isinstance(other, Tensor):
        return same_bits(one, other)
    return type(one) is type(other) and bool(one == other)


def same_state(one: dict[str, Any], other: dict[str, Any]) -> bool:
    return one["state"].keys() == other["state"].keys() and all(
        state.keys() == other["state"][number].keys()
        and all(same(value, other["state"][number][key]) for key, value in state.items())
        for number, state in one["state"].items()
    )


def follow_on(pair: Pair, full: dict[str, Any]) -> None:
    """The class unsharded loads the whole state, and has the same bits in all that follows."""
    pair.theirs.load_state_dict(copy.deepcopy(full))
    for number, (param, twin) in enumerate(pair.twins.items()):
        state = full["state"].get(number, {})
        twin.data.copy_(state["master"] if "master" in state else param.detach())
        for key in (
            "master",
            *([] if "step" in state and pair.ours.inside.rules.default.optimizer_class.step else ["step"]),
        ):
            pair.theirs.state[twin].pop(key, None)  # which zerox has in addition
        if not pair.theirs.state[twin]:
            del pair.theirs.state[twin]
    pair.check("loaded")
    for step in (2, 3):
        pair.step(step, branch=step == 3)


def save(rank: int, world_size: int, kinds: list[Kind], folder: str) -> list[dict[str, Any]]:
    found = []
    for index, (name, dtype) in enumerate(kinds):
        pair = Pair(rank, world_size, name, dtype, stage=1)
        for step in range(2):
            pair.step(step, branch=False)
        zerox.save(Path(folder) / str(index), pair.model, pair.ours)
        found.append(pair.ours.full_state_dict())
    return found


def load(rank: int, world_size: int, kinds: list[Kind], folder: str) -> list[dict[str, Any]]:
    found = []
    for index, (name, dtype) in enumerate(kinds):
        pair = Pair(rank, world_size, name, dtype)
        pair.step(7, branch=True)  # what is loaded replaces whatever there was
        zerox.load(Path(folder) / str(index), pair.model, pair.ours)
        full = pair.ours.full_state_dict()
        follow_on(pair, shared(full))
        found.append(full)
    return found


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 1)])
def test_a_checkpoint_loads_bit_for_bit_at_any_number_of_ranks(saved_by: int, loaded_by: int, tmp_path: Path) -> None:
    saved = run_ranks(save, saved_by, KINDS, str(tmp_path))[0]
    loaded = run_ranks(load, loaded_by, KINDS, str(tmp_path))[0]
    for (name, _), then, now in zip(KINDS, saved, loaded, strict=True):
        assert same_state(then, now), name
        numbers = {float(state["step"]) for state in then["state"].values()}
        assert numbers == {2}, "the branch and the unused layer have none"


def load_bytes(rank: int, world_size: int, folder: str) -> dict[str, Any]:
    """On as many ranks as saved it also from each one's state_dict()."""
    pair = Pair(rank, world_size, "bytes", torch.float32)
    zerox.load(Path(folder) / "0", pair.model, pair.ours)
    full, share = pair.ours.full_state_dict(), pair.ours.state_dict()
    other = Pair(rank, world_size, "bytes", torch.float32)
    other.step(7, branch=True)
    other.ours.load_state_dict(share)
    assert same_state(shared(other.ours.full_state_dict()), shared(full))
    assert all(each.state["count"].values.dtype is torch.uint8 for each in other.ours.inside.buckets)
    return full


def test_state_of_bytes_is_not_taken_for_codes(tmp_path: Path) -> None:
    saved = run_ranks(save, 2, [("bytes", torch.float32)], str(tmp_path))[0][0]
    for loaded_by in (2, 3):
        assert same_state(run_ranks(load_bytes, loaded_by, str(tmp_path))[0], saved)


@pytest.mark.parametrize(("then", "now"), [(None, None), (None, "auto"), ("auto", None)])
def test_state_of_float16_parameters_loads_with_and_without_masters(then: Any, now: Any, tmp_path: Path) -> None:
    def built(master_weights: Any) -> tuple[nn.Module, ShardedOptimizer]:
        model = nn.Linear(9, 5).half()
        options: dict[str, Any] = {"momentum": 0.5, "lr": 0.125, "master_weights": master_weights}
        return model, ShardedOptimizer(model.parameters(), torch.optim.SGD, **options)

    model, optimizer = built(then)
    model(torch.full((2, 9), 0.5, dtype=torch.float16)).sum().backward()
    optimizer.step()
    zerox.save(tmp_path / "x", model, optimizer)
    other, loaded = built(now)
    zerox.load(tmp_path / "x", other, loaded)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        kept = [each.full_state(param)["momentum_buffer"] for each, param in ((optimizer, one), (loaded, two))]
        assert torch.equal(*kept)
        assert bool(kept[0].any())


def whole(rank: int, world_size: int, kinds: list[Kind]) -> None:
    """full_state_dict() to torch and back, and state_dict() at the same number of ranks."""
    for name, dtype in kinds:
        pair = Pair(rank, world_size, name, dtype)
        for step in range(2):
            pair.step(step, branch=False)
        full, share = shared(pair.ours.full_state_dict()), pair.ours.state_dict()
        weights = copy.deepcopy(pair.model.state_dict())
        for given in (full, share):
            other = Pair(rank, world_size, name, dtype)
            other.step(7, branch=True)
            other.model.load_state_dict(weights)
            other.ours.load_state_dict(given)
            assert same_state(shared(other.ours.full_state_dict()), full), name
            follow_on(other, full)


def test_whole_state_goes_to_torch_and_back() -> None:
    run_ranks(whole, 2, KINDS)


def from_torch(rank: int, world_size: int, name: str) -> None:
    """torch's own state_dict(), of a training of its own."""
    cls, own = ALL[name]
    model, twin = make_model(), make_model()
    theirs = cls(twin.parameters(), **own)
    for step in range(2):
        backward(twin, batch(0, step))
        theirs.step()
        theirs.zero_grad()
    model.load_state_dict(twin.state_dict())
    ours = ShardedOptimizer(model.parameters(), cls, **own)
    ours.load_state_dict(theirs.state_dict())
    for each, optimizer in ((model, ours), (twin, theirs)):
        backward(each, batch(0, 2), branch=True)  # the same on all ranks: the mean of two equal ones is one of them
        optimizer.step()
    assert all(map(same_bits, model.state_dict().values(), twin.state_dict().values()))


@pytest.mark.parametrize("name", ["SGD, momentum", "NAdam", "Adagrad", "Python's numbers"])
def test_a_training_with_the_class_itself_goes_on_here(name: str) -> None:
    run_ranks(from_torch, 2, name)


def test_alone_state_is_where_torch_has_it_and_as_the_class_keeps_it() -> None:
    param = nn.Parameter(torch.ones(300))
    ours = ShardedOptimizer([param], PythonNumbers)
    for _ in range(3):
        param.grad = torch.ones(300)
        ours.step()
    assert float(ours.state[param]["weight"]) == 0.9**3
    assert int(ours.state[param]["step"]) == 3
    shown = ours.state_dict()["state"][0]
    types = {"step": int, "weight": float, "odd": bool, "length": Tensor, "mean": Tensor}
    assert {key: type(value) for key, value in shown.items()} == types
    assert shown["odd"] is True
    assert shown["length"].shape == (1,)
    theirs = PythonNumbers([nn.Parameter(param.detach().clone())])
    theirs.load_state_dict(copy.deepcopy(ours.state_dict()))
    [twin] = theirs.param_groups[0]["params"]
    for each, optimizer in ((param, ours), (twin, theirs)):
        each.grad = torch.full((300,), 0.5)
        optimizer.step()
    assert same_bits(param.detach(), twin.detach())


# ---- torch.distributed.checkpoint


def through_dcp(rank: int, world_size: int, name: str, folder: str, way: str) -> None:
    pass_on(lambda: Pair(rank, world_size, name, torch.float32), folder, way)


def pass_on(make: Callable[[], Pair], folder: str, way: str) -> None:
    """What a pair has after two steps, to another one."""
    pair = make()
    for step in range(2):
        pair.step(step, branch=False)
    full = shared(pair.ours.full_state_dict())
    other = make()
    other.model.load_state_dict(pair.model.state_dict())
    if way == "in place":
        saved, loaded = (entries(each.ours, parameter_names(each.model, each.ours)) for each in (pair, other))
        dcp.save(saved, checkpoint_id=folder)
        dcp.load(loaded, checkpoint_id=folder)  # into the tensors that it keeps, and without a word
    else:
        options = StateDictOptions(full_state_dict=way == "whole")
        state: Any = get_optimizer_state_dict(pair.model, pair.ours, options=options)
        if way == "slices":
            dcp.save(state, checkpoint_id=folder)
            state = get_optimizer_state_dict(other.model, other.ours)
            dcp.load(state, checkpoint_id=folder)
        set_optimizer_state_dict(other.model, other.ours, state, options=options)
    follow_on(other, full)
    assert same_state(shared(other.ours.full_state_dict()), shared(pair_after(pair)))


def pair_after(pair: Pair) -> dict[str, Any]:
    for step in (2, 3):
        pair.step(step, branch=step == 3)
    return pair.ours.full_state_dict()


@pytest.mark.parametrize("way", ["slices", "whole", "in place"])
@pytest.mark.parametrize("name", ["SGD, momentum", "NAdam", "Python's numbers"])
def test_dcp_s_ways_all_work(name: str, way: str, tmp_path: Path) -> None:
    run_ranks(through_dcp, 2, name, str(tmp_path / "x"), way)


def test_a_checkpoint_becomes_a_file_for_the_class(tmp_path: Path) -> None:
    """python -m zerox convert, which knows nothing of the class."""
    from zerox.checkpoint.convert import convert_file

    model, twin = nn.Linear(80, 70), nn.Linear(80, 70)
    ours = ShardedOptimizer(model.parameters(), torch.optim.NAdam)
    model(torch.ones(80)).square().sum().backward()
    model.bias.grad = None  # never updated
    ours.step()
    ours.zero_grad()
    zerox.save(tmp_path / "x", model, ours)
    convert_file(tmp_path / "x", tmp_path / "x.pt", weights=False, fp32=False, keys=("model", "optimizer"))
    found = torch.load(tmp_path / "x.pt")
    assert set(found["optimizer"]["state"]) == {0}
    assert same_state(found["optimizer"], ours.full_state_dict())
    twin.load_state_dict(found["model"])
    theirs = torch.optim.NAdam(twin.parameters())
    theirs.load_state_dict(found["optimizer"])
    for each, optimizer in ((model, ours), (twin, theirs)):
        each(torch.full((80,), 0.5)).square().sum().backward()
        optimizer.step()
    assert all(map(same_bits, model.state_dict().values(), twin.state_dict().values()))
