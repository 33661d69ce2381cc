"""Tables by other rules than Adam's: touched rows have the bits that they have in a dense parameter."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from tests.rows.tables import ROWS, WIDTH
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD
from zerox.checkpoint.convert import convert_file
from zerox.plan.plan import BLOCK_ROWS

RULES: dict[str, dict[str, Any]] = {
    "sgd": {"lr": 0.3},
    "sgd, maximize": {"lr": 0.3, "maximize": True},
    "lion": {"lr": 0.01, "betas": (0.8, 0.97)},
}
CLASSES = {"sgd": FusedShardedSGD, "lion": FusedShardedLion}


def rule_of(name: str) -> str:
    return name.partition(",")[0]


def rows_of(rank: int, world_size: int, step: int) -> Tensor:
    """All ranks' together are all rows; some come twice on one rank, and some from several ranks."""
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.cat([torch.arange(rank, ROWS, world_size), torch.randint(0, ROWS, (40,), generator=generator)])


def grad_of(rank: int, world_size: int, step: int, width: int) -> Tensor:
    rows = rows_of(rank, world_size, step)
    generator = torch.Generator().manual_seed(100 + 10 * step + rank)
    values = torch.randint(-9, 10, (rows.numel(), width), generator=generator) / 8  # whose sums and means are exact
    return torch.sparse_coo_tensor(rows[None], values, (ROWS, width), check_invariants=False)


def table(width: int = WIDTH, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(ROWS, width, generator=torch.Generator().manual_seed(7))
    return nn.Parameter(values.to(dtype))


def beside_dense(
    rank: int,
    world_size: int,
    name: str,
    stage: int,
    width: int,
    dtype: torch.dtype = torch.float32,
    options: Mapping[str, Any] = MappingProxyType({}),
    device: str = "cpu",
) -> None:
    """One optimizer has the table and a dense parameter of the same values and gradients."""
    own, twin = (nn.Parameter(table(width, dtype).detach().to(device)) for _ in range(2))
    shared = {"rule": rule_of(name), "weight_decay": 0.0, **RULES[name]}
    optimizer = FusedShardedAdam(
        [{"params": [own], "sparse": True, **shared}, {"params": [twin], **shared}], stage=stage, **options
    )
    for step in range(4):
        own.grad = grad_of(rank, world_size, step, width).to(device, dtype)
        twin.grad = own.grad.float().coalesce().to_dense().to(dtype)
        if step:
            optimizer.clip_grad_norm_(0.5)
        if step == 2:
            optimizer.clip_grad_value_(0.01)
        optimizer.step()
        optimizer.zero_grad()
        assert torch.equal(own, twin), (step, (own - twin).abs().max())
    assert not torch.equal(own.cpu(), table(width, dtype))
    state = optimizer.full_state_dict().get("state", {})
    for key, value in state[0].items() if state else ():
        assert torch.equal(value, state[1][key]), key
    assert not state or ("exp_avg" in state[0]) == (rule_of(name) == "lion")


@pytest.mark.parametrize("width", [WIDTH, 33])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("name", RULES)
def test_rows_that_are_always_touched_have_the_bits_of_a_dense_parameter(name: str, stage: int, width: int) -> None:
    run_ranks(beside_dense, 3, name, stage, width, torch.float32, {})


@pytest.mark.parametrize(
    ("name", "stage", "dtype", "masters"),
    [
        *((name, 2, dtype, "auto") for name in RULES for dtype in (torch.bfloat16, torch.float16)),
        *(("lion", stage, torch.bfloat16, masters) for stage, masters in ((1, "fp32"), (2, None))),
    ],
)
def test_so_have_16_bit_rows(name: str, stage: int, dtype: torch.dtype, masters: str | None) -> None:
    """Of a dense parameter whose gradients are reduced in float32, as rows are."""
    options = {"master_weights": masters, "reduce_dtype": torch.float32}
    run_ranks(beside_dense, 3, name, stage, 33, dtype, options)


@pytest.mark.parametrize("name", RULES)
def test_a_class_has_its_own_rule_for_tables(name: str) -> None:
    """Other rows and their states stay as they are."""
    rule, found = rule_of(name), []
    for cls, more in ((CLASSES[rule], {}), (FusedShardedAdam, {"rule": rule, "weight_decay": 0.0})):
        param = table()
        optimizer = cls([{"params": [param], "sparse": True, **more, **RULES[name]}], lr=0.5)
        for rows in ([5, 250], [5, 64]):
            values = torch.linspace(-1, 1, 2 * WIDTH).view(2, WIDTH)
            param.grad = torch.sparse_coo_tensor([rows], values, param.shape, check_invariants=False)
            optimizer.step()
        touched = [int(row) for row in (param != table()).any(1).nonzero()]
        assert touched == [5, 64, 250]
        for key, value in optimizer.full_state_dict()["state"][0].items():
            assert key == "step" or set(value.any(1).nonzero().flatten().tolist()) == {5, 64, 250}
        found.append(param)
    assert torch.equal(*found)


def test_sgd_is_torch_s() -> None:
    ours, theirs = table(), table()
    optimizer, twin = FusedShardedSGD([{"params": [ours], "sparse": True}], lr=0.3), torch.optim.SGD([theirs], lr=0.3)
    for step in range(4):
        ours.grad, theirs.grad = grad_of(0, 2, step, WIDTH), grad_of(0, 2, step, WIDTH).coalesce()
        optimizer.step()
        twin.step()
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"momentum": 0.9}, "momentum=0.9: rows keep no momentum_buffer. Leave momentum out in this group"),
        ({"weight_decay": 0.1}, "weight_decay=0.1: rows that no batch names would not decay"),
    ],
)
def test_options_that_reach_untouched_rows_are_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedShardedSGD([{"params": [table()], "sparse": True, **options}], lr=0.1)
    optimizer = FusedShardedSGD([{"params": [param := table()], "sparse": True}], lr=0.1)
    optimizer.param_groups[0].update(options)
    param.grad = grad_of(0, 1, 0, WIDTH)
    with pytest.raises(ValueError, match=re.escape(message)):
        optimizer.step()
    assert torch.equal(param, table())


def train(optimizer: FusedShardedAdam, param: Tensor, steps: range) -> None:
    for step in steps:  # each rank the same rows: any number of ranks has their mean
        param.grad = grad_of(0, 4, step, WIDTH)
        optimizer.step()
        optimizer.zero_grad()


def build(rule: str) -> tuple[nn.Module, FusedShardedAdam]:
    model = nn.Embedding(ROWS, WIDTH, sparse=True, _weight=table().detach())
    return model, CLASSES[rule]([{"params": list(model.named_parameters()), "sparse": True}], lr=0.125)


def saved(rank: int, world_size: int, rule: str, path: str) -> Any:
    model, optimizer = build(rule)
    train(optimizer, model.weight, range(2))
    zerox.save(path, model, optimizer)
    whole = optimizer.full_state_dict()
    train(optimizer, model.weight, range(2, 4))
    return whole, model.weight.detach(), optimizer.full_state_dict()


def loaded(rank: int, world_size: int, rule: str, path: str, whole: dict[str, Any], weight: Tensor) -> Any:
    model, optimizer = build(rule)
    train(optimizer, model.weight, range(8, 9))
    zerox.load(path, model, optimizer)
    train(optimizer, model.weight, range(2, 4))
    other, of_torch_s_form = build(rule)
    with torch.no_grad():
        other.weight.copy_(weight)
    of_torch_s_form.load_state_dict(whole)
    train(of_torch_s_form, other.weight, range(2, 4))
    assert torch.equal(other.weight, model.weight)
    return model.weight.detach(), optimizer.full_state_dict()


@pytest.mark.parametrize("rule", CLASSES)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(rule: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    whole, weight, state = run_ranks(saved, 2, rule, path)[0]
    convert_file(Path(path), tmp_path / "one.pt", weights=False, fp32=False, keys=("model", "optimizer"))
    before = torch.load(tmp_path / "one.pt", weights_only=True)["model"]["weight"]
    for found, of_rank in run_ranks(loaded, 3, rule, path, whole, before)[:1]:
        assert torch.equal(found, weight)
        torch.testing.assert_close(of_rank["state"], state["state"], rtol=0, atol=0)
    assert set(state["state"][0]) == ({"step", "exp_avg"} if rule == "lion" else {"step"})


def test_state_of_another_rule_is_refused(tmp_path: Path) -> None:
    model, optimizer = build("lion")
    train(optimizer, model.weight, range(1))
    _, other = build("sgd")
    with pytest.raises(ValueError, match="rule"):
        other.load_state_dict(optimizer.full_state_dict())


def kept(rank: int, world_size: int) -> list[int]:
    classes = (FusedShardedAdam, FusedShardedLion, FusedShardedSGD)
    return [cls(groups_of_a_table(), lr=0.1).memory_bytes().moments for cls in classes]


def groups_of_a_table() -> list[dict[str, Any]]:
    return [{"params": [table()], "sparse": True, "weight_decay": 0.0}]


def test_estimate_knows_what_each_rule_keeps() -> None:
    of_ranks = run_ranks(kept, 2)
    for rule, states, *own in zip(("adam", "lion", "sgd"), (2, 1, 0), *of_ranks, strict=True):
        assert sum(own) == states * ROWS * WIDTH * 4
        most = zerox.estimate(groups_of_a_table(), 2, rule=rule).moments
        assert max(own) <= most <= max(own) + states * BLOCK_ROWS * WIDTH * 4
