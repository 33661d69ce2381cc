"""A gradient that is absent, decided over all ranks: exactly torch's rule where none has one, zero where some have."""

from __future__ import annotations

import itertools
import random
from contextlib import nullcontext
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from tests.bucket_manager.rig import same_bits
from tests.optimizer.models import mean_over_ranks
from tests.own_state import own_state
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam

EPS = 1e-3  # see test_torch_behaviour.py
# Some span ranks (4,096 elements and more), some share a shard; one has no dimension and one no elements.
SHAPES = [(5000,), (7,), (), (64, 64), (300,), (0, 3), (13, 2), (4096,)]
NEVER, ON_RANK_1, EMPTY = 1, 4, 5


def make_params() -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(0)
    return [nn.Parameter(torch.randn(shape, generator=generator)) for shape in SHAPES]


@dataclass(frozen=True)
class Step:
    """``present[micro][rank]``: the parameters that take part in that backward; none of them: there is no backward."""

    present: list[list[set[int]]]
    sync_first: bool = False  # whether the first of two backwards sends its gradients too
    frozen: frozenset[int] = frozenset()


def plan(world_size: int) -> list[Step]:
    """Steps that all ranks know. Where ranks run no backward they do so in steps of one backward only."""
    choose = random.Random(17)

    def some(rank: int) -> set[int]:
        taken = {index for index in range(len(SHAPES)) if choose.random() < 0.5} | {0}
        return (taken - {NEVER} | {ON_RANK_1}) if rank == 1 else taken - {NEVER, ON_RANK_1}

    def all_ranks() -> list[set[int]]:
        return [some(rank) for rank in range(world_size)]

    everything = set(range(len(SHAPES))) - {NEVER}
    nothing: list[set[int]] = [set() for _ in range(world_size)]
    return [
        Step([[everything] * world_size]),
        Step([all_ranks()]),
        Step([nothing]),
        Step([[set() if rank == world_size - 1 else some(rank) for rank in range(world_size)]]),
        Step([all_ranks(), all_ranks()]),
        Step([all_ranks(), all_ranks()], sync_first=True),
        Step([all_ranks()], frozen=frozenset({0, 6, 7})),
        Step([[{0} for _ in range(world_size)]], frozen=frozenset({3})),
        Step([all_ranks(), all_ranks()], sync_first=True, frozen=frozenset({2, 3})),
        Step([nothing]),
        Step([all_ranks()]),
    ]


def run_backward(params: list[nn.Parameter], taken: set[int], seed: int) -> None:
    """Each gradient depends on rank, step and parameter; those that aren't taken get none."""
    terms = []
    for index in sorted(taken):
        if params[index].requires_grad:
            generator = torch.Generator().manual_seed(1000 * seed + index)
            terms.append((params[index] * torch.randn(params[index].shape, generator=generator)).sum())
    if terms:
        torch.stack(terms).sum().backward()


def snapshot(optimizer: FusedShardedAdam, param: Tensor) -> list[Tensor]:
    return [param.detach().clone(), *(t.clone() for t in own_state(optimizer).get(param, {}).values())]


def follow(rank: int, world_size: int, stage: int, cap_mb: float, set_to_none: bool) -> list[list[int]]:
    """Returns the step counts that each parameter went through."""
    ours_params, their_params = make_params(), make_params()
    ours = FusedShardedAdam(ours_params, lr=1e-2, eps=EPS, stage=stage, bucket_cap_mb=cap_mb)
    theirs = torch.optim.AdamW(their_params, lr=1e-2, eps=EPS, foreach=False)
    counts = []
    for number, step in enumerate(plan(world_size)):
        for index, (mine, other) in enumerate(zip(ours_params, their_params, strict=True)):
            mine.requires_grad_(index not in step.frozen)
            other.requires_grad_(index not in step.frozen)
        before = [snapshot(ours, param) for param in ours_params]
        for micro, present in enumerate(step.present):
            sync = micro == len(step.present) - 1 or step.sync_first
            with nullcontext() if sync else ours.no_sync():
                run_backward(ours_params, present[rank], seed=100 * rank + 10 * number + micro)
        ours.step()  # before the twin's collectives: in stage 1 others may wait in backward for a rank without one
        for micro, present in enumerate(step.present):
            run_backward(their_params, present[rank], seed=100 * rank + 10 * number + micro)
        for param in their_params:
            param.grad = mean_over_ranks(param.grad, param, world_size)
        theirs.step()
        for index, (mine, other) in enumerate(zip(ours_params, their_params, strict=True)):
            where = f"step {number}, parameter {index}"
            if other.grad is None:
                same = [same_bits(a, b) for a, b in zip(snapshot(ours, mine), before[index], strict=True)]
                assert all(same), f"{where}: absent everywhere, but something changed"
            torch.testing.assert_close(mine, other, msg=lambda m, w=where: f"{w}: {m}", rtol=1e-5, atol=1e-6)
            if mine in ours.state:
                assert int(ours.state[mine]["step"]) == int(theirs.state[other].get("step", 0)), where
        counts.append([int(theirs.state[p].get("step", 0)) for p in their_params])
        ours.zero_grad(set_to_none)
        theirs.zero_grad(set_to_none)
    return counts


CUTS = list(itertools.product([1e-6, 0.03, 64.0], [True, False]))  # MiB of a bucket; whether zero_grad() sets None
OVER = [(1, 1), (1, 2), (2, 1), (2, 2), (3, 1), (3, 2)]  # ranks, stage


@pytest.mark.parametrize(("cut", "over"), thinned(CUTS, [(1e-6, False), (0.03, True)], OVER, [(2, 1), (3, 2)]), ids=str)
def test_steps_follow_torch_whoever_has_which_gradients(over: tuple[int, int], cut: tuple[float, bool]) -> None:
    (world_size, stage), (cap_mb, set_to_none) = over, cut
    counts = run_ranks(follow, world_size, stage, cap_mb, set_to_none)[0]
    assert all(each[NEVER] == 0 for each in counts)
    if set_to_none:
        assert counts[2] == counts[1], "a step without any gradient"
        assert len(set(counts[-1])) >= 4, "parameters' counts went apart, or nothing was tested"


def messages_of(rank: int, world_size: int, stage: int, exchange: str) -> tuple[int, dict[str, tuple[int, int, int]]]:
    """The number of buckets; and what this rank sent from backward to the end of step(), in each case: gradients and
    parameters (any thread), all messages of the calling thread, and torch's collectives."""
    params = make_params()
    optimizer = FusedShardedAdam(params, stage=stage, bucket_cap_mb=0.03, exchange=exchange)
    optimizer.inside.calls.record.has_looked = True  # what the first step() sends: tests/optimizer/test_first_look.py
    everything = set(range(len(SHAPES)))
    cases = {
        "first": everything,
        "all present": everything,
        "different branches": {0, 1} if rank == 0 else {2, 3, 4},
        "present on one rank": everything if rank == 1 else {0},
        "one present": {0},
        "all present again": everything,
    }
    found = {}
    for seed, (case, taken) in enumerate(cases.items()):
        messages = optimizer.inside.manager.traffic[0]
        with profile(activities=[ProfilerActivity.CPU]) as prof:
            run_backward(params, taken, 100 * rank + seed)
            optimizer.step()
        names = [event.name for event in prof.events() if event.name.startswith("gloo:")]
        others = [name for name in names if name not in ("gloo:send", "gloo:recv")]
        found[case] = optimizer.inside.manager.traffic[0] - messages, names.count("gloo:send"), len(others)
        optimizer.zero_grad()
    return len(optimizer.inside.buckets), found


@pytest.mark.parametrize("world_size", [2, 3])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("exchange", ["direct", "messages"])
def test_absence_costs_no_collective_and_no_message(exchange: str, stage: int, world_size: int) -> None:
    """The calling thread gathers, and meets the others in one small all-reduce: in stage 2 in step(); in stage 1 there
    and where backward ends, where a second one says who has which gradients, absent ones or not."""
    in_memory = exchange == "direct"
    gathers, sync_points = {1: (2, 3), 2: (1, 1)}[stage]
    sent = 0
    results = run_ranks(messages_of, world_size, stage, exchange)
    for num_buckets, found in results:
        assert num_buckets > 2
        first = found.pop("first")
        assert first[2] == 1, "the order of buckets is learned once, in a broadcast"
        shards = gathers * num_buckets * (world_size - 1)
        # In memory the first sync point and the first gather tell where this rank's boxes are.
        told_once = 2 * (world_size - 1) if in_memory else 0
        assert set(found.values()) == {(first[0], 0 if in_memory else first[1], 0)}, found
        assert first[0] == (1 + gathers) * num_buckets * (world_size - 1)
        sent += first[1] - (told_once if in_memory else shards)
    assert sent == (0 if in_memory else sync_points * {2: 2, 3: 4}[world_size]), "messages of a small all-reduce"


def zero_gradients(rank: int, world_size: int, stage: int) -> None:
    params = make_params()
    before = [p.detach().clone() for p in params]
    optimizer = FusedShardedAdam(params, lr=0.1, weight_decay=0.0, stage=stage)
    for _ in range(3):
        torch.stack([(p * 0.0).sum() for p in params]).sum().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    assert all(same_bits(p.detach(), q) for p, q in zip(params, before, strict=True))
    assert all(int(state["step"]) == 3 for state in optimizer.state.values())


@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (1, 2), (3, 1), (3, 2)])
def test_zero_gradients_without_decay_change_nothing_but_the_count(world_size: int, stage: int) -> None:
    run_ranks(zero_gradients, world_size, stage)
