"""state_dict() and load_state_dict() in memory: no bit lost, torch's rules for what is missing, all or nothing."""

from __future__ import annotations

import copy
import io
import pickle
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

from tests.bucket_manager.rig import same_bits
from tests.optimizer.models import KINDS, backward, batch, make_model, make_optimizer
from tests.pull.shares import with_shares
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam


def in_memory(state_dict: Any) -> Any:
    return copy.deepcopy(state_dict)


def through_torch_save(state_dict: Any) -> Any:
    file = io.BytesIO()
    torch.save(state_dict, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def through_pickle(state_dict: Any) -> Any:
    return pickle.loads(pickle.dumps(state_dict))


WAYS = {each.__name__: each for each in (in_memory, through_torch_save, through_pickle)}


def snapshot(model: nn.Module, optimizer: FusedShardedAdam) -> list[Tensor]:
    """Parameters, and this rank's state in a fixed order."""
    params = list(model.parameters())
    own = [(key, optimizer.state[p][key]) for p in params if p in optimizer.state for key in sorted(optimizer.state[p])]
    return [*(p.detach().clone() for p in params), *(tensor.clone() for _, tensor in own)]


def restart(
    rank: int, world_size: int, kind: str, way: str, stage: int, names: tuple[bool, bool]
) -> tuple[bool, bool, int]:
    """Whether the state is the same bits once loaded, and the training after two more steps; how many tensors."""
    dtype, options = KINDS[kind]

    def build(seed: int, named: bool, lr: float) -> tuple[nn.Module, FusedShardedAdam]:
        model = make_model(dtype, seed)
        params = model.named_parameters() if named else model.parameters()
        return model, make_optimizer(params, lr=lr, stage=stage, bucket_cap_mb=0.03, **options)

    def train(model: nn.Module, optimizer: FusedShardedAdam, steps: range) -> None:
        for step in steps:
            backward(model, batch(rank, step, dtype=dtype), branch=step == 1)
            optimizer.clip_grad_norm_(0.5)
            optimizer.step()
            optimizer.zero_grad()

    model, optimizer = build(0, names[0], 1e-2)
    train(model, optimizer, range(2))
    saved = WAYS[way]([model.state_dict(), optimizer.state_dict()])
    other, fresh = build(5, names[1], 3e-4)
    train(other, fresh, range(3, 4))  # what is loaded replaces whatever there was
    other.load_state_dict(saved[0])
    fresh.load_state_dict(saved[1])
    loaded = [same_bits(a, b) for a, b in zip(snapshot(model, optimizer), snapshot(other, fresh), strict=True)]
    for each in ((model, optimizer), (other, fresh)):
        train(*each, range(4, 6))
    trained = [same_bits(a, b) for a, b in zip(snapshot(model, optimizer), snapshot(other, fresh), strict=True)]
    return all(loaded), all(trained), len(loaded)


# A copy and a pickle take tensors as they are; torch.save() has a format for each dtype.
FEW = ("fp32", "bf16 remainder", "three rules, 8-bit state")


@pytest.mark.parametrize(("kind", "world_size"), thinned(KINDS, FEW, [1, 3], [3]))
def test_state_of_every_kind_is_restored_to_the_bit_and_training_goes_on(world_size: int, kind: str) -> None:
    ways = dict(zip(WAYS, (1, 2, 2), strict=True))
    for way, stage in ways.items() if kind in FEW else [(through_torch_save.__name__, 2)]:
        results = run_ranks(restart, world_size, kind, way, stage, (True, True))
        assert all((loaded, trained) == (True, True) for loaded, trained, _ in results), way
        num_params = len(list(make_model().parameters()))
        assert sum(count for _, _, count in results) > num_params * (world_size + 2), "the comparison saw state"


@pytest.mark.parametrize("names", [(True, False), (False, True), (False, False)], ids=str)
def test_state_loads_from_named_to_unnamed_and_back(names: tuple[bool, bool]) -> None:
    assert run_ranks(restart, 1, "fp32", "in_memory", 2, names)[0][:2] == (True, True)


def small(make: Any = FusedShardedAdam, steps: int = 2, **options: Any) -> tuple[nn.Linear, Any]:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = nn.Linear(3, 2)
    optimizer = make(model.parameters(), **options)
    for step in range(steps):
        model(torch.tensor([[1.0, -2.0, step]])).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, optimizer


def adamw(params: Any, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(params, foreach=False, **options)


@pytest.mark.parametrize("source", [FusedShardedAdam, adamw])
@pytest.mark.parametrize("target", [FusedShardedAdam, adamw])
def test_in_one_process_state_loads_from_and_into_torch_s_adamw(source: Any, target: Any) -> None:
    model, optimizer = small(source, amsgrad=True, lr=0.1)
    other, loaded = small(target, steps=1, lr=0.7)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for each in ((model, optimizer), (other, loaded)):
        each[0](torch.full((1, 3), 1e-3)).square().sum().backward()  # small: amsgrad's maximum stays behind
        each[1].step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q)
        assert float(optimizer.state[p]["step"]) == float(loaded.state[q]["step"]) == 3.0
        for key in ("exp_avg", "exp_avg_sq", "max_exp_avg_sq"):
            torch.testing.assert_close(optimizer.state[p][key], loaded.state[q][key])


def float_steps(rank: int, world_size: int) -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.named_parameters())
    for bucket in optimizer.inside.buckets:
        bucket.steps.fill_(2**24 + 1)
    for found in (optimizer.state_dict(), get_optimizer_state_dict(model, optimizer)):
        for state in found["state"].values():
            assert state["step"].dtype is torch.float32
    given = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(given)  # rounded to what float32 holds
    assert all((bucket.steps == 2**24).all() for bucket in optimizer.inside.buckets)
    for state in given["state"].values():
        held = state["step"].own if world_size > 1 else state["step"]
        state["step"] = torch.tensor(2**24 + 1) if held.numel() else state["step"]  # int64, as zerox 0.1.0 had it
    optimizer.load_state_dict(given)
    assert all((bucket.steps == 2**24 + 1).all() for bucket in optimizer.inside.buckets)


@pytest.mark.parametrize("world_size", [1, 2])
def test_steps_are_float32_and_taken_in_either_dtype(world_size: int) -> None:
    run_ranks(float_steps, world_size)


def test_options_that_an_older_state_dict_did_not_have_take_the_defaults() -> None:
    _, optimizer = small()
    saved = copy.deepcopy(optimizer.state_dict())
    for key in ("amsgrad", "maximize", "decoupled_weight_decay"):
        del saved["param_groups"][0][key]
    for state in saved["state"].values():
        state["step"] = float(state["step"])  # as old versions of torch saved it
    model, target = small(steps=0)
    target.load_state_dict(saved)
    group = target.param_groups[0]
    assert (group["amsgrad"], group["maximize"], group["decoupled_weight_decay"]) == (False, False, True)
    assert [int(target.state[p]["step"]) for p in model.parameters()] == [2, 2]
    target.step()


@pytest.mark.parametrize("kind", KINDS)
def test_state_that_is_not_given_starts_anew_as_in_torch(kind: str) -> None:
    """As for the dict of an optimizer that was saved before its first step; the rest of the dict is loaded."""
    dtype, options = KINDS[kind]
    model = make_model(dtype)
    optimizer = make_optimizer(model.parameters(), lr=1e-2, **options)
    for step in range(2):
        backward(model, batch(0, step, dtype=dtype))
        optimizer.step()
        optimizer.zero_grad()
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {}})
    assert len(optimizer.state) == len(list(model.parameters()))
    for param in model.parameters():
        for key, tensor in optimizer.state[param].items():
            expected = param.detach().float() if key == "master" else torch.zeros_like(tensor)
            assert same_bits(tensor, expected), key


@with_shares
def another_ranks_share(rank: int, world_size: int) -> tuple[str, bool]:
    model = make_model()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.03)
    backward(model, batch(rank, 0))
    optimizer.step()
    shares: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(shares, optimizer.state_dict())
    before = snapshot(model, optimizer)
    theirs = shares[1 - rank]
    theirs["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match="another rank's share") as error:
        optimizer.load_state_dict(theirs)
    untouched = all(same_bits(a, b) for a, b in zip(snapshot(model, optimizer), before, strict=True))
    return str(error.value), untouched and optimizer.param_groups[0]["lr"] == 1e-2


def test_another_ranks_share_is_refused_naming_the_parameter_and_nothing_changes() -> None:
    for message, untouched in run_ranks(another_ranks_share, 2):
        assert "'" in message
        assert untouched


def another_memory_format(rank: int, _: int) -> str:
    optimizers = []
    for memory_format in (torch.channels_last, torch.contiguous_format):
        model = nn.Conv2d(64, 64, 3, bias=False).to(memory_format=memory_format)  # type: ignore[call-overload]
        optimizers.append(FusedShardedAdam(model.named_parameters()))
        model(torch.randn(2, 64, 5, 5)).sum().backward()
        optimizers[-1].step()
    with pytest.raises(ValueError, match="another memory format") as error:
        optimizers[1].load_state_dict(optimizers[0].state_dict())
    return str(error.value)


def test_a_share_of_a_parameter_in_another_memory_format_is_refused() -> None:
    """It is a range of other elements."""
    for message in run_ranks(another_memory_format, 2):
        assert "'weight'" in message


def test_eight_bits_without_their_scales_are_refused() -> None:
    weights = [nn.Parameter(torch.ones(64, 64)), nn.Parameter(torch.ones(3))]
    optimizer = FusedShardedAdam(weights, state_dtype="8bit")
    for param in weights:
        param.grad = torch.ones_like(param)
    optimizer.step()
    given = copy.deepcopy(optimizer.state_dict())
    del given["state"][0]["exp_avg_sq_scale"]
    with pytest.raises(ValueError, match="'param 0' has no exp_avg_sq_scale beside its exp_avg_sq of 8 bits"):
        optimizer.load_state_dict(given)


def test_what_does_not_fit_is_refused_before_anything_changes() -> None:
    model, optimizer = small()
    before = snapshot(model, optimizer)
    good = copy.deepcopy(optimizer.state_dict())
    wrong_size = copy.deepcopy(good)
    wrong_size["state"][0]["exp_avg"].fill_(5.0)
    wrong_size["state"][1]["exp_avg"] = torch.zeros(7)
    wrong_size["param_groups"][0]["lr"] = 7.0
    with pytest.raises(ValueError, match=r"'param 1'.*7 elements of exp_avg instead of 2"):
        optimizer.load_state_dict(wrong_size)
    for groups in ([], [*good["param_groups"]] * 2, [{**good["param_groups"][0], "params": [0]}]):
        with pytest.raises(ValueError, match="loaded state dict") as ours:
            optimizer.load_state_dict({**good, "param_groups": groups})
        with pytest.raises(ValueError, match="loaded state dict") as theirs:
            small(adamw)[1].load_state_dict({**good, "param_groups": groups})
        assert str(ours.value) == str(theirs.value)
    assert all(same_bits(a, b) for a, b in zip(snapshot(model, optimizer), before, strict=True))
    assert optimizer.param_groups[0]["lr"] == 1e-3


def test_state_of_a_parameter_that_is_frozen_here_waits_with_a_warning() -> None:
    _, optimizer = small()
    saved = optimizer.state_dict()
    other = nn.Linear(3, 2)
    other.bias.requires_grad_(False)
    target = FusedShardedAdam(other.named_parameters())
    with pytest.warns(
        UserWarning, match=r"parameters that are frozen, as 'bias': until they are trained zerox\.save\(\)"
    ):
        target.load_state_dict(saved)
    found = target.state_dict()["state"]
    assert found.keys() == saved["state"].keys()
    assert all(torch.equal(found[1][key], value) for key, value in saved["state"][1].items())
    target.load_state_dict({**saved, "state": {}})
    assert not target.state.get(other.bias)


def test_state_that_is_no_parameters_is_let_pass() -> None:
    _, optimizer = small()
    saved = optimizer.state_dict()
    optimizer.load_state_dict({**saved, "state": {**saved["state"], "global": {"samples": 3}}})


def test_the_pre_hook_that_keeps_state_uncast_is_gone_afterwards() -> None:
    _, optimizer = small()
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(ValueError, match="loaded state dict"):
        optimizer.load_state_dict({"state": {}, "param_groups": []})
    assert not optimizer._optimizer_load_state_dict_pre_hooks


def test_a_rank_s_state_is_whole_at_construction_and_after_a_step_without_gradients() -> None:
    model, optimizer = small(steps=0)
    assert {p: sorted(optimizer.state[p]) for p in model.parameters()} == {
        p: ["exp_avg", "exp_avg_sq", "step"] for p in model.parameters()
    }
    before = snapshot(model, optimizer)
    optimizer.step()
    assert all(same_bits(a, b) for a, b in zip(snapshot(model, optimizer), before, strict=True))


@pytest.mark.parametrize(
    "attempt",
    [copy.copy, copy.deepcopy, pickle.dumps, lambda o: torch.save(o, io.BytesIO()), lambda o: copy.deepcopy({"o": o})],
    ids=["copy", "deepcopy", "pickle", "torch.save", "deepcopy of what holds it"],
)
def test_copies_and_pickles_are_refused_naming_the_way_out(attempt: Any) -> None:
    model, optimizer = small()
    with pytest.raises(TypeError, match=r"FusedShardedAdam can't be copied or pickled.*Use state_dict\(\)"):
        attempt(optimizer)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()  # and is as it was
