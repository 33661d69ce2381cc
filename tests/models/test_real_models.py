"""Parameters, state and buffers after 5 steps on 1, 2 and 3 ranks equal those of one process, bit for bit."""

from __future__ import annotations

import contextlib
import io
from dataclasses import dataclass
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import same_bits
from tests.models.cases import ALL, CASES, Case
from tests.models.reference import LR, STEPS, Outcome, connect, local_gradients, reference
from tests.optimizer.models import mean_in_rank_order, memory_order
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam

SMALL_CAP = 0.04  # MiB: every model has several buckets


@dataclass
class Part:
    """What a rank holds of one parameter's state: ``tensors`` of the elements ``[start, stop)`` in memory order."""

    param: int
    start: int
    stop: int
    tensors: dict[str, Tensor]


def train(rank: int, world_size: int, name: str, stage: int) -> tuple[list[Tensor], list[Part], list[Tensor]]:
    case = ALL[name]
    model = case.model(seed=rank)  # the constructor gives everybody rank 0's values
    connect(model, dist.group.WORLD if world_size > 1 else None)
    optimizer = FusedShardedAdam(case.groups(model), lr=LR, stage=stage, bucket_cap_mb=SMALL_CAP, **case.options)
    assert len(optimizer.inside.buckets) > 1
    if stage == 3 and world_size == 2:  # each bucket is released as soon as no operator reads it
        optimizer.inside.gather.residents.set_hostile(True)
    LOOPS[case.loop](case, rank, case.compiled(model), optimizer)
    assert case.backend is None or torch._dynamo.utils.counters["stats"]["unique_graphs"] > 0
    index_of = {id(param): index for index, param in enumerate(model.parameters())}
    parts = []
    for bucket in optimizer.inside.buckets:
        for segment, (param, state) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
            tensors = {key: memory_order(value).clone() for key, value in state.items()}
            stop = segment.param_start + segment.span.numel
            parts.append(Part(index_of[id(param)], segment.param_start, stop, tensors))
    return [param.detach().clone() for param in model.parameters()], parts, list(model.buffers())


def plain_loop(case: Case, rank: int, model: Any, optimizer: FusedShardedAdam) -> None:
    for step in range(STEPS):
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                case.loss(model, rank, step, micro).backward()
        if case.clip is not None:
            optimizer.clip_grad_norm_(case.clip)
        optimizer.step()
        optimizer.zero_grad()


def trainer_loop(case: Case, rank: int, model: Any, optimizer: FusedShardedAdam) -> None:
    """As transformers.Trainer: a scheduler, model.zero_grad(), and checkpoints that rank 0 alone writes."""
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    for step in range(STEPS):
        for micro in range(case.accumulate):
            last = micro == case.accumulate - 1
            with contextlib.nullcontext() if last else optimizer.no_sync():
                case.loss(model, rank, step, micro).backward()
        if case.clip is not None:
            optimizer.clip_grad_norm_(case.clip)
        optimizer.step()
        scheduler.step()
        model.zero_grad()
        if rank == 0:
            saved = io.BytesIO()
            torch.save((model.state_dict(), optimizer.state_dict(), scheduler.state_dict()), saved)
            optimizer.load_state_dict(torch.load(io.BytesIO(saved.getvalue()))[1])


def closure_loop(case: Case, rank: int, model: Any, optimizer: FusedShardedAdam) -> None:
    """As Lightning: everything happens inside step()."""
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = case.loss(model, rank, step, 0)
            loss.backward()
            if case.clip is not None:
                optimizer.clip_grad_norm_(case.clip)
            return loss

        assert optimizer.step(closure).isfinite()


LOOPS = {"plain": plain_loop, "trainer": trainer_loop, "closure": closure_loop}


@cache
def one_process(name: str, world_size: int) -> Outcome:
    return run_ranks(reference, 1, name, world_size)[0]


def assert_as_in_one_process(name: str, world_size: int, stage: int) -> None:
    expected = one_process(name, world_size)
    covered = [0] * len(expected.params)
    for rank, (params, parts, buffers) in enumerate(run_ranks(train, world_size, name, stage)):
        for param, other in zip(params, expected.params, strict=True):
            assert same_bits(param, other)
        for part in parts:
            whole = expected.state[part.param]
            assert whole.keys() == part.tensors.keys()
            for key, value in part.tensors.items():
                assert same_bits(value, whole[key] if key == "step" else whole[key][part.start : part.stop]), key
            covered[part.param] += part.stop - part.start
        for buffer, other in zip(buffers, expected.buffers[rank], strict=True):
            assert same_bits(buffer, other)
    assert covered == [param.numel() for param in expected.params]


# What stages and numbers of ranks do to each other does not depend on the model: tests/optimizer/test_bit_equality.py.
RANKS = [(1, 2), (2, 1), (2, 3), (3, 2), (3, 3)]
FEW = ("decoder with tied weights, groups, clip, Trainer's loop", "mixture of experts as modules")


@pytest.mark.parametrize(("name", "ranks"), thinned(CASES, FEW, RANKS, [(2, 3), (3, 2)]), ids=str)
def test_training_equals_one_process(name: str, ranks: tuple[int, int]) -> None:
    world_size, stage = ranks
    assert_as_in_one_process(name, world_size, stage)


@pytest.mark.parametrize("ranks", RANKS[:4], ids=str)
def test_a_compiled_forward_trains_as_in_one_process(ranks: tuple[int, int]) -> None:
    world_size, stage = ranks
    assert_as_in_one_process("aot_eager", world_size, stage)


@pytest.mark.deep
@pytest.mark.parametrize("ranks", [(2, 3), (3, 2)], ids=str)
def test_a_forward_that_inductor_compiles_trains_as_in_one_process(ranks: tuple[int, int]) -> None:
    """Each rank runs a C++ compiler. In `make test` tests/residency/test_any_model.py has one such model."""
    world_size, stage = ranks
    assert_as_in_one_process("inductor", world_size, stage)


def test_the_mixtures_have_experts_that_idle_on_some_ranks_and_on_all() -> None:
    as_modules = one_process("mixture of experts as modules", 3).seen
    assert as_modules["some"] > 0
    assert as_modules["all"] >= STEPS * 4  # at least the expert that is never chosen: two weights and two biases
    in_3d = one_process("mixture of experts in 3-D parameters", 3).seen
    assert in_3d["idle on some"] > 0
    assert in_3d["some"] == in_3d["all"] == 0


def test_batch_norm_keeps_each_rank_its_own_buffers_or_all_the_same() -> None:
    def same_on_both(name: str) -> list[bool]:
        first, second = one_process(name, 2).buffers
        return [same_bits(a, b) for a, b in zip(first, second, strict=True) if a.is_floating_point()]

    assert not any(same_on_both("convolution with batch norm"))
    assert all(same_on_both("convolution with batch norm over all ranks"))


def test_batch_norm_over_all_ranks_gives_the_gradient_of_the_whole_batch() -> None:
    case = CASES["convolution with batch norm over all ranks"]
    replicas = [case.model(seed=0) for _ in range(2)]
    gradients = local_gradients(case, replicas, step=0)
    whole = CASES["convolution with batch norm"].model(seed=0)
    batches = [case.batch(1000 * rank) for rank in range(2)]
    whole(**{key: torch.cat([batch[key] for batch in batches]) for key in batches[0]}).loss.backward()
    for param, *parts in zip(whole.parameters(), *gradients, strict=True):
        mean = mean_in_rank_order(parts, param)
        assert (mean is None) == (param.grad is None)
        if mean is not None:
            torch.testing.assert_close(mean, param.grad, rtol=1e-4, atol=1e-5)


def test_clipping_scales_in_every_case_that_clips() -> None:
    clipped = {name: case for name, case in CASES.items() if case.clip is not None}
    assert clipped
    for name, case in clipped.items():
        assert all(norm > case.clip for norm in one_process(name, 2).norms)
