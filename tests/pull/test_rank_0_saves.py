"""``if rank == 0: torch.save(optimizer.state_dict())`` writes the whole state, with no partner."""

from __future__ import annotations

import copy
import hashlib
import io
import os
import pickle
import random
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn

from bench.allocator import Allocator, build
from tests.kernels.shards import same_bits
from tests.mortal_ranks import start_ranks
from tests.optimizer.models import KINDS, Mixed, make_model, make_optimizer
from tests.optimizer.test_full_state import train
from tests.ranks import run_ranks
from zerox import _C as C
from zerox import FusedShardedAdam
from zerox.sliced_tensor import SlicedTensor
from zerox.state.pulled_tensor import PulledTensor

REMAINDERS = "bf16 remainder, 8-bit moments"


def saved(what: object) -> bytes:
    file = io.BytesIO()
    torch.save(what, file)
    return file.getvalue()


def loaded(data: bytes) -> Any:
    return torch.load(io.BytesIO(data), weights_only=True)


def assert_same(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert one["param_groups"] == other["param_groups"]
    assert one["state"].keys() == other["state"].keys()
    for number, state in one["state"].items():
        assert state.keys() == other["state"][number].keys(), number
        for key, tensor in state.items():
            theirs = other["state"][number][key]
            assert type(tensor) is type(theirs) is Tensor
            assert tensor.dtype == theirs.dtype
            assert tensor.shape == theirs.shape
            assert same_bits(tensor, theirs), (number, key)


def made(kind: str, stage: int) -> tuple[Mixed, FusedShardedAdam]:
    dtype, options = KINDS[kind]
    model = make_model(dtype, seed=0)
    return model, make_optimizer(model.parameters(), lr=1e-2, bucket_cap_mb=0.05, stage=stage, **options)


def trained(rank: int, kind: str = REMAINDERS, stage: int = 2) -> tuple[Mixed, FusedShardedAdam]:
    model, optimizer = made(kind, stage)
    train(model, optimizer, rank, range(2))
    return model, optimizer


def full(optimizer: FusedShardedAdam) -> dict[str, Any]:
    """On every rank. Collective."""
    found: list[Any] = [optimizer.full_state_dict()]
    dist.broadcast_object_list(found)
    return found[0]


def saves_alone(rank: int, world_size: int, kind: str, stage: int) -> bytes:
    _, optimizer = trained(rank, kind, stage)
    found = b""
    for each in range(world_size):
        if rank == each:
            found = saved(optimizer.state_dict())  # the others wait at the barrier
        dist.barrier()
    assert_same(loaded(found), full(optimizer))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_whole_state_is_written_and_the_same_bytes_on_any_rank(kind: str, stage: int) -> None:
    files = run_ranks(saves_alone, 3, kind, stage)
    assert len(set(files)) == 1
    assert len(files[0]) > 1000


def saves_large(rank: int, world_size: int) -> None:
    """Of which two threads read a part each."""
    params = [nn.Parameter(torch.randn(3_000_001, generator=torch.Generator().manual_seed(seed))) for seed in range(2)]
    optimizer = FusedShardedAdam(params, lr=1e-3)
    for param in params:
        param.grad = param.detach() * (rank + 1)
    optimizer.step()
    whole = optimizer.full_state_dict(to=world_size - 1)
    if rank == world_size - 1:
        assert_same(loaded(saved(optimizer.state_dict())), whole)
    dist.barrier()


@pytest.mark.parametrize("world_size", [2, 3])
def test_large_tensors_are_written_whole(world_size: int) -> None:
    run_ranks(saves_large, world_size)


def loads_what_one_saved(rank: int, world_size: int, kind: str, data: bytes, weights: Any) -> dict[str, Any]:
    model, optimizer = made(kind, 2)
    model.load_state_dict(weights)
    optimizer.load_state_dict(loaded(data))
    return full(optimizer)


def saves_with_weights(rank: int, world_size: int, kind: str) -> tuple[bytes, Any, Any]:
    model, optimizer = trained(rank, kind)
    found = saved(optimizer.state_dict()) if rank == 0 else b""
    dist.barrier()
    return found, model.state_dict(), full(optimizer)


@pytest.mark.parametrize("kind", ["amsgrad", "bf16 remainder, 8-bit moments"])
def test_any_number_of_ranks_loads_what_one_saved_and_so_does_torch(kind: str) -> None:
    data, weights, expected = run_ranks(saves_with_weights, 3, kind)[0]
    for world_size in (1, 2, 3):
        for found in run_ranks(loads_what_one_saved, world_size, kind, data, weights):
            assert_same(found, expected)
    params = [nn.Parameter(p.float()) for p in make_model(KINDS[kind][0]).parameters()]
    theirs = torch.optim.AdamW(params, amsgrad=kind == "amsgrad")
    theirs.load_state_dict(loaded(data))
    for number, param in enumerate(params):
        assert torch.equal(theirs.state[param]["exp_avg"], expected["state"][number]["exp_avg"])
    for param in params:
        param.grad = torch.ones_like(param)
    theirs.step()


def looks(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)
    expected = full(optimizer)["state"]
    shown = optimizer.state_dict()["state"]
    number = max(expected, key=lambda each: expected[each]["exp_avg"].numel())
    tensor, whole = shown[number]["exp_avg"], expected[number]["exp_avg"]
    assert type(tensor) is PulledTensor
    if rank == 0:
        assert not tensor.has_all
        assert np.array_equal(tensor.numpy(), whole.numpy())
        assert np.array_equal(np.asarray(tensor), whole.numpy())
        assert tensor.tolist() == whole.tolist()
        assert repr(tensor) == repr(whole)
        assert torch.equal(tensor, whole)
        assert torch.equal(tensor * 2 + tensor[0], whole * 2 + whole[0])
        assert float(tensor.norm()) == float(whole.norm())
        assert pickle.loads(pickle.dumps(tensor)).equal(whole)
        assert [float(each["step"]) for each in shown.values()] == [float(each["step"]) for each in expected.values()]
        with pytest.raises(RuntimeError, match=r"mul_.* writes a tensor of state_dict\(\)"):
            tensor.mul_(2)
        with pytest.raises(RuntimeError, match=r"writes a tensor of state_dict\(\)"):
            torch.add(whole, whole, out=tensor)
    dist.barrier()
    for copied in (tensor.detach(), tensor.clone(), tensor.cpu(), tensor.to("cpu"), copy.deepcopy(tensor)):
        assert type(copied) is PulledTensor
        assert copied.span == tensor.span
        assert same_bits(copied.own, tensor.own)
    sent = pickle.loads(bytes(ForkingPickler.dumps(tensor)))
    assert type(sent) is SlicedTensor
    assert same_bits(sent.own, tensor.own)


def test_it_is_whole_where_it_is_looked_at_and_copies_stay_slices() -> None:
    run_ranks(looks, 3)


def rolls_back(rank: int, world_size: int, kind: str, model_first: bool) -> None:
    model, optimizer = trained(rank, kind)
    expected = full(optimizer)
    kept, weights = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(model.state_dict())
    train(model, optimizer, rank, range(2, 4))
    loads = [lambda: model.load_state_dict(weights), lambda: optimizer.load_state_dict(kept)]
    for load in loads if model_first else reversed(loads):
        load()
    assert_same(full(optimizer), expected)


@pytest.mark.parametrize("model_first", [True, False], ids=["model first", "optimizer first"])
@pytest.mark.parametrize("kind", KINDS)
def test_a_deep_copy_rolls_back_bit_for_bit(kind: str, model_first: bool) -> None:
    run_ranks(rolls_back, 2, kind, model_first)


def outdated(rank: int, world_size: int, change: str) -> None:
    model, optimizer = trained(rank)
    before = optimizer.state_dict()
    copied = copy.deepcopy(before)
    if change == "step":
        train(model, optimizer, rank, range(2, 3))
    elif change == "load":
        optimizer.load_state_dict(copied)
    else:
        optimizer.set_full_state_(next(model.parameters()), step=7)
    for each in (before, copied):
        with pytest.raises(RuntimeError, match=r"the state before a later step\(\)"):
            saved(each)
    dist.barrier()
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))


@pytest.mark.parametrize("change", ["step", "load", "set"])
def test_what_was_taken_before_a_change_raises_and_so_do_its_copies(change: str) -> None:
    run_ranks(outdated, 2, change)


LATE = [
    ("step", "bf16 fp32", 3, False),
    ("load", "bf16 fp32", 3, False),
    *(("step", REMAINDERS, stage, hidden) for stage in (1, 2) for hidden in (False, True)),
    ("load", REMAINDERS, 2, True),
]


def late_owner(rank: int, world_size: int, what: str, kind: str, stage: int, hidden: bool) -> None:
    """Rank 0 is through with a step, or a load, long before rank 1, whose state it needs. ``hidden``: the gather is
    hidden behind what follows."""
    model, optimizer = made(kind, stage)
    if hidden:
        optimizer.overlap_gather(model)
    train(model, optimizer, rank, range(2))
    kept = copy.deepcopy(optimizer.state_dict())
    runs, update = optimizer.inside.update.runs, optimizer.inside.update

    def late(*args: Any) -> Any:
        if rank == 1:
            time.sleep(0.5)
        yield from runs(*args)

    if what == "step":
        with patch.object(update, "runs", late):
            train(model, optimizer, rank, range(2, 3))
    else:
        train(model, optimizer, rank, range(2, 3))
        if rank == 1:
            time.sleep(0.5)
        optimizer.load_state_dict(kept)
    found = saved(optimizer.state_dict()) if rank == 0 else b""
    expected = full(optimizer)
    if rank == 0:
        assert_same(loaded(found), expected)


@pytest.mark.parametrize("how", LATE, ids=str)
def test_a_pull_waits_until_the_owner_has_come_as_far(how: tuple[Any, ...]) -> None:
    run_ranks(late_owner, 2, *how)


def digest(state: object) -> str:
    return hashlib.sha256(saved(state)).hexdigest()


def saves_beside(
    rank: int, world_size: int, count: int, kind: str = REMAINDERS, stage: int = 2, hidden: bool = False
) -> int:
    """A thread saves at random moments, on each rank, until it has ``count`` files. Returns how often it could not."""
    model, optimizer = made(kind, stage)
    if hidden:
        optimizer.overlap_gather(model)
    train(model, optimizer, rank, range(2))
    known, files, refused = {digest(full(optimizer)["state"])}, [], []

    def save() -> None:
        moments = random.Random(rank)
        while len(files) < count and len(refused) < 100 * count:
            time.sleep(moments.expovariate(200))
            try:
                files.append(digest(loaded(saved(optimizer.state_dict()))["state"]))
            except RuntimeError as error:
                refused.append(str(error))

    saver = threading.Thread(target=save)
    saver.start()
    is_through, step = torch.zeros(1), 2
    while not is_through:
        train(model, optimizer, rank, range(step, step + 1))
        known.add(digest(full(optimizer)["state"]))
        is_through, step = torch.tensor([float(not saver.is_alive())]), step + 1
        dist.all_reduce(is_through, dist.ReduceOp.MIN)
    saver.join()
    assert set(files) <= known
    assert all("the state before a later step()" in each for each in refused)
    assert len(files) == count
    return len(refused)


@pytest.mark.parametrize("how", [(REMAINDERS, 2, False), (REMAINDERS, 1, True), ("bf16 fp32", 3, False)], ids=str)
def test_each_file_is_the_state_of_one_step(how: tuple[Any, ...]) -> None:
    run_ranks(saves_beside, 3, 10, *how)


@pytest.mark.deep
def test_each_of_a_thousand_files_is_the_state_of_one_step() -> None:
    run_ranks(saves_beside, 3, 334, timeout_s=600)


def breaks_off(rank: int, world_size: int) -> None:
    """As a Ctrl-C in the middle of step() on rank 1."""
    _, optimizer = trained(rank, "fp32")
    kept = copy.deepcopy(optimizer.state_dict())
    with suppress(KeyboardInterrupt), optimizer.inside.loading.pulls.step(capturing=False):
        if rank == 1:
            raise KeyboardInterrupt
    if rank == 0:
        with pytest.raises(
            RuntimeError,
            match=r"rank 1 can't be read: an error, as of a load_state_dict\(\), has left its optimizer state",
        ):
            saved(optimizer.state_dict())
    dist.barrier()
    optimizer.load_state_dict(kept)
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))


def test_state_that_an_error_has_left_half_changed_is_not_read() -> None:
    run_ranks(breaks_off, 2)


def loads_on_some(rank: int, world_size: int) -> None:
    """Versions are the same again after the next step()."""
    model, optimizer = trained(rank)
    if rank == 0:
        optimizer.load_state_dict(optimizer.state_dict())
    train(model, optimizer, rank, range(2, 3))
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))


def test_a_load_on_one_rank_alone_is_forgotten_by_the_next_step() -> None:
    run_ranks(loads_on_some, 2)


def writes_state(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank, "fp32")
    for state in optimizer.state.values():
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    with pytest.raises(RuntimeError, match=r"optimizer\.state was written, and the other ranks do not know of it yet"):
        saved(optimizer.state_dict())
    optimizer.synchronize()
    found = loaded(saved(optimizer.state_dict()))
    assert not any(state["exp_avg"].any() for state in found["state"].values())
    assert_same(found, full(optimizer))


def test_state_that_was_written_is_read_once_all_ranks_know_of_it() -> None:
    run_ranks(writes_state, 2)


def moves(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank, "fp32")
    for state in optimizer.state.values():
        state["exp_avg"].share_memory_()
    train(model, optimizer, rank, range(2, 3))
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))


def test_state_that_lies_elsewhere_since_is_read_there() -> None:
    run_ranks(moves, 2)


def with_dcp(rank: int, world_size: int, kind: str, path: str) -> None:
    """DCP, which is given the state_dict() itself: it fills the slices, and they are loaded."""
    model, optimizer = trained(rank, kind)
    expected, weights = full(optimizer), copy.deepcopy(model.state_dict())
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    train(model, optimizer, rank, range(2, 4))
    model.load_state_dict(weights)
    into = {"optimizer": optimizer.state_dict()}
    dcp.load(into, checkpoint_id=path)
    optimizer.load_state_dict(into["optimizer"])
    assert_same(full(optimizer), expected)


@pytest.mark.parametrize("kind", ["fp32", "bf16 remainder, 8-bit moments"])
def test_dcp_saves_and_fills_what_it_is_given(kind: str, tmp_path: Path) -> None:
    run_ranks(with_dcp, 2, kind, str(tmp_path / "dcp"))


def copies_into(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank)
    expected, shown = full(optimizer)["state"], optimizer.state_dict()["state"]
    plain = torch.zeros_like(expected[0]["exp_avg"])
    plain.copy_(shown[0]["exp_avg"])
    assert torch.equal(plain, expected[0]["exp_avg"])
    with pytest.raises(RuntimeError, match=r"an assignment writes a tensor of state_dict\(\)"):
        shown[0]["exp_avg"][0] = 1.0
    dist.barrier()


def test_it_is_copied_into_others_and_not_assigned_to() -> None:
    run_ranks(copies_into, 2)


def gets_more_state(rank: int, world_size: int) -> None:
    """It lies elsewhere then."""
    model, optimizer = trained(rank, "fp32")
    for amsgrad in (False, True):
        optimizer.param_groups[0]["amsgrad"] = amsgrad
        train(model, optimizer, rank, range(2, 3))
        found = saved(optimizer.state_dict())
        expected = full(optimizer)
        assert ("max_exp_avg_sq" in expected["state"][0]) == amsgrad
        assert_same(loaded(found), expected)


def test_state_that_an_option_asks_for_later_is_pulled_too() -> None:
    run_ranks(gets_more_state, 2)


def steps_meanwhile(rank: int, world_size: int) -> float:
    """A thread of rank 0 is in the middle of a tensor."""
    model, optimizer = trained(rank)
    begun = threading.Event()

    def pull() -> None:
        with C.StatePull(optimizer.inside.loading.pulls.window.peers):
            begun.set()
            time.sleep(0.5)

    thread = threading.Thread(target=pull)
    start = time.monotonic()
    if rank == 0:
        thread.start()
        begun.wait()
    train(model, optimizer, rank, range(2, 3))
    took = time.monotonic() - start
    if rank == 0:
        thread.join()
    return took


def test_a_step_waits_for_a_tensor_that_is_being_pulled() -> None:
    assert min(run_ranks(steps_meanwhile, 2)) > 0.4, "on the owner too"


def share_only(rank: int, world_size: int) -> None:
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):
        _, optimizer = trained(rank)
        shown = optimizer.state_dict()["state"]
        assert type(shown[0]["exp_avg"]) is SlicedTensor
        os.environ["ZEROX_STATE_PULL"] = "no"
        with pytest.raises(ValueError, match="ZEROX_STATE_PULL must be '0' or '1', got 'no'"):
            made("fp32", 2)


def test_the_switch_leaves_each_rank_its_share() -> None:
    run_ranks(share_only, 2)


def takes_no_memory(rank: int, world_size: int, library: Path) -> None:
    _, optimizer = trained(rank, REMAINDERS)
    allocator = Allocator(library)
    before = allocator.now
    shown = optimizer.state_dict()
    assert allocator.now - before < 1000 * len(shown["state"]), "numbers only"
    part = shown["state"][0]["exp_avg"]
    assert part.own.dtype == torch.float32
    assert allocator.now - before >= part.own.nbytes


def test_a_state_dict_takes_no_memory_until_it_is_looked_at() -> None:
    run_ranks(takes_no_memory, 2, build())


def is_in_a_graph(rank: int, world_size: int) -> None:
    _, optimizer = trained(rank, "fp32")
    shown = optimizer.state_dict()
    with optimizer.inside.loading.pulls.step(capturing=True):
        pass  # which is what Python sees of it
    with pytest.raises(RuntimeError, match=r"a CUDA graph replays step\(\).*call full_state_dict\(\) on all ranks"):
        saved(shown)
    assert type(optimizer.state_dict()["state"][0]["exp_avg"]) is SlicedTensor, "its share"


def test_what_a_graph_replays_is_not_read() -> None:
    run_ranks(is_in_a_graph, 2)


def owner_ends(rank: int, world_size: int) -> str:
    _, optimizer = trained(rank)
    shown = optimizer.state_dict()
    dist.barrier()
    if rank == 1:
        os._exit(0)
    time.sleep(0.5)
    start = time.monotonic()
    try:
        saved(shown)
    except RuntimeError as error:
        return f"{time.monotonic() - start < 5} {error}"
    return "saved"


def check_that_it_is_named(folder: Path, function: Callable[..., str], *args: Any) -> None:
    """By rank 0. ``function(rank, world_size, *args)``: owner_ends(), or what calls it."""
    ranks = start_ranks(function, 2, *args, folder=folder / "ranks", timeout_s=60)
    try:
        answer = ranks.answer(0, within_s=120)
    finally:
        ranks.close()
    assert answer.startswith("True ")
    assert "rank 1" in answer


def test_an_owner_that_is_gone_is_named(tmp_path: Path) -> None:
    check_that_it_is_named(tmp_path, owner_ends)


def in_the_gather(rank: int, world_size: int) -> None:
    """A thread of rank 0 saves while others' parameters are on their way to it, of which masters are made."""
    model, optimizer = trained(rank, REMAINDERS)
    gather, files = optimizer.inside.gather, []
    end_step = gather.end_step

    saver = threading.Thread(target=lambda: files.append(saved(optimizer.state_dict())))

    def late(hidden: bool) -> None:
        if rank == 0:
            saver.start()
            time.sleep(0.5)
        end_step(hidden)

    with patch.object(gather, "end_step", late):
        train(model, optimizer, rank, range(2, 3))
    if rank == 0:
        saver.join()
    expected = full(optimizer)
    for file in files:
        assert_same(loaded(file), expected)
    assert len(files) == (rank == 0)


def test_masters_wait_for_parameters_that_are_on_their_way() -> None:
    run_ranks(in_the_gather, 2)


def written_between(rank: int, world_size: int) -> None:
    """Parameter and remainders are read one after the other, and a step comes between."""
    model, optimizer = trained(rank, REMAINDERS)
    pulls, shown = optimizer.inside.loading.pulls, optimizer.state_dict()["state"]
    params, met = pulls._own_params, threading.Barrier(2)

    def late(*args: Any) -> Any:
        found = params(*args)
        met.wait(20)
        met.wait(20)
        return found

    refused: list[str] = []

    def pull() -> None:
        try:
            shown[0]["master"].tolist()
        except RuntimeError as error:
            refused.append(str(error))

    # The step does not wait for the pull, as for one that begins later.
    with patch.object(pulls, "_own_params", late), patch.object(C.PeerStates, "await_pulls", lambda states: None):
        puller = threading.Thread(target=pull)
        if rank == 0:
            puller.start()
            met.wait(20)
        train(model, optimizer, rank, range(2, 3))
        if rank == 0:
            met.wait(20)
            puller.join()
            assert "the state before a later step()" in refused[0]
    dist.barrier()


def test_remainders_and_parameters_are_of_one_step() -> None:
    run_ranks(written_between, 2)


def writes_parameters(rank: int, world_size: int, kind: str) -> None:
    """Between steps, as one who swaps in an average of weights."""
    model, optimizer = trained(rank, kind, stage=3)
    before = optimizer.state_dict()
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(1.001)
    if kind == REMAINDERS:
        with pytest.raises(
            RuntimeError, match="masters of 16-bit parameters that are sharded, before these were written"
        ):
            saved(before)
    else:
        saved(before)
    dist.barrier()
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))


@pytest.mark.parametrize("kind", ["fp32", REMAINDERS])
def test_sharded_parameters_that_are_written_change_masters_alone(kind: str) -> None:
    run_ranks(writes_parameters, 2, kind)


def unshards(rank: int, world_size: int) -> None:
    _model, optimizer = trained(rank, REMAINDERS, stage=3)
    expected = full(optimizer)
    optimizer.unshard()
    assert_same(loaded(saved(optimizer.state_dict())), expected)
    dist.barrier()


def test_the_state_is_read_after_unshard() -> None:
    run_ranks(unshards, 2)


def swallows_a_load(rank: int, world_size: int) -> str:
    """It fails on rank 1 alone; rank 0 saves before the step that would tell it."""
    _, optimizer = trained(rank, "fp32")
    kept = copy.deepcopy(optimizer.state_dict())
    if rank == 1:
        kept["state"][0]["exp_avg"] = torch.zeros(3)
    with suppress(ValueError):
        optimizer.load_state_dict(kept)
    said, start = "", time.monotonic()
    if rank == 0:
        with pytest.raises(RuntimeError) as error:
            saved(optimizer.state_dict())
        said = f"{time.monotonic() - start < 5} {error.value}"
    dist.barrier()
    optimizer.load_state_dict(optimizer.state_dict())
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))
    return said


def test_a_load_that_failed_elsewhere_is_named() -> None:
    said = run_ranks(swallows_a_load, 2)[0]
    assert said.startswith("True zerox: rank 1 can't be read: an error, as of a load_state_dict(), has left")


def codes_by_dcp(rank: int, world_size: int, path: str) -> None:
    """A checkpoint of shares, which have codes."""
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):
        _model, shares = trained(rank, "amsgrad, 8-bit moments")
    dcp.save({"optimizer": shares.state_dict()}, checkpoint_id=path)
    _, optimizer = made("amsgrad, 8-bit moments", 2)
    with pytest.raises(dcp.api.CheckpointException, match="this checkpoint has codes of 8 bits"):
        dcp.load({"optimizer": optimizer.state_dict()}, checkpoint_id=path)


def test_codes_are_not_filled_in_as_moments(tmp_path: Path) -> None:
    run_ranks(codes_by_dcp, 2, str(tmp_path / "dcp"))


def makes_others_like_it(rank: int, world_size: int) -> None:
    """Which read nothing: the other rank is gone on, and could not be read."""
    model, optimizer = trained(rank, "fp32")
    shown = optimizer.state_dict()["state"][0]["exp_avg"]
    train(model, optimizer, rank, range(2, 3))
    for found in (torch.zeros_like(shown), torch.empty_like(shown), shown.new_zeros(3)):
        assert type(found) is Tensor
    assert torch.zeros_like(shown).shape == shown.shape


def test_what_is_made_like_it_reads_nothing() -> None:
    run_ranks(makes_others_like_it, 2)


def filled_by_dcp(rank: int, world_size: int, path: str) -> None:
    model, optimizer = trained(rank, "fp32")
    dcp.save({"optimizer": optimizer.state_dict()}, checkpoint_id=path)
    expected = full(optimizer)
    train(model, optimizer, rank, range(2, 3))
    into = {"optimizer": optimizer.state_dict()}
    dcp.load(into, checkpoint_id=path)
    for filled in (into, copy.deepcopy(into)):
        with pytest.raises(RuntimeError, match="has filled this state_dict"):
            saved(filled)
    optimizer.load_state_dict(into["optimizer"])
    assert_same(loaded(saved(optimizer.state_dict())), full(optimizer))
    assert_same(full(optimizer), expected)


def test_what_dcp_has_filled_is_loaded_before_it_is_read(tmp_path: Path) -> None:
    run_ranks(filled_by_dcp, 2, str(tmp_path / "dcp"))


def interrupted(rank: int, world_size: int) -> None:
    """Ctrl-C on rank 0 where parameters come; it saves then, as a script does on its way out."""
    model, optimizer = trained(rank, REMAINDERS)
    gather = optimizer.inside.gather
    end_step = gather.end_step

    def stopped(hidden: bool) -> None:
        end_step(hidden)
        if rank == 0:
            raise KeyboardInterrupt

    start = time.monotonic()
    with patch.object(gather, "end_step", stopped), suppress(KeyboardInterrupt):
        train(model, optimizer, rank, range(2, 3))
    found = saved(optimizer.state_dict()) if rank == 0 else b""
    assert time.monotonic() - start < 10, "it did not wait for its patience"
    dist.barrier()
    expected = full(optimizer)
    if rank == 0:
        assert_same(loaded(found), expected)


def test_a_rank_saves_after_ctrl_c_in_the_gather() -> None:
    run_ranks(interrupted, 2)
