"""Experts, of which ranks (edp 2, ep 2) have different ones, beside torch.optim on the whole model in one process."""

from __future__ import annotations

import contextlib
import re
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from tests.mesh.expert_models import Mixture, Places, batch, groups, loss_of, own_part, twins
from tests.ranks import Once, run_ranks
from tests.tolerances import NORM_RTOL
from zerox import FusedShardedAdam, GradScaler

STEPS = 20
PARAM_ATOL = 2e-6  # over 20 steps of Adam
OPTIONS = {"lr": 1e-3, "weight_decay": 0.05}
MOST = 0.05


@dataclass(frozen=True)
class Case:
    """``micro``: backwards of a step; ``late``: all but the last inside no_sync(). ``of_experts``: their options."""

    stage: int = 2
    micro: int = 1
    late: bool = False
    zero: bool = True  # grads to None
    options: dict[str, Any] = field(default_factory=dict)
    of_experts: dict[str, Any] = field(default_factory=dict)
    hides: bool = False
    adds: bool = False  # the experts' group is added later
    scales: bool = False
    as_mesh: bool = False
    steps: int = 7


CASES = {
    f"{name}, stage {stage}": Case(stage=stage, **options)
    for stage in (2, 1)
    for name, options in {
        "plain": {"steps": STEPS},
        "of a mesh": {"as_mesh": True},
        "two backwards": {"micro": 2},
        "no_sync": {"micro": 2, "late": True},
        "zeros": {"zero": False, "micro": 2},
        "hidden gathers": {"hides": True},
        "small buckets": {"options": {"bucket_cap_mb": 0.0005}},
        "a scaler": {"scales": True},
        "added later": {"adds": True},
    }.items()
}


def build(case: Case, model: Mixture, places: Places) -> FusedShardedAdam:
    of_experts = groups(model, places.mesh["edp"] if case.as_mesh else places.edp, **case.of_experts)
    first = of_experts[:1] if case.adds else of_experts
    optimizer = FusedShardedAdam(first, stage=case.stage, **OPTIONS, **case.options)
    if case.adds:
        optimizer.add_param_group(of_experts[1])
    if case.hides:
        optimizer.overlap_gather(model)
    return optimizer


def backward(case: Case, model: Mixture, optimizer: Any, step: int, scale: float = 1.0) -> None:
    x, y = (own_part(each) for each in batch(step))
    for index, (part, target) in enumerate(zip(x.chunk(case.micro), y.chunk(case.micro), strict=True)):
        kept = case.late and index < case.micro - 1
        with optimizer.no_sync() if kept else contextlib.nullcontext():
            (loss_of(model, part, target) * scale / case.micro).backward()


def train(case: Case, places: Places) -> dict[str, Any]:
    model, whole = twins(places)
    optimizer = build(case, model, places)
    reference = torch.optim.AdamW(whole.parameters(), **OPTIONS)
    scaler = GradScaler(init_scale=64.0) if case.scales else None
    norms, off, lonely = [], [], 0
    for step in range(case.steps):
        if scaler is None:
            backward(case, model, optimizer, step)
        else:
            backward(case, model, optimizer, step, scaler.get_scale())
            scaler.unscale_(optimizer)
        loss_of(whole, *batch(step)).backward()
        here = [any(p.grad is not None for p in expert.parameters()) for expert in model.experts.values()]
        lonely += here.count(False)
        norms.append(optimizer.clip_grad_norm_(MOST))
        expected = torch.nn.utils.clip_grad_norm_(whole.parameters(), MOST)
        off.append(float((norms[-1] - expected).abs() / expected))
        if scaler is None:
            optimizer.step()
        else:
            scaler.step(optimizer)
            scaler.update()
        reference.step()
        optimizer.zero_grad(set_to_none=case.zero)
        reference.zero_grad(set_to_none=case.zero)
    optimizer.synchronize()
    return {
        "norms": [float(norm) for norm in norms],
        "off": max(off),
        "far": far_of(model, whole),
        "lonely": lonely,
        "dense": [p.tolist() for _, p in model.dense],
        "experts": {name: p.tolist() for name, p in model.own},
    }


def far_of(model: Mixture, whole: Mixture) -> float:
    theirs = dict(whole.named_parameters())
    return max(float((p - theirs[name]).detach().abs().max()) for name, p in model.named_parameters())


def places_of() -> Places:
    return Places(init_device_mesh("cpu", (2, 2), mesh_dim_names=("edp", "ep")))


def train_all(rank: int, _: int) -> dict[str, dict[str, Any]]:
    places = places_of()
    return {name: train(case, places) for name, case in CASES.items()}


found = Once(train_all, 4, timeout_s=300)


@pytest.mark.parametrize("name", CASES)
def test_experts_train_as_the_whole_model_in_one_process(name: str) -> None:
    by_rank = [each[name] for each in found()]
    for of_rank in by_rank:
        assert of_rank["norms"] == by_rank[0]["norms"], "the same bits on all ranks"
        assert min(of_rank["norms"]) > MOST, "each step is clipped"
        assert of_rank["off"] <= NORM_RTOL
        assert of_rank["far"] <= PARAM_ATOL
        assert of_rank["dense"] == by_rank[0]["dense"]
    for one, other in ((0, 2), (1, 3)):
        assert by_rank[one]["experts"] == by_rank[other]["experts"]
    assert set(by_rank[0]["experts"]).isdisjoint(by_rank[1]["experts"])


def test_some_experts_had_no_token_on_some_ranks() -> None:
    """Seen where p.grad stays this rank's own."""
    assert sum(of_rank["plain, stage 2"]["lonely"] for of_rank in found()) > 0


def divided_by_their_own(rank: int, _: int) -> tuple[float, float]:
    found = train(Case(of_experts={"gradient_divisor": 2}), places_of())
    return found["far"], found["off"]


def test_experts_divided_by_their_own_ranks_would_be_noticed() -> None:
    for far, off in run_ranks(divided_by_their_own, 4):
        assert far > 10 * PARAM_ATOL
        assert off > 1000 * NORM_RTOL


# ---- beside two optimizers, whose bits one has


ALIKE = {
    "8 bits": ({"state_dtype": "8bit"}, {}, torch.float32),
    "bf16": ({}, {}, torch.bfloat16),
    "bf16 with masters": ({"master_weights": "fp32"}, {}, torch.bfloat16),
    "a rule of their own": ({}, {"rule": "lion"}, torch.float32),
    "a divisor of their own": ({}, {"gradient_divisor": 3.0}, torch.float32),
}


def train_alike(rank: int, _: int, stage: int) -> dict[str, bool]:
    places, same = places_of(), {}
    for name, (options, of_experts, dtype) in ALIKE.items():
        model, _ = twins(places, dtype)
        twin, _ = twins(places, dtype)
        one = build(Case(stage=stage, options=options, of_experts=of_experts), model, places)
        divisor = {"gradient_divisor": 4.0, **of_experts}
        apart = [
            FusedShardedAdam(twin.dense, stage=stage, **OPTIONS, **options),
            FusedShardedAdam(
                [{"params": twin.own, **divisor}], process_group=places.edp, stage=stage, **OPTIONS, **options
            ),
        ]
        for step in range(4):
            for each, optimizers in ((model, [one]), (twin, apart)):
                loss_of(each, *map(own_part, batch(step))).backward()
                for optimizer in optimizers:
                    optimizer.step()
                    optimizer.zero_grad()
        pairs = zip(model.parameters(), twin.parameters(), strict=True)
        same[name] = all(torch.equal(p, q) for p, q in pairs)
    return same


@pytest.mark.parametrize("stage", [1, 2])
def test_one_optimizer_has_the_bits_of_two(stage: int) -> None:
    for of_rank in run_ranks(train_alike, 4, stage):
        assert of_rank == dict.fromkeys(ALIKE, True)


# ---- what is sent


def sent(rank: int, _: int, edp: int) -> tuple[list[tuple[int, int]], dict[str, int]]:
    """Bytes of one step over all ranks and over the experts' own, and what they come to."""
    mesh = init_device_mesh("cpu", (edp, 4 // edp), mesh_dim_names=("edp", "ep"))
    torch.manual_seed(mesh["ep"].get_local_rank())
    numel = {"dense": 5 * 16384, "experts": 3 * 16384}  # large enough to be cut evenly
    dense, expert = (torch.nn.Parameter(torch.randn(each)) for each in numel.values())
    own = {"params": [("expert", expert)], "process_group": mesh["edp"]}
    optimizer = FusedShardedAdam([{"params": [("dense", dense)]}, own])
    manager = optimizer.inside.grads.manager
    (dense.sum() + expert.sum() * (rank + 1)).backward()
    optimizer.step()
    return manager.traffic_by_axis, numel


@pytest.mark.parametrize("edp", [1, 2])
def test_experts_send_to_the_ranks_that_have_them(edp: int) -> None:
    for by_axis, numel in run_ranks(sent_as_messages, 4, edp):
        (_, of_dense), (_, of_experts) = by_axis
        # Gradients and parameters, and two flags of 4 bytes a slice, padded to 64 elements.
        least = {"dense": 2 * 3 * numel["dense"] // 4 * 4, "experts": 2 * (edp - 1) * numel["experts"] // edp * 4}
        flags = {"dense": 3, "experts": edp - 1}
        assert 0 <= of_dense - least["dense"] <= flags["dense"] * 256, of_dense
        assert 0 <= of_experts - least["experts"] <= flags["experts"] * 256, of_experts


def sent_as_messages(rank: int, world_size: int, edp: int) -> tuple[list[tuple[int, int]], dict[str, int]]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("ZEROX_EXCHANGE", "messages")
        return sent(rank, world_size, edp)


# ---- agreement


def swapped(rank: int, _: int) -> str:
    """Rank 1 launches its buckets in another order."""
    places = places_of()
    model, _ = twins(places)
    optimizer = build(Case(), model, places)
    for step in range(3):
        if rank == 1 and step == 2:
            order = optimizer.inside.grads.manager.backward.launch_order
            optimizer.inside.grads.manager.backward.set_order(order[::-1])
        backward(Case(), model, optimizer, step)
        try:
            optimizer.step()
        except RuntimeError as error:
            assert step == 2
            return str(error)
        optimizer.zero_grad()
    return ""


def test_a_swap_of_the_order_over_several_groups_is_an_error_on_all_ranks() -> None:
    for message in run_ranks(swapped, 4, timeout_s=20):
        assert re.search("zerox: rank (1 and rank .|. and rank 1) launched their buckets in different orders", message)


def uneven_rounds(rank: int, _: int) -> Tensor:
    """Subgroups of 3 ranks and of 1, each expert present on some ranks only."""
    world = dist.new_group([0, 1, 2]), dist.new_group([3])
    torch.manual_seed(int(rank == 3))
    expert = torch.nn.Parameter(torch.randn(300))
    before = expert.detach().clone()
    optimizer = FusedShardedAdam([{"params": [expert], "process_group": world[int(rank == 3)]}], lr=0.1)
    if rank in (1, 3):
        (expert * (rank + 1)).sum().backward()
    optimizer.step()
    same = torch.nn.Parameter(before)
    same.grad = torch.full_like(before, (rank + 1) / 4 if rank == 3 else 0.5)
    torch.optim.AdamW([same], lr=0.1).step()
    return (expert - same).detach().abs().max()


def test_subgroups_may_have_different_sizes() -> None:
    assert max(map(float, run_ranks(uneven_rounds, 4))) <= PARAM_ATOL


# ---- experts at one place in their subgroups are different ones


def absent_there(rank: int, _: int, stage: int, how: str) -> tuple[bool, bool]:
    """Whether the expert of ranks 0 and 2 moved, and that of ranks 1 and 3, which has no gradient in the end."""
    expert = torch.nn.Parameter(torch.ones(300))
    dense = torch.nn.Parameter(torch.ones(5))
    own = {"params": [expert], "process_group": places_of().edp}
    optimizer = FusedShardedAdam([{"params": [dense]}, own], lr=0.1, stage=stage)
    loss = dense.sum()
    if rank % 2 == 0 or how == "discarded":
        loss = loss + expert.sum()
    with optimizer.no_sync() if how == "not sent yet" else contextlib.nullcontext():
        loss.backward()
    if rank % 2 == 1 and how == "discarded":
        expert.grad = None
    optimizer.step()
    return rank % 2 == 0, bool((expert != 1).all())


@pytest.mark.parametrize("how", ["never there", "discarded", "not sent yet"])
@pytest.mark.parametrize("stage", [1, 2])
def test_an_expert_without_a_gradient_stays_while_others_at_its_place_move(stage: int, how: str) -> None:
    for has_gradient, moved in run_ranks(absent_there, 4, stage, how):
        assert moved == has_gradient
