"""The route that users of torch.distributed.checkpoint know: get and set state dicts, save, load, async save."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)

from tests.checkpoint.test_entries import STEPS, build, train
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox.sliced_tensor import SlicedTensor


def values(model: torch.nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def save(rank: int, _: int, kind: str, path: str, way: str) -> list[Tensor]:
    model, optimizer = build(kind, 0)
    train(model, optimizer, rank, range(STEPS))
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    weights, state = get_state_dict(model, optimizer, options=options)
    if way == "async":
        saving = dcp.async_save({"model": weights, "optimizer": state}, checkpoint_id=path)
    else:
        dcp.save({"model": weights, "optimizer": state}, checkpoint_id=path)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    if way == "async":
        saving.result()  # type: ignore[union-attr]
    return values(model)


def load(rank: int, _: int, kind: str, path: str, way: str) -> list[Tensor]:
    model, optimizer = build(kind, 1, bucket_cap_mb=0.02)
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    weights, state = get_state_dict(model, optimizer, options=options)
    found = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options
    )
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return values(model)


@pytest.mark.parametrize("kind", ["fp32", "bf16 remainder, 8-bit moments"])
@pytest.mark.parametrize("way", ["plain", "flat", "async"])
@pytest.mark.parametrize("world_size", [1, 2])
def test_a_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, way: str, world_size: int) -> None:
    ended = run_ranks(save, world_size, kind, str(tmp_path), way)
    went_on = run_ranks(load, world_size, kind, str(tmp_path), way)
    for ours, theirs in zip(went_on[0], ended[0], strict=True):
        assert same_bits(ours, theirs)


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(2, 3), (3, 2), (4, 1), (1, 2)])
@pytest.mark.parametrize("way", ["plain", "flat"])
def test_other_ranks_load_it(tmp_path: Path, way: str, saved_by: int, loaded_by: int) -> None:
    run_ranks(save, saved_by, "fp32", str(tmp_path), way)
    alone = run_ranks(load_and_tell, 1, str(tmp_path), way)[0]
    for theirs in run_ranks(load_and_tell, loaded_by, str(tmp_path), way):
        for key, tensor in theirs.items():
            assert same_bits(tensor, alone[key]), key


def load_and_tell(rank: int, _: int, path: str, way: str) -> dict[str, Tensor]:
    """Everything there is, whole, on rank 0; the parameters elsewhere."""
    model, optimizer = build("fp32", 1)
    options = StateDictOptions(flatten_optimizer_state_dict=way == "flat")
    weights, state = get_state_dict(model, optimizer, options=options)
    found: dict[str, Any] = {"model": weights, "optimizer": state}
    dcp.load(found, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"], options=options
    )
    whole = optimizer.full_state_dict().get("state", {})
    told = {f"{number}.{key}": tensor for number, each in whole.items() for key, tensor in each.items()}
    return told | {str(number): value for number, value in enumerate(values(model))}


def owns_nothing(rank: int, world_size: int) -> tuple[int, int]:
    param = torch.nn.Parameter(torch.ones(8))
    model = torch.nn.ParameterDict({"w": param})
    from zerox import FusedShardedAdam

    optimizer = FusedShardedAdam(model.named_parameters(), lr=0.1)
    (param * rank).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    state = get_optimizer_state_dict(model, optimizer)
    set_optimizer_state_dict(model, optimizer, state)
    held = sum(tensor.own.numel() for tensor in state["state"]["w"].values())  # type: ignore[union-attr, index]
    return held, len(optimizer.inside.buckets)


def test_a_rank_that_owns_nothing_is_not_asked_to_step() -> None:
    """DCP's getters call step() where an optimizer has no state: on such a rank alone, it would wait forever."""
    assert run_ranks(owns_nothing, 3) == [(17, 1), (0, 1), (0, 1)]


def from_rank_0(rank: int, _: int, full: dict[str, Any]) -> dict[int, dict[str, Tensor]]:
    model, optimizer = build("fp32", 0)
    names = [name for name, _ in model.named_parameters()]
    given: dict[str, Any] = {}
    if rank == 0:
        [group] = full["param_groups"]
        given = {
            "state": {names[number]: state for number, state in full["state"].items()},
            "param_groups": [{**group, "params": names}],
        }
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
    set_optimizer_state_dict(model, optimizer, given, options=options)
    return optimizer.full_state_dict().get("state", {})


def make_full(rank: int, _: int) -> dict[str, Any]:
    model, optimizer = build("fp32", 0)
    train(model, optimizer, rank, range(STEPS))
    return optimizer.full_state_dict()


def test_a_full_state_dict_is_broadcast_from_rank_0() -> None:
    full = run_ranks(make_full, 3)[0]
    loaded = run_ranks(from_rank_0, 2, full)[0]
    for number, state in full["state"].items():
        for key, tensor in state.items():
            assert same_bits(loaded[number][key], tensor), (number, key)


def whole_through_dcp(rank: int, _: int, kind: str, cpu_offload: bool, flat: bool) -> bool:
    """Whether this rank got the state: it is what full_state_dict() gives, and training goes on from it."""
    model, optimizer = build(kind, 0)
    train(model, optimizer, rank, range(STEPS))
    options = StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload, flatten_optimizer_state_dict=flat)
    found: Any = get_optimizer_state_dict(model, optimizer, options=options)
    shared = [optimizer.full_state_dict()]
    torch.distributed.broadcast_object_list(shared)
    for number, (name, _param) in enumerate(model.named_parameters()):
        for key, tensor in shared[0]["state"][number].items() if found else ():
            theirs = found[f"state.{name}.{key}"] if flat else found["state"][name][key]
            assert type(theirs) is Tensor
            assert same_bits(theirs, tensor), (name, key)
    assert not any(isinstance(each, SlicedTensor) for each in torch.utils._pytree.tree_leaves(found))
    if flat:  # torch 2.13 itself sets no state that is full and flat, of AdamW neither
        return bool(found)
    other, fresh = build(kind, 1)
    train(other, fresh, rank, range(1))  # what is loaded replaces all of what there was
    other.load_state_dict(model.state_dict())
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=cpu_offload)
    set_optimizer_state_dict(other, fresh, found, options=options)
    for each in ((model, optimizer), (other, fresh)):
        train(*each, rank, range(STEPS, 2 * STEPS))
    for ours, theirs in zip(values(model), values(other), strict=True):
        assert same_bits(ours, theirs)
    return bool(found)


@pytest.mark.parametrize("kind", ["fp32", "bf16 remainder, 8-bit moments"])
@pytest.mark.parametrize("cpu_offload", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_dcp_s_full_state_dict_is_whole(kind: str, cpu_offload: bool, flat: bool) -> None:
    """As FSDP2's: on all ranks, or with cpu_offload on rank 0 alone, from where it is broadcast."""
    assert run_ranks(whole_through_dcp, 2, kind, cpu_offload, flat) == [True, not cpu_offload]
    assert run_ranks(whole_through_dcp, 1, kind, cpu_offload, flat) == [True]
