"""One rank writes sharded parameters and puts them back, as where rank 0 evaluates with an average of the weights."""

from __future__ import annotations

import time
from contextlib import ExitStack
from pathlib import Path
from threading import Thread
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.mortal_ranks import start_ranks
from tests.optimizer.models import KINDS
from tests.ranks import run_ranks
from tests.residency.models import Gpt, entropy
from tests.residency.rig import WAYS, assert_as_in_stage_2, assert_same, batch, build, made, run_by_way, train, values
from tests.thinned import thinned
from zerox import FusedShardedAdam, sparse_params
from zerox.integrations.engines import standing_outside
from zerox.residency import written_alone

NOT_PUT_BACK = r"parameters of bucket .* were written on rank 0 and not on all ranks"


class Average:
    """As examples of diffusers have it: in place, through .data."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self.kept = values(model)
        self.stored: list[Tensor] = []

    def update(self) -> None:
        for kept, param in zip(self.kept, self.model.parameters(), strict=True):
            kept.lerp_(param.detach(), 0.5)

    def store(self) -> None:
        self.stored = [param.detach().cpu().clone() for param in self.model.parameters()]

    def copy_to(self, params: Any) -> None:
        for kept, param in zip(self.kept, params, strict=True):
            param.data.copy_(kept)

    def restore(self) -> None:
        for stored, param in zip(self.stored, self.model.parameters(), strict=True):
            param.data.copy_(stored)


def evaluates(rank: int, world_size: int, kind: str, hostile: bool) -> None:
    dtype, options = KINDS[kind]

    def run(stage: int) -> list[Tensor]:
        torch.manual_seed(0)
        model = Gpt().to(dtype)
        optimizer = build(model, stage, hostile, **options)
        average = Average(model) if rank == 0 else None
        seen = []
        for _ in range(3):
            seen += train(model, optimizer, rank, entropy, steps=2)
            if average is not None:  # the others are in their next step by then
                average.update()
                average.store()
                average.copy_to(model.parameters())
                with torch.no_grad():
                    seen.append(entropy(model, batch(7, 0)))
                seen += values(model)
                average.restore()
        optimizer.synchronize()  # for which ranks wait, as one that ends waits for none
        return seen + values(model)

    assert_as_in_stage_2(run)


HOW = [("fp32", True), ("bf16 remainder, 8-bit moments", False)]  # what is kept, and whether buckets go at once
OVER = [(2, "memory"), (3, "memory"), (2, "messages"), (3, "two machines")]


@pytest.mark.parametrize(("how", "over"), thinned(HOW, HOW[:1], OVER, OVER[-1:]), ids=str)
def test_an_average_that_one_rank_swaps_in_and_out_is_as_in_stage_2(
    over: tuple[int, str], how: tuple[str, bool]
) -> None:
    run_ranks(run_by_way, *over, evaluates, *how)


def forgets(rank: int, world_size: int) -> None:
    """To put back what it wrote."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    before = values(model)
    dist.barrier()
    if rank == 0:
        with torch.no_grad():
            model.get_parameter("blocks.0.up.weight").zero_()
            assert not model.get_parameter("blocks.0.up.weight").any()
    start = time.monotonic()
    entropy(model, batch(1, rank)).backward()
    with pytest.raises(RuntimeError, match=NOT_PUT_BACK + r".*blocks.0.up.weight|" + NOT_PUT_BACK):
        optimizer.step()
    assert time.monotonic() - start < 20, "long before the timeout"
    assert_same(values(model), before)
    optimizer.zero_grad()
    train(model, optimizer, rank, entropy, steps=1)
    after = values(model)
    everyone: list[Any] = [None] * world_size
    dist.all_gather_object(everyone, after)
    assert_same(everyone[0], everyone[-1])


@pytest.mark.parametrize("way", WAYS)
def test_what_is_not_put_back_raises_on_all_ranks_and_is_taken_back(way: str) -> None:
    run_ranks(run_by_way, 3 if way == "two machines" else 2, way, forgets)


def writes_with(rank: int, world_size: int) -> None:
    """Two of three ranks write the same, and put it back."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage)
        seen = train(model, optimizer, rank, entropy, steps=1)
        if rank < 2:
            average = Average(model)
            average.store()
            average.kept = [value + 1 for value in average.kept]
            average.copy_to(model.parameters())
            seen += values(model)
            average.restore()
        return [*seen, *train(model, optimizer, rank, entropy, steps=2)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_some_ranks_of_several_may_do_so(way: str) -> None:
    run_ranks(run_by_way, 3, way, writes_with)


def after_sync(rank: int, world_size: int) -> None:
    """A rank that is late, but comes, is waited for: by how often ranks have synchronized, and not by time."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage)
        seen = train(model, optimizer, rank, entropy, steps=2)
        for number in range(3):
            if rank == number % 2:
                time.sleep(0.2)
            optimizer.synchronize()
            with torch.no_grad():
                for param in model.parameters():
                    param.add_(number)
        return [*seen, *values(model), *train(model, optimizer, rank, entropy, steps=1)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_who_writes_late_is_waited_for(way: str) -> None:
    run_ranks(run_by_way, 2, way, after_sync)


def raises_inside_whole(rank: int, world_size: int) -> None:
    """On one rank. Afterwards all still know of each other how often they have come."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    before = values(model)

    def write() -> None:
        with optimizer.whole():
            for param in model.parameters():
                param.data.zero_()
            if rank == 1:
                raise ZeroDivisionError

    with pytest.raises((RuntimeError, ZeroDivisionError, ValueError)):
        write()
    assert_same(values(model), before)
    if rank == 0:
        time.sleep(0.5)
    with torch.no_grad():
        for param in model.parameters():
            param.add_(1)
    assert_same(values(model), [value + 1 for value in before])
    if rank == 0:
        swaps(model)
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_all_write_and_one_swaps_after_an_error_inside_whole(way: str) -> None:
    run_ranks(run_by_way, 2, way, raises_inside_whole)


def is_gone(rank: int, world_size: int) -> None:
    """What is read back without a sync point has said so before: a script may end there."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    if rank == 0:
        with torch.no_grad():
            model.get_parameter("blocks.0.up.weight").zero_()
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(pytest.warns(UserWarning, match=NOT_PUT_BACK))
        with standing_outside([optimizer], "accelerator.wait_for_everyone()"):
            dist.barrier()
    assert model.get_parameter("blocks.0.up.weight").any()
    with pytest.raises((RuntimeError, ValueError), match=NOT_PUT_BACK):  # told by rank 0
        optimizer.unshard()
    optimizer.unshard()


def test_what_is_taken_back_is_warned_of_at_once() -> None:
    run_ranks(is_gone, 2)


def in_several_calls(rank: int, world_size: int, call: str) -> None:
    """Wherever ranks synchronize next."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    if rank == 0:
        with torch.no_grad():
            model.get_parameter("blocks.0.up.weight").zero_()
    calls = {
        "full_state_dict": optimizer.full_state_dict,
        "synchronize": optimizer.synchronize,
        "clip": lambda: optimizer.clip_grad_norm_(1.0),
        "broadcast": optimizer.broadcast_parameters,
    }
    entropy(model, batch(1, rank)).backward()
    with pytest.raises(RuntimeError, match=NOT_PUT_BACK):
        calls[call]()


@pytest.mark.parametrize("call", ["full_state_dict", "synchronize", "clip"])
def test_it_is_told_wherever_ranks_synchronize(call: str) -> None:
    run_ranks(in_several_calls, 2, call)


def swaps(model: nn.Module) -> None:
    before = values(model)
    average = Average(model)
    average.store()
    average.kept = [value + 1 for value in average.kept]
    average.copy_to(model.parameters())
    assert_same(values(model), [value + 1 for value in before])
    average.restore()


def meets_others(rank: int, world_size: int) -> None:
    """The others wait in a framework's barrier meanwhile."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    before = values(model)
    if rank == 0:
        swaps(model)
    with standing_outside([optimizer], "accelerator.wait_for_everyone()"):
        dist.barrier()
    assert_same(values(model), before)
    with torch.no_grad():  # all ranks, before they synchronize
        for param in model.parameters():
            param.add_(1)
    assert_same(values(model), [value + 1 for value in before])
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_an_average_goes_in_where_the_others_wait_for_accelerate(way: str) -> None:
    start = time.monotonic()
    run_ranks(run_by_way, 2, way, meets_others)
    assert time.monotonic() - start < 20, "long before the timeout"


def collective_of(call: str) -> Any:
    """Of the script's own, over all ranks."""
    others = dist.new_group(backend="gloo") if call == "another group" else None
    return {
        "barrier": dist.barrier,
        "another group": lambda: dist.barrier(others),
        "all_reduce": lambda: dist.all_reduce(torch.ones(2)),
        "objects": lambda: dist.all_gather_object([None] * dist.get_world_size(), "text"),
    }[call]


def waits_in_torch(rank: int, world_size: int, call: str) -> None:
    """The others stand in torch's own collective meanwhile."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    before = values(model)
    collective = collective_of(call)
    start = time.monotonic()
    for _ in range(2):
        if rank == 0:
            swaps(model)
        collective()
    assert_same(values(model), before)
    with torch.no_grad():  # all ranks, before the optimizer synchronizes them
        for param in model.parameters():
            param.add_(1)
    assert_same(values(model), [value + 1 for value in before])
    train(model, optimizer, rank, entropy, steps=1)
    assert time.monotonic() - start < 20, "long before the timeout"


@pytest.mark.parametrize("call", ["barrier", "another group", "all_reduce", "objects"])
@pytest.mark.parametrize(("world_size", "way"), [(2, "memory"), (3, "messages")])
def test_an_average_goes_in_where_the_others_wait_in_a_collective_of_torch(
    world_size: int, way: str, call: str
) -> None:
    run_ranks(run_by_way, world_size, way, waits_in_torch, call)


def waits_with_others(rank: int, world_size: int) -> None:
    """Ranks beside those of the optimizer stand there too."""
    pair = dist.new_group([0, 1])
    if rank < 2:
        model, optimizer = made(process_group=pair)
        train(model, optimizer, rank, entropy, steps=1)
        before = values(model)
    if rank == 0:
        swaps(model)
    dist.barrier()
    if rank < 2:
        assert_same(values(model), before)
        train(model, optimizer, rank, entropy, steps=1)


def test_an_average_goes_in_where_the_others_wait_with_more_ranks() -> None:
    start = time.monotonic()
    run_ranks(waits_with_others, 3)
    assert time.monotonic() - start < 20, "long before the timeout"


def comes_to_barrier() -> None:
    dist.barrier()
    time.sleep(1)  # Python raises between two of its instructions


def interrupted_there(rank: int, world_size: int) -> None:
    """Ctrl-C where a rank comes to a collective is no other error."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    if rank == 0:
        with (
            patch.object(written_alone, "_with_shards", side_effect=KeyboardInterrupt),
            pytest.raises(KeyboardInterrupt),
        ):
            comes_to_barrier()
    else:
        dist.barrier()


def test_ctrl_c_where_a_rank_comes_to_a_collective_stays_that() -> None:
    run_ranks(interrupted_there, 2)


def is_not_put_back_in_torch(rank: int, world_size: int) -> None:
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    before = values(model)
    if rank == 0:
        model.get_parameter("blocks.0.up.weight").data.zero_()
    with ExitStack() as stack:
        if rank == 0:
            stack.enter_context(pytest.warns(UserWarning, match=NOT_PUT_BACK))
        dist.barrier()
    assert_same(values(model), before)
    with pytest.raises((RuntimeError, ValueError), match=NOT_PUT_BACK):
        optimizer.synchronize()
    optimizer.zero_grad()
    train(model, optimizer, rank, entropy, steps=1)


def test_what_is_not_put_back_before_a_collective_of_torch_is_taken_back() -> None:
    run_ranks(is_not_put_back_in_torch, 2)


def all_write_around(rank: int, world_size: int) -> None:
    """All ranks write, and some of them, or another thread, come to collectives before others do."""

    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage)
        seen = train(model, optimizer, rank, entropy, steps=1)
        some, of_thread = dist.new_group([1, 2]), dist.new_group(backend="gloo")
        saver = Thread(target=lambda: [dist.barrier(of_thread) for _ in range(2)])
        if rank > 0:
            saver.start()
            dist.barrier(some)
        with torch.no_grad():
            for number in range(3):
                if rank == number:
                    time.sleep(0.3)
                for param in model.parameters():
                    param.add_(1)
                work = dist.all_reduce(torch.ones(2), async_op=True)
                for param in model.parameters():
                    param.mul_(0.5)
                work.wait()
                if rank == 0 and number == 0:
                    dist.send(torch.ones(1), 1)
                elif rank == 1 and number == 0:
                    dist.recv(torch.ones(1), 0)
        if rank == 0:
            saver.start()
        saver.join()
        return [*seen, *values(model), *train(model, optimizer, rank, entropy, steps=1)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_what_all_ranks_write_between_collectives_is_no_ranks_alone(way: str) -> None:
    run_ranks(run_by_way, 3, way, all_write_around)


def steps_of_another(rank: int, world_size: int, stage: int) -> None:
    """Two optimizers, as of a generator and of what judges it: the others wait in the step of the other one."""

    def run(stage_here: int) -> list[Tensor]:
        generator, optimizer = made(stage_here)
        judge, its_optimizer = made(min(stage, stage_here))
        seen = []
        for _ in range(2):
            seen += train(judge, its_optimizer, rank, entropy, steps=1)
            seen += train(generator, optimizer, rank, entropy, steps=1)
            if rank == 0:
                swaps(generator)
        return [*seen, *train(judge, its_optimizer, rank, entropy, steps=1), *values(generator)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("way", ["memory", "messages"])
def test_an_average_goes_in_where_the_others_wait_in_the_step_of_another_optimizer(way: str, stage: int) -> None:
    start = time.monotonic()
    run_ranks(run_by_way, 2, way, steps_of_another, stage)
    assert time.monotonic() - start < 20, "long before the timeout"


def hands_out_buffers(rank: int, world_size: int) -> None:
    """The others wait in a forward of the wrapper, which hands out buffers."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.Linear(16, 4))
    optimizer = build(model)
    ddp = zerox.DistributedDataParallel(model)
    for step in range(3):
        torch.manual_seed(10 * step + rank)
        ddp(torch.randn(6, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        if rank == 0:
            swaps(model)
    optimizer.synchronize()


def test_an_average_goes_in_where_the_others_wait_in_a_forward() -> None:
    start = time.monotonic()
    run_ranks(hands_out_buffers, 2)
    assert time.monotonic() - start < 20, "long before the timeout"


def ends_meanwhile(rank: int, world_size: int) -> str:
    """Rank 0 waits when the other one comes to the end of its script, or is there since."""
    model, optimizer = made()
    train(model, optimizer, rank, entropy, steps=1)
    if rank == 1:
        time.sleep(0.3)
        return "through"
    swaps(model)
    time.sleep(1.0)
    swaps(model)
    return "swapped"


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_an_average_goes_in_where_the_others_are_through(way: str, tmp_path: Path) -> None:
    run = start_ranks(run_by_way, 2, way, ends_meanwhile, folder=tmp_path / "ranks", timeout_s=60)
    try:
        assert run.answer(0, within_s=40) == "swapped"
    finally:
        run.close()


def writes_a_table(rank: int, world_size: int) -> None:
    """A table that is sharded is written on all ranks. Training goes on with what all have."""
    model = nn.Sequential(nn.Embedding(300, 8, sparse=True), nn.Linear(8, 4))
    groups = [
        {"params": sparse_params(model), "sparse": True, "weight_decay": 0.0},
        {"params": list(model[1].parameters())},
    ]
    optimizer = FusedShardedAdam(groups, stage=3)
    model(torch.arange(5)).square().mean().backward()
    if rank == 0:
        with pytest.raises(RuntimeError, match="were written here and not on all ranks"), torch.no_grad():
            model[0].weight.zero_()
    with pytest.raises(RuntimeError, match=r"were written here and not on all ranks|rank 0"):
        optimizer.step()
    for _ in range(2):
        optimizer.zero_grad()
        model(torch.arange(5)).square().mean().backward()
        optimizer.step()
    table = model[0].weight.detach().clone()
    assert table.any()
    tables: list[Any] = [None] * world_size
    dist.all_gather_object(tables, table)
    assert_same(tables[:1], tables[-1:])


def test_a_table_that_one_rank_writes_raises_at_once() -> None:
    start = time.monotonic()
    run_ranks(writes_a_table, 2)
    assert time.monotonic() - start < 40
