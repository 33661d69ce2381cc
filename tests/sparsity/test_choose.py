"""Which elements masks keep: exactly, whatever lies on which rank, and with ties together."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from tests.sparsity.trained import Case, model, optimizer_of
from zerox import FusedShardedAdam, Sparsity
from zerox.memory.mask import Mask, unpack_bits


def coarse(module: nn.Module) -> dict[str, Tensor]:
    """Values with many equal magnitudes, zeros and signs of zero among them."""
    for param in module.parameters():
        param.data.mul_(20).round_().div_(16)
    return {name: param.detach().clone() for name, param in module.named_parameters()}


def chosen(rank: int, world: int, targets: dict[str, float], scope: str) -> list[bool]:
    module = model()
    before = coarse(module)
    optimizer = optimizer_of(Case(), module, bucket_cap_mb=0.01)
    sparsity = Sparsity(optimizer, targets, scope=scope)
    masks, reached = sparsity.masks(), sparsity.sparsity()
    found = []
    for glob, names in sparsity.matched.items():
        for together in [names] if scope == "global" else [[name] for name in names]:
            values = torch.cat([before[name].abs().flatten() for name in together])
            limit = values.kthvalue(round(targets[glob] * values.numel())).values
            for name in together:
                found.append(torch.equal(masks[name], before[name].abs() > limit))
                found.append(reached[name] == float((~masks[name]).double().mean()))
                found.append(torch.equal(module.get_parameter(name), before[name] * masks[name]))
    return found


@pytest.mark.parametrize("world", [1, 2, 3, 4])
@pytest.mark.parametrize("scope", ["tensor", "global"])
def test_masks_are_those_of_whole_tensors_by_kthvalue(world: int, scope: str) -> None:
    for targets in ({"*.weight": 0.5}, {"0.weight": 0.9, "[24].weight": 0.3, "3.bias": 0.99}):
        for found in run_ranks(chosen, world, targets, scope):
            assert found
            assert all(found)


def from_zeros(rank: int, world: int) -> list[bool]:
    module = model()
    before = coarse(module)
    optimizer = optimizer_of(Case(), module, weight_decay=0.1)
    sparsity = Sparsity.from_zeros(optimizer, ["*.weight"])
    found = [torch.equal(kept, before[name] != 0) for name, kept in sparsity.masks().items()]
    module(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    sparsity.step()
    found += [not module.get_parameter(name)[~kept].any() for name, kept in sparsity.masks().items()]
    module[0].weight.data.fill_(1.0)  # as somebody who does not know of masks
    module(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    found += [not module[0].weight[~sparsity.masks()["0.weight"]].any()]
    sparsity.remove()
    module[0].weight.data.fill_(1.0)
    module(torch.randn(4, 40)).square().mean().backward()
    optimizer.step()
    return [*found, bool(module[0].weight.all())]


def test_a_pruned_model_s_own_zeros_are_its_masks() -> None:
    for found in run_ranks(from_zeros, 2):
        assert len(found) == 8
        assert all(found)


def test_two_of_four_are_kept_and_the_first_of_equal_ones() -> None:
    weight = nn.Parameter(torch.tensor([[1.0, -3.0, 2.0, 0.5], [1.0, -1.0, 1.0, 1.0], [0.0, 0.0, 0.0, 5.0]]))
    optimizer = FusedShardedAdam([("w", weight)])
    sparsity = Sparsity(optimizer, {"w": 0.5}, pattern=(2, 4))
    expected = torch.tensor([[0, 1, 1, 0], [1, 1, 0, 0], [1, 0, 0, 1]], dtype=torch.bool)
    assert torch.equal(sparsity.masks()["w"], expected)


def test_chance_is_another_at_each_change_and_the_same_in_each_run() -> None:
    def masks(count: int) -> list[Tensor]:
        module = model()
        optimizer = optimizer_of(Case(), module, bucket_cap_mb=0.01 * count)
        sparsity = Sparsity(optimizer, {"0.weight": 0.9}, zerox.set_(0.5, every=1, until=9))
        found = []
        for _ in range(3):
            module(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            sparsity.step()
            found.append(sparsity.masks()["0.weight"])
        return found

    first, again = masks(1), masks(2)
    assert all(torch.equal(one, other) for one, other in zip(first, again, strict=True))
    grown = [after & ~before for before, after in itertools.pairwise(first)]
    assert all(each.sum() > 100 for each in grown)
    places = grown[0].flatten().nonzero()
    assert 0.4 < float(places.float().mean()) / grown[0].numel() < 0.6


REFUSED: dict[str, tuple[Any, type[Exception], str]] = {
    "nothing": (
        lambda o: Sparsity(o, {"nope.*": 0.5}),
        ValueError,
        "'nope.*' stands for no trained parameter",
    ),
    "biases": (
        lambda o: Sparsity(o, {"*.bias": 0.5}),
        ValueError,
        "biases and norms are taken by their full names",
    ),
    "twice": (lambda o: Sparsity(o, {"0.*": 0.5, "*.weight": 0.2}), ValueError, "both stand for parameter '0.weight'"),
    "all": (
        lambda o: Sparsity(o, {"0.*": 1.0}),
        ValueError,
        "'0.*' asks for 1.0: it must be",
    ),
    "no names": (lambda o: Sparsity(o, {}), ValueError, "no names of parameters were given"),
    "a scope": (lambda o: Sparsity(o, {"0.*": 0.5}, scope="row"), ValueError, "scope must be one of"),
    "a pattern of 3": (
        lambda o: Sparsity(o, {"0.*": 0.5}, pattern=(3, 6)),
        ValueError,
        "shape (120, 40) has no",
    ),
    "its sparsity": (lambda o: Sparsity(o, {"0.*": 0.6}, pattern=(2, 4)), ValueError, "masks 0.5, '0.*' asks for 0.6"),
    "its schedule": (
        lambda o: Sparsity(o, {"0.*": 0.5}, zerox.cubic(0, 9), pattern=(2, 4)),
        ValueError,
        "a pattern holds from the start, and has no cubic(",
    ),
    "two": (lambda o: [Sparsity(o, {"0.*": 0.5}), Sparsity(o, {"2.*": 0.5})], ValueError, "has one already"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_can_t_be_is_refused(name: str) -> None:
    make, error, message = REFUSED[name]
    with pytest.raises(error) as caught:
        make(optimizer_of(Case(), model()))
    assert message in str(caught.value)


def test_optimizers_that_masks_do_not_go_with() -> None:
    module = model()
    with pytest.raises(NotImplementedError, match="does not go with ShardedOptimizer"):
        Sparsity(zerox.ShardedOptimizer(module.named_parameters(), torch.optim.SGD, lr=0.1), {"0.weight": 0.5})
    with pytest.raises(ValueError, match="build the optimizer from model"):
        Sparsity(FusedShardedAdam(module.parameters()), {"0.weight": 0.5})


@pytest.mark.parametrize("wrong", [(5, 5), (-1, 5), (0, 5, 0)])
def test_a_schedule_says_what_is_wrong(wrong: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"must hold|must be 1 or more"):
        zerox.cubic(*wrong)
    with pytest.raises(ValueError, match="must be"):
        zerox.rigl(1.0)
    with pytest.raises(ValueError, match="until"):
        zerox.set_(0.5, until=0)


def said(error: type[Exception], call: Callable[[], Any]) -> str:
    with pytest.raises(error) as caught:
        call()
    return str(caught.value)


def left_out(rank: int, world: int) -> str:
    module = model()
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity(optimizer, {"0.weight": 0.5}, zerox.cubic(0, 2, 1))

    def loop() -> None:
        for step in range(2):
            module(torch.ones(1, 40)).sum().backward()
            optimizer.step()
            if rank == 0 or step == 1:
                sparsity.step()
            optimizer.zero_grad()

    return said(RuntimeError, loop)


def differing(rank: int, world: int) -> str:
    optimizer = optimizer_of(Case(), model())
    return said(ValueError, lambda: Sparsity(optimizer, {"0.weight": 0.5 + 0.1 * rank}))


def without_gradients(rank: int, world: int) -> str:
    module = model()
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity(optimizer, {"0.weight": 0.5}, zerox.rigl(0.3, every=1))
    module(torch.ones(1, 40)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    return said(RuntimeError, sparsity.step)


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (left_out, "call Sparsity.step() on all ranks"),
        (differing, "ranks must agree: rank 0 has Sparsity of"),
        (without_gradients, "call sparsity.step() after optimizer.step() and before zero_grad()"),
    ],
)
def test_all_ranks_raise(function: Any, message: str) -> None:
    for text in run_ranks(function, 2):
        assert message in text


def test_parts_of_a_mask_start_anywhere() -> None:
    kept = torch.rand(1000, generator=torch.Generator().manual_seed(0)) < 0.5
    mask = Mask.of(kept, [0])
    assert torch.equal(mask.kept(), kept)
    for start, numel in ((0, 1000), (8, 100), (13, 300), (991, 9), (5, 0)):
        bits = mask.part(start, numel)
        assert bits.numel() == -(-numel // 8) + 4
        assert torch.equal(unpack_bits(bits, numel), kept[start : start + numel])
        others = ~kept[start : start + numel]
        expected = torch.cat([kept[:start], others, kept[start + numel :]])
        assert torch.equal(mask.with_replaced(start, others).kept(), expected)
        assert torch.equal(mask.kept(), kept)


def test_nothing_grows_where_there_is_no_gradient() -> None:
    module = model()
    optimizer = optimizer_of(Case(), module)
    sparsity = Sparsity(optimizer, {"0.weight": 0.2}, zerox.rigl(0.9, every=1))  # all that are masked may grow
    before = sparsity.masks()["0.weight"]
    inputs = torch.ones(1, 40)
    inputs[:, :30] = 0
    module(inputs).square().sum().backward()
    optimizer.step()
    sparsity.step()
    grown = sparsity.masks()["0.weight"] & ~before
    assert grown.any()
    assert not grown[:, :30].any()
