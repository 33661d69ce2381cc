"""full_state_dict() and load_state_dict() of whole tensors: to and from torch.optim.AdamW, at any number of ranks."""

from __future__ import annotations

import copy
import functools
import io
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, Mixed, backward, batch, make_model, make_optimizer
from tests.pull.shares import with_shares
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam
from zerox.state import fill as state_parts

Full = dict[str, Any]
STEPS = 2


def build(kind: str, seed: int = 0) -> tuple[Mixed, FusedShardedAdam]:
    dtype, options = KINDS[kind]
    model = make_model(dtype, seed)
    return model, make_optimizer(model.parameters(), lr=1e-2, bucket_cap_mb=0.05, **options)


def train(model: Mixed, optimizer: torch.optim.Optimizer, rank: int, steps: range) -> None:
    for step in steps:
        backward(model, batch(rank, step, dtype=next(model.parameters()).dtype), branch=step == 1)
        optimizer.step()
        optimizer.zero_grad()


def whole(rank: int, _: int, kind: str) -> tuple[Full, dict[str, Tensor]]:
    model, optimizer = build(kind)
    train(model, optimizer, rank, range(STEPS))
    return optimizer.full_state_dict(), model.state_dict()


@functools.cache
def whole_of_three(kind: str) -> list[tuple[Full, dict[str, Tensor]]]:
    """To be read only: several tests have it."""
    return run_ranks(whole, 3, kind)


@pytest.mark.parametrize("kind", KINDS)
def test_it_is_whole_on_rank_0_and_empty_elsewhere(kind: str) -> None:
    """Of three ranks that share their gradients' mean: each parameter's state is what one rank alone has of that."""
    results = whole_of_three(kind)
    assert [bool(full) for full, _ in results] == [True, False, False]
    full, weights = results[0]
    model, optimizer = build(kind)
    names = {param: name for name, param in model.named_parameters()}
    members = [(member, bucket.rule) for bucket in optimizer.inside.buckets for member in bucket.members]
    amsgrad = {"max_exp_avg_sq"} if "amsgrad" in kind else set()
    assert list(full["state"]) == list(range(len(names)))
    wide = torch.float64 if kind == "fp64" else torch.float32
    for member, rule in members:
        name, param, state = names[member.param], member.param, full["state"][member.number]
        assert state["step"].dtype is torch.float32
        assert float(state["step"]) == (0 if "unused" in name else 1 if "branch" in name else STEPS)
        keys = {"step", *(spec.key for spec in rule.states)} - ({"max_exp_avg_sq"} - amsgrad)
        has_master = param.dtype in (torch.bfloat16, torch.float16) and "no master" not in kind
        assert set(state) == keys | ({"master"} if has_master else set())
        for key in set(state) - {"step"}:
            assert (state[key].shape, state[key].dtype) == (param.shape, wide)
            assert state[key].device.type == "cpu"
        if has_master:
            assert torch.allclose(state["master"], weights[name].float(), rtol=2**-8, atol=1e-7)


def load_whole(rank: int, _: int, kind: str, full: Full, weights: dict[str, Tensor]) -> tuple[Full, list[Tensor]]:
    """Into another start; and a round of training after it."""
    model, optimizer = build(kind, seed=1)
    model.load_state_dict(weights)
    optimizer.load_state_dict(full)
    again = optimizer.full_state_dict()
    train(model, optimizer, 0, range(STEPS, STEPS + 1))  # the same batch on all ranks
    return again, [p.detach().clone() for p in model.parameters()]


# How ranks cut what they load does not depend on what it is: tests/optimizer/test_bit_equality.py.
FEW = ("amsgrad", "bf16 remainder", "three rules, 8-bit state")


@pytest.mark.parametrize(("kind", "world_size"), thinned(KINDS, FEW, [1, 2, 4], [4]))
def test_any_number_of_ranks_loads_it_without_a_loss(world_size: int, kind: str) -> None:
    full, weights = whole_of_three(kind)[0]
    results = run_ranks(load_whole, world_size, kind, full, weights)
    again = results[0][0]
    for number, state in full["state"].items():
        for key, tensor in state.items():
            assert same_bits(again["state"][number][key], tensor), (number, key)
    alone = run_ranks(load_whole, 1, kind, full, weights)[0][1]
    for ours, theirs in zip(results[0][1], alone, strict=True):
        assert same_bits(ours, theirs)


def adamw(model: nn.Module, **options: Any) -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=1e-2, **options)


@pytest.mark.parametrize("options", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("amsgrad", [False, True])
def test_adamw_goes_on_from_it(options: dict[str, Any], amsgrad: bool) -> None:
    kind = "amsgrad" if amsgrad else "fp32"
    full, weights = run_ranks(whole, 2, kind)[0]
    theirs, reference = make_model(seed=2), make_model(seed=3)
    theirs.load_state_dict(weights)
    reference.load_state_dict(weights)
    torchs = adamw(theirs, amsgrad=amsgrad, **options)
    torchs.load_state_dict(copy.deepcopy(full))
    for group in torchs.param_groups:
        group.update(options)  # as torch: a loaded group says how it is computed
    ours = FusedShardedAdam(reference.parameters(), amsgrad=amsgrad)
    ours.load_state_dict(full)
    for model, optimizer in ((theirs, torchs), (reference, ours)):
        train(model, optimizer, 0, range(STEPS, STEPS + 2))
    for p, q in zip(theirs.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-5, atol=1e-7)


def from_adamw(rank: int, world_size: int, saved: bytes) -> list[Tensor]:
    weights, state = torch.load(io.BytesIO(saved), weights_only=True)
    model = make_model(seed=1)
    model.load_state_dict(weights)
    optimizer = FusedShardedAdam(model.named_parameters(), bucket_cap_mb=0.05)
    optimizer.load_state_dict(state)
    assert optimizer.param_groups[0]["lr"] == 1e-2
    train(model, optimizer, 0, range(STEPS, STEPS + 1))
    return [p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("world_size", [1, 3])
def test_a_training_with_adamw_goes_on_here(world_size: int) -> None:
    model = make_model()
    optimizer = adamw(model)
    train(model, optimizer, 0, range(STEPS))
    file = io.BytesIO()
    torch.save([model.state_dict(), optimizer.state_dict()], file)
    results = run_ranks(from_adamw, world_size, file.getvalue())
    train(model, optimizer, 0, range(STEPS, STEPS + 1))
    for params in results:
        for ours, theirs in zip(params, model.parameters(), strict=True):
            torch.testing.assert_close(ours, theirs.detach(), rtol=1e-5, atol=1e-7)


def test_channels_last_parameters_are_taken_in_their_own_order() -> None:
    def conv(seed: int) -> nn.Module:
        torch.manual_seed(seed)
        return nn.Conv2d(8, 16, 3).to(memory_format=torch.channels_last)

    model = conv(0)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2)
    model(torch.randn(2, 8, 5, 5)).square().sum().backward()
    optimizer.step()
    full = optimizer.full_state_dict()
    contiguous = copy.deepcopy(full)
    for state in contiguous["state"].values():
        state["exp_avg"] = state["exp_avg"].contiguous()
    other = FusedShardedAdam(conv(1).parameters(), lr=1e-2)
    other.load_state_dict(contiguous)
    assert same_bits(other.full_state_dict()["state"][0]["exp_avg"], full["state"][0]["exp_avg"])
    assert torch.equal(full["state"][0]["exp_avg"], optimizer.state[model.weight]["exp_avg"])  # type: ignore[index, union-attr]


@with_shares
def shares_elsewhere(rank: int, world_size: int) -> str:
    _, optimizer = build("fp32")
    shares: list[Any] = [None] * world_size
    torch.distributed.all_gather_object(shares, optimizer.state_dict())
    with pytest.raises(ValueError, match=r"another rank's share or was saved at another world size") as error:
        FusedShardedAdam(make_model().parameters(), bucket_cap_mb=1.0).load_state_dict(shares[rank])
    return str(error.value)


def test_a_share_of_other_buckets_is_refused_with_what_to_do() -> None:
    for message in run_ranks(shares_elsewhere, 2):
        assert "each rank loads its own, at the number of ranks that saved them" in message
        assert "call optimizer.consolidate_state_dict() on all ranks, or save by zerox.save()" in message


@pytest.mark.parametrize(
    ("master", "moments"), [("fp32", "8bit"), ("remainder", torch.bfloat16), ("fp32", torch.float32)]
)
def test_conversions_are_the_same_in_pieces(monkeypatch: pytest.MonkeyPatch, master: str, moments: Any) -> None:
    """Of large parameters it is done a piece at a time; here of blocks that are not whole."""
    torch.manual_seed(0)
    first = nn.Parameter(torch.randn(5001).to(torch.bfloat16))
    saved = FusedShardedAdam([first], state_dtype="8bit", master_weights="remainder")
    first.grad = torch.randn(5001).to(torch.bfloat16)
    saved.step()
    found = []
    for size in (state_parts.PIECE_NUMEL, 512):
        monkeypatch.setattr(state_parts, "PIECE_NUMEL", size)
        other = FusedShardedAdam([first.detach().clone().requires_grad_()], state_dtype=moments, master_weights=master)
        other.load_state_dict(saved.state_dict())
        found.append(other.full_state_dict()["state"][0])
    for key, tensor in found[0].items():
        assert same_bits(found[1][key], tensor), key
