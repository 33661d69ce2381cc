"""The flow of rows on an accelerator (zerox/rows/device_rows.py), with the CPU's tensors: the bits of the host's flow.

tests/gpu/test_rows.py runs it on a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import zerox.rows.rows
from tests.ranks import run_ranks
from tests.rows import (
    test_16_bits,
    test_added,
    test_around,
    test_meshes,
    test_rules,
    test_sharded,
    test_sparse_adam,
    test_state,
    test_stored_state,
)
from tests.rows.tables import NARROW
from zerox.ranks.group import Ranks
from zerox.rows.device_messages import DeviceMessages
from zerox.rows.device_rows import DeviceRowFlow


def device_flow(ranks: Ranks, reads: bool) -> tuple[DeviceMessages, DeviceRowFlow]:
    messages = DeviceMessages(ranks)
    return messages, DeviceRowFlow(messages)


def as_on_a_device(rank: int, world_size: int, body: Callable[..., Any], *args: Any) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(zerox.rows.rows, "flow_of", device_flow)
        return body(rank, world_size, *args)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_has_the_bits_of_sparse_adam_on_the_mean(world_size: int, stage: int) -> None:
    run_ranks(as_on_a_device, world_size, test_sparse_adam.train, stage, {})


@pytest.mark.parametrize(
    ("kind", "world_size", "stage"),
    [("bf16", 1, 1), ("bf16", 3, 2), ("fp16", 2, 1), ("bf16, fp32", 2, 2), ("bf16, none", 3, 1)],
)
def test_16_bit_tables_have_the_bits_of_sparse_adam_on_their_masters(kind: str, world_size: int, stage: int) -> None:
    dtype, options = NARROW[kind]
    run_ranks(as_on_a_device, world_size, test_sparse_adam.train, stage, options, dtype)


@pytest.mark.parametrize("kind", ["", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_stage_3_has_the_bits_of_stage_2(world_size: int, kind: str) -> None:
    run_ranks(as_on_a_device, world_size, test_sharded.as_in_stage_2, kind)


def test_maximize_is_torch_s() -> None:
    run_ranks(as_on_a_device, 2, test_sparse_adam.train, 2, {"maximize": True})


def test_many_tables_on_many_ranks_need_a_message_more() -> None:
    run_ranks(as_on_a_device, 3, test_sparse_adam.train_with_many)


@pytest.mark.parametrize(("stage", "norm_type"), [(1, 2.0), (2, 2.0), (2, math.inf), (2, 1.0)])
def test_norm_and_clipped_step_are_torch_s_on_dense_gradients(stage: int, norm_type: float) -> None:
    run_ranks(as_on_a_device, 3, test_sparse_adam.clip, stage, norm_type, 0.01)


MADE = [
    test_sparse_adam.cancelling,
    test_sparse_adam.empty,
    test_sparse_adam.on_one_rank,
    test_sparse_adam.everywhere,
    test_sparse_adam.unsorted,
]


@pytest.mark.parametrize("make", MADE, ids=lambda make: make.__name__)
@pytest.mark.parametrize("world_size", [1, 3])
def test_rows_that_cancel_or_are_absent_count_as_in_torch(world_size: int, make: Callable[..., Any]) -> None:
    run_ranks(as_on_a_device, world_size, test_sparse_adam.handmade, make)


def test_what_changes_after_an_exchange_counts() -> None:
    run_ranks(as_on_a_device, 3, test_added.changed_between)


@pytest.mark.parametrize(
    ("body", "args"),
    [
        (test_added.accumulate, ()),
        (test_added.added_in_place, ()),
        (test_sparse_adam.value_clipped, ()),
        (test_sparse_adam.skipped, (2,)),
        (test_sparse_adam.nonfinite, (1, math.inf)),
        (test_sparse_adam.nonfinite, (2, math.nan)),
        (test_16_bits.written, ("bf16",)),
        (test_16_bits.overflowing, (2,)),
        (test_rules.beside_dense, ("sgd", 2, 12)),
        (test_rules.beside_dense, ("sgd, maximize", 1, 33)),
        (test_rules.beside_dense, ("lion", 2, 33)),
        *((test_stored_state.train, (2, kind, rule)) for kind in ("8 bits", "bf16") for rule in ("adam", "lion")),
        *((test_stored_state.train, (3, kind, "adam")) for kind in ("8 bits", "bf16")),
        *((test_stored_state.train, (2, kind, "adam", torch.bfloat16)) for kind in ("8 bits", "bf16")),
    ],
    ids=lambda value: value.__name__ if callable(value) else None,
)
def test_what_the_host_s_flow_does(body: Callable[..., Any], args: tuple[Any, ...]) -> None:
    run_ranks(as_on_a_device, 2, body, *args)


def test_a_backward_through_old_values_raises(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zerox.rows.rows, "flow_of", device_flow)
    test_around.test_a_backward_through_old_values_raises()


def test_a_checkpoint_goes_on_at_any_number_of_ranks(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(as_on_a_device, 2, test_state.save, path, 2)
    there = run_ranks(as_on_a_device, 3, test_state.load, path, 2)
    here = run_ranks(test_state.load, 2, path, 2)
    test_state.assert_equal(there[0][0], saved[0])
    test_state.assert_equal(there[0][1], here[0][1])


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("body", [test_meshes.beside_experts, test_meshes.beside_dtensors])
def test_beside_experts_and_dtensors(body: Callable[..., Any], stage: int, tmp_path: Path) -> None:
    run_ranks(as_on_a_device, test_meshes.WORLD, body, stage, str(tmp_path / "checkpoint"))


def test_the_norm_over_pipeline_stages_has_their_tables() -> None:
    assert len(set(run_ranks(as_on_a_device, test_meshes.WORLD, test_meshes.in_stages, 2))) == 1


@pytest.mark.parametrize(("stage", "kind"), [(1, ""), (2, "bf16")])
def test_a_mesh_of_two_axes_has_the_bits_of_sparse_adam(stage: int, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(as_on_a_device, test_meshes.WORLD, test_meshes.over_two_axes, stage, kind, path)
