"""Accelerate with a ParallelismConfig: hybrid sharding and tensor parallelism, beside the same loop without one."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.utils import ParallelismConfig
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.utils.data import DataLoader, TensorDataset

from tests.hugging_face import accelerators_environment
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load, save
from zerox.integrations.accelerate import adopt, data_parallel_mesh

WIDTH = 24
BATCHES = 6
SIZES: dict[str, dict[str, int]] = {
    "replicated": {"dp_replicate_size": 4},
    "sharded": {"dp_shard_size": 4},
    "hybrid": {"dp_replicate_size": 2, "dp_shard_size": 2},
    "tensor": {"dp_shard_size": 2, "tp_size": 2},
    "tensor alone": {"tp_size": 4},
}


def whole(param: Tensor) -> Tensor:
    return (param.full_tensor() if isinstance(param, DTensor) else param).detach().clone()


def state_of(model: nn.Module) -> dict[str, Tensor]:
    return {name: whole(param) for name, param in model.named_parameters()}


def steps(accelerator: Any, model: Any, optimizer: Any, loader: Any) -> list[float]:
    norms = []
    for (x,) in loader:
        with accelerator.accumulate(model):
            accelerator.backward(model(x).square().mean())
            norms.append(float(accelerator.clip_grad_norm_(model.parameters(), 0.1)))
            optimizer.step()
            optimizer.zero_grad()
    return norms


def train(rank: int, world_size: int, sizes: dict[str, int], folder: str) -> dict[str, Any]:
    """Accelerate itself refuses a ParallelismConfig on CPUs, where it knows of no use for one."""
    on_cpus = mock.patch.object(ParallelismConfig, "_validate_accelerator")
    with on_cpus, accelerators_environment(rank, world_size):
        config = ParallelismConfig(**sizes) if sizes else None
        accelerator = adopt(Accelerator(cpu=True, parallelism_config=config))
        torch.manual_seed(0)
        plain = nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH))
        if "tp_size" in sizes:
            plan = {"0": ColwiseParallel(), "2": RowwiseParallel()}
            parallelize_module(plain, accelerator.torch_device_mesh["tp"], plan)
        optimizer: Any = FusedShardedAdam(
            plain.named_parameters(), lr=1e-2, process_group=data_parallel_mesh(accelerator)
        )
        inputs = torch.randn(4 * 2 * BATCHES, WIDTH, generator=torch.Generator().manual_seed(1))
        shares = world_size // sizes.get("tp_size", 1)
        loader: Any = DataLoader(TensorDataset(inputs), batch_size=8 // shares)
        model, optimizer, loader = accelerator.prepare(plain, optimizer, loader)
        found: dict[str, Any] = {"norms": steps(accelerator, model, optimizer, loader), "state": state_of(plain)}
        found["axes"] = [len(axis.members) for axis in optimizer.optimizer.inside.ranks.axes]
        if "tp_size" in sizes:
            with pytest.raises(ValueError, match=r"is a DTensor: call zerox.save\(\) on all ranks"):
                accelerator.save_state(folder)
            save(folder, plain, optimizer.optimizer)
        else:
            accelerator.save_state(folder)
        accelerator.wait_for_everyone()
        later = [steps(accelerator, model, optimizer, loader)]
        if "tp_size" in sizes:
            load(folder, plain, optimizer.optimizer)
        else:
            accelerator.load_state(folder)
        later.append(steps(accelerator, model, optimizer, loader))
        found["goes on"] = later[0] == later[1]
        return found


def test_a_loop_trains_so_over_any_mesh(tmp_path: Path) -> None:
    plain = run_ranks(train, 4, {}, str(tmp_path / "plain"))[0]
    assert len(plain["norms"]) == BATCHES
    axes = {}
    for name, sizes in SIZES.items():
        found = run_ranks(train, 4, sizes, str(tmp_path / name))
        axes[name] = found[0]["axes"]
        for each in found:
            assert each["norms"] == found[0]["norms"], name
            assert each["goes on"], name
        assert found[0]["norms"] == pytest.approx(plain["norms"], rel=1e-5), name
        for key, value in plain["state"].items():
            torch.testing.assert_close(found[0]["state"][key], value, rtol=0, atol=2e-6, msg=f"{name}, {key}")
    expected = {"replicated": [4], "sharded": [4], "hybrid": [2, 2], "tensor": [2], "tensor alone": [1]}
    assert axes == expected


def misuse(rank: int, world_size: int) -> list[str]:
    """Without a mesh, tensor-parallel ranks would get other batches; without the axis, their gradients be averaged."""
    said = []
    on_cpus = mock.patch.object(ParallelismConfig, "_validate_accelerator")
    for sizes, group in (({}, "data-parallel"), ({"dp_shard_size": 2, "tp_size": 2}, None)):
        with on_cpus, accelerators_environment(rank, world_size):
            accelerator = adopt(Accelerator(cpu=True, parallelism_config=ParallelismConfig(**sizes) if sizes else None))
            mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
            model = parallelize_module(nn.Sequential(nn.Linear(WIDTH, WIDTH)), mesh["tp"], {"0": ColwiseParallel()})
            try:
                optimizer = FusedShardedAdam(model.parameters(), process_group=mesh["dp"] if group else None)
                accelerator.prepare(model, optimizer)
            except ValueError as error:
                said.append(str(error))
    with on_cpus, accelerators_environment(rank, world_size):
        try:
            adopt(Accelerator(cpu=True, parallelism_config=ParallelismConfig(dp_shard_size=2, sp_size=2)))
        except ValueError as error:
            said.append(str(error))
    return said


def test_what_would_train_otherwise_is_refused() -> None:
    for shares, averages, divides in run_ranks(misuse, 4):
        assert "Accelerate has 4 processes, and the optimizer averages over 2" in shares
        assert "average their gradients" in averages
        assert 'process_group, as mesh["dp"]' in averages
        assert "divides sequences (cp_size or sp_size" in divides
