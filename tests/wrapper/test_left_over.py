"""Gradients that no optimizer of zerox holds: who sends them, once, and what happens around it."""

from __future__ import annotations

import gc
import warnings
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

from tests.bucket_manager.rig import same_bits
from tests.ranks import run_ranks
from tests.wrapper.twins import of_zerox
from zerox import DistributedDataParallel


def left_over_of(model: DistributedDataParallel) -> Any:
    return model._averaging.left_over


def held(rank: int, world_size: int) -> list[bool]:
    """Where optimizers hold all parameters, frozen ones in none, there is nothing of its own."""
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    model.module[0].requires_grad_(False)
    optimizer = script.optimizer(model.module[2].parameters())
    script.train(model, optimizer)
    left = left_over_of(model)
    hooks = [len(param._backward_hooks or ()) for param in model.parameters()]
    return [left.grads is None, left.ranks is None, hooks[:2] == [0, 0]]


def test_nothing_of_its_own_where_optimizers_hold_all() -> None:
    assert all(map(all, run_ranks(held, 2)))


def mean_of(grads: Tensor) -> Tensor:
    total = grads.clone()
    dist.all_reduce(total)
    return total / dist.get_world_size()


class Odd(nn.Module):
    """Parameters with gradients of all dtypes, channels-last, transposed, used twice, of no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.last = nn.Parameter(torch.randn(2, 3, 4, 4).to(memory_format=torch.channels_last))
        self.turned = nn.Parameter(torch.randn(6, 5).t())
        self.narrow = nn.Parameter(torch.randn(7).bfloat16())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.float64))
        self.scalar = nn.Parameter(torch.tensor(0.5))
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.tied = self.turned
        self.register_parameter("none", None)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        turned = (x * self.turned).sum() + (self.tied * x).square().sum()
        halves = (self.narrow.float() * x.sum()).sum()
        return turned, halves, (self.wide * x.double().sum()).sum(), x.sum() * self.last.sum() * self.scalar


def odd(rank: int, world_size: int) -> list[bool]:
    torch.manual_seed(rank)
    model = DistributedDataParallel(Odd())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for set_to_none in (True, False):
        torch.manual_seed(rank)
        x = torch.randn(5, 6)
        optimizer.zero_grad(set_to_none)
        alone = torch.autograd.grad(sum(model.module(x)), [p for p in model.parameters() if p.numel()])
        sum(model(x)).backward()  # type: ignore[union-attr]
        for param, own in zip([p for p in model.parameters() if p.numel()], alone, strict=True):
            assert param.grad is not None
            expected = mean_of(own.float() if own.dtype is torch.bfloat16 else own).to(own.dtype)
            found.append(param.grad.dtype == param.dtype and param.grad.stride() == param.stride())
            torch.testing.assert_close(
                param.grad, expected, rtol=1e-5 if own.dtype is not torch.bfloat16 else 1e-2, atol=1e-6
            )
        before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
        sum(model(x)).backward()  # type: ignore[union-attr]  # adds to the mean
        for param, grad in zip([p for p in model.parameters() if p.grad is not None], before, strict=True):
            torch.testing.assert_close(
                param.grad, 2 * grad, rtol=1e-2 if grad.dtype is torch.bfloat16 else 1e-5, atol=1e-6
            )
        optimizer.step()
    return found


def test_they_are_the_mean_in_p_grad_as_it_lies() -> None:
    assert all(map(all, run_ranks(odd, 2)))


def thawed(rank: int, world_size: int) -> list[bool]:
    script = of_zerox(rank, 2)
    net = script.net()
    net[0].requires_grad_(False)
    model = DistributedDataParallel(net)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    script.train(model, optimizer)
    net[0].requires_grad_(True)
    optimizer.zero_grad()
    [own] = torch.autograd.grad(script.loss(net), [net[0].weight])
    script.loss(model).backward()
    torch.testing.assert_close(net[0].weight.grad, mean_of(own), rtol=0, atol=1e-6)
    return [True]


def test_a_layer_that_is_thawed_is_averaged() -> None:
    assert all(map(all, run_ranks(thawed, 2)))


def taken_within_a_step(rank: int, world_size: int) -> list[bool]:
    """An optimizer is built between a backward and its step(): the mean is not averaged again."""
    script = of_zerox(rank, 1)
    model = DistributedDataParallel(script.net())
    script.loss(model).backward()
    before = [param.grad.clone() for param in model.parameters() if param.grad is not None]
    optimizer = script.optimizer(model.parameters())
    optimizer.synchronize()
    same = [same_bits(param.grad, grad) for param, grad in zip(model.parameters(), before, strict=True)]
    optimizer.step()
    gone = weakref.ref(optimizer)
    del optimizer
    script.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    return [*same, gone() is None, left_over_of(model).grads is not None]


def test_one_that_is_taken_over_is_not_averaged_twice() -> None:
    assert all(map(all, run_ranks(taken_within_a_step, 2)))


def raised(rank: int, world_size: int) -> list[Any]:
    """Rank 0's backward raises; both go on."""
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("on purpose")

    loss = script.loss(model)
    if rank == 0:
        handle = model.module[0].weight.register_hook(fail)
    said = ""
    try:
        loss.backward()
    except (ValueError, RuntimeError) as error:
        said = str(error)
    if rank == 0:
        handle.remove()
    optimizer.zero_grad()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        script.train(model, optimizer)
    totals = [float(param.detach().double().sum()) for param in model.parameters()]
    return [said, [str(each.message) for each in caught], totals]


def test_after_a_backward_that_raised_all_ranks_go_on() -> None:
    (one, warned, totals), (other, warned_too, same) = run_ranks(raised, 2)
    assert one == "on purpose"
    assert "rank 0 can't go on" in other
    assert totals == same
    for texts in (warned, warned_too):
        assert any("'0.weight' and all that no optimizer of zerox holds are discarded" in text for text in texts)


def one_more(rank: int, world_size: int) -> str:
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    try:
        for _ in range(1 + rank):
            script.loss(model).backward()
        if rank == 0:
            script.loss(model).backward()
            script.loss(model).backward()
    except RuntimeError as error:
        return str(error)
    return ""


def test_a_rank_that_runs_one_backward_less_ends_in_an_error() -> None:
    assert any("did not answer" in said or "has run" in said for said in run_ranks(one_more, 2, timeout_s=4))


def refused(rank: int, world_size: int) -> list[str]:
    said = []
    eighth = nn.Linear(2, 2)
    eighth.more = nn.Parameter(torch.zeros(3).to(torch.float8_e4m3fn))
    model = DistributedDataParallel(eighth)
    try:
        model(torch.ones(1, 2))
    except ValueError as error:
        said.append(str(error))
    gc.collect()
    return said


def test_what_can_t_be_averaged_so_is_refused_by_name() -> None:
    for [dtype] in run_ranks(refused, 2):
        assert "'more'" in dtype
        assert "float8_e4m3fn" in dtype


def dropped(rank: int, world_size: int) -> list[bool]:
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    net = model.module
    script.train(model, torch.optim.SGD(model.parameters(), lr=0.1))
    gone = [weakref.ref(model), weakref.ref(left_over_of(model).grads)]
    gc.disable()
    try:
        del model
        found = [each() is None for each in gone]
    finally:
        gc.enable()
    script.loss(net).backward()  # each rank's own from here on
    return [*found, type(net[0].weight.grad) is Tensor]


def test_it_goes_with_its_wrapper() -> None:
    assert all(map(all, run_ranks(dropped, 2)))


def compressed(rank: int, world_size: int) -> list[bool]:
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    model.register_comm_hook(None, default_hooks.bf16_compress_hook)
    [own] = torch.autograd.grad(script.loss(model.module), [model.module[0].weight])
    script.loss(model).backward()
    expected = mean_of(own.bfloat16().float()).bfloat16()
    found = [torch.equal(model.module[0].weight.grad, expected.float())]
    optimizer = script.optimizer(model.parameters())
    with pytest.raises(ValueError, match="bf16_compress_hook was registered, and FusedShardedAdam sends"):
        model(script.data())
    del optimizer
    script.optimizer(model.parameters(), reduce_dtype=torch.bfloat16)
    model(script.data())
    model._register_builtin_comm_hook(dist.BuiltinCommHookType.ALLREDUCE)
    with pytest.raises(NotImplementedError, match="reduce_dtype"):
        model.register_comm_hook(None, default_hooks.fp16_compress_wrapper(default_hooks.allreduce_hook))
    return found


def test_hooks_that_only_compress_are_taken() -> None:
    assert all(map(all, run_ranks(compressed, 2)))
