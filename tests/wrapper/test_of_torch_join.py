"""What torch's own tests say of its DistributedDataParallel.join(), on ours. docs/ddp-tests.md has the list."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from tests.wrapper import torch_models as models
from tests.wrapper.beside import data
from zerox import DistributedDataParallel, FusedShardedAdam, FusedShardedSGD


class Uneven(nn.Module):
    """Statistics of the inputs, and a layer that is used on rank 0 alone if ``some``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.b = nn.BatchNorm1d(4), nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, both: bool) -> Tensor:
        outputs = self.norm(inputs)
        return self.b(self.a(outputs)) if both else self.b(outputs)


COUNTS = (((1, 5), 2), ((0, 3), 1), ((2, 2), 2), ((4, 1), 1))  # and of so many backwards one is sent
UNEVEN = [(counts, some, every) for counts, every in COUNTS for some in (False, True)]


def joined(cls: Any, stage: int, rank: int, counts: tuple[int, int], some: bool, every: int) -> list[Tensor]:
    """``every``: of so many backwards one is sent, the last."""
    torch.manual_seed(0)
    ddp = cls(Uneven(), find_unused_parameters=some)
    ours = cls is DistributedDataParallel
    optimizer: Any = FusedShardedSGD(ddp.parameters(), lr=0.1, stage=stage) if ours else sgd(ddp.parameters())
    with ddp.join():
        for step in range(every * counts[rank]):
            last = step % every == every - 1
            with nullcontext() if last else ddp.no_sync():
                ddp(data(rank, step), not some or rank == 0).exp().mean().backward()
            if last:
                optimizer.step()
                optimizer.zero_grad()
    with optimizer.whole() if ours else nullcontext():
        return [tensor.detach().clone() for tensor in (*ddp.module.parameters(), ddp.module.norm.running_mean)]


def sgd(params: Iterable[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.SGD(params, lr=0.1)


def apart_from_torchs(train: Callable[..., list[Tensor]], rank: int, case: Any, stages: Iterable[int]) -> list[Any]:
    """The stages in which it trains otherwise."""
    theirs = train(OfTorch, 0, rank, *case)
    apart = []
    for stage in stages:
        ours = train(DistributedDataParallel, stage, rank, *case)
        if not all(torch.allclose(*each, atol=1e-6) for each in zip(ours, theirs, strict=True)):
            apart.append((case, stage))
    return apart


def uneven(rank: int, world_size: int) -> list[Any]:
    return [each for case in UNEVEN for each in apart_from_torchs(joined, rank, case, (1, 2, 3))]


def test_join_trains_as_torchs() -> None:
    assert run_ranks(uneven, 2) == [[], []]


def by_hand(ddp: nn.Module) -> None:
    for param in ddp.parameters():
        param.grad = None


def below_versions(ddp: nn.Module) -> None:
    """As scripts of old do. No version counter shows it, so that it goes unseen in the middle of a step."""
    for param in ddp.parameters():
        if param.grad is not None:
            param.grad.data.zero_()


ZEROING: dict[str, Callable[[Any], None]] = {
    "ddp.zero_grad()": lambda ddp: ddp.zero_grad(),
    "model.zero_grad(set_to_none=False)": lambda ddp: ddp.module.zero_grad(set_to_none=False),
    "p.grad = None": by_hand,
    "p.grad.data.zero_()": below_versions,
}


def zeroed(
    cls: Any, stage: int, rank: int, zero: Callable[[Any], None], first: bool, twice: bool, clips: bool
) -> list[Tensor]:
    """``first``: before the backward, else after step(). ``twice``: also after the first of two backwards of a step."""
    torch.manual_seed(0)
    ddp = cls(Uneven(), find_unused_parameters=True)
    ours = cls is DistributedDataParallel
    optimizer: Any = FusedShardedSGD(ddp.parameters(), lr=0.1, stage=stage) if ours else sgd(ddp.parameters())
    with ddp.join():
        for step in range((2, 5)[rank]):
            if first:
                zero(ddp)
            if twice:
                ddp(data(rank, 10 + step), True).exp().mean().backward()
                zero(ddp)
            ddp(data(rank, step), rank == 0 or step < 3).exp().mean().backward()
            if clips and ours:
                optimizer.clip_grad_norm_(0.5)
            elif clips:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
            if not first:
                zero(ddp)
    with optimizer.whole() if ours else nullcontext():
        return [tensor.detach().clone() for tensor in (*ddp.module.parameters(), ddp.module.norm.running_mean)]


def zeroed_apart(rank: int, world_size: int) -> list[Any]:
    apart = []
    for name, zero in ZEROING.items():
        for case in ((first, twice, clips) for first in (True, False) for twice in (False, True) for clips in (0, 1)):
            if zero is below_versions and case[1]:
                continue
            stages = (1, 2) if name == "ddp.zero_grad()" else (1,)
            apart += [(name, each) for each in apart_from_torchs(zeroed, rank, (zero, *case), stages)]
    return apart


def clipped(cls: Any, stage: int, rank: int, divides_by_all: bool, num_clipped: int) -> list[Tensor]:
    """By torch's clip, which writes to p.grad, in the first steps. Gradients are zeroed where the loop begins: a rank
    that has run out has the last ones still."""
    torch.manual_seed(0)
    ddp = cls(Uneven(), find_unused_parameters=True)
    ours = cls is DistributedDataParallel
    optimizer: Any = FusedShardedSGD(ddp.parameters(), lr=0.1, stage=stage) if ours else sgd(ddp.parameters())
    with ddp.join(divide_by_initial_world_size=divides_by_all):
        for step in range((2, 5)[rank]):
            ddp.zero_grad()
            ddp(data(rank, step), True).exp().mean().backward()
            if step < num_clipped:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
            optimizer.step()
    with optimizer.whole() if ours else nullcontext():
        return [tensor.detach().clone() for tensor in ddp.module.parameters()]


def clips_apart(rank: int, world_size: int) -> list[Any]:
    apart = []
    for case in ((by_all, num_clipped) for by_all in (True, False) for num_clipped in (2, 3, 5)):
        # In stage 1 a rank that has run out can't clip.
        apart += apart_from_torchs(clipped, rank, case, (1, 2, 3) if case[1] == 2 else (2, 3))
    return apart


def test_gradients_that_torchs_clip_wrote_are_of_their_step_alone() -> None:
    assert run_ranks(clips_apart, 2) == [[], []]


def clips_on(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(nn.Linear(4, 2))
    optimizer = FusedShardedSGD(ddp.parameters(), lr=0.1, stage=1)
    try:
        with ddp.join():
            for step in range((2, 5)[rank]):
                optimizer.zero_grad()
                ddp(data(rank, step)).square().mean().backward()
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.05)
                optimizer.step()
    except RuntimeError as error:
        return str(error)
    return "no error"


def test_what_a_rank_that_has_run_out_can_t_do_to_p_grad_raises_on_all_ranks() -> None:
    for said in run_ranks(clips_on, 2):
        assert "rank 1 can't go on: it wrote to p.grad before step(), as torch's clip_grad_norm_() does" in said
        assert "call optimizer.clip_grad_norm_(), or build the optimizer with stage=2" in said


def test_inside_join_gradients_may_be_zeroed_in_any_way() -> None:
    assert run_ranks(zeroed_apart, 2) == [[], []]


def join_off(rank: int, world_size: int) -> list[Any]:
    ddp = DistributedDataParallel(nn.Linear(1, 1))
    with ddp.join(enable=False):
        for _ in range(3):
            ddp.zero_grad()
            ddp(torch.full((1,), float(rank))).sum().backward()
    return [float(ddp.module.weight.grad), ddp._join_config.enable]


def test_join_that_is_off_does_nothing() -> None:
    assert run_ranks(join_off, 2) == [[0.5, False]] * 2


def join_raises(rank: int, world_size: int) -> str:
    ddp = DistributedDataParallel(models.Raising())
    optimizer = FusedShardedAdam(ddp.parameters())
    with pytest.raises(ValueError, match="on purpose"), ddp.join():
        ddp(data(rank)).sum().backward()
    return type(optimizer).__name__


def test_an_exception_passes_through_join() -> None:
    assert run_ranks(join_raises, 2) == ["FusedShardedAdam"] * 2


def kept_apart(rank: int, world_size: int) -> list[float]:
    model = DistributedDataParallel(nn.BatchNorm1d(4), forward_sync_buffers=False)
    optimizer = FusedShardedAdam(model.parameters())
    with model.join():
        for _ in range(1 + rank):
            model(torch.randn(8, 4) + rank).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
    return [float(model.module.running_mean.sum()), float(model.require_forward_param_sync)]


def test_buffers_stay_where_hand_outs_are_off() -> None:
    (one, synced), (other, synced_too) = run_ranks(kept_apart, 2)
    assert one != other
    assert synced == synced_too == 1.0


def grads_before_step(cls: Any, rank: int, divide: bool, sent: int, clips: bool) -> list[Tensor]:
    """p.grad where each backward ends, and the parameters at the end. ``sent``: so many backwards in a step."""
    torch.manual_seed(0)
    ddp = cls(Uneven())
    ours = cls is DistributedDataParallel
    optimizer: Any = FusedShardedSGD(ddp.parameters(), lr=0.1, stage=1) if ours else sgd(ddp.parameters())
    found = []
    with ddp.join(divide_by_initial_world_size=divide):
        for step in range((2, 4)[rank]):
            ddp.zero_grad()
            for micro in range(sent):
                ddp(data(rank, 10 * micro + step), True).exp().mean().backward()
                found += [param.grad.clone() for param in ddp.parameters()]
            if clips and ours:
                optimizer.clip_grad_norm_(0.5)
            elif clips:
                nn.utils.clip_grad_norm_(ddp.parameters(), 0.5)
            optimizer.step()
    return [*found, *(param.detach().clone() for param in ddp.parameters())]


def before_step(rank: int, world_size: int) -> list[Any]:
    apart = []
    for case in ((True, 1, False), (False, 1, False), (False, 1, True), (False, 2, False), (False, 2, True)):
        theirs, ours = (grads_before_step(cls, rank, *case) for cls in (OfTorch, DistributedDataParallel))
        if not all(torch.allclose(*each, atol=1e-6) for each in zip(ours, theirs, strict=True)):
            apart.append(case)
    return apart


def test_inside_join_p_grad_is_torchs_before_step_too() -> None:
    assert run_ranks(before_step, 2) == [[], []]


def weighed(rank: int, world_size: int) -> list[float]:
    """In stage 1, where the mean is one over the active ranks. A divisor of the user's is not touched by that."""
    found = []
    for divisor in (None, 2.0):
        ddp = DistributedDataParallel(nn.Linear(1, 1, bias=False))
        optimizer = FusedShardedSGD(
            [{"params": ddp.parameters(), "gradient_divisor": divisor}], lr=0.0, stage=1, momentum=0.0
        )
        with ddp.join(divide_by_initial_world_size=False):
            for _ in range(1 + rank):
                optimizer.zero_grad()
                ddp(torch.full((1, 1), 6.0)).sum().backward()
                found.append(float(ddp.module.weight.grad))
                if divisor is None:
                    optimizer.mean_over(3)
                    found.append(float(ddp.module.weight.grad))
                optimizer.step()
    return found


def test_inside_join_mean_over_and_divisors_are_what_they_are() -> None:
    assert run_ranks(weighed, 2) == [[6.0, 2.0, 6.0], [6.0, 2.0, 6.0, 2.0, 6.0, 3.0]]
