"""full_grad(), full_state(), set_full_grad_() and set_full_state_(): one parameter, whole on every rank, and back."""

from __future__ import annotations

import math
import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.mean import one_parameter as these
from tests.mean.one_parameter import KINDS, STAGES, WORLDS, assert_same, backward, build, own_bytes, whole_values
from tests.ranks import run_ranks
from zerox import FusedShardedSGD, ShardedOptimizer

CLIP = 0.75
Params = dict[str, nn.Parameter]


def start(kind: str, stage: int, rank: int, world_size: int) -> tuple[Params, Any]:
    """After two steps, with the gradients of a third."""
    params, optimizer = build(kind, stage)
    for step in range(2):
        backward(rank, world_size, step, params)
        optimizer.step()
        optimizer.zero_grad()
    backward(rank, world_size, 2, params)
    return params, optimizer


def as_step_sees(kind: str, mean: Tensor, factor: float) -> Tensor:
    product = mean * torch.tensor(factor, dtype=mean.dtype)
    return product.bfloat16().float() if kind == "inner bf16" else product


def read_gradients(params: Params, optimizer: Any, world_size: int, kind: str) -> Tensor:
    """They are the reference's mean before a clip and after it, which this makes. Returns the norm."""
    dtype, _, options = KINDS[kind]
    means = {n: these.mean_gradient(world_size, 2, n, p, options.get("reduce_dtype", dtype)) for n, p in params.items()}
    found = {name: optimizer.full_grad(p) for name, p in params.items()}
    assert [name for name, grad in found.items() if grad is None] == ["unused"]
    norm = optimizer.clip_grad_norm_(CLIP)
    factor = float(torch.clamp(CLIP / (norm + 1e-6), max=1.0))
    assert factor < 1.0
    clipped = {name: optimizer.full_grad(p) for name, p in params.items()}
    wide = torch.float64 if dtype is torch.float64 else torch.float32
    for name, mean in means.items():
        p, grad = params[name], found[name]
        if mean is not None:
            assert (grad.dtype, grad.shape, grad.stride()) == (wide, p.shape, torch.empty_like(p).stride()), name
            assert torch.equal(grad, mean), name
            assert torch.equal(clipped[name], as_step_sees(kind, mean, factor)), name
    return norm


def read_states(params: Params, optimizer: Any, rank: int, to: int) -> dict[int, dict[str, Any]]:
    """They are full_state_dict()'s."""
    full = optimizer.full_state_dict(to)
    states = {number: optimizer.full_state(p) for number, p in enumerate(params.values())}
    for number, state in states.items() if rank == to else ():
        theirs = full["state"].get(number, {})
        assert list(state) == list(theirs)
        assert_same(state, theirs, f"state {number}")
        assert all(each.stride() == theirs[key].stride() for key, each in state.items() if isinstance(each, Tensor))
    return states


def set_states(params: Params, optimizer: Any, states: dict[int, dict[str, Any]]) -> tuple[dict[str, Tensor], set[str]]:
    """Sets new ones, writes them into ``states``, and returns the masters among them, and warnings."""
    masters, said = {}, set()
    for number, (name, p) in enumerate(params.items()):
        if name not in ("empty", "unused"):
            for key, each in states[number].items():
                if isinstance(each, Tensor) and each.dim() == p.dim():
                    states[number][key] = new_values(p, number).abs() + 1 / 3
            states[number]["step"] = torch.tensor(9.0)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.set_full_state_(p, **(states[number] | {"step": 9}))
            assert all(each.filename == __file__ for each in caught), "warnings name the caller's line"
            said |= {str(each.message) for each in caught}
            masters |= {name: states[number]["master"]} if "master" in states[number] else {}
    return masters, said


def assert_same_training(ours: tuple[Params, Any], theirs: tuple[Params, Any], when: str) -> None:
    assert_same(own_bytes(ours[1]), own_bytes(theirs[1]), f"what is stored {when}")
    assert_same(whole_values(*ours), whole_values(*theirs), f"parameters {when}")


def read_and_set(rank: int, world_size: int, kind: str, stage: int) -> set[str]:
    params, optimizer = ours = start(kind, stage, rank, world_size)
    twins, twin = theirs = start(kind, stage, rank, world_size)
    norm = read_gradients(params, optimizer, world_size, kind)
    states = read_states(params, optimizer, rank, world_size - 1)
    assert norm == twin.clip_grad_norm_(CLIP)
    for number, p in enumerate(params.values()):
        grad = optimizer.full_grad(p)
        if grad is not None:
            optimizer.set_full_grad_(p, grad)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of forms that could round other values
            optimizer.set_full_state_(p, **states[number])
    assert_same_training(ours, theirs, "after what was read is set")
    assert optimizer.clip_grad_norm_(math.inf) == twin.clip_grad_norm_(math.inf)
    for each in (optimizer, twin):
        each.step()
    assert_same_training(ours, theirs, "after the next step")

    masters, said = set_states(params, optimizer, states)
    with twin.whole(), torch.no_grad():
        for name, master in masters.items():
            twins[name].copy_(master)
    full = {number: twin.full_state(p) for number, p in enumerate(twins.values())}
    state = {number: full[number] if number in (2, 3) else states[number] for number in full}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        twin.load_state_dict({"state": state, "param_groups": twin.state_dict()["param_groups"]})
    assert_same_training(ours, theirs, "as if it were loaded")
    for each in (optimizer, twin):
        each.step()
    assert_same_training(ours, theirs, "a step later")
    return said


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("world_size", WORLDS)
def test_what_is_read_is_what_step_uses_and_goes_back_without_a_bit_changed(world_size: int, kind: str) -> None:
    """Each kind is tried at each stage, and each number of ranks at each stage. What is set is as if it were loaded."""
    stage = STAGES[(list(KINDS).index(kind) + world_size) % 3]
    said = set().union(*run_ranks(read_and_set, world_size, kind, stage))
    assert bool(said) == (kind in ("bf16 moments", "8 bit", "lion", "inner bf16"))
    assert all("rounded" in each for each in said)


def new_values(param: Tensor, seed: int = 5) -> Tensor:
    """Of few bits: no wire rounds them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-120, 120, param.shape, generator=generator) / 64


def set_gradients(rank: int, world_size: int, wire: torch.dtype, clips: bool) -> bool:
    """SGD with the rate 1 from zeros: the new parameters are what step() saw. Returns whether it warned."""
    said = []
    for stage in STAGES:
        params = {name: nn.Parameter(torch.zeros_like(p)) for name, p in these.make_params().items()}
        options = {"lr": 1.0, "stage": stage, "bucket_cap_mb": these.CAP_MB, "reduce_dtype": wire}
        optimizer = FusedShardedSGD(list(params.items()), **options)
        backward(rank, world_size, 0, params)
        first = optimizer.clip_grad_norm_(CLIP if clips else math.inf)  # its sum were cached by the reduction
        values = {name: new_values(p) for name, p in params.items() if name != "unused"}
        for name in ("spans", "small", "empty"):
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer.set_full_grad_(params[name], values[name])
            assert all(each.filename == __file__ and "rounded" in str(each.message) for each in caught)
            said += caught
            seen = optimizer.full_grad(params[name])
            tolerance = 2**-23 if wire is torch.float32 else 2**-8
            torch.testing.assert_close(seen, values[name], rtol=tolerance if clips else 0, atol=0)
        seen = {name: optimizer.full_grad(p) for name, p in params.items()}
        norm = optimizer.clip_grad_norm_(math.inf)
        whole = torch.cat([grad.double().flatten() for grad in seen.values() if grad is not None])
        torch.testing.assert_close(norm.double(), whole.norm(), rtol=1e-6, atol=0)
        assert abs(norm - first) > 0.1
        if stage == 1:
            for name, p in params.items():
                assert (p.grad is None) == (name == "unused")
                if not clips and name in ("spans", "small", "empty"):
                    assert p.grad is not None
                    assert torch.equal(p.grad, values[name]), name
        optimizer.step()
        with optimizer.whole():
            for name, p in params.items():
                assert torch.equal(p, torch.zeros_like(p) if seen[name] is None else -seen[name]), (stage, name)
    return bool(said)


@pytest.mark.parametrize("clips", [False, True])
@pytest.mark.parametrize("wire", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [1, 3])
def test_the_next_step_and_norm_see_a_gradient_that_was_set(world_size: int, wire: torch.dtype, clips: bool) -> None:
    rounds = run_ranks(set_gradients, world_size, wire, clips)
    assert all(each == (clips and wire is torch.bfloat16) for each in rounds)


def see_limits_and_scales(rank: int, world_size: int, dtype: torch.dtype, inner: bool) -> None:
    """Each call between backward and step() shows in full_grad(), as in the step."""
    for stage in STAGES:
        params = {name: nn.Parameter(torch.zeros_like(p)) for name, p in these.make_params(dtype).items()}
        options: dict[str, Any] = {"lr": 1.0, "stage": stage, "bucket_cap_mb": these.CAP_MB, "master_weights": None}
        optimizer = (
            ShardedOptimizer(list(params.items()), torch.optim.SGD, foreach=False, **options)
            if inner
            else FusedShardedSGD(list(params.items()), **options)
        )
        backward(rank, world_size, 0, params)
        mean = these.mean_gradient(world_size, 0, "spans", params["spans"], dtype)
        assert mean is not None
        optimizer.unscale_grads_(torch.tensor(0.5))
        assert torch.equal(optimizer.full_grad(params["spans"]), mean * 0.5)
        optimizer.scale_grads_(4.0)
        assert torch.equal(optimizer.full_grad(params["spans"]), mean * 2)
        optimizer.mean_over(2)
        assert torch.equal(optimizer.full_grad(params["spans"]), mean)
        optimizer.clip_grad_norm_(1e-3, parameters=params["small"])
        assert torch.equal(optimizer.full_grad(params["spans"]), mean)
        torch.testing.assert_close(optimizer.full_grad(params["small"]).norm(), torch.tensor(1e-3), rtol=2**-8, atol=0)
        optimizer.clip_grad_norm_(0.37)
        clipped = optimizer.full_grad(params["spans"])
        optimizer.clip_grad_value_(2**-7)
        seen = {name: optimizer.full_grad(p) for name, p in params.items()}
        assert torch.equal(seen["spans"], clipped.clamp(-(2**-7), 2**-7))
        assert not torch.equal(seen["spans"], clipped)
        optimizer.step()
        with optimizer.whole():
            for name, p in params.items():
                expected = torch.zeros_like(p) if seen[name] is None else -seen[name].to(dtype)
                assert torch.equal(p, expected), (stage, name)


@pytest.mark.parametrize("inner", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("world_size", [2])
def test_scales_clips_and_limits_show(world_size: int, dtype: torch.dtype, inner: bool) -> None:
    run_ranks(see_limits_and_scales, world_size, dtype, inner)


def set_on_a_wide_wire(rank: int, world_size: int) -> None:
    """Shards hold more than p.grad, in stage 1 too, where both are kept."""
    for stage in STAGES:
        params = {name: nn.Parameter(torch.zeros_like(p)) for name, p in these.make_params(torch.bfloat16).items()}
        options: dict[str, Any] = {"reduce_dtype": torch.float32, "bucket_cap_mb": these.CAP_MB}
        optimizer = FusedShardedSGD(list(params.items()), lr=1.0, stage=stage, **options)
        backward(rank, world_size, 0, params)
        for name in ("spans", "small"):
            value = new_values(params[name]) / 3
            optimizer.set_full_grad_(params[name], value)
            assert torch.equal(optimizer.full_grad(params[name]), value)
            if stage == 1:
                assert torch.equal(params[name].grad, value.bfloat16())
        optimizer.step()
        for name in ("spans", "small"):
            assert torch.equal(optimizer.full_state(params[name])["master"], new_values(params[name]) / -3)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_wide_wire_keeps_what_is_set(world_size: int) -> None:
    run_ranks(set_on_a_wide_wire, world_size)


def go_on_from_a_set_gradient(rank: int, world_size: int) -> None:
    """Another backward adds to it, as to p.grad; a captured address and p.grad itself stay."""
    for stage in STAGES:
        params = {"a": nn.Parameter(torch.zeros(5000)), "b": nn.Parameter(torch.zeros(4))}
        optimizer = FusedShardedSGD(list(params.items()), lr=1.0, stage=stage, bucket_cap_mb=these.CAP_MB)
        sum(p.sum() for p in params.values()).backward()
        optimizer.synchronize()
        grads = [p.grad for p in params.values()]
        places = [each.data_ptr() for each in optimizer.inside.grads.reduced_tensors()]
        optimizer.set_full_grad_(params["a"], torch.full((5000,), 3.0))
        assert all(p.grad is grad for p, grad in zip(params.values(), grads, strict=True))
        assert [each.data_ptr() for each in optimizer.inside.grads.reduced_tensors()] == places
        sum(p.sum() * 2 * (rank + 1) for p in params.values()).backward()
        optimizer.step()
        with optimizer.whole():
            assert torch.equal(params["a"], torch.full((5000,), -3.0 - (world_size + 1)))
            assert torch.equal(params["b"], torch.full((4,), -1.0 - (world_size + 1)))


@pytest.mark.parametrize("world_size", WORLDS)
def test_backward_adds_to_a_gradient_that_was_set(world_size: int) -> None:
    run_ranks(go_on_from_a_set_gradient, world_size)
