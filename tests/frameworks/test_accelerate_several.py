"""Several models and optimizers, ranks with unequal numbers of batches, and what users of torch.optim rely on."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, DistributedDataParallelKwargs
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.loops import MOST
from tests.hugging_face import ALONE, accelerators_environment, run_anywhere
from tests.optimizer.models import batch
from zerox import FusedShardedAdam
from zerox.integrations.accelerate import adopt


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(72, 40), nn.Tanh(), nn.Linear(40, 72))


def make(kind: str, params: Any, **options: Any) -> torch.optim.Optimizer:
    return FusedShardedAdam(params, **options) if kind == "zerox" else torch.optim.AdamW(params, **options)


def state_of(*models: nn.Module) -> dict[str, Tensor]:
    found = nn.ModuleList(models).state_dict()
    return {name.replace("module.", ""): value.detach().clone() for name, value in found.items()}


def two_of_each(rank: int, world_size: int, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """As adversarial networks train: in turn, each with a clip of its own; then both in one step, with one norm."""
    with accelerators_environment(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if kind == "zerox":
            adopt(accelerator)
        plain = [network(1), network(2)]
        optimizers = [make(kind, plain[0].parameters()), make(kind, plain[1].parameters(), lr=1.5e-3)]
        one, other, *optimizers = accelerator.prepare(*plain, *optimizers)
        norms = []
        for step in range(8):
            x = batch(rank, step)
            with accelerator.accumulate(one):
                loss = (one(x) - x).square().mean()
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    norms.append(float(accelerator.clip_grad_norm_(one.parameters(), 0.05)))
                optimizers[0].step()
                optimizers[0].zero_grad()
            accelerator.backward((other(one(x).detach()) - x).square().mean())
            if step % 2:
                norms.append(float(accelerator.clip_grad_norm_(plain[1][2].parameters(), 0.02)))
                optimizers[1].step()
                optimizers[1].zero_grad()
        accelerator.gradient_accumulation_steps = 1
        accelerator.gradient_state._set_sync_gradients(True)
        accelerator.backward((other(one(batch(rank, 9))) - 1).square().mean())
        norms.append(float(accelerator.clip_grad_norm_([*one.parameters(), *other.parameters()], 0.1)))
        for each in optimizers:
            each.step()
            each.zero_grad()
        return norms, state_of(*plain)


def compare(ours: Any, theirs: Any) -> None:
    for (own_numbers, own), (numbers, other) in zip(ours, theirs, strict=True):
        assert own_numbers == pytest.approx(numbers, rel=1e-6)
        far = {name: float((value - other[name]).abs().max()) for name, value in own.items()}
        assert max(far.values()) <= MOST, far


@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_two_models_and_optimizers(world_size: int) -> None:
    compare(*(run_anywhere(two_of_each, world_size, kind) for kind in ("zerox", "torch")))


def one_optimizer_of_two_models(rank: int, world_size: int, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    with accelerators_environment(rank, world_size):
        accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
        if kind == "zerox":
            adopt(accelerator)
        plain = [network(1), network(2)]
        optimizer = make(kind, [{"params": plain[0].parameters()}, {"params": plain[1].parameters(), "lr": 1e-4}])
        one, other, optimizer = accelerator.prepare(*plain, optimizer)
        for step in range(6):
            with accelerator.accumulate(one, other):
                accelerator.backward(other(one(batch(rank, step))).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        return [group["lr"] for group in optimizer.param_groups], state_of(*plain)


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_one_optimizer_of_two_models(world_size: int) -> None:
    compare(*(run_anywhere(one_optimizer_of_two_models, world_size, kind) for kind in ("zerox", "torch")))


def uneven(rank: int, world_size: int, kind: str) -> tuple[list[float], dict[str, Tensor]]:
    """Three batches for the first rank and two for the second. The reference: one process, absent gradients as zero."""
    inputs = torch.cat([batch(0, number) for number in range(5)])
    if kind == "torch":
        plain = network(1)
        optimizer = make(kind, plain.parameters())
        for first, second in ((0, 1), (2, 3), (4, None)):
            for number in filter(lambda each: each is not None, (first, second)):
                (plain(inputs[4 * number : 4 * number + 4]).square().mean() / 2).backward()
            optimizer.step()
            optimizer.zero_grad()
        return [], state_of(plain)
    with accelerators_environment(rank, world_size):
        accelerator = adopt(Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(even_batches=True)))
        plain = nn.Sequential(*network(1), nn.BatchNorm1d(72, affine=False).eval())
        plain[3].running_mean.fill_(rank)
        model, optimizer, loader = accelerator.prepare(
            plain, make(kind, plain.parameters()), DataLoader(TensorDataset(inputs), batch_size=4)
        )
        counted = 0
        with accelerator.join_uneven_inputs([model], even_batches=False):
            for (x,) in loader:
                counted += 1
                accelerator.backward(nn.Sequential(*model[:3])(x).square().mean())
                optimizer.step()
                optimizer.zero_grad()
        assert counted == (3 if rank == 0 else 2)
        assert loader.batch_sampler.even_batches
        assert not plain[3].running_mean.any(), "rank 0's"
        return [], state_of(plain[:3])


def test_ranks_may_have_unequal_numbers_of_batches() -> None:
    theirs = uneven(0, 1, "torch")
    compare(run_anywhere(uneven, 2, "zerox"), [theirs, theirs])


# ---- what users of torch.optim rely on, through the wrapper that prepare() makes


def a_closure(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    def closure() -> Tensor:
        optimizer.zero_grad()
        value = loss()
        value.backward()
        return value

    optimizer.step(closure)


def zeroed_in_place(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    for factor in (3.0, 1.0):  # the first gradient is zeroed, and not added
        optimizer.zero_grad(set_to_none=False)
        (loss() * factor).backward()
    optimizer.step()


def zeroed_by_the_model(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    (loss() * 3.0).backward()
    model.zero_grad()
    loss().backward()
    optimizer.step()


def absent(optimizer: Any, model: Any, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    next(iter(model.parameters())).grad = None
    optimizer.step()


def frozen(optimizer: Any, model: Any, loss: Callable[[], Tensor]) -> None:
    first = next(iter(model.parameters()))
    for trains in (False, True):
        first.requires_grad_(trains)
        loss().backward()
        optimizer.step()
        optimizer.zero_grad()


def step_hooks(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    called = []
    handles = [
        optimizer.optimizer.register_step_pre_hook(lambda *_: called.append("before")),
        optimizer.optimizer.register_step_post_hook(lambda *_: called.append("after")),
    ]
    loss().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()
    assert called == ["before", "after"]


def gradient_hooks(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    handles = [param.register_hook(lambda grad: 2 * grad) for param in model.parameters()]
    loss().backward()
    optimizer.step()
    for handle in handles:
        handle.remove()


def another_group(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    torch.manual_seed(5)
    gain = nn.Parameter(torch.rand(72))
    optimizer.add_param_group({"params": [gain], "lr": 1e-2})
    (loss() * gain.square().sum()).backward()
    if not isinstance(optimizer.optimizer, FusedShardedAdam) and torch.distributed.is_initialized():
        torch.distributed.all_reduce(gain.grad)  # DistributedDataParallel does not know it
        gain.grad /= torch.distributed.get_world_size()
    optimizer.step()
    model.seen = gain.detach()


def two_backwards(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    loss().backward()
    (0.5 * loss()).backward()
    optimizer.step()


def written_between(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    values = {name: 0.5 * value for name, value in model.state_dict().items()}
    model.load_state_dict(values)
    loss().backward()
    optimizer.step()


def a_tensor_lr(optimizer: Any, model: nn.Module, loss: Callable[[], Tensor]) -> None:
    optimizer.param_groups[0]["lr"] = torch.tensor(5e-3)
    loss().backward()
    optimizer.step()


USES = [a_closure, zeroed_in_place, zeroed_by_the_model, absent, frozen, step_hooks, gradient_hooks, another_group]
USES += [two_backwards, written_between, a_tensor_lr]


def use(rank: int, world_size: int, kind: str, number: int) -> tuple[list[float], dict[str, Tensor]]:
    with accelerators_environment(rank, world_size):
        unused = DistributedDataParallelKwargs(find_unused_parameters=True)
        accelerator = Accelerator(cpu=True, kwargs_handlers=[unused])
        if kind == "zerox":
            adopt(accelerator)
        plain = network(1)
        model, optimizer = accelerator.prepare(plain, make(kind, plain.parameters()))
        for step in range(2):
            USES[number](optimizer, model, lambda step=step: (model(batch(rank, step)) - 1).square().mean())
            optimizer.zero_grad()
            assert all(param.grad is None for param in plain.parameters())
        extra = {"seen": model.seen} if hasattr(model, "seen") else {}
        return [], copy.deepcopy(state_of(plain)) | extra


@pytest.mark.parametrize("number", range(len(USES)), ids=lambda number: USES[number].__name__)
@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_a_prepared_optimizer_does_what_users_of_torch_optim_rely_on(world_size: int, number: int) -> None:
    compare(*(run_anywhere(use, world_size, kind, number) for kind in ("zerox", "torch")))


def an_average_of_weights(rank: int, world_size: int, kind: str) -> dict[str, Tensor]:
    """A model without an optimizer, and a frozen layer in none: each rank seeds them differently."""
    with accelerators_environment(rank, world_size):
        accelerator = Accelerator(cpu=True)
        if kind == "zerox":
            adopt(accelerator)
        average, model = network(10 + rank), network(20 + rank)
        model[0].requires_grad_(False)
        optimizer = make(kind, model[2].parameters())
        average, model, optimizer = accelerator.prepare(average, model, optimizer)
        x = batch(rank, 0)
        accelerator.backward((model(x) - x).square().mean())
        optimizer.step()
        return state_of(average, model)


def test_what_is_prepared_without_an_optimizer_begins_alike() -> None:
    found = [run_anywhere(an_average_of_weights, 2, kind) for kind in ("torch", "zerox")]
    for expected, ours in zip(*found, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(ours[name], value, rtol=0, atol=1e-6)
