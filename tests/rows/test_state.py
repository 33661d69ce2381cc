"""The state of tables: in checkpoints at any number of ranks, in state_dict(), and whole as torch has it."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch

import zerox
from tests.ranks import run_ranks
from tests.rows.tables import NARROW, Model, Twin, backward, build, ids_of
from zerox import FusedShardedAdam, sparse_params
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.memory.row_owners import RowOwners
from zerox.plan.plan import BLOCK_ROWS

SPLIT = 3  # the step at which a training is saved


def state_of(optimizer: FusedShardedAdam) -> dict[int, dict[str, Any]]:
    found: dict[int, dict[str, Any]] = optimizer.full_state_dict().get("state", {})
    return found


def save(rank: int, size: int, path: str, stage: int, kind: str = "", device: str = "cpu") -> Any:
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model().to(dtype).to(device)
    optimizer = build(model, stage=stage, **options)
    for step in range(SPLIT):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    zerox.save(path, model, optimizer)
    return state_of(optimizer), values_of(model)


def values_of(model: Model) -> dict[str, torch.Tensor]:
    return {name: value.cpu().clone() for name, value in model.state_dict().items()}


def load(rank: int, size: int, path: str, stage: int, kind: str = "", device: str = "cpu") -> Any:
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model(seed=9).to(dtype).to(device)
    optimizer = build(model, stage=stage, **options)
    zerox.load(path, model, optimizer)
    loaded = state_of(optimizer), values_of(model)
    for param in sparse_params(model):  # each rank the same rows: the mean is theirs
        ones = torch.ones(2, param.shape[1], device=device)
        grad = torch.sparse_coo_tensor(torch.tensor([[1, 65]], device=device), ones, param.shape)
        param.grad = grad.to(grad_dtype_of(param))
    optimizer.step()
    return loaded, (state_of(optimizer), values_of(model))


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("saved_by", "loaded_by"),
    [((2, 1), (3, 2)), ((3, 2), (1, 2)), ((1, 2), (4, 2)), ((3, 3), (2, 2)), ((2, 2), (4, 3))],
)
def test_a_checkpoint_goes_on_at_any_number_of_ranks(
    saved_by: tuple[int, int], loaded_by: tuple[int, int], tmp_path: Path
) -> None:
    """By so many ranks in that stage."""
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, saved_by[0], path, saved_by[1])
    assert_equal(saved[0][1], saved[-1][1])
    there = run_ranks(load, loaded_by[0], path, loaded_by[1])
    here = run_ranks(load, saved_by[0], path, saved_by[1])
    assert_equal(there[0][0], saved[0])
    assert_equal(here[0][0], saved[0])
    assert_equal(there[0][1], here[0][1])
    assert any(int(entry["step"]) == SPLIT for entry in saved[0][0].values())


@pytest.mark.parametrize(
    ("kind", "saved_by", "loaded_by"),
    [
        ("bf16", (2, 1), (3, 3)),
        ("fp16", (3, 3), (1, 2)),
        ("bf16, fp32", (1, 2), (2, 3)),
        ("bf16, none", (2, 3), (3, 2)),
    ],
)
def test_a_checkpoint_of_16_bit_tables_goes_on_with_their_masters(
    kind: str, saved_by: tuple[int, int], loaded_by: tuple[int, int], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, saved_by[0], path, saved_by[1], kind)
    there = run_ranks(load, loaded_by[0], path, loaded_by[1], kind)
    here = run_ranks(load, saved_by[0], path, saved_by[1], kind)
    assert_equal(there[0][0], saved[0])
    assert_equal(here[0][0], saved[0])
    assert_equal(there[0][1], here[0][1])
    assert ("master" in saved[0][0][2]) is (kind != "bf16, none")


def exact_values(rank: int, size: int, path: str, stage: int, kind: str, warns: bool) -> Any:
    """The masters of the tables, or their values if they have none."""
    dtype, options = NARROW[kind]
    model = Model(seed=9).to(dtype)
    optimizer = build(model, stage=stage, **options)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zerox.load(path, model, optimizer)
    said = [str(each.message) for each in caught]
    assert any("masters to the parameters' dtype" in each for each in said) is warns
    state = state_of(optimizer)
    return [state.get(number, {}).get("master", param) for number, param in tables_of(model, optimizer)]


def tables_of(model: Model, optimizer: FusedShardedAdam) -> list[tuple[int, torch.Tensor]]:
    with optimizer.whole():
        return [(t.member.number, t.param.detach().float()) for t in optimizer.inside.tables]


@pytest.mark.parametrize("saved_as", ["bf16", "bf16, fp32", "bf16, none"])
def test_masters_of_tables_are_converted_as_those_of_dense_parameters(saved_as: str, tmp_path: Path) -> None:
    """From one form to another at most the last of 24 bits is lost, and only where a value lies in the middle."""
    path = str(tmp_path / "checkpoint")
    state, values = run_ranks(save, 2, path, 2, saved_as)[0]
    plain = [values[name].float() for name in ("words.weight", "bags.weight", "means.weight")]
    numbers = sorted(state)[-3:]
    exact = [state[number].get("master", each) for number, each in zip(numbers, plain, strict=True)]
    assert saved_as == "bf16, none" or not torch.equal(exact[0], plain[0])
    for loaded_as in ("bf16", "bf16, fp32", "bf16, none"):
        loses = loaded_as == "bf16, none" != saved_as
        found = run_ranks(exact_values, 3, path, 3, loaded_as, loses)[0]
        for ours, expected, rounded in zip(found, exact, plain, strict=True):
            if loaded_as == "bf16, none":
                assert torch.equal(ours, rounded)
            else:
                torch.testing.assert_close(ours, expected, rtol=2.0**-23, atol=0)


def test_a_table_that_was_dense_goes_on_as_one_and_back(tmp_path: Path) -> None:
    model = Model()
    dense = FusedShardedAdam(model.head.parameters(), weight_decay=0.0)
    dense.add_param_group({"params": [model.words.weight], "weight_decay": 0.0})
    model.words.sparse = False
    model(ids_of(0, 0), branch=False).backward()
    dense.step()
    path = tmp_path / "checkpoint"
    zerox.save(path, model, dense)
    other = Model(seed=3)
    optimizer = FusedShardedAdam(other.head.parameters(), weight_decay=0.0)
    optimizer.add_param_group({"params": [other.words.weight], "sparse": True, "weight_decay": 0.0})
    zerox.load(path, other, optimizer)
    assert_equal(optimizer.full_state_dict()["state"], dense.full_state_dict()["state"])
    other(ids_of(0, 1), branch=False).backward()
    optimizer.step()
    zerox.save(path, other, optimizer)
    zerox.load(path, model, dense)
    assert_equal(optimizer.full_state_dict()["state"], dense.full_state_dict()["state"])
    assert "sparse" not in dense.param_groups[1]
    dense.load_state_dict(optimizer.state_dict())
    assert "sparse" not in dense.param_groups[1]


def of_another_shape(rank: int, size: int, path: str) -> None:
    model = Model()
    zerox.save(path, model, build(model))
    other = Model()
    other.words = torch.nn.Embedding(77, 12, sparse=True)
    with pytest.raises(
        zerox.CheckpointError, match=r"words.weight.exp_avg was saved as \[300, 12\], and is \[77, 12\]"
    ):
        zerox.load(path, other, build(other))


def test_a_table_of_another_shape_is_named(tmp_path: Path) -> None:
    run_ranks(of_another_shape, 2, str(tmp_path / "checkpoint"))


def through_state_dict(rank: int, size: int, kind: str) -> Any:
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model().to(dtype)
    optimizer = build(model, **options)
    for step in range(2):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    own = optimizer.state_dict()
    whole = optimizer.full_state_dict()
    results = []
    for given in (own, whole if rank == 0 else None):
        twin = Model(seed=4).to(dtype)
        other = build(twin, **options)
        if size > 1 and given is None:
            continue
        twin.load_state_dict(model.state_dict())
        other.load_state_dict(given)
        results.append(given is own)
        shares = [table.kept for table in other.inside.tables]
        assert_equal(shares, [table.kept for table in optimizer.inside.tables])
        assert [int(t.step) for t in other.inside.tables] == [int(t.step) for t in optimizer.inside.tables]
        assert [group.get("sparse") for group in other.param_groups] == [None, True]
    return own


@pytest.mark.parametrize(("size", "kind"), [(1, ""), (2, ""), (1, "bf16"), (2, "bf16"), (2, "fp16")])
def test_state_dict_is_this_rank_s_share_and_loads_again(size: int, kind: str) -> None:
    shares = run_ranks(through_state_dict, size, kind)
    assert len(shares) == size


def of_another_rank(rank: int, size: int) -> None:
    model = Model()
    optimizer = build(model)
    states: list[Any] = [None] * size
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):  # as in a file of each rank
        torch.distributed.all_gather_object(states, optimizer.state_dict()["state"][2])
    given = optimizer.state_dict()
    given["state"][2] = states[1 - rank]
    with pytest.raises(ValueError, match=rf"is of rank {1 - rank} of 2, and this is rank {rank} of 2"):
        optimizer.load_state_dict(given)


def test_the_share_of_another_rank_is_refused() -> None:
    run_ranks(of_another_rank, 2)


def test_alone_state_is_that_of_sparse_adam() -> None:
    model, twin = Model(), Model()
    optimizer = build(model)
    theirs = torch.optim.SparseAdam(sparse_params(twin), lr=0.05, betas=(0.875, 0.99), eps=1e-6)
    for each in (model, twin):
        backward(each, 0, 0)
    optimizer.step()
    theirs.step()
    for ours, other in zip(sparse_params(model), sparse_params(twin), strict=True):
        assert set(optimizer.state[ours]) == set(theirs.state[other]) == {"step", "exp_avg", "exp_avg_sq"}
        assert_equal(optimizer.state[ours]["exp_avg"], theirs.state[other]["exp_avg"])


def test_a_table_s_moments_are_divided_over_ranks_and_hot_rows_too() -> None:
    num_rows = 100_000
    for world_size in (1, 2, 3, 4):
        owners = RowOwners(num_rows, world_size, number=5)
        rows = [owners.rows_of(rank) for rank in range(world_size)]
        assert torch.equal(torch.cat(rows).sort().values, torch.arange(num_rows))
        assert max(map(len, rows)) - min(map(len, rows)) <= 2 * BLOCK_ROWS
        for rank, own in enumerate(rows):
            assert torch.equal(owners.places_of(own), torch.arange(len(own)))
            hot = int((own < num_rows // 10).sum())  # rows in the order of their frequency
            assert hot / (num_rows / 10 / world_size) == pytest.approx(1.0, abs=0.25), (world_size, rank)
    assert torch.equal(RowOwners(130, 1).rows_of(0), torch.arange(130))


def consolidated(rank: int, size: int) -> Any:
    model = Model()
    optimizer = build(model)
    backward(model, rank, 0)
    optimizer.step()
    optimizer.consolidate_state_dict(to=0)
    return optimizer.state_dict(), optimizer.full_state_dict()


def test_a_consolidated_state_has_whole_tables() -> None:
    shown, full = run_ranks(consolidated, 2)[0]
    assert_equal(shown["state"], full["state"])


def in_full(rank: int, world_size: int, stage: int, kind: str) -> None:
    """full_grad() is what step() uses, full_state() what full_state_dict() has."""
    dtype, options = NARROW.get(kind, (torch.float32, {}))
    model = Model().to(dtype)
    optimizer, twin = build(model, stage=stage, **options), Twin(model, world_size, **options)
    assert optimizer.full_grad(model.words.weight) is None
    twin.take_gradients(0)
    backward(model, rank, 0)
    optimizer.scale_grads_(0.25)
    optimizer.clip_grad_value_(0.01)
    for ours, theirs in zip(sparse_params(model), twin.tables, strict=True):
        assert theirs.grad is not None
        theirs.grad._values().mul_(0.25).clamp_(-0.01, 0.01)
        assert torch.equal(optimizer.full_grad(ours), theirs.grad.to_dense())
    optimizer.step()
    twin.step()
    for ours, theirs in zip(sparse_params(model), twin.tables, strict=True):
        found, kept = optimizer.full_state(ours), twin.optimizer.state[theirs]
        assert kind == "" or torch.equal(found.pop("master"), theirs)
        assert set(found) == set(kept)
        assert float(found["step"]) == kept["step"]
        assert torch.equal(found["exp_avg"], kept["exp_avg"])
        assert torch.equal(found["exp_avg_sq"], kept["exp_avg_sq"])
    with pytest.raises(ValueError, match="same parameter"):
        optimizer.full_state(model.words.weight if rank == 0 else model.head.weight)


@pytest.mark.parametrize(("stage", "kind"), [(1, ""), (2, ""), (1, "bf16"), (2, "fp16")])
def test_gradient_and_state_of_one_table_are_had_in_full(stage: int, kind: str) -> None:
    run_ranks(in_full, 2, stage, kind)
