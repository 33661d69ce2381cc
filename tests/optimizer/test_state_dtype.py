"""Moments in bf16 and in 8 bits, through the optimizer."""

from __future__ import annotations

import io
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels import stored
from tests.kernels.shards import same_bits
from tests.optimizer.models import backward, batch, make_model, memory_order
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, estimate

KINDS = [torch.bfloat16, "8bit"]
BLOCK = 256


def own_moments(optimizer: FusedShardedAdam) -> dict[tuple[str, str, int], Tensor]:
    """(name, key, place of its first element) -> this rank's part of a moment or of scales, in memory order."""
    found = {}
    for bucket in optimizer.inside.buckets:
        parts = dict(bucket.state_of_own())
        for segment in bucket.own_segments:
            member = bucket.members[segment.slot]
            for key, value in parts[member.param].items():
                if key != "step":
                    found[member.name, key, segment.param_start] = memory_order(value).clone()
    return found


def train_alike(rank: int, world_size: int, options: dict[str, Any]) -> Any:
    """All ranks have the same gradients: with 1, 2 or 4 of them their mean is the same bits.

    Drawn ones, through a product with each parameter: matrix products in two processes need not give the same bits on
    every processor, and parameters lie elsewhere in their bucket with another number of ranks.
    """
    model = make_model()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.05, **options)
    for step in range(3):
        generator = torch.Generator().manual_seed(step)
        products = [
            (param * torch.randn(param.shape, generator=generator)).sum()
            for name, param in model.named_parameters()
            if "unused" not in name and (step == 1 or "branch" not in name)
        ]
        torch.stack(products).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in model.parameters()], own_moments(optimizer)


def joined(results: list[Any]) -> dict[tuple[str, str], Tensor]:
    """(name, key) -> the whole moment, put together from what each rank has of it."""
    parts: dict[tuple[str, str], dict[int, Tensor]] = {}
    for _, moments in results:
        for (name, key, start), values in moments.items():
            parts.setdefault((name, key), {})[start] = values
    return {what: torch.cat([found[start] for start in sorted(found)]) for what, found in parts.items()}


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_neither_noise_nor_blocks_depend_on_the_number_of_ranks(kind: Any) -> None:
    options = {"state_dtype": kind, "amsgrad": True}
    alone = run_ranks(train_alike, 1, options)
    for world_size in (2, 4):
        results = run_ranks(train_alike, world_size, options)
        for params, _ in results:
            assert all(same_bits(p, q) for p, q in zip(params, alone[0][0], strict=True))
        ours, theirs = joined(results), joined(alone)
        assert ours.keys() == theirs.keys()
        for what in ours:
            assert same_bits(ours[what], theirs[what]), what


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_step_is_that_of_fp32_moments_then_stored(kind: Any) -> None:
    """Against an optimizer with fp32 moments that starts each step from what is stored."""
    model, twin = make_model(), make_model()
    ours = FusedShardedAdam(model.parameters(), lr=1e-2, state_dtype=kind)
    theirs = FusedShardedAdam(twin.parameters(), lr=1e-2)
    for step in range(3):
        for optimizer, each in ((ours, model), (theirs, twin)):
            backward(each, batch(0, step), branch=step == 1)
            optimizer.step()
            optimizer.zero_grad()
        for number, (p, q) in enumerate(zip(model.parameters(), twin.parameters(), strict=True)):
            assert same_bits(p, q)
            for key in ("exp_avg", "exp_avg_sq"):
                exact = memory_order(theirs.state[q][key])
                exact.copy_(after_storing(ours.state[p], key, number, exact))


def after_storing(state: dict[str, Tensor], key: str, number: int, exact: Tensor) -> Tensor:
    """What is left of ``exact``, after a look at whether ``state`` stores that."""
    got, step = memory_order(state[key]), int(state["step"])
    if step == 0:  # no gradient yet
        assert not got.any()
        return exact
    if got.dtype is torch.bfloat16:
        words = stored.random_bits(step, number, torch.arange(got.numel()))
        half = (words & 0xFFFF) if key == "exp_avg" else words >> 16
        assert same_bits(got, stored.stochastic_bf16(exact, half))
        return got.float()
    if got.dtype is torch.uint8:
        codes, scales = stored.encode(exact, signed=key == "exp_avg")
        assert same_bits(got, codes)
        assert same_bits(state[key + "_scale"], scales)
        return stored.decode(codes, scales, signed=key == "exp_avg")
    assert same_bits(got, exact)
    assert got.numel() < 4096
    return exact


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (torch.float32, [torch.float32, torch.float32, torch.float64]),
        (torch.bfloat16, [torch.bfloat16, torch.bfloat16, torch.float64]),
        ("8bit", [torch.uint8, torch.float32, torch.float64]),
    ],
    ids=str,
)
def test_small_and_float64_parameters_keep_wide_moments(kind: Any, expected: list[torch.dtype]) -> None:
    numels = [(4096, torch.bfloat16), (4095, torch.bfloat16), (5000, torch.float64)]
    params = [nn.Parameter(torch.ones(numel, dtype=dtype)) for numel, dtype in numels]
    optimizer = FusedShardedAdam(params, amsgrad=True, state_dtype=kind)
    for param, dtype in zip(params, expected, strict=True):
        state = optimizer.state[param]
        assert [state[key].dtype for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq")] == [dtype] * 3
        scales = {key: value.shape for key, value in state.items() if key.endswith("_scale")}
        names = ("exp_avg_scale", "exp_avg_sq_scale", "max_exp_avg_sq_scale")
        assert scales == (dict.fromkeys(names, (16,)) if dtype is torch.uint8 else {})


@pytest.mark.parametrize("kind", [torch.float32, *KINDS], ids=str)
def test_memory_is_as_estimated_to_the_byte(kind: Any) -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters(), state_dtype=kind, bucket_cap_mb=0.05)
    formula = estimate(model.parameters(), 1, state_dtype=kind, bucket_cap_mb=0.05)
    assert optimizer.memory_bytes().moments == formula.moments


def test_moments_take_the_bytes_that_their_kinds_say() -> None:
    params = [torch.empty(1 << 20, dtype=torch.bfloat16, requires_grad=True)]
    taken = [estimate(params, 4, state_dtype=kind).moments for kind in (torch.float32, *KINDS)]
    assert taken == [2 * (1 << 18) * 4, 2 * (1 << 18) * 2, 2 * (1 << 18) + 2 * (1 << 18) // BLOCK * 4]


@pytest.mark.parametrize("kind", KINDS, ids=str)
def test_a_run_that_is_saved_and_loaded_goes_on_with_the_same_bits(kind: Any) -> None:
    def make() -> tuple[nn.Module, FusedShardedAdam]:
        model = make_model()
        return model, FusedShardedAdam(model.parameters(), lr=1e-2, amsgrad=True, state_dtype=kind)

    def train(model: nn.Module, optimizer: FusedShardedAdam, steps: range) -> None:
        for step in steps:
            backward(model, batch(0, step))
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = make()
    train(model, optimizer, range(2))
    file = io.BytesIO()
    torch.save((model.state_dict(), optimizer.state_dict()), file)
    train(model, optimizer, range(2, 4))
    resumed, second = make()
    file.seek(0)
    weights, state = torch.load(file)
    resumed.load_state_dict(weights)
    second.load_state_dict(state)
    train(resumed, second, range(2, 4))
    assert all(same_bits(p, q) for p, q in zip(model.parameters(), resumed.parameters(), strict=True))
    ours, theirs = own_moments(optimizer), own_moments(second)
    assert all(same_bits(ours[what], theirs[what]) for what in ours)


@pytest.mark.parametrize(
    ("saved", "loaded", "rounds"),
    [("8bit", torch.float32, ""), (torch.float32, "8bit", "to 8 bits"), ("8bit", KINDS[0], "to torch")],
    ids=str,
)
def test_state_of_another_state_dtype_is_converted_and_rounding_is_told(saved: Any, loaded: Any, rounds: str) -> None:
    torch.manual_seed(0)
    params = [nn.Parameter(torch.randn(5000)) for _ in range(2)]
    first, second = (FusedShardedAdam([p], state_dtype=kind) for p, kind in zip(params, (saved, loaded), strict=True))
    params[0].grad = torch.randn(5000)
    first.step()
    with warnings.catch_warnings(record=True) as said:
        second.load_state_dict(first.state_dict())
    assert [f"exp_avg {rounds}" in str(each.message) for each in said] == ([True] if rounds else [])
    [theirs], [ours] = (each.full_state_dict()["state"].values() for each in (first, second))
    for key in ("exp_avg", "exp_avg_sq"):
        torch.testing.assert_close(ours[key], theirs[key], rtol=0, atol=0.015 * float(theirs[key].abs().max()))
        assert rounds or same_bits(ours[key], theirs[key])
    assert ours["step"] == theirs["step"] == 1


def train_late(rank: int, world_size: int, late: bool) -> list[Tensor]:
    """All parameters from the start; or the first one unfrozen, and the last one added, before the first backward."""
    model = make_model()
    first, middle, last = model.inner.weight, list(model.norm.parameters()), model.outer.weight
    first.requires_grad_(not late)
    given = [{"params": [first]}, {"params": middle}]
    optimizer = FusedShardedAdam(given if late else [*given, {"params": [last]}], state_dtype=torch.bfloat16)
    if late:
        optimizer.add_param_group({"params": [last]})
        first.requires_grad_(True)
    for step in range(2):
        backward(model, batch(rank, step))
        optimizer.step()
        optimizer.zero_grad()
        model.zero_grad()
    return [p.detach().clone() for p in (first, *middle, last)]


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_parameter_s_noise_does_not_depend_on_when_it_joined(world_size: int) -> None:
    late, early = (run_ranks(train_late, world_size, late) for late in (True, False))
    for params, expected in zip(late, early, strict=True):
        assert all(same_bits(p, q) for p, q in zip(params, expected, strict=True))
