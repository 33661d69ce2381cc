"""docs/coming-from.md: both sides of its diffs train alike, and a loop like nanoGPT's changes in two lines."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.ranks import run_ranks

PAGE = (Path(__file__).parents[1] / "docs/coming-from.md").read_text()
SECTIONS = dict(re.findall(r"^## (\w+)\n.*?```diff\n(.*?)```", PAGE, re.M | re.S))
OF_TORCH = ("DistributedDataParallel", "ZeroRedundancyOptimizer", "FSDP2")  # whose scripts run here as they were

NANO = """
import torch
from torch.nn.parallel import DistributedDataParallel as DDP

ddp, ddp_local_rank, gradient_accumulation_steps, grad_clip = True, None, 2, 1.0
scaler = torch.amp.GradScaler("cpu", enabled=False)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
if ddp:
    model = DDP(model, device_ids=ddp_local_rank)
raw_model = model.module if ddp else model
for iter_num in range(len(batches) // gradient_accumulation_steps):
    for param_group in optimizer.param_groups:
        param_group["lr"] = 1e-3 / (1 + iter_num)
    for micro_step in range(gradient_accumulation_steps):
        if ddp:
            model.require_backward_grad_sync = micro_step == gradient_accumulation_steps - 1
        loss = loss_of(model, batches[2 * iter_num + micro_step]) / gradient_accumulation_steps
        scaler.scale(loss).backward()
    if grad_clip != 0.0:
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), grad_clip)
    scaler.step(optimizer)
    scaler.update()
    optimizer.zero_grad(set_to_none=True)
model = raw_model
"""
OF_NANO = {
    "from torch.nn.parallel import DistributedDataParallel as DDP": (
        "from zerox import DistributedDataParallel as DDP, FusedShardedAdam"
    ),
    "torch.optim.AdamW(": "FusedShardedAdam(",
}


def sides(diff: str) -> tuple[str, str]:
    """The script before and after."""
    lines = diff.splitlines()
    return tuple("\n".join(line[1:] for line in lines if line[:1] in ("", " ", sign)) for sign in "-+")  # type: ignore[return-value]


def trained(rank: int, _: int, script: str) -> list[Tensor]:
    """Whole parameters, after the script."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(24, 40), nn.Tanh(), nn.Linear(40, 24))
    torch.manual_seed(rank)
    names: dict[str, Any] = {"torch": torch, "model": model, "batches": torch.randn(6, 5, 24).unbind()}
    names["loss_of"] = lambda model, batch: (model(batch) - batch).square().mean()
    exec(compile(script, "script", "exec"), names)
    dist.barrier()
    values = [param.full_tensor() if hasattr(param, "full_tensor") else param for param in names["model"].parameters()]
    return [value.detach().clone() for value in values]


def assert_alike(first: str, second: str, world_size: int) -> None:
    for ours, theirs in zip(run_ranks(trained, world_size, first), run_ranks(trained, world_size, second), strict=True):
        for mine, other in zip(ours, theirs, strict=True):
            torch.testing.assert_close(mine, other, rtol=0, atol=2e-7)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("section", OF_TORCH)
def test_the_scripts_of_a_diff_train_alike(section: str, world_size: int) -> None:
    before, after = sides(SECTIONS[section])
    assert "zerox" not in before
    assert_alike(before, after, world_size)


@pytest.mark.parametrize("section", sorted(set(SECTIONS) - set(OF_TORCH)))
def test_what_comes_of_other_scripts_trains_as_torch_s(section: str) -> None:
    before, after = sides(SECTIONS[section])
    assert "zerox" not in before
    clips = "    optimizer.clip_grad_norm_(1.0)\n"
    assert after.count(clips) == 1
    assert_alike(sides(SECTIONS["DistributedDataParallel"])[0], after, 2)


@pytest.mark.parametrize("world_size", [1, 2])
def test_a_loop_like_nanogpts_changes_in_two_lines(world_size: int) -> None:
    after = NANO
    for old, new in OF_NANO.items():
        assert after.count(old) == 1
        after = after.replace(old, new)
    changed = [line for line in difflib.ndiff(NANO.splitlines(), after.splitlines()) if line.startswith("+ ")]
    assert len(changed) == 2
    assert_alike(NANO, after, world_size)


def test_every_library_has_a_section_and_a_table() -> None:
    assert list(SECTIONS) == [*OF_TORCH, "DeepSpeed", "apex", "Megatron"]
    assert len(re.findall(r"^\| (?:with|in|of) .* \| here \|(?: without a wrapper \|)?$", PAGE, re.M)) == len(SECTIONS)
