"""Everything that has a place of its own beside the plain step, on ranks that share the device: the CPU's bits.

The model is elementwise (tests/gpu/chain.py), so nothing but zerox decides about the bits.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import zerox
from tests.bucket_manager.rig import same_bits
from tests.gpu.chain import MIB, Scales, batch_of, cpu_copies
from tests.gpu.on_gradients import with_operators_on_grads, with_torchs_scaler
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, ShardedOptimizer, Sparsity

SHAPE = (50, 96)
NUMEL = SHAPE[0] * SHAPE[1]
LAYERS, STEPS = 6, 6
CAP_MB = 2 * NUMEL * 4 / MIB


class Planes(Scales):
    """Of two dimensions, as masks want them."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__(LAYERS, NUMEL)
        self.weights = nn.ParameterList(weight.detach().to(dtype).view(SHAPE) for weight in self.weights)
        self.skipped = -1  # a layer that is left out

    def used(self) -> Iterator[Tensor]:
        return (weight for index, weight in enumerate(self.weights) if index != self.skipped)


class Training:
    """What a case has: it makes the optimizer, and may change how a step goes. ``folder``: for what it writes."""

    def __init__(self, rank: int, device: str, dtype: torch.dtype, folder: str) -> None:
        self.rank, self.device, self.dtype, self.folder = rank, torch.device(device), dtype, folder
        self.model = Planes(dtype).to(device)
        self.optimizer: Any = None

    def adam(self, params: Any = None, **options: Any) -> Any:
        named = list(self.model.named_parameters()) if params is None else params
        self.optimizer = FusedShardedAdam(named, lr=1e-2, **{"bucket_cap_mb": CAP_MB, **options})
        return self.optimizer

    def loss(self, step: int) -> Tensor:
        x = batch_of(self.rank, step, NUMEL).to(self.device).view(SHAPE)
        return self.model(x).square().sum()

    def backward(self, step: int, micro: int = 0) -> None:
        x = batch_of(self.rank, 10 * step + micro, NUMEL, self.dtype).to(self.device).view(SHAPE)
        self.model(x).float().square().sum().backward()

    def steps(self, count: int = STEPS, after: Callable[[], object] = tuple) -> None:
        for step in range(count):
            self.backward(step)
            self.update(after)

    def update(self, after: Callable[[], object] = tuple) -> None:
        self.optimizer.clip_grad_norm_(0.05)
        self.optimizer.step()
        after()
        self.optimizer.zero_grad()

    def found(self) -> list[Tensor]:
        with self.optimizer.whole():
            tensors = [each.to_local() if isinstance(each, DTensor) else each for each in self.model.parameters()]
            return cpu_copies(tensors)


# ---- rules, and how state is stored


def with_rule(training: Training, name: str, stage: int, state_dtype: Any) -> None:
    made: dict[str, Callable[..., Any]] = {
        "adam": FusedShardedAdam,
        "sgd": lambda params, **options: FusedShardedSGD(params, momentum=0.9, **options),
        "lion": FusedShardedLion,
    }
    named = list(training.model.named_parameters())
    training.optimizer = made[name](named, lr=1e-3, bucket_cap_mb=CAP_MB, stage=stage, state_dtype=state_dtype)
    training.steps()


def with_rules_of_groups(training: Training, stage: int) -> None:
    first, second, *rest = training.model.named_parameters()
    groups = [{"params": [first], "rule": "sgd", "momentum": 0.9}, {"params": [second], "rule": "lion"}]
    training.adam([*groups, {"params": rest}], stage=stage)
    training.steps()


def with_a_class_of_torch(training: Training, stage: int) -> None:
    """SGD: others' arithmetic differs between devices (test_any_class.py holds them to themselves)."""
    named = list(training.model.named_parameters())
    options = {"lr": 1e-2, "momentum": 0.9, "bucket_cap_mb": CAP_MB, "stage": stage}
    training.optimizer = ShardedOptimizer(named, torch.optim.SGD, **options)
    training.steps()


# ---- masks


SCHEDULES = {
    "cubic": lambda: zerox.cubic(1, 4, every=1),
    "rigl": lambda: zerox.rigl(0.3, every=2, until=5),
    "set": lambda: zerox.set_(0.3, every=2, until=5),
}


def with_masks(training: Training, stage: int, schedule: str, scope: str, state_dtype: Any = torch.float32) -> None:
    optimizer = training.adam(stage=stage, state_dtype=state_dtype)
    sparsity = Sparsity(optimizer, {"weights.[0-3]": 0.7}, SCHEDULES[schedule](), scope=scope)
    training.steps(after=sparsity.step)
    masks = sparsity.masks()
    with optimizer.whole():
        for name, param in training.model.named_parameters():
            assert name not in masks or not param[~masks[name]].any()
    assert len(masks) == 4


def with_two_of_four(training: Training, stage: int) -> None:
    sparsity = Sparsity(training.adam(stage=stage), {"weights.*": 0.5}, pattern=(2, 4))
    training.steps(after=sparsity.step)
    with training.optimizer.whole():
        for param in training.model.parameters():
            assert int((param.view(-1, 4) != 0).sum(1).max()) == 2


# ---- other means, and ranks that run out


def with_a_mean_over_tokens(training: Training, stage: int) -> None:
    training.adam(stage=stage)
    for step in range(STEPS):
        training.backward(step)
        training.optimizer.mean_over(torch.tensor(3 + training.rank, device=training.device))
        training.update()


def with_several_backwards(training: Training, stage: int, accumulates_in: torch.dtype | None) -> None:
    training.adam(stage=stage, accumulate_dtype=accumulates_in)
    for step in range(STEPS):
        for micro in range(3):
            with nullcontext() if micro == 2 else training.optimizer.no_sync():
                training.backward(step, micro)
        training.update()


def with_unequal_batches(training: Training, stage: int, divide: str) -> None:
    training.adam(stage=stage)
    with training.optimizer.join(divide):
        training.steps(STEPS - 2 * training.rank)


# ---- who has what


def on_a_mesh(training: Training, stage: int) -> None:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    training.adam(stage=stage, process_group=mesh)
    training.steps()


def with_a_group_of_its_own(training: Training) -> None:
    halves = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    *shared, own = training.model.named_parameters()
    with torch.no_grad():
        own[1].mul_(1 + training.rank // 2)
    training.adam([{"params": shared}, {"params": [own], "process_group": halves[training.rank // 2]}])
    training.steps()


def with_dtensors(training: Training, stage: int) -> None:
    mesh = init_device_mesh(training.device.type, (2,))
    for index, weight in enumerate(training.model.weights):
        local = weight.detach().chunk(2)[training.rank]
        training.model.weights[index] = nn.Parameter(DTensor.from_local(local, mesh, [Shard(0)], run_check=False))
    training.adam(stage=stage, process_group="alone")
    for step in range(STEPS):
        x = batch_of(0, step, NUMEL).view(SHAPE).chunk(2)[training.rank].to(training.device)
        training.model(DTensor.from_local(x, mesh, [Shard(0)], run_check=False)).to_local().square().sum().backward()
        training.update()


def with_frozen_and_absent(training: Training, stage: int) -> None:
    training.model.weights[0].requires_grad_(False)
    training.adam([param for param in training.model.parameters() if param.requires_grad], stage=stage)
    for step in range(STEPS):
        training.model.skipped = 1 + (step + training.rank) % 4 if step % 2 else 1 + step % 4  # on one rank, or on all
        training.backward(step)
        training.update()


# ---- saved, loaded, written


def across_a_checkpoint(training: Training, stage: int) -> None:
    """Half of the training, and the other half by another optimizer that loads it."""
    training.adam(stage=stage)
    training.steps(3)
    zerox.save(training.folder, training.model, training.optimizer)
    training.model = Planes(training.dtype).to(training.device)
    training.adam(stage=stage)
    zerox.load(training.folder, training.model, training.optimizer)
    training.steps(3)


def across_a_state_dict(training: Training, stage: int) -> None:
    training.adam(stage=stage)
    training.steps(3)
    saved = training.optimizer.full_state_dict()
    text = [saved if training.rank == 0 else None]
    dist.broadcast_object_list(text, src=0)
    training.optimizer.load_state_dict(text[0])
    training.steps(3)


def with_values_written(training: Training, stage: int) -> None:
    """By operators, inside whole(), through load_state_dict(), and one parameter's gradient and state."""
    training.adam(stage=stage)
    training.steps(1)
    with training.optimizer.whole(), torch.no_grad():
        training.model.weights[0].add_(1)
    training.steps(1)
    with torch.no_grad():
        training.model.weights[1].mul_(0.5)
    training.steps(1)
    training.model.load_state_dict({name: each / 2 for name, each in training.model.state_dict().items()})
    param = training.model.weights[2]
    training.backward(0)
    training.optimizer.set_full_grad_(param, training.optimizer.full_grad(param) * 2)
    training.optimizer.set_full_state_(param, exp_avg=training.optimizer.full_state(param)["exp_avg"] * 2)
    training.update()


def with_a_scaler(training: Training, stage: int) -> None:
    training.adam(stage=stage)
    scaler = zerox.GradScaler(training.device.type, init_scale=2.0**16, growth_interval=2)
    for step in range(STEPS):
        loss = training.loss(step)
        scaler.scale(loss * (float("inf") if step == 2 and training.rank == 1 else 1.0)).backward()
        scaler.unscale_(training.optimizer)
        training.optimizer.clip_grad_norm_(0.05)
        scaler.step(training.optimizer)
        scaler.update()
        training.optimizer.zero_grad()
    assert scaler.get_scale() == 2.0**17


def with_hidden_gathers(training: Training, stage: int) -> None:
    training.adam(stage=stage).overlap_gather(training.model)
    training.steps()


# ---- all of them

STAGES = (1, 2, 3)
BF16 = torch.bfloat16
Case = tuple[int, Callable[..., None], tuple[Any, ...], torch.dtype]  # ranks, function, its arguments, dtype


def cases() -> Iterator[tuple[str, Case]]:
    for stage in STAGES:
        for rule, state in itertools.product(("adam", "sgd", "lion"), (torch.float32, torch.bfloat16, "8bit")):
            yield f"{rule}, {state}", (2, with_rule, (rule, stage, state), torch.float32)
        yield "adam of bf16", (2, with_rule, ("adam", stage, torch.float32), BF16)
        yield "lion of bf16, 8 bits", (2, with_rule, ("lion", stage, "8bit"), BF16)
        yield "rules of groups", (3, with_rules_of_groups, (stage,), torch.float32)
        yield "torch's SGD", (2, with_a_class_of_torch, (stage,), torch.float32)
        for schedule, scope in itertools.product(SCHEDULES, ("tensor", "global")):
            if schedule == "cubic" or scope == "tensor":
                yield f"masks, {schedule}, {scope}", (2, with_masks, (stage, schedule, scope), torch.float32)
        yield "masks, bf16 and 8 bits", (2, with_masks, (stage, "cubic", "tensor", "8bit"), BF16)
        yield "2:4", (2, with_two_of_four, (stage,), torch.float32)
        yield "mean over tokens", (2, with_a_mean_over_tokens, (stage,), torch.float32)
        for accumulates_in, dtype in ((None, torch.float32), (torch.float32, BF16)):
            yield f"several backwards, {dtype}", (2, with_several_backwards, (stage, accumulates_in), dtype)
        for divide in ("all", "active"):
            yield f"unequal batches, {divide}", (2, with_unequal_batches, (stage, divide), torch.float32)
        yield "a mesh", (4, on_a_mesh, (stage,), torch.float32)
        yield "frozen and absent", (3, with_frozen_and_absent, (stage,), torch.float32)
        yield "a checkpoint", (2, across_a_checkpoint, (stage,), torch.float32)
        yield "a checkpoint of bf16", (2, across_a_checkpoint, (stage,), BF16)
        yield "a state dict", (2, across_a_state_dict, (stage,), torch.float32)
        yield "values written", (2, with_values_written, (stage,), torch.float32)
        yield "a scaler", (2, with_a_scaler, (stage,), torch.float32)
        yield "torch's scaler", (2, with_torchs_scaler, (stage,), torch.float32)
        yield "operators on gradients", (2, with_operators_on_grads, (stage,), torch.float32)
        yield "operators on gradients of bf16", (2, with_operators_on_grads, (stage,), BF16)
        if stage != 3:
            yield "DTensors", (2, with_dtensors, (stage,), torch.float32)
            yield "hidden gathers", (2, with_hidden_gathers, (stage,), torch.float32)
        if stage == 2:
            yield "a group of its own", (4, with_a_group_of_its_own, (), torch.float32)


NAMED = {f"{name}, stage {next((each for each in case[2] if each in STAGES), 2)}": case for name, case in cases()}


def trained(rank: int, _: int, device: str, name: str, folder: str) -> list[Tensor]:
    _, function, arguments, dtype = NAMED[name]
    training = Training(rank, device, dtype, folder)
    function(training, *arguments)
    return training.found()


@pytest.mark.parametrize("name", NAMED)
def test_ranks_on_the_device_have_the_cpu_s_bits(device: torch.device, name: str, tmp_path: Path) -> None:
    count, function, *_ = NAMED[name]
    ours = run_ranks(trained, count, device.type, name, str(tmp_path / "of device"))
    expected = run_ranks(trained, count, "cpu", name, str(tmp_path / "of cpu"))
    for params, of_cpu in zip(ours, expected, strict=True):
        assert len(params) == LAYERS
        assert all(same_bits(one, other) for one, other in zip(params, of_cpu, strict=True))
    alike = all(same_bits(one, other) for one, other in zip(ours[0], ours[-1], strict=True))
    assert alike or function in (with_dtensors, with_a_group_of_its_own)
