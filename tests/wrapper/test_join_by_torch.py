"""torch's Join with a wrapper, early termination, and what goes wrong inside join(): all ranks hear of it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.algorithms.join import Join
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from tests.wrapper.beside import data
from zerox import DistributedDataParallel, FusedShardedAdam

BATCHES = (2, 4)
EPS = 1e-2  # a bias before statistics has noise for a gradient, which a smaller one would make a step of


def net(seed: int = 0) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4))


def values(*models: nn.Module) -> list[Tensor]:
    return [each.detach().clone() for model in models for each in (*model.parameters(), *model.buffers())]


def optimizer_for(ddp: nn.Module, holds: str) -> Any:
    if holds == "torch's":
        return torch.optim.AdamW(ddp.parameters(), lr=0.1, eps=EPS)
    return FusedShardedAdam(ddp.parameters(), lr=0.1, eps=EPS, stage=int(holds))


def ends_early(cls: Any, rank: int, holds: str, by_torch: bool) -> tuple[str, list[Tensor]]:
    """What is raised, and the parameters after three more steps of both ranks. (Buffers are the last rank's with
    torch's class, which never leaves its join(), and rank 0's here.)"""
    ddp = cls(net())
    optimizer = optimizer_for(ddp, holds)

    def steps(count: int) -> None:
        for step in range(count):
            ddp(data(rank, step)).exp().mean().backward()
            optimizer.step()
            ddp.zero_grad()

    made: Callable[[], AbstractContextManager[Any]] = lambda: (  # noqa: E731
        Join([ddp], throw_on_early_termination=True) if by_torch else ddp.join(throw_on_early_termination=True)
    )
    with made():
        steps(2)
    with pytest.raises(RuntimeError) as raised, made():
        steps(BATCHES[rank])
    steps(3)
    return str(raised.value), [param.detach().clone() for param in ddp.parameters()]


def early(rank: int, world_size: int) -> list[Any]:
    found = []
    for by_torch in (False, True):
        said, theirs = ends_early(OfTorch, rank, "torch's", by_torch)
        for holds in ("torch's", "1", "2"):
            ours_said, ours = ends_early(DistributedDataParallel, rank, holds, by_torch)
            same = all(torch.allclose(*each, atol=1e-6) for each in zip(ours, theirs, strict=True))
            found.append(same and ours_said == said and "exhausted" in said)
    return found


def test_early_termination_is_torchs_on_all_ranks_and_training_goes_on() -> None:
    assert run_ranks(early, 2) == [[True] * 6] * 2


def two(cls: Any, rank: int, order: str, holds: str, chained: bool) -> list[Tensor]:
    """Two wrappers in one loop; ``order``: of torch's Join. ``chained``: one takes the other's outputs."""
    one, other = cls(net(0)), cls(net(1))
    optimizers = [optimizer_for(each, holds) for each in (one, other)]
    every = {"1": one, "2": other, "a": optimizers[0], "b": optimizers[1]}
    with Join([every[each] for each in order]):
        for step in range(BATCHES[rank]):
            if chained:
                other(one(data(rank, step))).exp().mean().backward()
                optimizers[1].step()
                one.zero_grad(), other.zero_grad()
                (other(one(data(rank, step))) - 1).square().mean().backward()
            else:
                one(data(rank, step)).exp().mean().backward()
                other(data(rank, step)).exp().mean().backward()
                optimizers[1].step()
            optimizers[0].step()
            one.zero_grad(), other.zero_grad()
    return values(one.module, other.module)


def two_wrappers(rank: int, world_size: int) -> list[Any]:
    """Torch's can't be chained, nor do two forwards in an iteration."""
    apart = []
    for chained in (False, True):
        ours, theirs = DistributedDataParallel, DistributedDataParallel if chained else OfTorch
        expected = two(theirs, rank, "12", "torch's", chained)
        for order, holds in (("12", "1"), ("12", "2"), ("1a2b", "1"), ("12ba", "2"), ("1b2", "3")):
            found = two(ours, rank, order, holds, chained)
            if not all(torch.allclose(*each, atol=1e-5) for each in zip(found, expected, strict=True)):
                apart.append((chained, order, holds))
    return apart


def test_two_wrappers_in_torchs_join_with_their_optimizers() -> None:
    assert run_ranks(two_wrappers, 2) == [[], []]


def optimizer_first(rank: int, world_size: int) -> list[bool]:
    ddp = DistributedDataParallel(net())
    optimizer = optimizer_for(ddp, "2")
    with pytest.raises(RuntimeError, match=r"pass Join\(\[ddp, optimizer\]\)"):
        Join([optimizer, ddp])
    for argument in ("divide_by_initial_world_size", "throw_on_early_termination"):
        with pytest.raises(RuntimeError, match="ranks must agree"), ddp.join(**{argument: rank == 0}):
            pass
    with Join([optimizer]):  # it is as before
        for step in range(BATCHES[rank]):
            ddp.module(data(rank, step)).exp().mean().backward()
            optimizer.step()
    with pytest.raises(RuntimeError, match="inside another join"), ddp.join(), ddp.join():
        pass
    return [ddp._following is None, optimizer.inside.joining.divide is None]


def test_the_wrapper_comes_first_in_torchs_join() -> None:
    assert run_ranks(optimizer_first, 2) == [[True, True]] * 2


def wrong(rank: int, world_size: int, holds: str, what: str) -> str:
    """Rank 1 does something wrong in its third step, which rank 0 follows; or both build an optimizer in the second."""
    ddp = DistributedDataParallel(net(), broadcast_buffers=holds != "1")
    ddp.module[1].requires_grad_(False)
    optimizer = optimizer_for(ddp, holds)
    kept = []
    try:
        with ddp.join():
            for step in range(BATCHES[rank]):
                if step == 2 and what == "raises":
                    raise KeyError("a label")
                if step == 2 and what == "thaws":
                    ddp.module[1].requires_grad_(True)
                if step == 1 and what == "builds":
                    kept += [FusedShardedAdam(ddp.module[2].parameters())]
                ddp(data(rank, step)).exp().mean().backward()
                optimizer.step()
                ddp.zero_grad()
    except (KeyError, RuntimeError) as error:
        return f"{error} {ddp._following} {[param.grad is None for param in ddp.parameters()]}"
    return ""


@pytest.mark.parametrize(
    ("holds", "what", "said"),
    [
        ("torch's", "raises", "a label"),
        ("1", "raises", "a label"),
        ("2", "raises", "a label"),
        ("torch's", "builds", "an optimizer took parameters inside join()"),
        ("torch's", "thaws", "other parameters than before are held by no optimizer of zerox, such as '1.weight'"),
    ],
)
def test_what_one_rank_raises_inside_join_all_raise(holds: str, what: str, said: str) -> None:
    for answer in run_ranks(wrong, 2, holds, what, timeout_s=20):
        assert said in answer
        assert "None" in answer  # it is outside again


def own_grads(rank: int, world_size: int) -> list[Any]:
    """p.grad of a rank that has run out. Where forwards ended in no_sync(), the next one waits for no other rank."""
    found = []
    for cls in (OfTorch, DistributedDataParallel):
        ddp = cls(net())
        with ddp.join():
            for step in range(BATCHES[rank]):
                ddp.zero_grad()
                ddp(data(rank, step)).exp().mean().backward()
        found += [ddp.module[1].weight.grad.clone()]
    mine = ddp.module[1].weight.grad
    with ddp.join():
        for step in range(BATCHES[rank]):
            with ddp.no_sync():
                ddp(data(rank, step)).exp().mean().backward()
    synced = ddp.will_sync_module_buffers()
    ddp(data(rank))
    return [torch.allclose(*found, atol=1e-6), synced, ddp.module[1].weight.grad is mine]


def test_a_rank_that_has_run_out_keeps_its_own_gradients() -> None:
    assert run_ranks(own_grads, 2) == [[True, True, True]] * 2


class TwoLayers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        return self.a(inputs) + self.b(inputs) if both else self.b(inputs)


def not_as_torchs(rank: int, world_size: int) -> dict[str, list[Any]]:
    """Rank 0 runs out, and rank 1 then uses one layer only, whose two backwards in a step are both sent."""
    found: dict[str, list[Any]] = {"unused": [], "added": [], "buffers": []}
    for cls, holds in ((OfTorch, "torch's"), (DistributedDataParallel, "1")):
        torch.manual_seed(0)
        ddp = cls(TwoLayers(), find_unused_parameters=True)
        optimizer = optimizer_for(ddp, holds)
        with ddp.join():
            for step in range((1, 2)[rank]):
                ddp.zero_grad()
                for _ in range(2):
                    ddp(torch.ones(1, 4), step == 0).sum().backward()
                if step == 1:
                    found["unused"].append(ddp.module.a.weight.grad is None)
                    found["added"].append(float(ddp.module.b.bias.grad[0]))
                optimizer.step()
        ddp.module.seen.fill_(1.0 + rank)
        ddp(torch.ones(1, 4), True)
        ddp(torch.ones(1, 4), True)
        found["buffers"].append(float(ddp.module.seen))
    return found


def test_what_is_not_as_torchs_inside_join() -> None:
    none, found = run_ranks(not_as_torchs, 2)
    assert none["buffers"] == found["buffers"] == [2.0, 1.0]  # torch's stays inside
    assert found["unused"] == [False, True]
    assert found["added"] == [0.75, 1.0]  # half of (a half and 1); twice a half
