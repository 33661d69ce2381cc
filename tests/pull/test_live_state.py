"""``optimizer.state`` on several ranks: all parameters, and each tensor whole where it is looked at."""

from __future__ import annotations

import copy
import gc
import os
import time
import weakref
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.local_optimizers.test_bits import Pair
from tests.optimizer.models import KINDS
from tests.optimizer.test_full_state import train
from tests.pull.test_rank_0_saves import REMAINDERS, full, loaded, saved, trained
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.state.live_tensor import LiveTensor

MESSAGES = {"ZEROX_EXCHANGE": "messages"}


def params_of(optimizer: FusedShardedAdam) -> list[Tensor]:
    return [param for group in optimizer.param_groups for param in group["params"]]


def assert_is(state: Any, expected: dict[str, Tensor]) -> None:
    """``state``: of one parameter."""
    assert state.keys() == expected.keys()
    for key, tensor in expected.items():
        assert state[key].shape == tensor.shape
        found = state[key] * torch.ones((), dtype=state[key].dtype, device="cpu")
        assert type(found) is Tensor
        assert same_bits(found.to(tensor.dtype), tensor), key


def reads_alone(rank: int, world_size: int, kind: str, stage: int, where: dict[str, str]) -> None:
    with patch.dict(os.environ, where):
        model, optimizer = trained(rank, kind, stage)
    for step in (2, 3):
        expected = full(optimizer)["state"]
        if rank == step % world_size:  # the others wait at the barrier
            assert len(optimizer.state) == len(expected)
            for number, param in enumerate(params_of(optimizer)):
                assert list(optimizer.state)[number] is param
                assert param in optimizer.state
                assert_is(optimizer.state[param], expected[number])
        dist.barrier()
        train(model, optimizer, rank, range(step, step + 1))


@pytest.mark.parametrize(
    ("kind", "stage", "where"),
    [*((kind, 2, {}) for kind in KINDS), (REMAINDERS, 1, {}), (REMAINDERS, 3, {}), (REMAINDERS, 3, MESSAGES)],
)
def test_one_rank_alone_reads_all_of_it(kind: str, stage: int, where: dict[str, str]) -> None:
    run_ranks(reads_alone, 3, kind, stage, where)


def reads_of_a_class(rank: int, world_size: int) -> None:
    pair = Pair(rank, world_size, "Adagrad", torch.float32, stage=2)
    pair.step(0, branch=True)
    expected = pair.ours.full_state_dict(to=1).get("state", {})
    if rank == 1:
        for number, state in enumerate(pair.ours.state.values()):
            for key, tensor in expected.get(number, {}).items():
                assert torch.equal(torch.as_tensor(state[key] * 1.0), torch.as_tensor(tensor) * 1.0), (number, key)
    dist.barrier()


def test_so_is_that_of_a_class_of_torch() -> None:
    run_ranks(reads_of_a_class, 2)


def writes(rank: int, world_size: int, kind: str) -> None:
    _, optimizer = trained(rank, kind)
    before = full(optimizer)["state"]
    for param in params_of(optimizer):
        state = optimizer.state[param]
        state["exp_avg"].mul_(0.5)
        state["exp_avg"].data.add_(state["exp_avg"])
        state["exp_avg_sq"].zero_()
        state["exp_avg_sq"].copy_(torch.full_like(param, 0.25, dtype=torch.float32))
        state["exp_avg_sq"].mul_(torch.full(param.shape[-1:], 4.0))  # as broadcasting has it
    for number, state in full(optimizer)["state"].items():
        assert same_bits(state["exp_avg"], before[number]["exp_avg"])
        assert bool((state["exp_avg_sq"] == 1).all())
        if "master" in state:
            assert same_bits(state["master"], before[number]["master"])


@pytest.mark.parametrize("kind", ["fp32", "fp64", REMAINDERS])
def test_writes_of_each_element_are_this_rank_s(kind: str) -> None:
    run_ranks(writes, 3, kind)


def refused(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)  # of 8 bits: no tensor is a view
    before = full(optimizer)
    largest = max(params_of(optimizer), key=Tensor.numel)
    state = optimizer.state[largest]
    assert isinstance(state["exp_avg"], LiveTensor)

    def row() -> Tensor:
        return state["exp_avg"].view(-1)[1:].chunk(2)[0]

    calls = [
        lambda: state["exp_avg"].cumsum_(0),
        lambda: setattr(state["exp_avg"], "data", torch.zeros(1)),
        lambda: dist.all_reduce(state["exp_avg"]),
        lambda: dist.all_reduce(row()),
        lambda: dist.recv(row(), (rank + 1) % world_size),
        lambda: row().zero_(),
        lambda: row().__setitem__(0, 1.0),
        lambda: row().__imul__(2.0),
        lambda: torch.mul(row(), 2.0, out=row()),
        lambda: state["exp_avg"].__setitem__(0, 1.0),
        lambda: torch._foreach_zero_([state["exp_avg"]]),
        lambda: torch.add(state["exp_avg"], 1, out=state["exp_avg_sq"]),
    ]
    for call in calls:
        with pytest.raises(RuntimeError, match=r"writes a part of a tensor of optimizer\.state"):
            call()
    with pytest.raises(RuntimeError, match=r"call optimizer\.set_full_state_\(p, master=\.\.\.\) on all ranks"):
        state["master"].zero_()
    with pytest.raises(RuntimeError, match=r"writes a tensor of state_dict\(\)"):
        dist.all_reduce(optimizer.state_dict()["state"][0]["exp_avg"])
    assert type(row() * 2) is type(row().topk(1).indices) is type(row().clone()) is Tensor
    (row() * 2).zero_()
    for each in (state["exp_avg"], row()):
        with pytest.raises(ValueError, match="read-only"):
            each.numpy()[:] = 0
    total, one = torch.zeros(row().shape), torch.zeros(state["exp_avg"].shape)
    for _ in range(2):  # what is read is added up
        total += row()
        one += state["exp_avg"]
    assert type(total.zero_()) is type(one.zero_()) is Tensor
    assert torch.equal(loaded(saved(row())), row())
    assert repr(row()) == repr(row().clone())
    assert f"{state['step']:.1f}" == "2.0"
    everybodys = [torch.empty(state["exp_avg"].shape) for _ in range(world_size)]
    dist.all_gather(everybodys, state["exp_avg"] * 1)
    assert torch.equal(*everybodys)
    after = full(optimizer)
    assert all(
        same_bits(after["state"][number][key], tensor)
        for number, kept in before["state"].items()
        for key, tensor in kept.items()
    )


def test_other_writes_raise_and_change_nothing() -> None:
    run_ranks(refused, 2)


def halves(optimizer: FusedShardedAdam) -> None:
    for state in optimizer.state.values():
        state["exp_avg"] = state["exp_avg"] * 0.5


def centers(optimizer: FusedShardedAdam) -> None:
    for state in optimizer.state.values():
        state["exp_avg"].sub_(state["exp_avg"].mean())


def scales(optimizer: FusedShardedAdam) -> None:
    norm = torch.stack([state["exp_avg"].norm() for state in optimizer.state.values()]).norm()
    for state in optimizer.state.values():
        state["exp_avg"].div_(norm)


def exchanges(optimizer: FusedShardedAdam) -> None:
    for state in optimizer.state.values():
        state["exp_avg"], state["exp_avg_sq"] = state["exp_avg_sq"], state["exp_avg"]


def moves_data(optimizer: FusedShardedAdam) -> None:
    for state in optimizer.state.values():
        for value in state.values():
            value.data = value.data.to("cpu")


def exchanges_entries(optimizer: FusedShardedAdam) -> None:
    """Of two parameters of one shape, of which ranks have other parts."""
    params = params_of(optimizer)
    pairs = [(a, b) for i, a in enumerate(params) for b in params[i + 1 :] if a.shape == b.shape]
    assert pairs
    for one, other in pairs[:1]:
        optimizer.state[one], optimizer.state[other] = optimizer.state[other], optimizer.state[one]


def copies_steps(optimizer: FusedShardedAdam) -> None:
    first, *others = optimizer.state.values()
    first["step"] = torch.tensor(7.0)
    for state in others:
        state["step"].copy_(first["step"])


def in_torch(loop: Callable[[Any], None], optimizer: FusedShardedAdam, state: dict[int, dict[str, Tensor]]) -> Any:
    """What the same loop makes of torch's."""
    twin = torch.optim.Adam([nn.Parameter(param.detach().clone()) for param in params_of(optimizer)])
    for number, param in enumerate(params_of(twin)):
        twin.state[param] = {key: value.clone() for key, value in state[number].items()}
    loop(twin)
    return list(twin.state.values())


def loops(rank: int, world_size: int, loop: Callable[[Any], None], where: dict[str, str]) -> None:
    """Each rank reads what others have, and writes; one comes to the next call before another has begun."""
    with patch.dict(os.environ, where):
        _, optimizer = trained(rank, "fp32")
    expected = in_torch(loop, optimizer, full(optimizer)["state"])
    time.sleep(0.3 * rank)
    loop(optimizer)
    optimizer.synchronize()
    for number, state in full(optimizer)["state"].items():
        for key, value in state.items():
            assert same_bits(value, expected[number][key]), (number, key)


@pytest.mark.parametrize("where", [{}, MESSAGES], ids=["by memory", "by message"])
@pytest.mark.parametrize(
    "loop",
    [halves, centers, scales, exchanges, exchanges_entries, copies_steps, moves_data],
    ids=lambda loop: loop.__name__,
)
def test_a_loop_that_reads_and_writes_is_no_race(loop: Callable[[Any], None], where: dict[str, str]) -> None:
    run_ranks(loops, 3, loop, where)


def writes_what_it_holds(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)
    held = [state["exp_avg"] for state in optimizer.state.values()]
    for value in (1.0, 5.0):
        optimizer.state[params_of(optimizer)[0]]["mine"] = value
        for each in held:
            each.fill_(value)
        optimizer.synchronize()
        assert all(bool((state["exp_avg"] == value).all()) for state in full(optimizer)["state"].values())
    assert all(each is state["exp_avg"] for each, state in zip(held, optimizer.state.values(), strict=True))
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3).bfloat16())]})
    for each in held:
        each.fill_(9.0)
    optimizer.synchronize()
    assert all(bool((each == 9).all()) for each in held)


def test_a_tensor_that_is_held_goes_on_being_the_state() -> None:
    run_ranks(writes_what_it_holds, 2)


def puts_back(rank: int, world_size: int) -> None:
    """As scripts do that take a parameter's entry, change it, and put it back."""
    _, optimizer = trained(rank, "fp32")
    first, second, *_ = params_of(optimizer)
    kept = optimizer.state.get(first)
    kept["exp_avg"] = torch.full(first.shape, 3.0)
    del optimizer.state[first]
    optimizer.state[first] = kept
    optimizer.state[second] = optimizer.state.pop(second)
    before = full(optimizer)["state"]
    assert bool((before[0]["exp_avg"] == 3).all())
    assert float(before[0]["step"]) == float(before[1]["step"]) == 2
    assert optimizer.state != {}
    assert type(optimizer.state)(optimizer.state.default_factory, {"one": 1}) == {"one": 1}


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_entry_that_is_put_back_is_the_state(world_size: int) -> None:
    run_ranks(puts_back, world_size)


def moves(rank: int, world_size: int) -> None:
    """Between parameters of which ranks have other elements, or none."""
    params = [nn.Parameter(torch.ones(4000)) for _ in range(4)]
    optimizer = FusedShardedAdam(params)
    for index, param in enumerate(params):
        param.grad = torch.full_like(param, 1.0 + index)
    optimizer.step()
    before, state = full(optimizer)["state"], optimizer.state
    state[params[0]], state[params[3]] = state[params[3]], state[params[0]]
    state[params[1]].update({key: value.clone() for key, value in state[params[2]].items()})
    after = full(optimizer)["state"]
    for number, other in enumerate((3, 2, 2, 0)):
        assert all(same_bits(value, before[other][key]) for key, value in after[number].items())


@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_state_moves_between_parameters(world_size: int) -> None:
    run_ranks(moves, world_size)


def reads_what_it_wrote(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)
    for state in optimizer.state.values():
        state["exp_avg"].mul_(0.5)
        kept = state["exp_avg"].clone()
        for each in (state["exp_avg"], kept):
            with pytest.raises(RuntimeError, match="was written in place, and other ranks' parts of it may not be"):
                each.sum()
    optimizer.synchronize()
    assert all(bool(state["exp_avg"].isfinite().all()) for state in optimizer.state.values())


def test_what_was_written_in_place_is_read_once_ranks_have_met() -> None:
    run_ranks(reads_what_it_wrote, 2)


def writes_on_one(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank, "fp32")
    if rank == 1:
        for state in optimizer.state.values():
            state["exp_avg"].zero_()
    with pytest.raises(RuntimeError, match=r"rank 1 wrote optimizer\.state of parameter .*, and rank 0"):
        optimizer.synchronize()
    optimizer.load_state_dict(optimizer.state_dict() if rank == 0 else copy.deepcopy(optimizer.state_dict()))
    optimizer.synchronize()


def test_a_write_in_place_on_one_rank_alone_raises_on_all() -> None:
    run_ranks(writes_on_one, 2)


def goes_back(rank: int, world_size: int, kind: str) -> None:
    """As after a NaN, from clones; numbers of Python, too."""
    model, optimizer = trained(rank, kind)
    before = full(optimizer)["state"]
    kept = {param: {k: v.clone() for k, v in state.items()} for param, state in optimizer.state.items()}
    train(model, optimizer, rank, range(2, 3))
    for param, state in kept.items():
        optimizer.state[param].update({key: value for key, value in state.items() if key != "master"})
    optimizer.synchronize()
    for number, state in full(optimizer)["state"].items():
        assert all(same_bits(value, before[number][key]) for key, value in state.items() if key != "master")
    for state in optimizer.state.values():
        state["step"] = 7
    optimizer.synchronize()
    assert all(float(state["step"]) == 7 for state in full(optimizer)["state"].values())


@pytest.mark.parametrize("kind", ["fp32", REMAINDERS])
def test_it_goes_back_to_clones(kind: str) -> None:
    run_ranks(goes_back, 3, kind)


def is_freed(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)
    held = optimizer.state[next(iter(params_of(optimizer)))]
    float(held["exp_avg"].sum())
    core, bucket = weakref.ref(optimizer.inside), weakref.ref(optimizer.inside.buckets[0])
    gc.collect()
    gc.disable()
    try:
        del optimizer
        assert core() is None
        assert bucket() is None
    finally:
        gc.enable()


def test_what_it_shows_keeps_no_optimizer() -> None:
    run_ranks(is_freed, 2)


def keeps_own(rank: int, world_size: int) -> None:
    """What users keep there is looked at once."""
    _, optimizer = trained(rank)
    param = params_of(optimizer)[0]
    optimizer.state["of mine"] = {"count": 1}
    optimizer.state[param]["mine"] = 2
    optimizer.state[nn.Parameter(torch.ones(1))]
    optimizer.synchronize()
    shows = optimizer._state.shows
    assert shows.is_as_shown(optimizer.state)
    assert optimizer.state["of mine"] == {"count": 1}


def test_what_users_keep_there_is_looked_at_once() -> None:
    run_ranks(keeps_own, 2)


def holds(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    param = params_of(optimizer)[0]
    held, kept = optimizer.state[param]["exp_avg"], optimizer.state[param]["exp_avg"].clone()
    then = full(optimizer)["state"][0]["exp_avg"]
    assert same_bits(kept * 1.0, then)
    train(model, optimizer, rank, range(2, 3))
    now = full(optimizer)["state"][0]["exp_avg"]
    assert not torch.equal(now, then)
    assert same_bits(held * 1.0, now)
    with pytest.raises(RuntimeError, match=r"this is the state before a later step\(\)"):
        kept * 1.0


def test_it_is_the_state_of_the_moment() -> None:
    run_ranks(holds, 2)


def copies(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank, "fp32")
    expected = full(optimizer)["state"]
    if rank == 0:
        found = loaded(saved([dict(state) for state in optimizer.state.values()]))
        for number, state in enumerate(found):
            assert_is(state, expected[number])
    dist.barrier()
    for param, state in optimizer.state.items():  # as frameworks move state to a device
        optimizer.state[param] = {key: value.to("cpu", copy=True) for key, value in state.items()}
    kept = copy.deepcopy(dict(optimizer.state))
    assert len(kept) == len(expected)
    train(model, optimizer, rank, range(2, 3))
    twin, other = trained(rank, "fp32")
    train(twin, other, rank, range(2, 3))
    ours, theirs = full(optimizer), full(other)
    assert all(same_bits(ours["state"][n][k], v) for n, state in theirs["state"].items() for k, v in state.items())


def test_copies_are_taken_for_what_was_there() -> None:
    run_ranks(copies, 3)


def takes_away(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank, "fp32")
    before = full(optimizer)["state"]
    first, second, *others = params_of(optimizer)
    del optimizer.state[first]
    assert optimizer.state.pop(second).keys() >= {"step", "exp_avg"}
    assert len(optimizer.state) == len(others)
    assert first not in optimizer.state
    assert optimizer.state.get(second) is None
    assert optimizer.state.setdefault(others[0], {}).keys() >= {"step", "exp_avg"}
    optimizer.synchronize()
    state = full(optimizer)["state"]
    assert not any(bool(state[number]["exp_avg"].any()) for number in (0, 1))
    assert all(same_bits(state[number]["exp_avg"], before[number]["exp_avg"]) for number in range(2, len(state)))
    assert bool(before[0]["exp_avg"].any())
    optimizer.state[first] = {"exp_avg": torch.ones(first.shape)}
    del optimizer.state[first]
    assert first not in optimizer.state
    assert list(reversed(optimizer.state)) == list(reversed(optimizer.state.keys()))
    assert (optimizer.state | {"one": 1}).keys() == ({"one": 1} | optimizer.state).keys()
    assert optimizer.state.popitem()[0] is others[-1]
    while optimizer.state:
        optimizer.state.popitem()
    optimizer.state.clear()
    assert len(optimizer.state) == 0
    assert optimizer.state[first] == {}


def test_what_is_taken_away_is_no_entry() -> None:
    run_ranks(takes_away, 3)


def late_write(rank: int, world_size: int) -> None:
    """One rank takes in what it wrote, for its state_dict(), before another has written: that one's read raises."""
    params = [nn.Parameter(torch.ones(40)) for _ in range(4)]
    optimizer = FusedShardedAdam(params, bucket_cap_mb=0.0001)
    for param in params:
        param.grad = torch.ones_like(param)
    optimizer.step()
    if rank == 0:
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros_like(state["exp_avg"])
        optimizer.state_dict()
        dist.barrier()
    else:
        dist.barrier()
        with pytest.raises(RuntimeError, match=r"optimizer\.state was written there"):
            saved(optimizer.state_dict())
        for state in optimizer.state.values():
            state["exp_avg"] = torch.zeros(state["exp_avg"].shape)
    optimizer.synchronize()
    dist.barrier()
    found = loaded(saved(optimizer.state_dict()))
    assert not any(bool(state["exp_avg"].any()) for state in found["state"].values())


def test_what_one_rank_has_written_is_not_taken_for_the_state_before() -> None:
    run_ranks(late_write, 2)
