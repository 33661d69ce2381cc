"""What the calls about one parameter refuse, on all ranks, and what they leave alone; masters; parameters elsewhere."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.mean import one_parameter as these
from tests.mean.one_parameter import STAGES, WORLDS, assert_same, backward, build, own_bytes, whole_values
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD

Call = Callable[[Any, dict[str, nn.Parameter], int], Any]
ELSEWHERE = torch.ones(2)
# By what is said on all ranks: the error, and the call.
WRONG: dict[str, tuple[type[Exception], Call]] = {
    "full_grad(): a tensor of shape (2,) is no parameter that this optimizer trains": (
        ValueError,
        lambda ours, p, rank: ours.full_grad(ELSEWHERE if rank == 1 else p["spans"]),
    ),
    "full_state(): a tensor of shape (3,) is no parameter that this optimizer trains; pass one of its param groups": (
        ValueError,
        lambda ours, p, rank: ours.full_state(p["frozen"]),
    ),
    "set_full_grad_(): 'small' is no parameter": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_("small", ELSEWHERE),
    ),
    "set_full_state_(): a tensor of shape (2,) is no parameter": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(ELSEWHERE, step=1),
    ),
    "rank 0 has full_grad() of parameter 'small', which is number 1; rank 1 has full_grad() of parameter 'spans'": (
        ValueError,
        lambda ours, p, rank: ours.full_grad(p["spans" if rank else "small"]),
    ),
    "rank 0 has full_grad() of parameter 'small', which is number 1; rank 1 has full_state() of parameter 'small', "
    "which is number 1: make the same call on all ranks": (
        ValueError,
        lambda ours, p, rank: ours.full_state(p["small"]) if rank else ours.full_grad(p["small"]),
    ),
    "for the same parameter and with equal values": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_(p["small"], torch.full((7,), float(rank))),
    ),
    "step 2": (ValueError, lambda ours, p, rank: ours.set_full_state_(p["small"], step=1 + rank)),
    "the gradient of parameter 'small' must be a whole tensor of its shape (7,), got a tensor of shape (6,)": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_(p["small"], torch.ones(6 if rank else 7)),
    ),
    "must be a whole tensor of its shape (7,), got 1.0": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_(p["small"], 1.0),
    ),
    "must be a dense tensor of real numbers, got torch.complex64": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_(p["small"], torch.ones(7, dtype=torch.complex64)),
    ),
    "exp_avg of parameter 'spans' must be a whole tensor": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["spans"], step=3, exp_avg=torch.ones(50)),
    ),
    "no 'exp_averages' is kept for parameter 'small': pass some of step, exp_avg, exp_avg_sq, master": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["small"], exp_averages=torch.ones(7)),
    ),
    "no 'max_exp_avg_sq' is kept": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["small"], max_exp_avg_sq=torch.ones(7)),
    ),
    "no 'remainder' is kept": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["small"], remainder=torch.ones(7)),
    ),
    "step must be a whole number, 0 or more, got -1.0": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["small"], step=-1),
    ),
    "got 0.5": (ValueError, lambda ours, p, rank: ours.set_full_state_(p["small"], step=torch.tensor(0.5))),
    "step of parameter 'small' must be one number, got '9'": (
        ValueError,
        lambda ours, p, rank: ours.set_full_state_(p["small"], step="9"),
    ),
    "no rank has a gradient of parameter 'unused'; call it after a backward that reaches the parameter": (
        RuntimeError,
        lambda ours, p, rank: ours.set_full_grad_(p["unused"], torch.ones(5, 6)),
    ),
    "was called inside no_sync()": (RuntimeError, lambda ours, p, rank: inside_no_sync(ours, p["small"])),
    # Of what these leave for step() the twin has none.
    "set_full_grad_() was called after clip_grad_value_(), which comes last": (
        RuntimeError,
        lambda ours, p, rank: (ours.clip_grad_value_(1.0), ours.set_full_grad_(p["small"], torch.ones(7))),
    ),
    "step() will multiply the gradients by 0.0, whatever they are: set them before": (
        RuntimeError,
        lambda ours, p, rank: (ours.clip_grad_norm_(0.0), ours.set_full_grad_(p["small"], torch.ones(7))),
    ),
    "values for parameter 'small' are too large for gradients in torch.float16": (
        ValueError,
        lambda ours, p, rank: ours.set_full_grad_(p["small"], torch.full((7,), 1e6)),
    ),
}


def inside_no_sync(optimizer: Any, param: Tensor) -> None:
    with optimizer.no_sync():
        optimizer.full_grad(param)


def with_a_frozen_one(stage: int, **options: Any) -> tuple[dict[str, nn.Parameter], FusedShardedAdam]:
    params = these.make_params(torch.bfloat16) | {"frozen": nn.Parameter(torch.ones(3).bfloat16(), requires_grad=False)}
    return params, FusedShardedAdam(list(params.items()), stage=stage, bucket_cap_mb=these.CAP_MB, **options)


def call_wrongly(rank: int, world_size: int, stage: int) -> list[str]:
    params, ours = with_a_frozen_one(stage, reduce_dtype=torch.float16)
    twins, twin = with_a_frozen_one(stage, reduce_dtype=torch.float16)
    trained = {name: p for name, p in params.items() if name != "frozen"}
    said = []
    for step, (kind, call) in enumerate(WRONG.values()):
        for each in (ours, twin):
            backward(rank, world_size, step, trained if each is ours else {name: twins[name] for name in trained})
        with pytest.raises((ValueError, RuntimeError)) as raised:
            call(ours, params, rank)
        assert isinstance(raised.value, kind)
        said.append(str(raised.value))
        if kind is RuntimeError and "unused" not in said[-1] and "no_sync" not in said[-1]:
            for each in (ours, twin):
                each.zero_grad()
        for each in (ours, twin):
            each.step()
            each.zero_grad()
        assert_same(own_bytes(ours), own_bytes(twin), said[-1])
    assert_same(whole_values(params, ours), whole_values(twins, twin), "parameters")
    return said


@pytest.mark.parametrize("stage", STAGES)
def test_wrong_calls_raise_on_all_ranks_and_change_nothing(stage: int) -> None:
    for said in run_ranks(call_wrongly, 2, stage):
        for expected, found in zip(WRONG, said, strict=True):
            assert expected in found


def in_other_kinds(rank: int, world_size: int) -> None:
    params, optimizer = build("fp32", 2)
    with pytest.raises(ValueError, match=r"no 'master' is kept .* pass some of step, exp_avg, exp_avg_sq"):
        optimizer.set_full_state_(params["small"], master=torch.ones(7))
    params, optimizer = build("sgd", 2)
    with pytest.raises(ValueError, match="momentum_buffer of parameter 'small' would begin anew, since step=0"):
        optimizer.set_full_state_(params["small"], momentum_buffer=torch.ones(7), step=0)
    optimizer.set_full_state_(params["small"], momentum_buffer=torch.ones(7))  # counts as one update, as when loaded
    assert optimizer.full_state(params["small"])["step"] == 1
    params, optimizer = build("inner bf16", 2)
    optimizer.param_groups[0]["momentum"] = 0.0
    with pytest.raises(ValueError, match="no 'momentum_buffer' is kept"):
        optimizer.set_full_state_(params["small"], momentum_buffer=torch.ones(7))
    assert optimizer.full_state(params["small"]) == {}
    optimizer.param_groups[0]["momentum"] = 0.9
    optimizer.set_full_state_(params["small"], momentum_buffer=torch.ones(7))
    backward(rank, world_size, 0, params)
    seen = optimizer.full_grad(params["small"])
    optimizer.step()
    expected = seen.bfloat16() + 0.9 * torch.ones(7)
    torch.testing.assert_close(
        optimizer.full_state(params["small"])["momentum_buffer"], expected, rtol=2**-7, atol=2**-8
    )
    params, optimizer = build("inner bf16", 2)
    optimizer.param_groups[0]["momentum"] = 0.0
    for step in range(2):  # the buffer begins with the second one, but for "small"
        backward(rank, world_size, step, {name: p for name, p in params.items() if step == 0 or name != "small"})
        optimizer.step()
        for number, p in enumerate(params.values()):
            theirs = optimizer.full_state_dict(world_size - 1)
            state = optimizer.full_state(p)
            assert ("momentum_buffer" in state) == (
                step == 1 and p is not params["unused"] and p is not params["small"]
            )
            if rank == world_size - 1:
                assert_same(state, theirs["state"].get(number, {}), f"state {number}")
        optimizer.zero_grad()
        optimizer.param_groups[0]["momentum"] = 0.9
    params, optimizer = build("fp32", 2)
    optimizer.param_groups[0]["amsgrad"] = True  # begins with what is set, as it would with the next step
    optimizer.set_full_state_(params["small"], max_exp_avg_sq=torch.full((7,), 0.25))
    assert torch.equal(optimizer.full_state(params["small"])["max_exp_avg_sq"], torch.full((7,), 0.25))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_is_kept_is_what_the_group_s_rule_keeps_now(world_size: int) -> None:
    run_ranks(in_other_kinds, world_size)


def leave_alone(rank: int, world_size: int) -> None:
    """Getters leave the norm's cached sums, the consolidated state, and state objects; setters what they don't set."""
    params, optimizer = build("8 bit", 2)
    backward(rank, world_size, 0, params)
    optimizer.step()
    optimizer.zero_grad()
    optimizer.consolidate_state_dict(to=0)
    backward(rank, world_size, 1, params)
    optimizer.synchronize()
    grads = optimizer.inside.grads
    limbs = [grads.limbs(index) for index in range(len(optimizer.inside.buckets))]
    shown = [optimizer.full_grad(p) for p in params.values()] + [optimizer.full_state(p) for p in params.values()]
    assert len(shown) == 2 * len(params)
    for index, each in enumerate(limbs):
        assert each is None or torch.equal(grads.limbs(index), each)
    assert world_size == 1 or any(each is not None for each in limbs)
    states = [id(state) for state in optimizer.state.values()]
    kept = optimizer.inside.loading.consolidated
    assert (kept is not None) == (rank == 0 and world_size > 1)
    optimizer.set_full_grad_(params["small"], torch.ones(7))
    assert optimizer.inside.loading.consolidated is kept
    optimizer.set_full_state_(params["small"])
    assert optimizer.inside.loading.consolidated is kept, "nothing was set"
    optimizer.set_full_state_(params["small"], step=5)
    assert optimizer.inside.loading.consolidated is None
    assert [id(state) for state in optimizer.state.values()] == states
    assert optimizer.full_state(params["small"])["step"] == 5
    assert optimizer.full_state(params["spans"])["step"] == 1


@pytest.mark.parametrize("world_size", WORLDS)
def test_calls_leave_alone_what_they_are_not_about(world_size: int) -> None:
    run_ranks(leave_alone, world_size)


def set_masters(rank: int, world_size: int, kind: str) -> None:
    """Ties, both signs, the largest numbers, inf and NaN: the parameter is the master rounded."""
    odd = torch.tensor([1.0 + 2**-8, -1.0 - 2**-8, 1.0 + 3 * 2**-8, 3.3e38, -1e-40, torch.inf, torch.nan])
    wide = torch.randn(50, 130, generator=torch.Generator().manual_seed(1))
    for stage in STAGES:
        params, optimizer = build(kind, stage)
        backward(rank, world_size, 0, params)
        optimizer.step()  # before it a class of torch's kind has no state to show
        optimizer.zero_grad()
        others = whole_values({name: p for name, p in params.items() if name not in ("small", "spans")}, optimizer)
        places = [] if stage == 3 else [p.data_ptr() for p in params.values()]
        for name, master in (("small", odd), ("spans", wide)):
            version = params[name]._version
            optimizer.set_full_state_(params[name], master=master)
            assert params[name]._version > version, "a backward through the old value raises"
            kept = optimizer.full_state(params[name])["master"]
            torch.testing.assert_close(kept, master, rtol=0, atol=0, equal_nan=True)
            with optimizer.whole():
                value = params[name].detach().clone()
            these.assert_same_on_all_ranks(value, name)
            ties = name == "small" and "remainder" in kind  # away from zero, as the update does it
            expected = master.to(value.dtype)
            if ties:
                expected[:3] = torch.tensor([1.0 + 2**-7, -1.0 - 2**-7, 1.0 + 2**-6])
            torch.testing.assert_close(value, expected, rtol=0, atol=0, equal_nan=True)
        rest = whole_values({name: p for name, p in params.items() if name not in ("small", "spans")}, optimizer)
        assert_same(rest, others, "other parameters")
        assert places == ([] if stage == 3 else [p.data_ptr() for p in params.values()])
        optimizer.param_groups[0]["lr"] = 0.0
        backward(rank, world_size, 0, params)
        optimizer.step()
        kept = optimizer.full_state(params["spans"])["master"]
        assert torch.equal(kept, wide), "the next step starts from it"


@pytest.mark.parametrize("kind", ["bf16 remainder", "bf16 fp32, wide wire", "inner masters"])
@pytest.mark.parametrize("world_size", WORLDS)
def test_a_master_that_is_set_is_the_parameter_s_value_too(world_size: int, kind: str) -> None:
    run_ranks(set_masters, world_size, kind)


def elsewhere(rank: int, world_size: int, where: str) -> None:
    for stage in STAGES:
        params, optimizer = build("bf16 remainder", stage)
        param = params["spans"]
        before = whole_values(params, optimizer)
        if where == "new storages":
            for p, value in zip(params.values(), before, strict=True):
                p.data = value.clone()
        elif where == "shared memory":
            param.share_memory_()
            address = param.data_ptr()
        master = torch.full((50, 130), 1.0 + 2**-10)
        with optimizer.whole() if where == "inside whole()" else contextlib.nullcontext():
            optimizer.set_full_state_(param, master=master)
            assert torch.equal(param, master.bfloat16())
        backward(rank, world_size, 0, params)
        optimizer.param_groups[0]["lr"] = 0.0
        optimizer.step()
        after = whole_values(params, optimizer)
        assert torch.equal(after[0], master.bfloat16())
        assert_same(after[1:], before[1:], "other parameters")
        assert torch.equal(optimizer.full_state(param)["master"], master)
        if where == "shared memory":
            assert param.data_ptr() == address


@pytest.mark.parametrize("where", ["new storages", "shared memory", "inside whole()"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_master_is_set_wherever_the_parameter_lies(world_size: int, where: str) -> None:
    run_ranks(elsewhere, world_size, where)


def set_by_hand(rank: int, world_size: int) -> None:
    """Gradients that no backward made: in stage 1 they are sent where they changed since. What is set is not."""
    for stage in STAGES:
        param = nn.Parameter(torch.zeros(5000))
        optimizer = FusedShardedSGD([param], lr=1.0, stage=stage)
        param.grad = torch.full((5000,), float(rank))
        mean = optimizer.full_grad(param)
        torch.testing.assert_close(mean, torch.full((5000,), (world_size - 1) / 2), rtol=2**-23, atol=0)
        value = torch.rand(5000, generator=torch.Generator().manual_seed(3))
        optimizer.set_full_grad_(param, value)
        assert torch.equal(optimizer.full_grad(param), value)
        optimizer.step()
        with optimizer.whole():
            assert torch.equal(param, -value)


@pytest.mark.parametrize("world_size", WORLDS)
def test_what_is_set_is_not_averaged_again(world_size: int) -> None:
    run_ranks(set_by_hand, world_size)


def unfreeze(rank: int, world_size: int) -> None:
    for stage in STAGES:
        params = {"a": nn.Parameter(torch.ones(5)), "b": nn.Parameter(torch.ones(5), requires_grad=False)}
        optimizer = FusedShardedSGD(list(params.items()), lr=1.0, stage=stage)
        params["b"].requires_grad_()
        (params["b"] * 3).sum().backward()
        assert torch.equal(optimizer.full_grad(params["b"]), torch.full((5,), 3.0)), "adopted by the call itself"
        params["a"].requires_grad_(False)
        assert optimizer.full_grad(params["a"]) is None, "frozen since: it is trained, and has no gradient"


@pytest.mark.parametrize("world_size", [1, 2])
def test_parameters_frozen_or_unfrozen_since_are_known(world_size: int) -> None:
    run_ranks(unfreeze, world_size)
