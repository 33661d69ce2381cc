"""Parameters that are DTensors, on ranks (dp 2, tp 2), beside torch.optim on the whole model in one process.

All cases are trained by one run of the same processes.
"""

from __future__ import annotations

import contextlib
import math
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import zerox
from tests.mesh.parallel_models import Meshes, Net, batch, local, loss_of, twins, whole
from tests.optimizer.combined import digest
from tests.ranks import Once, run_ranks
from tests.tolerances import NORM_RTOL
from zerox import FusedShardedAdam

STEPS = 20
PROMISED = {"steps": STEPS}
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
    hides: bool = False
    steps: int = 6  # operators on DTensors are slow


WITH_BIAS = {"bias": True}
SP = {"sequence": True, "model": {"scaled": False}}
KINDS: dict[str, dict[str, Any]] = {
    "tensor": {},
    "sequence": SP,
    "biases": {**SP, "model": {"scaled": False, **WITH_BIAS}},
    "uneven": {"model": {"hidden": 7}},
    "empty on one rank": {"model": {"hidden": 1, **WITH_BIAS}},
    "two backwards": {**SP, "micro": 2},
    "no_sync": {**SP, "micro": 2, "late": True},
    "zeros": {**SP, "zero": "zeros", "micro": 2},
    "by the model": {**SP, "zero": "by the model"},
    "absent": {**SP, "idle": (1, 2, 4)},
    "largest": {**SP, "order": math.inf, "most": 0.02},
    "hidden gathers": {**SP, "hides": True},
    "small buckets": {**SP, "options": {"bucket_cap_mb": 0.001}},
    "wire of 64 bits": {**SP, "dtype": torch.float64},
}
# How a parameter is cut is known before there is a stage, and how gradients are cleared does not know of it.
IN_STAGE = {
    2: tuple(KINDS),
    # Gradients are whole there.
    1: (
        "tensor",
        "sequence",
        "uneven",
        "empty on one rank",
        "two backwards",
        "no_sync",
        "zeros",
        "absent",
        "wire of 64 bits",
    ),
    # Where a rank has nothing of a layer, torch gathers its weights: a collective, which stage 3 refuses.
    3: ("sequence", "biases", "uneven", "no_sync", "absent", "small buckets"),
}
LONG = ("tensor", "sequence", "uneven")
CASES = {
    f"{name}, stage {stage}": Case(stage=stage, **KINDS[name], **(PROMISED if name in LONG else {}))
    for stage, names in IN_STAGE.items()
    for name in names
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
    if case.hides:
        optimizer.overlap_gather(net)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    norms, off = [], []
    for step in range(case.steps):
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
    with optimizer.whole():  # full_tensor() is a collective
        pairs = zip(net.named_parameters(), twin.parameters(), strict=True)
        far = {name: float((whole(p) - q).detach().abs().max()) for (name, p), q in pairs}
        return {
            "norms": [float(norm) for norm in norms],
            "off": max(off),
            "far": max(far.values()),
            "worst": max(far, key=lambda name: far[name]),
            "bits": digest([local(p) for p in net.parameters()]),
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


results = Once(trained, 4, CASES, timeout_s=120)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_the_whole_model_in_one_process(name: str) -> None:
    of_ranks = [each[name] for each in results()]
    loose = CASES[name].model.get("bias") or CASES[name].model.get("hidden") == 1
    for found in of_ranks:
        assert found["off"] <= NORM_RTOL, found["off"]
        assert found["far"] <= (BIASED_ATOL if loose else PARAM_ATOL), found["worst"]
        assert found["norms"] == of_ranks[0]["norms"], "the same bits on all ranks"
        assert found["replicated"] == of_ranks[0]["replicated"], "replicated parameters stay the same"
    assert min(of_ranks[0]["norms"]) > CASES[name].most, "each step is clipped"


@pytest.mark.parametrize("name", [name for name in CASES if name.endswith("stage 3")])
def test_stage_3_has_stage_2_s_bits(name: str) -> None:
    for found in results():
        assert found[name]["bits"] == found[name.replace("stage 3", "stage 2")]["bits"]


def several(rank: int, world_size: int) -> dict[str, Any]:
    """What is asked of the gradients between backward and step()."""
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    found: dict[str, Any] = {}

    def begun(**options: Any) -> tuple[Net, Net, FusedShardedAdam]:
        net, twin = twins(True, meshes, scaled=False)
        optimizer = FusedShardedAdam(net.named_parameters(), process_group=meshes.dp, **OPTIONS, **options)
        loss_of(net, batch(0).chunk(2)[meshes.dp.get_local_rank()]).backward()
        loss_of(twin, batch(0)).backward()
        return net, twin, optimizer

    def stepped(net: Net, twin: Net, optimizer: FusedShardedAdam) -> float:
        torch.optim.AdamW(twin.parameters(), **OPTIONS).step()
        optimizer.step()
        pairs = zip(net.parameters(), twin.parameters(), strict=True)
        return max(float((whole(p) - q).detach().abs().max()) for p, q in pairs)

    for stage in (1, 2):
        # Some parameters: a Partial one, and one that is cut.
        net, twin, optimizer = begun(stage=stage)
        asked = [net.norm.weight, net.blocks[0].up.weight]
        norm = optimizer.clip_grad_norm_(0.01, parameters=asked)
        expected = torch.nn.utils.clip_grad_norm_([twin.norm.weight, twin.blocks[0].up.weight], 0.01)
        found[f"some, stage {stage}"] = (float(norm / expected - 1), stepped(net, twin, optimizer))
        # A scaler: one rank of the tensor axis has an inf, and all skip.
        net, twin, optimizer = begun(stage=stage)
        before = local(net.head.weight).clone()
        if stage == 1 and rank == 1 and net.head.weight.grad is not None:
            local(net.head.weight.grad)[0, 0] = math.inf
            is_inf = optimizer.unscale_grads_(None)
        elif stage == 2 and rank in (1, 3):
            optimizer.zero_grad()
            tokens = batch(0).chunk(2)[meshes.dp.get_local_rank()]
            loss = loss_of(net, tokens)
            net.head.weight.register_hook(lambda grad: grad * math.inf)
            loss.backward()
            is_inf = optimizer.unscale_grads_(None)
        elif stage == 2:
            optimizer.zero_grad()
            loss_of(net, batch(0).chunk(2)[meshes.dp.get_local_rank()]).backward()
            is_inf = optimizer.unscale_grads_(None)
        else:
            is_inf = optimizer.unscale_grads_(None)
        optimizer.step()
        found[f"inf, stage {stage}"] = (float(is_inf), bool(torch.equal(before, local(net.head.weight))))
        # Two optimizers, clipped together, on the same axes.
        net, twin, optimizer = begun(stage=stage)
        del optimizer
        net.zero_grad()
        twin_norm = torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.1)
        params = list(net.parameters())
        parts = [params[::2], params[1::2]]
        both = [FusedShardedAdam(part, process_group=meshes.dp, stage=stage, **OPTIONS) for part in parts]
        loss_of(net, batch(0).chunk(2)[meshes.dp.get_local_rank()]).backward()
        norm = zerox.clip_grad_norm_(both, 0.1)
        both[0].step()
        found[f"together, stage {stage}"] = (float(norm / twin_norm - 1), stepped(net, twin, both[1]))
        # bfloat16 parameters: replicated ones, and their masters, stay the same.
        net, twin = twins(True, meshes, torch.bfloat16, scaled=False)
        optimizer = FusedShardedAdam(net.named_parameters(), process_group=meshes.dp, stage=stage, **OPTIONS)
        norms = []
        for step in range(5):
            loss_of(net, batch(step).chunk(2)[meshes.dp.get_local_rank()]).backward()
            norms.append(float(optimizer.clip_grad_norm_(0.25)))
            optimizer.step()
            optimizer.zero_grad()
        kept = [local(p).float().tolist() for p in net.parameters() if not is_cut(p)]
        found[f"bfloat16, stage {stage}"] = (norms, kept)
    # Stages of a pipeline, on the axis that is tensor parallel above: each rank has parameters of its own.
    own = torch.nn.Parameter(torch.full((5,), 1.0 + meshes.tp.get_local_rank()))
    optimizer = FusedShardedAdam([own], process_group=meshes.dp, norm_group=meshes.tp)
    own.square().sum().backward()
    found["pipeline"] = float(optimizer.clip_grad_norm_(math.inf))
    return found


def test_what_is_asked_between_backward_and_step_is_of_the_whole_model() -> None:
    of_ranks = run_ranks(several, 4)
    for stage in (1, 2):
        for what in ("some", "together"):
            for off, far in (found[f"{what}, stage {stage}"] for found in of_ranks):
                assert abs(off) <= NORM_RTOL, (what, stage)
                assert far <= PARAM_ATOL, (what, stage)
        assert all(found[f"inf, stage {stage}"] == (1.0, True) for found in of_ranks)
        assert all(found[f"bfloat16, stage {stage}"] == of_ranks[0][f"bfloat16, stage {stage}"] for found in of_ranks)
    assert all(found["pipeline"] == pytest.approx(math.sqrt(5 * (2**2 + 4**2)), rel=1e-6) for found in of_ranks)


def on_three_axes(rank: int, _: int) -> tuple[list[float], float, float]:
    """Tensor parallel beside a mesh (replicate, shard): norms, how far they and the parameters are off."""
    mesh = init_device_mesh("cpu", (2, 2, 2), mesh_dim_names=("replicate", "shard", "tp"))
    net, twin = twins(True, Meshes(mesh), scaled=False)
    optimizer = FusedShardedAdam(net.named_parameters(), process_group=mesh["replicate", "shard"], **OPTIONS)
    reference = torch.optim.AdamW(twin.parameters(), **OPTIONS)
    norms, off = [], 0.0
    for step in range(STEPS):
        tokens = batch(step)
        loss_of(net, tokens.chunk(4)[rank // 2]).backward()
        loss_of(twin, tokens).backward()
        norms.append(float(optimizer.clip_grad_norm_(0.25)))
        expected = float(torch.nn.utils.clip_grad_norm_(twin.parameters(), 0.25))
        off = max(off, abs(norms[-1] - expected) / expected)
        for each in (optimizer, reference):
            each.step()
            each.zero_grad()
    pairs = zip(net.parameters(), twin.parameters(), strict=True)
    return norms, off, max(float((whole(p) - q).detach().abs().max()) for p, q in pairs)


def test_tensor_parallel_goes_with_a_mesh_of_replicate_and_shard() -> None:
    found = run_ranks(on_three_axes, 8)
    for norms, off, far in found:
        assert norms == found[0][0], "the same bits on all ranks"
        assert off <= NORM_RTOL
        assert far <= PARAM_ATOL


# ---- what is not trained


def frozen(rank: int, world_size: int, stage: int) -> None:
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    net, twin = twins(False, meshes)
    for name, param in net.named_parameters():
        param.requires_grad_("norm" not in name)
    optimizer = FusedShardedAdam(net.parameters(), lr=0.1, process_group=meshes.dp, stage=stage)
    if stage == 3:
        optimizer.inside.gather.residents.release_all()
    for (name, param), theirs in zip(net.named_parameters(), twin.parameters(), strict=True):
        assert param.requires_grad or torch.equal(param, theirs), name


@pytest.mark.parametrize("stage", [2, 3])
def test_frozen_parameters_are_the_first_rank_s_over_all_axes(stage: int) -> None:
    """In stage 3 also once they have been released."""
    run_ranks(frozen, 4, stage)
