"""In-place operators on p.grad in orders of calls that are easy to get wrong, beside stage 1, where torch does them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.bucket_manager.rig import input_of
from tests.optimizer.test_in_place_grads import Trained, each, some
from tests.ranks import run_ranks


def stepped_twice(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    made.optimizer.step()
    made.optimizer.step()
    return []


def changed_after_a_step(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    made.optimizer.step()
    each(lambda grad: grad.mul_(0.5))(made.params)
    norm = float(made.params[0].grad.norm())  # type: ignore[union-attr]
    made.optimizer.step()
    return [norm]


def whole_after_a_step(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    made.optimizer.step()
    return [float(made.optimizer.full_grad(made.params[0]).norm())]  # type: ignore[union-attr]


def negative(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(-0.5))(made.params)
    norm = float(made.optimizer.clip_grad_norm_(1e-3))
    made.optimizer.step()
    return [norm]


def device_like_tensors(made: Trained) -> list[float]:
    """A tensor that changes between uses is two factors."""
    made.backward(0)
    factor = torch.tensor(0.5)
    for grad in (param.grad for param in made.params):
        assert grad is not None
        grad.mul_(factor)
        factor.mul_(0.9)
    made.optimizer.step()
    return []


def not_a_number(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(math.nan).nan_to_num_(0.25))(made.params)
    made.optimizer.step()
    return []


def zeroed_and_filled(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.zero_().fill_(0.25))(made.params)
    made.optimizer.step()
    return []


def met_and_added(made: Trained) -> list[float]:
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    norm = float(made.params[0].grad.norm())  # type: ignore[union-attr]
    made.backward(1)
    made.optimizer.step()
    return [norm]


def refused_inside_a_backward(made: Trained) -> list[float]:
    """What was refused there leaves nothing behind."""
    factor = torch.tensor(0.5)

    def spoil(_: torch.Tensor) -> None:
        for param in made.params:
            if param.grad is not None:
                param.grad.mul_(factor)

    if made.optimizer.inside.grads.sharded:
        hook = made.params[0].register_hook(spoil)
        with pytest.raises(RuntimeError, match="inside a backward"):
            made.backward(0)
        hook.remove()
        made.optimizer.zero_grad()
    made.backward(1)
    each(lambda grad: grad.mul_(factor))(made.params)
    made.optimizer.step()
    return []


ORDERS: dict[str, Callable[[Trained], list[float]]] = {
    "two steps": stepped_twice,
    "after a step": changed_after_a_step,
    "the whole gradient after a step": whole_after_a_step,
    "a negative factor, then a norm": negative,
    "a tensor that changes": device_like_tensors,
    "NaN": not_a_number,
    "zeroed and filled": zeroed_and_filled,
    "ranks synchronized, then another backward": met_and_added,
    "refused inside a backward": refused_inside_a_backward,
}


def beside_whole_gradients(rank: int, world_size: int) -> dict[str, float]:
    found = {}
    for name, order in ORDERS.items():
        results = []
        for stage in (1, 2, 3):
            made = Trained(rank, stage)
            seen = order(made)
            with made.optimizer.whole():
                results.append(torch.cat([torch.tensor(seen), *(p.detach().flatten() for p in made.params)]))
        for stage, result in zip((2, 3), results[1:], strict=True):
            apart = (result - results[0]).abs() / results[0].abs().clamp(min=1)  # norms of 40 have rounding of 4e-6
            found[f"{name}, {stage}"] = float(apart.max())
    return found


@pytest.mark.parametrize("world_size", [1, 2])
def test_every_order_is_as_on_whole_gradients(world_size: int) -> None:
    for found in run_ranks(beside_whole_gradients, world_size):
        assert {name: apart for name, apart in found.items() if not apart <= 2e-6} == {}


def on_one_rank(made: Trained) -> None:
    """Ranks have synchronized for the factor; then one alone runs another backward."""
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    made.optimizer.synchronize()
    if made.rank == 0:
        made.backward(1)


def one_assigned(made: Trained) -> None:
    made.backward(0)
    made.params[2].grad = torch.ones_like(made.params[2])
    each(lambda grad: grad.mul_(0.5))(made.params)


def one_assigned_later(made: Trained) -> None:
    made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    made.optimizer.synchronize()
    made.params[2].grad = torch.ones_like(made.params[2])


def thawed(made: Trained) -> None:
    made.backward(0)
    made.optimizer.zero_grad()
    extra = nn.Parameter(torch.ones(3), requires_grad=False)
    made.optimizer.add_param_group({"params": [("extra", extra)]})
    extra.requires_grad_()
    (made.model(input_of(made.rank, 1)).square().sum() + extra.sum()).backward()
    each(lambda grad: grad.mul_(0.5))([*made.params, extra])


def zeroed_then_filled(made: Trained) -> None:
    made.backward(0)
    made.params[0].grad.zero_().fill_(3.0)  # type: ignore[union-attr]
    made.backward(1)


REFUSED: dict[str, tuple[Callable[[Trained], None], str]] = {
    "on one rank": (on_one_rank, "ranks did different things to all gradients"),
    "one assigned": (one_assigned, "parameter 'layers.1.weight' has not left yet"),
    "one assigned later": (one_assigned_later, "parameter 'layers.1.weight' has not left yet"),
    "thawed": (thawed, "parameter 'extra' has not left yet"),
    "zeroed, then filled": (zeroed_then_filled, "was zeroed and then given fill_"),
}


def refused(rank: int, world_size: int) -> dict[str, str]:
    found = {}
    for name, (misuse, _) in REFUSED.items():
        made = Trained(rank, 2)
        with pytest.raises(RuntimeError) as caught:  # noqa: PT012  # here or there
            misuse(made)
            made.optimizer.step()
        found[name] = str(caught.value)
        made.optimizer.zero_grad()
        made.backward(3)
        made.optimizer.step()
    return found


def test_what_can_t_be_told_apart_is_refused() -> None:
    for found in run_ranks(refused, 2):
        for name, (_, expected) in REFUSED.items():
            assert expected in found[name], name


def sums_that_wait(rank: int, world_size: int) -> str:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    made = Trained(rank, 2, process_group=mesh)
    with made.optimizer.no_sync(outer=True):
        made.backward(0)
    each(lambda grad: grad.mul_(0.5))(made.params)
    with pytest.raises(RuntimeError) as caught:
        made.backward(1)
    made.optimizer.zero_grad()
    return str(caught.value)


def test_sums_that_wait_on_an_axis_are_not_changed_before_another_backward() -> None:
    assert all("no_sync(outer=True)" in said for said in run_ranks(sums_that_wait, 4))


def unfollowed(rank: int, world_size: int) -> str:
    """A rank has run out; the other has met it for a factor, and adds to the gradients."""
    made = Trained(rank, 2)

    def steps() -> None:
        with made.optimizer.join():
            for _ in range(rank):
                made.backward(0)
                each(lambda grad: grad.mul_(0.5))(made.params)
                made.optimizer.synchronize()
                made.backward(1)
                made.optimizer.step()

    with pytest.raises(RuntimeError) as caught:
        steps()
    return str(caught.value)


def test_a_factor_that_was_met_for_can_t_be_followed_into_another_backward() -> None:
    assert all("between two backwards" in said for said in run_ranks(unfollowed, 2))


def test_one_alone_may_be_changed_and_stepped_on() -> None:
    """In one process: some() of what stage 1 does."""
    results = []
    for stage in (1, 2):
        made = Trained(0, stage)
        made.backward(0)
        some(lambda grad: grad.mul_(0.1))(made.params)
        made.optimizer.step()
        made.optimizer.step()
        results.append(torch.cat([p.detach().flatten() for p in made.params]))
    torch.testing.assert_close(*results)
