"""Parameters and state have the bits of the class unsharded, which steps on the same mean gradient on every rank."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.local_optimizers.classes import ELEMENTWISE, OWN
from tests.optimizer.models import backward, batch, make_model, mean_over_ranks, memory_order, watch_gradients
from tests.ranks import run_ranks
from zerox import ShardedOptimizer

ALL = {**ELEMENTWISE, **OWN}
CAP_MB = 0.03  # several buckets
BOTH = [(world_size, stage) for world_size in (1, 2, 3) for stage in (1, 2)]


SHAPES = {"large": (5000,), "matrix": (70, 72), "small": (7,), "gain": (), "branch": (300,), "unused": (20,)}


class Plain(nn.Module):
    """Parameters that span ranks, and some that lie on one; their gradients are given."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in SHAPES.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator)))


class Pair:
    """Ours, and the class itself on copies of all parameters, or of their float32 values.

    ``kind``: a name in ALL, or a class with its options."""

    def __init__(
        self,
        rank: int,
        world_size: int,
        kind: str | tuple[Any, dict[str, Any]],
        dtype: torch.dtype,
        model: nn.Module | None = None,
        **options: Any,
    ) -> None:
        cls, own = ALL[kind] if isinstance(kind, str) else kind
        self.rank, self.world_size = rank, world_size
        self.model = (Plain() if model is None else model).to(dtype)
        self.grads = watch_gradients(self.model)
        named = list(self.model.named_parameters())
        chosen = {key: options.pop(key) for key in ("foreach", "lr") if options.get(key) is not None}
        groups = options.pop("groups", lambda params: params)
        cap_mb = options.pop("bucket_cap_mb", CAP_MB)
        self.ours = ShardedOptimizer(groups(named), cls, bucket_cap_mb=cap_mb, **own, **chosen, **options)
        has_masters = dtype in (torch.bfloat16, torch.float16)
        self.twins = {
            param: nn.Parameter(param.detach().float() if has_masters else param.detach().clone()) for _, param in named
        }
        self.theirs = cls(groups([(name, self.twins[param]) for name, param in named]), **own, **chosen)

    def backward(self, number: int, branch: bool) -> None:
        if not isinstance(self.model, Plain):
            backward(self.model, batch(self.rank, number, dtype=next(self.model.parameters()).dtype), branch=branch)
            return
        for index, (name, param) in enumerate(self.model.named_parameters()):
            used = name != "unused" or number == 3
            if used and param.requires_grad and (branch or name != "branch") and self.owns(param):
                generator = torch.Generator().manual_seed(1000 * self.rank + 10 * number + index)
                grad = torch.randn(param.shape, generator=generator).to(param)
                param.grad, self.grads[param] = grad, grad.clone()

    def owns(self, param: Tensor) -> bool:
        return any(param is each for group in self.ours.param_groups for each in group["params"])

    def step(self, number: int, branch: bool, clip: float | None = None) -> None:
        self.grads.clear()
        self.backward(number, branch)
        norm = None if clip is None else self.ours.clip_grad_norm_(clip)
        self.ours.step()
        self.take_means()
        if clip is not None and norm is not None:  # torch's own norm has other last bits
            assert norm > clip
            nn.utils.clip_grads_with_norm_(list(self.twins.values()), clip, norm)
        self.theirs.step()
        self.check(f"step {number}")
        self.ours.zero_grad()

    def take_means(self) -> None:
        for param, twin in self.twins.items():
            mean = mean_over_ranks(self.grads.get(param), param, self.world_size)
            twin.grad = None if mean is None else torch.empty_like(twin).copy_(mean)  # in the order of the parameter
            if mean is not None and not self.ours.inside.grads.sharded:
                assert same_bits(param.grad, mean), "the mean is that of zerox"

    def check(self, where: str) -> None:
        for param, twin in self.twins.items():
            assert same_bits(param.detach(), twin.detach().to(param.dtype)), f"{where}: parameters"
        for bucket in self.ours.inside.buckets:
            for segment, (param, state) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
                theirs: dict[str, Any] = self.theirs.state.get(self.twins[param], {})
                for key, value in theirs.items():
                    ours = state[key]
                    if isinstance(value, Tensor) and value.shape == param.shape and param.numel() != 1:
                        assert ours.shape == param.shape or segment.span.numel < param.numel(), f"{where}: {key}"
                        start = segment.param_start
                        value = memory_order(value)[start : start + segment.span.numel]
                        assert same_bits(memory_order(ours), value), f"{where}: {key}"
                    elif isinstance(value, Tensor) and value.numel() != 1:  # one number for each row, or so
                        assert ours.shape == value.shape, f"{where}: {key}"
                        assert same_bits(ours, value), f"{where}: {key}"
                    else:
                        assert float(ours) == float(value), f"{where}: {key}"


def follow(rank: int, world_size: int, names: list[str], dtype: torch.dtype, options: dict[str, Any]) -> None:
    for name in names:
        pair = Pair(rank, world_size, name, dtype, **options)
        for number in range(3):  # the branch has no gradient in the first step, and on some ranks only in the last
            pair.step(number, branch=number == 1 or (number == 2 and rank == 0))
        assert pair.theirs.param_groups[0].get("k") == pair.ours.param_groups[0].get("k")


# A rank alone has the same gradients in both stages, and two cut as three do.
@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (2, 2), (3, 1), (3, 2)])
def test_every_elementwise_class_has_the_bits_that_it_has_unsharded(world_size: int, stage: int) -> None:
    """foreach or not, in float32 and with bfloat16 parameters and float32 masters, in turn over the stages."""
    names = list(ELEMENTWISE)
    run_ranks(follow, world_size, names, torch.float32, {"stage": stage, "foreach": stage == 2})
    run_ranks(follow, world_size, names, torch.bfloat16, {"stage": stage, "foreach": stage == 1})


@pytest.mark.parametrize(("world_size", "stage"), [(1, 2), (2, 1), (3, 2)])
def test_so_have_classes_that_nobody_knows(world_size: int, stage: int) -> None:
    run_ranks(follow, world_size, list(OWN), torch.float32, {"stage": stage})


def with_backward(rank: int, world_size: int, stage: int) -> None:
    """A model whose gradients leave while backward runs, with a branch that not all ranks take."""
    for name in ("SGD, momentum", "NAdam"):
        pair = Pair(rank, world_size, name, torch.float32, make_model(), stage=stage)
        for number in range(3):
            pair.step(number, branch=number == 1 or (number == 2 and rank == 0))


@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_of_a_backward_are_the_same_to_the_class(stage: int) -> None:
    run_ranks(with_backward, 2, stage)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float16], ids=str)
def test_other_dtypes(dtype: torch.dtype) -> None:
    run_ranks(follow, 2, ["SGD, momentum", "NAdam"], dtype, {"master_weights": "fp32"})


def without_masters(rank: int, world_size: int) -> None:
    """Each rank works in 16 bits, in which every update is rounded: as the class does on such parameters."""
    for name in ("Adam", "SGD"):
        cls, own = ALL[name]
        model = make_model(torch.bfloat16)
        grads = watch_gradients(model)
        ours = ShardedOptimizer(model.named_parameters(), cls, master_weights=None, **own)
        twins = {param: nn.Parameter(param.detach().clone()) for param in model.parameters()}
        theirs = cls(twins.values(), **own)
        for number in range(3):
            backward(model, batch(rank, number, dtype=torch.bfloat16))
            ours.step()
            for param, twin in twins.items():
                twin.grad = mean_over_ranks(grads.get(param), param, world_size)
            theirs.step()
            ours.zero_grad()
        assert all(same_bits(param.detach(), twin.detach()) for param, twin in twins.items())
        assert ours.memory_bytes().master == 0


def test_without_masters_the_class_works_in_16_bits() -> None:
    run_ranks(without_masters, 2)


# ---- what a training does beside steps


def two_groups(params: list[tuple[str, Tensor]]) -> list[dict[str, Any]]:
    """The second has one small parameter, of which one rank alone has something."""
    return [
        {"params": [pair for pair in params if pair[0] != "gain"]},
        {"params": [pair for pair in params if pair[0] == "gain"], "lr": 0.05},
    ]


def in_all_ways(rank: int, world_size: int, name: str, stage: int) -> None:
    """Groups, a schedule, clipping that has an effect, a step without gradients, and values that are written."""
    pair = Pair(rank, world_size, name, torch.bfloat16, stage=stage, groups=two_groups)
    schedules = [torch.optim.lr_scheduler.ExponentialLR(each, 0.5) for each in (pair.ours, pair.theirs)]
    for number in range(4):
        if number == 1:  # no rank has a gradient
            pair.ours.step()
            pair.theirs.zero_grad()
            pair.theirs.step()
            pair.check("without gradients")
        if number == 2:
            for param in (pair.model.matrix, pair.model.gain):
                param.data.fill_(64.0)  # which no master rounds to
                pair.twins[param].data.fill_(64.0)
        pair.step(number, branch=False, clip=None)
        for schedule in schedules:
            schedule.step()
    seen = [[(group["lr"], group.get("k")) for group in each.param_groups] for each in (pair.ours, pair.theirs)]
    assert seen[0] == seen[1], "on every rank, also where it has nothing of a group"
    assert seen[0][1][0] == 0.05 * 0.5**4


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["SGD, momentum", "NAdam", "counting"])
def test_groups_schedules_and_written_values_reach_the_class(name: str, stage: int) -> None:
    run_ranks(in_all_ways, 3, name, stage)


def growing(rank: int, world_size: int, name: str, stage: int) -> None:
    """One parameter is frozen for a step, one is frozen for two, and a group is added before the second step."""
    pair = Pair(rank, world_size, name, torch.float32, stage=stage, groups=lambda named: named[:3])
    late = [(key, param) for key, param in pair.model.named_parameters() if key in ("gain", "branch", "unused")]
    pair.model.unused.requires_grad_(False)
    for number in range(4):
        if number == 1:
            pair.ours.add_param_group({"params": late, "lr": 0.003})
            pair.theirs.add_param_group({"params": [(key, pair.twins[param]) for key, param in late], "lr": 0.003})
        pair.model.matrix.requires_grad_(number != 2)
        pair.model.unused.requires_grad_(number > 1)
        pair.step(number, branch=True)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", ["SGD, momentum", "NAdam", "counting"])
def test_frozen_unfrozen_and_added_parameters_train_as_with_the_class(name: str, stage: int) -> None:
    run_ranks(growing, 2, name, stage)


def clipped(rank: int, world_size: int, stage: int) -> None:
    pair = Pair(rank, world_size, "SGD, momentum", torch.float32, stage=stage)
    for number in range(3):
        pair.step(number, branch=False, clip=0.01)


@pytest.mark.parametrize("stage", [1, 2])
def test_clipping_scales_what_the_class_gets(stage: int) -> None:
    run_ranks(clipped, 2, stage)


def gradients_stay(rank: int, world_size: int, stage: int, clip: bool) -> None:
    """Two steps with the same gradients. The large one is updated from where autograd or the exchange left it."""
    params = [nn.Parameter(torch.linspace(-1, 1, numel)) for numel in (2**20, 300)]
    twins = [nn.Parameter(param.detach().clone()) for param in params]
    cls, _ = OWN["writes gradients"]
    ours, theirs = ShardedOptimizer(params, cls, stage=stage), cls(twins)
    torch.stack([(param * param).sum() for param in params]).sum().backward()
    grads = [2 * param.detach() for param in params]
    for _ in range(2):
        norm = ours.clip_grad_norm_(1e-3) if clip else None
        ours.step()
        for twin, grad in zip(twins, grads, strict=True):
            twin.grad = grad.clone()
        if norm is not None:
            nn.utils.clip_grads_with_norm_(twins, 1e-3, norm)
        theirs.step()
    assert all(same_bits(param.detach(), twin.detach()) for param, twin in zip(params, twins, strict=True))
    if stage == 1:
        assert all(same_bits(param.grad, grad) for param, grad in zip(params, grads, strict=True))


@pytest.mark.parametrize(("world_size", "stage", "clip"), [(1, 1, False), (1, 2, False), (2, 1, False), (2, 2, True)])
def test_step_does_not_consume_gradients_even_if_the_class_writes_them(world_size: int, stage: int, clip: bool) -> None:
    run_ranks(gradients_stay, world_size, stage, clip)


def accumulated(rank: int, world_size: int, hidden: bool) -> list[Tensor]:
    model = make_model()
    ours = ShardedOptimizer(model.named_parameters(), torch.optim.RMSprop, lr=1e-3, bucket_cap_mb=CAP_MB)
    if hidden:
        ours.overlap_gather(model)
    for step in range(2):
        for micro in range(3):
            with nullcontext() if micro == 2 else ours.no_sync():
                backward(model, batch(rank, step, micro))
        ours.step()
        ours.zero_grad()
    ours.synchronize()
    return [param.detach().clone() for param in model.parameters()]


def test_no_sync_accumulates_and_a_hidden_gather_changes_no_bit() -> None:
    plain, hidden = (run_ranks(accumulated, 2, hidden) for hidden in (False, True))
    for each in (plain[1], *hidden):
        assert all(map(same_bits, each, plain[0]))
