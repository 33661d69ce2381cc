"""Parameters that are DTensors, on ranks (dp 2, tp 2), beside torch.optim on the whole model in one process.

All cases are trained by one run of the same processes.
"""

from __future__ import annotations

import contextlib
import functools
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.mesh.parallel_models import Meshes, Net, batch, local, loss_of, twins, whole
from tests.ranks import RankFailed, run_ranks
from tests.tolerances import NORM_RTOL
from zerox import FusedShardedAdam

STEPS = 20
PARAM_ATOL = 2e-6  # over 20 steps of Adam
BIASED_ATOL = 2e-5  # where the gradient of some bias is little more than rounding
OPTIONS = {"lr": 1e-3, "weight_decay": 0.05}


@dataclass(frozen=True)
class Case:
    """``micro``: backwards of a step; ``late``: all but the last inside no_sync(). ``idle``: steps in which the layer
    that has a gradient in few of them takes part. ``order``: of the norm that is clipped to ``most``."""

    sequence: bool = False
    stage: int = 2
    model: dict[str, Any] = field(default_factory=dict)
    micro: int = 1
    late: bool = False
    zero: str = "to None"
    order: float = 2.0
    most: float = 0.25
    idle: tuple[int, ...] = ()
    dtype: torch.dtype = torch.float32
    options: dict[str, Any] = field(default_factory=dict)


WITH_BIAS = {"bias": True}
SP = {"sequence": True, "model": {"scaled": False}}
CASES = {
    f"{name}, stage {stage}": Case(stage=stage, **options)
    for stage in (2, 1)
    for name, options in {
        "tensor": {},
        "sequence": SP,
        "biases": {**SP, "model": {"scaled": False, **WITH_BIAS}},
        "uneven": {"model": {"hidden": 7}},
        "empty on one rank": {"model": {"hidden": 1, **WITH_BIAS}},
        "two backwards": {**SP, "micro": 2},
        "no_sync": {**SP, "micro": 2, "late": True},
        "zeros": {**SP, "zero": "zeros", "micro": 2},
        "by the model": {**SP, "zero": "by the model"},
        "absent": {**SP, "idle": (2, 3, 7)},
        "largest": {**SP, "order": math.inf, "most": 0.02},
        "small buckets": {**SP, "options": {"bucket_cap_mb": 0.001}},
        "wire of 64 bits": {**SP, "dtype": torch.float64},
    }.items()
}


def zero(case: Case, net: Net, optimizer: Any) -> None:
    if case.zero == "by the model":
        net.zero_grad()
    else:
        optimizer.zero_grad(set_to_none=case.zero == "to None")


def train(case: Case, meshes: Meshes) -> dict[str, Any]:
    net, twin = twins(case.sequence, meshes, case.dtype, **case.model)
    optimizer = FusedShardedAdam(
        net.named_parameters(), process_group=meshes.dp, stage=case.stage, **OPTIONS, **case.options
    )
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    norms, off = [], []
    for step in range(STEPS):
        with_idle = step in case.idle
        tokens = batch(step)
        ours = tokens.view(2, case.micro, -1, tokens.shape[1])[meshes.dp.get_local_rank()]
        for index, part in enumerate(ours):
            kept = case.late and index < case.micro - 1
            with optimizer.no_sync() if kept else contextlib.nullcontext():
                (loss_of(net, part, with_idle=with_idle) / case.micro).backward()
        loss_of(twin, tokens, with_idle=with_idle).backward()
        if case.stage == 1 and step == 0:
            check_whole_grads(net, twin)
        norms.append(optimizer.clip_grad_norm_(case.most, case.order))
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), case.most, case.order)
        off.append(float((norms[-1] - expected).abs() / expected))
        optimizer.step()
        reference.step()
        zero(case, net, optimizer)
        reference.zero_grad(set_to_none=case.zero != "zeros")
    pairs = zip(net.named_parameters(), twin.parameters(), strict=True)
    far = {name: float((whole(p) - q).detach().abs().max()) for (name, p), q in pairs}
    return {
        "norms": [float(norm) for norm in norms],
        "off": max(off),
        "far": max(far.values()),
        "worst": max(far, key=lambda name: far[name]),
        "replicated": {name: local(p).tolist() for name, p in net.named_parameters() if not is_cut(p)},
    }


def is_cut(param: Tensor) -> bool:
    return isinstance(param, DTensor) and any(each.is_shard() for each in param.placements)


def check_whole_grads(net: Net, twin: Net) -> None:
    for (name, param), other in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert (param.grad is None) == (other.grad is None), name
        if param.grad is not None:
            assert isinstance(param.grad, type(param.data)), name
            torch.testing.assert_close(whole(param.grad), other.grad, rtol=1e-4, atol=1e-6)


def trained(rank: int, world_size: int, asked: dict[str, Case]) -> dict[str, dict[str, Any]]:
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    return {name: train(case, meshes) for name, case in asked.items()}


@functools.cache
def results() -> list[dict[str, dict[str, Any]]] | str:
    try:
        return run_ranks(trained, 4, CASES, timeout_s=60)
    except RankFailed as error:  # once for all cases
        return str(error)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_whole_model_in_one_process(name: str) -> None:
    everyone = results()
    assert not isinstance(everyone, str), everyone
    of_ranks = [each[name] for each in everyone]
    loose = CASES[name].model.get("bias") or CASES[name].model.get("hidden") == 1
    for found in of_ranks:
        assert found["off"] <= NORM_RTOL, found["off"]
        assert found["far"] <= (BIASED_ATOL if loose else PARAM_ATOL), found["worst"]
        assert found["norms"] == of_ranks[0]["norms"], "the same bits on all ranks"
        assert found["replicated"] == of_ranks[0]["replicated"], "replicated parameters stay the same"
    assert min(of_ranks[0]["norms"]) > CASES[name].most, "each step is clipped"
