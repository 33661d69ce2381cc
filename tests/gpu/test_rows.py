"""Tables on a GPU: torch.optim.SparseAdam's bits there, on ranks that share it, and the CPU's by other rules."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.gpu.twins import DEVICE
from tests.ranks import run_ranks
from tests.rows import test_meshes, test_rules, test_sharded, test_sparse_adam, test_state, test_stored_state
from tests.rows.tables import NARROW
from zerox import FusedShardedAdam


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [1, 2, 3])
def test_training_has_the_bits_of_sparse_adam_on_the_mean(device: torch.device, world_size: int, stage: int) -> None:
    run_ranks(test_sparse_adam.train, world_size, stage, {}, torch.float32, str(DEVICE))


@pytest.mark.parametrize(
    ("kind", "world_size", "stage"), [("bf16", 1, 2), ("bf16", 3, 1), ("fp16", 2, 2), ("bf16, fp32", 2, 2)]
)
def test_16_bit_tables_have_the_bits_of_sparse_adam_on_their_masters(
    device: torch.device, kind: str, world_size: int, stage: int
) -> None:
    dtype, options = NARROW[kind]
    run_ranks(test_sparse_adam.train, world_size, stage, options, dtype, str(DEVICE))


@pytest.mark.parametrize(("stage", "norm_type"), [(1, 2.0), (2, 2.0), (2, math.inf)])
def test_norm_and_clipped_step_are_torch_s_on_dense_gradients(
    device: torch.device, stage: int, norm_type: float
) -> None:
    run_ranks(test_sparse_adam.clip, 2, stage, norm_type, 0.01, "", str(DEVICE))


@pytest.mark.parametrize("width", [12, 33])
@pytest.mark.parametrize("name", test_rules.RULES)
def test_rows_have_the_bits_of_a_dense_parameter(device: torch.device, name: str, width: int) -> None:
    run_ranks(test_rules.beside_dense, 2, name, 2, width, torch.float32, {}, str(DEVICE))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", ["8 bits", "bf16"])
@pytest.mark.parametrize("rule", ["adam", "lion"])
def test_moments_in_fewer_bits_are_those_of_the_cpu(
    device: torch.device, rule: str, kind: str, dtype: torch.dtype
) -> None:
    run_ranks(test_stored_state.train, 2, 2, kind, rule, dtype, str(DEVICE))


@pytest.mark.parametrize("kind", ["", "bf16"])
def test_a_mesh_of_two_axes_has_the_bits_of_sparse_adam(device: torch.device, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    run_ranks(test_meshes.over_two_axes, test_meshes.WORLD, 2, kind, path, str(DEVICE))


def test_the_norm_over_pipeline_stages_has_their_tables(device: torch.device) -> None:
    assert len(set(run_ranks(test_meshes.in_stages, test_meshes.WORLD, 2, str(DEVICE)))) == 1


@pytest.mark.parametrize("kind", ["", "bf16", "fp16"])
@pytest.mark.parametrize("world_size", [2, 3])
def test_stage_3_has_the_bits_of_stage_2(device: torch.device, world_size: int, kind: str) -> None:
    run_ranks(test_sharded.as_in_stage_2, world_size, kind, str(DEVICE))


@pytest.mark.parametrize("kind", ["8 bits", "bf16"])
def test_moments_in_fewer_bits_are_those_of_the_cpu_in_stage_3(device: torch.device, kind: str) -> None:
    run_ranks(test_stored_state.train, 2, 3, kind, "adam", torch.float32, str(DEVICE))


@pytest.mark.parametrize("kind", ["", "bf16"])
def test_a_checkpoint_goes_on_in_stage_3(device: torch.device, kind: str, tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(test_state.save, 2, path, 3, kind, str(DEVICE))[0]
    (loaded, after), (_, of_stage_2) = (
        run_ranks(test_state.load, size, path, stage, kind, str(DEVICE))[0] for size, stage in ((3, 3), (2, 2))
    )
    test_state.assert_equal(loaded, saved)
    test_state.assert_equal(after, of_stage_2)


def look_up(rank: int, size: int) -> None:
    """A lookup fetches rows into memory that is free again when it is over; all else the table, which says so."""
    table = torch.nn.Embedding(20_000, 64, device=DEVICE)
    expected = table.weight.detach().clone()
    dist.broadcast(host := expected.cpu(), 0)
    groups = [{"params": table.parameters(), "sparse": True, "weight_decay": 0.0}]
    optimizer = FusedShardedAdam(groups, stage=3)
    expected = host.to(DEVICE)
    del host
    ids = torch.randint(0, 20_000, (5000,), device=DEVICE)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with torch.no_grad():
        for _ in range(3):
            found = table(ids)
            assert torch.equal(found, expected[ids])
            del found
        torch.cuda.synchronize()
        assert torch.cuda.memory_allocated() - before <= 2**20
        assert torch.cuda.max_memory_allocated() - before >= table.weight.nbytes
        with pytest.warns(UserWarning, match="which is sharded by rows"):
            assert torch.equal(table.weight.sum(), expected.sum())
    assert optimizer.inside.gather.residents.counts.faults == 0


def test_a_lookup_s_memory_is_free_when_it_is_over(cuda: torch.device) -> None:
    run_ranks(look_up, 2)
