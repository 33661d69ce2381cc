"""Each rank's own parameters, in orders of calls and beside features that a script may have."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from tests.wrapper.own_cases import WIDTH, Recommender, trained
from tests.wrapper.twins import STAGES, of_zerox, values_of


def one_norm(optimizer: Any, shared: list[Tensor], own: list[Tensor]) -> Tensor:
    """Of the shared gradients, once, and of all ranks' own ones."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, [param.grad.to_dense().clone() for param in own if param.grad is not None])
    grads = [optimizer.full_grad(param).clone() for param in shared if param.requires_grad]
    return nn.utils.get_total_norm([*grads, *(grad for each in everyone for grad in each)])


def added(rank: int, _: int, stage: int) -> None:
    """A group that is all the ranks' own, added or put into param_groups; and one that was taken out."""
    script = of_zerox(rank, stage)
    model = Recommender(script)
    shared, own = list(model.top.parameters()), list(model.tables.parameters())
    optimizer = script.optimizer(shared, lr=0.01)
    optimizer.add_param_group({"params": own})
    model(0).square().mean().backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), one_norm(optimizer, shared, own))
    optimizer.zero_grad()
    extra = nn.Parameter(torch.ones(3))
    optimizer.param_groups[1]["params"].append(extra)
    (model(1).square().mean() + 100 * extra.sum()).backward()
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), one_norm(optimizer, shared, [*own, extra]))
    del optimizer.param_groups[1]["params"][-1]
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), one_norm(optimizer, shared, own))
    optimizer.step()
    assert torch.equal(extra.detach(), torch.ones(3))


@pytest.mark.parametrize("stage", STAGES)
def test_groups_that_change(stage: int) -> None:
    run_ranks(added, 2, stage)


def frozen(rank: int, _: int) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    model.top.requires_grad_(False)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    model(0).square().mean().backward()
    norm = one_norm(optimizer, [], list(model.tables.parameters()))
    torch.testing.assert_close(optimizer.clip_grad_norm_(0.001), norm)
    optimizer.step()


def test_where_all_that_is_wrapped_is_frozen() -> None:
    run_ranks(frozen, 2)


def followed(rank: int, _: int) -> None:
    """The last gradients of a rank that has run out count no more."""
    script = of_zerox(rank, 2)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.0)
    norms = []
    with optimizer.join():
        for step in range(1 + 2 * rank):
            optimizer.zero_grad()
            (1000 ** (1 - rank) * model(step).square().mean()).backward()
            norms.append(float(optimizer.clip_grad_norm_(1e9)))
            optimizer.step()
    assert rank == 0 or max(norms[1:]) < 0.01 * norms[0]


def test_a_rank_that_follows_has_no_gradients() -> None:
    run_ranks(followed, 2)


def turned(rank: int, _: int, turns: bool) -> list[float]:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    one, other = (nn.Parameter(torch.ones(1)) for _ in range(2))
    groups = [{"params": [one], "rule": "sgd", "lr": 0.1}, *model.groups(), {"params": [other]}]
    optimizer = script.optimizer(groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        (model(step).square().mean() + one.square().sum() + other.square().sum()).backward()
        optimizer.step()
        if turns:
            optimizer.param_groups.reverse()
    return [one.item(), other.item()]


def test_groups_that_are_moved_keep_their_rules() -> None:
    assert run_ranks(turned, 2, True) == run_ranks(turned, 2, False)


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1).double()

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.second(self.first(x).double())
        return found


def scaled(rank: int, _: int, dtype: torch.dtype) -> None:
    """Dtypes have lists of their own in torch's scaler; rank 1 overflows in its own table in the second step."""
    script = of_zerox(rank, 2)
    torch.manual_seed(rank)
    table, top = nn.Embedding(6, WIDTH, sparse=True, dtype=dtype), script.wrap(TwoDtypes())
    optimizer = zerox.FusedShardedSGD([*top.parameters(), *table.parameters()], lr=0.1, stage=2)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    for step in range(3):
        before = [*values_of(top), table.weight.detach().clone()]
        optimizer.zero_grad()
        loss = top(table(torch.tensor([0, 1, 1, 2])).float()).square().mean()
        scaler.scale(loss).backward()
        grad = table.weight.grad.to_dense() / scaler.get_scale()
        if step == rank == 1:
            table.weight.grad._values()[0, 0] = float("inf")
        scaler.step(optimizer)
        scaler.update()
        now = [*values_of(top), table.weight.detach()]
        assert all(map(torch.equal, before, now)) == (step == 1)
        if step != 1:
            atol = 1e-2 if dtype is torch.bfloat16 else 1e-6
            torch.testing.assert_close(now[-1], before[-1] - 0.1 * grad, atol=atol, rtol=0)
    assert scaler.get_scale() == 512.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_torch_s_scaler_with_sparse_gradients_and_several_dtypes(dtype: torch.dtype) -> None:
    run_ranks(scaled, 2, dtype)


def experts(rank: int, _: int) -> None:
    """A param group with a process_group is not each rank's own."""
    script = of_zerox(rank, 2)
    model = Recommender(script)
    expert = nn.Linear(WIDTH, WIDTH)
    groups = [*model.groups(), {"params": list(expert.parameters()), "process_group": dist.new_group([0, 1])}]
    optimizer = script.optimizer(groups, lr=0.01)
    for step in range(2):
        optimizer.zero_grad()
        (model(step) + expert(torch.full((8, WIDTH), 1.0 + rank)).mean()).square().mean().backward()
        optimizer.step()
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, values_of(expert))
    assert all(map(torch.equal, *everyone))


def test_experts_are_their_group_s() -> None:
    run_ranks(experts, 2)


def wrapped_late(rank: int, _: int) -> None:
    script = of_zerox(rank, 2)
    first, second = nn.Linear(16, 16), nn.Linear(16, 1)
    ddp = script.wrap(first)
    optimizer = script.optimizer([*first.parameters(), *second.parameters()], lr=0.01)
    late = script.wrap(second)
    for _ in range(2):
        late(ddp(script.data())).square().mean().backward()
        with pytest.raises(ValueError, match="was wrapped in a DistributedDataParallel after the optimizer was built"):
            optimizer.step()
        optimizer.zero_grad()
    model = Recommender(script)
    again = script.optimizer(model.groups(), lr=0.01)
    with pytest.raises(ValueError, match="is this rank's own, which no DistributedDataParallel has"):
        again.clip_grad_norm_(1.0, parameters=model.tables.parameters())


def test_all_are_wrapped_before_the_optimizer_is_built() -> None:
    run_ranks(wrapped_late, 2)


def outlived(rank: int, _: int) -> None:
    """A wrapper that is still there when its group has ended, and one that ended before its optimizer did."""
    script = of_zerox(rank, 2)
    group = dist.new_group([0, 1])
    wrapper = zerox.DistributedDataParallel(nn.Linear(2, 2), process_group=group)
    dist.destroy_process_group(group)
    net = script.net()
    script.train(net, script.optimizer(net.parameters(), lr=0.01))
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    trained(model, optimizer)
    model.top = model.top.module
    late = nn.Parameter(torch.full((2,), float(rank)))
    optimizer.add_param_group({"params": [late]})
    trained(model, optimizer)
    assert torch.equal(late.detach(), torch.full((2,), float(rank)))
    del wrapper


def test_wrappers_and_groups_that_have_ended() -> None:
    run_ranks(outlived, 2)
