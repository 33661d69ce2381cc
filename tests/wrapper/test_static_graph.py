"""Several gradients of one parameter in one backward, with static_graph=True: reentrant checkpoints.

That they train as under torch's class is in test_of_torch.py.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.ranks import Once
from tests.wrapper.beside import data
from tests.wrapper.tables import ATOL, mean_of
from zerox import DistributedDataParallel, FusedShardedSGD

KINDS = ("left over", 1, 2, 3)


class Twice(nn.Module):
    """``middle`` is in ``times`` checkpoints. ``table``: in place of the first layer, and not used by every forward;
    then a checkpoint has all else."""

    def __init__(self, times: int = 2, table: bool = False) -> None:
        super().__init__()
        self.first = nn.Embedding(3, 4, sparse=True) if table else nn.Linear(4, 4)
        self.middle, self.last = nn.Linear(4, 4), nn.Identity() if table else nn.Linear(4, 4)
        self.times = times

    def forward(self, x: Tensor, reentrant: bool = True, looks_up: bool = True) -> Tensor:
        if isinstance(self.first, nn.Linear):
            x = self.first(x).tanh()
        else:
            x = x.requires_grad_() + (self.first(torch.tensor([1, 2, 2, 0])) if looks_up else 0)
        for _ in range(self.times):
            x = checkpoint(self.middle, x, use_reentrant=reentrant).tanh()
        return self.last(x)


def made(kind: Any, **options: Any) -> tuple[DistributedDataParallel, Any]:
    """A small bucket for each parameter, so that the first ones are complete early."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Twice(**options), static_graph=True)
    if kind == "left over":
        return ddp, None
    return ddp, FusedShardedSGD(dense_of(ddp.module), lr=0.1, stage=kind, bucket_cap_mb=1e-5)


def dense_of(model: nn.Module) -> list[nn.Parameter]:
    layers = [each for each in model.modules() if isinstance(each, nn.Linear)]
    return [param for each in layers for param in each.parameters()]


def grads_of(ddp: DistributedDataParallel, optimizer: Any) -> list[Tensor]:
    return [param.grad if optimizer is None else optimizer.full_grad(param) for param in dense_of(ddp.module)]


def own_grads(ddp: DistributedDataParallel, x: Tensor, **options: Any) -> list[Tensor]:
    outputs = ddp.module(x, reentrant=False, **options)
    return list(torch.autograd.grad(outputs.square().sum(), dense_of(ddp.module)))


def is_mean(ddp: DistributedDataParallel, optimizer: Any, own: list[Tensor]) -> bool:
    means = [mean_of(grad) for grad in own]
    return all(torch.allclose(a, b, atol=10 * ATOL) for a, b in zip(grads_of(ddp, optimizer), means, strict=True))


def zero(ddp: DistributedDataParallel, optimizer: Any) -> None:
    ddp.zero_grad() if optimizer is None else optimizer.zero_grad()


def accumulated(rank: int, kind: Any) -> list[bool]:
    """In no_sync(), and over two backwards of one step, from the first one on. In stages 2 and 3 all of the first has
    left where it ends."""
    found = []
    ddp, optimizer = made(kind)
    for keeps in (False, True, False):
        own = [own_grads(ddp, data(rank, seed)) for seed in (0, 1)]
        ddp.require_backward_grad_sync = not keeps
        ddp(data(rank, 0)).square().sum().backward()
        ddp.require_backward_grad_sync = True
        stays = keeps or kind not in (2, 3)
        found += [(type(param.grad) is Tensor) == stays for param in dense_of(ddp.module)]
        ddp(data(rank, 1)).square().sum().backward()
        found.append(is_mean(ddp, optimizer, [a + b for a, b in zip(*own, strict=True)]))
        zero(ddp, optimizer)
    return found


def changing(rank: int, kind: Any) -> list[Any]:
    """One more checkpoint than before: an error where p.grad may have left, else the mean."""
    ddp, optimizer = made(kind)
    said: list[Any] = []
    for times in (2, 3):
        ddp.module.times = times
        own = own_grads(ddp, data(rank))
        try:
            ddp(data(rank)).square().sum().backward()
            said.append(is_mean(ddp, optimizer, own))
        except RuntimeError as error:
            said.append(str(error))
        if times == 2:
            zero(ddp, optimizer)
    return said


def launched(rank: int, kind: Any) -> list[bool]:
    """The second backward sends each bucket once, and the first ones before the last gradient is there. In stage 1 the
    first backward sends none before."""
    ddp, optimizer = made(kind)
    counts = []
    for step in range(2):
        x = data(rank, step)
        ddp(x)  # makes the bucket manager
        manager = ddp._averaging.left_over.grads.manager if optimizer is None else optimizer.inside.manager
        before, inside = manager.flights.num_launched, []
        handle = ddp.module.first.weight.register_hook(
            lambda _, manager=manager, inside=inside: inside.append(manager.flights.num_launched)
        )
        ddp(x).square().sum().backward()
        handle.remove()
        if optimizer is not None:
            optimizer.step()
        zero(ddp, optimizer)
        counts.append((inside[0] - before, manager.flights.num_launched - before))
    (too_early, _), (early, in_all) = counts
    return [kind in (2, 3) or too_early == 0, in_all == manager.num_buckets, optimizer is None or early > 0]


def with_a_table(rank: int, kind: Any) -> list[bool]:
    """Gradients of a table that one rank does not use come after those of all else: ranks synchronize once."""
    found = []
    ddp, optimizer = made(kind, table=True, times=1)
    for _ in range(2):
        own = own_grads(ddp, data(rank), looks_up=rank == 0)
        ddp(data(rank), looks_up=rank == 0).square().sum().backward()
        found.append(is_mean(ddp, optimizer, own))
        found.append(ddp.module.first.weight.grad is not None)
        zero(ddp, optimizer)
        ddp.zero_grad()
    return found


CASES: dict[str, Callable[[int, Any], list[Any]]] = {
    "accumulated": accumulated,
    "changing": changing,
    "launched": launched,
    "with a table": with_a_table,
}


def run_all(rank: int, world_size: int) -> dict[tuple[str, Any], Any]:
    found: dict[tuple[str, Any], Any] = {}
    for name, case in CASES.items():
        for kind in KINDS:
            try:
                found[name, kind] = case(rank, kind)
            except Exception:
                found[name, kind] = traceback.format_exc()
    return found


ALL = Once(run_all, 2)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", ["accumulated", "launched", "with a table"])
def test_several_gradients_in_one_backward_are_averaged(name: str, kind: Any) -> None:
    for found in ALL():
        assert all(each is True for each in found[name, kind]), found[name, kind]


@pytest.mark.parametrize("kind", KINDS)
def test_a_static_graph_that_changes_is_right_or_raises(kind: Any) -> None:
    for found in ALL():
        first, second = found["changing", kind]
        assert first is True
        if kind in (2, 3):
            assert second is True
        else:
            assert "'middle." in second
            assert "with static_graph=True every backward must have the same graph" in second
