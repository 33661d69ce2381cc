"""Where a wrapper is built, all ranks get rank 0's values, and optimizers that are there already follow."""

from __future__ import annotations

import os
import re
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.ranks import run_ranks
from tests.wrapper.twins import of_zerox, values_of
from zerox import DistributedDataParallel, FusedShardedAdam, ShardedOptimizer


def net(rank: int) -> nn.Sequential:
    torch.manual_seed(rank)
    return nn.Sequential(nn.Linear(16, 300), nn.Tanh(), nn.Linear(300, 16), nn.BatchNorm1d(16))


def same_on_all(values: list[Tensor]) -> bool:
    """The same bits as rank 0's."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values)
    return all(map(same_bits, values, everyone[0]))


def written_before(rank: int, world_size: int, stage: int, how: str, dtype: torch.dtype) -> list[bool]:
    """Rank 0 alone writes all parameters, one of which is frozen, once the optimizer is there."""
    found = []
    for masters in ("auto", "fp32") if dtype is not torch.float32 else ("auto",):
        model = net(rank).to(dtype)
        model[2].bias.requires_grad_(False)
        optimizer = FusedShardedAdam(model.parameters(), stage=stage, master_weights=masters, bucket_cap_mb=0.01)
        model(torch.ones(8, 16, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        with torch.no_grad():
            for param in model.parameters() if rank == 0 else ():
                if how == "in place":
                    param.fill_(0.3)
                else:
                    param.data = torch.full_like(param, 0.3)
        wrapped = DistributedDataParallel(model)
        wanted = torch.tensor(0.3, dtype=dtype)
        found.append(same_on_all(values_of(wrapped)) and bool((model[0].weight.detach() == wanted).all()))
        state = optimizer.full_state(model[0].weight)
        found.append("master" not in state or bool((state["master"].to(dtype) == wanted).all()))
        found.append(not optimizer.inside.manager.params.moved())
        wrapped(torch.ones(8, 16, dtype=dtype)).float().square().mean().backward()
        optimizer.step()
        found.append(same_on_all(values_of(wrapped)))
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_what_rank_0_wrote_alone_is_on_all_ranks(stage: int) -> None:
    for how in ("in place", "moved"):
        for dtype in (torch.float32, torch.bfloat16):
            assert all(map(all, run_ranks(written_before, 2, stage, how, dtype))), (how, dtype)


def by_message(rank: int, world_size: int) -> list[bool]:
    os.environ["ZEROX_EXCHANGE"] = "messages"
    try:
        return written_before(rank, world_size, 3, "in place", torch.float32)
    finally:
        del os.environ["ZEROX_EXCHANGE"]


def test_with_sharded_parameters_on_other_machines_too() -> None:
    assert all(map(all, run_ranks(by_message, 3)))


def written_on_another(rank: int, world_size: int) -> bool:
    model = net(rank)
    optimizer = FusedShardedAdam(model.parameters(), stage=3)
    with optimizer.whole():
        before = [value.clone() for value in values_of(model)]
    if rank == 1:
        with torch.no_grad():
            model[0].weight.fill_(7.0)
            model[2].weight.data = torch.zeros_like(model[2].weight)
    DistributedDataParallel(model)
    return all(map(same_bits, values_of(model)[:6], before[:6]))


def test_what_another_rank_wrote_alone_is_dropped() -> None:
    assert all(run_ranks(written_on_another, 3))


def by_the_optimizer(rank: int, world_size: int, stage: int) -> list[bool]:
    model = net(rank)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    if rank == 0:
        with torch.no_grad():
            for param in model.parameters():
                param.mul_(2.0)
    optimizer.broadcast_parameters()
    found = [same_on_all([param.detach() for param in model.parameters()])]
    model(torch.ones(8, 16)).square().mean().backward()
    optimizer.step()
    return [*found, same_on_all([param.detach() for param in model.parameters()])]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_broadcast_parameters_does_it_without_a_wrapper(stage: int) -> None:
    assert all(map(all, run_ranks(by_the_optimizer, 2, stage)))


def of_one_of_two(rank: int, world_size: int) -> list[bool]:
    """One optimizer over two models, of which one is wrapped: the other is not overwritten."""
    one, other = net(rank), net(rank + 10)
    FusedShardedAdam([*one.parameters(), *other.parameters()], lr=0.0)
    with torch.no_grad():
        for model in (one, other):
            model[0].weight.fill_(float(rank + 1))
    DistributedDataParallel(one)
    return [float(one[0].weight[0, 0]) == 1.0, float(other[0].weight[0, 0]) == rank + 1]


def test_other_parameters_of_its_optimizer_are_left_alone() -> None:
    assert all(map(all, run_ranks(of_one_of_two, 2)))


def of_torch_s_kind(rank: int, world_size: int) -> bool:
    model = net(rank).bfloat16()
    ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    if rank == 0:
        with torch.no_grad():
            model[0].weight.fill_(0.5)
    return same_on_all(values_of(DistributedDataParallel(model)))


def test_with_an_optimizer_of_torch_s_kind_inside() -> None:
    assert all(run_ranks(of_torch_s_kind, 2))


def without(rank: int, world_size: int) -> list[bool]:
    model = net(rank)
    before = values_of(model)
    DistributedDataParallel(model, init_sync=False)
    as_it_was = all(map(same_bits, values_of(model), before))
    ignoring = net(rank)
    ignoring._ddp_params_and_buffers_to_ignore = ["0.weight", "3.running_mean"]
    ignoring[3].running_mean.fill_(rank)
    wrapped = DistributedDataParallel(ignoring)
    kept = same_bits(ignoring[0].weight, before[0]) and float(ignoring[3].running_mean[0]) == rank
    given = same_on_all([ignoring[2].weight.detach()])
    own = net(rank)
    own[3].running_mean.fill_(rank)
    DistributedDataParallel(own, broadcast_buffers=False)
    first = net(rank)
    first[3].running_mean.fill_(rank)
    DistributedDataParallel(first, forward_sync_buffers=False)
    means = [float(each[3].running_mean[0]) for each in (own, first)]
    return [as_it_was, kept, given, wrapped.parameters_to_ignore == {"0.weight", "3.running_mean"}, means == [rank, 0]]


def test_what_is_not_handed_out() -> None:
    assert all(map(all, run_ranks(without, 2)))


def unlike(rank: int, world_size: int, what: str) -> str:
    model = net(rank)
    if rank == 1 and what == "parameter":
        model[2] = nn.Linear(300, 17)
    elif rank == 1 and what == "buffer":
        model.register_buffer("more", torch.zeros(3))
    elif rank == 1 and what == "dtype":
        model[3].running_mean = model[3].running_mean.double()
    elif rank == 1 and what == "order":
        model[0].weight = nn.Parameter(model[0].weight.detach().t().contiguous().t())
    try:
        DistributedDataParallel(model)
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("what", "said"),
    [
        ("parameter", "2.weight"),
        ("buffer", "'more' of shape \\(3,\\)"),
        ("dtype", "3.running_mean.*float64"),
        ("order", "0.weight.*strides"),
    ],
)
def test_modules_that_differ_are_refused_on_all_ranks(what: str, said: str) -> None:
    for text in run_ranks(unlike, 2, what):
        assert "ranks must agree" in text
        assert re.search(said, text), text


def without_memory(rank: int, world_size: int) -> str:
    with torch.device("meta"):
        model = nn.Linear(3, 3)
    DistributedDataParallel(model, init_sync=False)
    try:
        DistributedDataParallel(model)
    except ValueError as error:
        return str(error)
    return ""


def test_a_model_on_meta_is_refused_by_name() -> None:
    for said in run_ranks(without_memory, 2):
        assert "parameter 'weight' is on the meta device" in said


def in_another_order(rank: int, world_size: int) -> list[str]:
    """Over another group than the optimizer's, in both orders."""
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    found = []
    for first in ("wrapper", "optimizer"):
        model = net(rank)
        try:
            if first == "wrapper":
                wrapped = DistributedDataParallel(model, process_group=halves[rank // 2])
                FusedShardedAdam(wrapped.module.parameters(), process_group=dist.group.WORLD)
            else:
                optimizer = FusedShardedAdam(model.parameters())
                assert optimizer.inside.ranks.size == 4
                DistributedDataParallel(model, process_group=halves[rank // 2])
            found.append("")
        except ValueError as error:
            found.append(str(error))
    model = net(rank)
    wrapped = DistributedDataParallel(model, process_group=halves[rank // 2])
    sizes = [FusedShardedAdam(model.parameters()).inside.ranks.size]
    del wrapped
    sizes.append(FusedShardedAdam(model.parameters()).inside.ranks.size)
    return [*found, str(sizes)]


def test_the_wrapper_s_group_is_its_optimizers() -> None:
    for rank, (one, other, size) in enumerate(run_ranks(in_another_order, 4)):
        mine = [0, 1] if rank < 2 else [2, 3]
        for text in (one, other):
            assert "[0, 1, 2, 3]" in text
            assert f"around Sequential has ranks {mine}" in text
        assert size == "[2, 4]", "without the wrapper, all ranks"


def test_one_process_without_a_group() -> None:
    script = of_zerox(0, 2)
    model = DistributedDataParallel(script.net())
    before = values_of(model)
    script.train(model, script.optimizer(model.parameters(), lr=0.1))
    with model.join(), model.no_sync():
        script.loss(model).backward()
    assert not any(map(torch.equal, values_of(model), before))
