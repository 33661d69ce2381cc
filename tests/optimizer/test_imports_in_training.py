"""A training of plain parameters imports neither torch.distributed.tensor nor Dynamo, which take more than a second."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from tests.programs import run_programs
from zerox.memory.torch_optimizer import _of_torch

TRAINS = """
import sys

import torch
import torch.distributed as dist
import zerox

rank, store, world_size = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
if world_size > 1:
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world_size)
for stage in (1, 2, 3):
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.ReLU(), torch.nn.Linear(8, 1))
    first, second = list(model[0].named_parameters()), list(model[2].named_parameters())
    optimizer = zerox.FusedShardedAdam([{"params": first}], lr=0.1, stage=stage)
    optimizer.add_param_group({"params": second, "lr": 0.01})
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    for _ in range(2):
        model(torch.ones(4, 8)).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    optimizer.load_state_dict(optimizer.state_dict())
    slow = ("torch.distributed.tensor", "torch._dynamo")
    print("stage", stage, [name for name in slow if name in sys.modules])
    with optimizer.whole():
        assert all(param.isfinite().all() for param in model.parameters())
if world_size > 1:
    dist.destroy_process_group()
"""


@pytest.mark.parametrize("world_size", [1, 2])
def test_plain_parameters_train_without_what_is_slow_to_import(world_size: int, tmp_path: Path) -> None:
    """One stage after the other: the first that imports it is the one to look at."""
    for printed in run_programs(TRAINS, tmp_path, str(world_size), world_size=world_size):
        assert printed.splitlines() == [f"stage {stage} []" for stage in (1, 2, 3)]


def test_where_dynamo_is_there_torch_s_own_method_keeps_it_out_of_the_optimizer() -> None:
    import torch._dynamo

    assert _of_torch("add_param_group") is torch.optim.Optimizer.add_param_group


def test_a_patch_of_torch_s_class_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    def patched(self: torch.optim.Optimizer, group: dict[str, object]) -> None: ...

    patched.__wrapped__ = torch.optim.Optimizer.add_param_group  # type: ignore[attr-defined]  # as functools.wraps
    monkeypatch.setattr(torch.optim.Optimizer, "add_param_group", patched)
    monkeypatch.delitem(sys.modules, "torch._dynamo", raising=False)
    assert _of_torch("add_param_group") is patched
