"""What commit 764e2e6 wrote on two ranks loads for good, with its bits: pickles of state dicts, a folder of
torch.distributed.checkpoint's, and a checkpoint of format 2, with masks. (test_format_1.py has one of format 1.)

``python -m tests.checkpoint.test_written_before`` made the folder, at that commit; it is not to be made again.
"""

from __future__ import annotations

import json
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict

import zerox
from tests.bits.model import Products, batch
from tests.bits.recording import digest, named_state
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, Sparsity
from zerox.checkpoint import manifest

FOLDER = Path(__file__).with_name("written_at_764e2e6")
WAYS = ("pickles", "whole", "dcp", "checkpoint")


def build(seed: int, stage: int = 2) -> tuple[nn.Module, FusedShardedAdam, Sparsity]:
    """bfloat16 with remainders; moments in 8 bits and in float32, of two rules; masks."""
    model = Products(seed).to(torch.bfloat16)
    del model.branch  # the folder is small enough without
    named = dict(model.named_parameters())
    of_lion = [(name, p) for name, p in named.items() if "bias" in name]
    rest = [(name, p) for name, p in named.items() if "bias" not in name]
    groups = [{"params": rest, "weight_decay": 0.25}, {"params": of_lion, "rule": "lion", "lr": 0.125}]
    optimizer = FusedShardedAdam(groups, lr=2.0**-6, state_dtype="8bit", bucket_cap_mb=0.012, stage=stage)
    return model, optimizer, Sparsity(optimizer, {"inner.weight": 0.5, "twice.weight": 0.25})


def train(model: nn.Module, optimizer: FusedShardedAdam, sparsity: Sparsity, rank: int) -> None:
    for step in range(3):
        model(batch(rank, step)).backward()
        optimizer.step()
        sparsity.step()
        optimizer.zero_grad()


def digests(model: nn.Module, optimizer: FusedShardedAdam) -> dict[str, str]:
    """The state's is rank 0's."""
    groups = [{key: value for key, value in group.items() if key != "params"} for group in optimizer.param_groups]
    with optimizer.whole():
        params = digest(iter(model.named_parameters()))
    return {"params": params, "state": digest(named_state(optimizer)), "lr": str([group["lr"] for group in groups])}


def make(rank: int, _: int) -> None:
    model, optimizer, sparsity = build(0)
    train(model, optimizer, sparsity, rank)
    weights = model.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # a rank's share is what is meant
        torch.save({"model": weights, "optimizer": optimizer.state_dict()}, FOLDER / f"rank_{rank}.pt")
    whole = optimizer.full_state_dict()
    if rank == 0:
        torch.save({"model": weights, "optimizer": whole}, FOLDER / "whole.pt")
    of_model, of_optimizer = get_state_dict(model, optimizer)
    dcp.save({"model": of_model, "optimizer": of_optimizer}, checkpoint_id=FOLDER / "dcp")
    zerox.save(FOLDER / "checkpoint", model, optimizer, extra={"step": 3, "masks": sparsity.state_dict()})
    found = digests(model, optimizer)
    if rank == 0:
        (FOLDER / "expected.json").write_text(json.dumps(found, indent=1) + "\n")


def load(rank: int, world_size: int, way: str, stage: int) -> dict[str, str]:
    model, optimizer, sparsity = build(1, stage)
    if way == "checkpoint":
        extra: Any = zerox.load(FOLDER / "checkpoint", model, optimizer)
        assert extra["step"] == 3
        sparsity.load_state_dict(extra["masks"])
    elif way == "dcp":
        of_model, of_optimizer = get_state_dict(model, optimizer)
        found = {"model": of_model, "optimizer": of_optimizer}
        dcp.load(found, checkpoint_id=FOLDER / "dcp")
        set_state_dict(model, optimizer, model_state_dict=found["model"], optim_state_dict=found["optimizer"])
    else:
        pickled = torch.load(
            FOLDER / ("whole.pt" if way == "whole" else f"rank_{rank}.pt"), weights_only=way == "whole"
        )
        model.load_state_dict(pickled["model"])
        optimizer.load_state_dict(pickled["optimizer"])
    dist.barrier()
    return digests(model, optimizer)


@pytest.mark.parametrize(
    ("way", "world_size", "stage"),
    [(way, *where) for way in WAYS for where in ((2, 2), (2, 3), (3, 1)) if way != "pickles" or where[0] == 2],
)
def test_it_loads_with_its_bits(way: str, world_size: int, stage: int) -> None:
    expected = json.loads((FOLDER / "expected.json").read_text())
    assert run_ranks(load, world_size, way, stage)[0] == expected


def test_the_checkpoint_is_of_format_2() -> None:
    assert manifest.read(FOLDER / "checkpoint")["format"] == 2


if __name__ == "__main__":
    from tests.checkpoint import test_written_before as this  # the ranks need a name that is the same there

    FOLDER.mkdir()
    run_ranks(this.make, 2)
    sys.exit()
