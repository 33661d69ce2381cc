"""What profilers show of a step: each thing that happens to a bucket, once, in order, on the thread that does it."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from bench.trace import Range, profile_all_threads, ranges_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

LAYERS, WIDTH = 4, 40
CAP_MB = 4 * WIDTH * (WIDTH + 1) / 2**20  # a layer is a bucket
OF_A_FLIGHT = ("launch", "pack", "land", "wait", "reduce", "let_go")
OF_A_STEP = ("update", "gather", "gather_wait")
OF_WHOLE_GRADS = ("gather_grads", "gather_grads_wait")


def profiled_step(rank: int, _: int, stage: int, backwards: int, all_threads: bool) -> list[Range]:
    """The third step's: the order of buckets is learned by then."""
    torch.manual_seed(0)
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])
    optimizer = FusedShardedAdam(model.parameters(), stage=stage, bucket_cap_mb=CAP_MB)
    x = torch.full((2, WIDTH), float(rank + 1))

    def step() -> None:
        optimizer.zero_grad()
        for _ in range(backwards):
            model(x).square().mean().backward()
        optimizer.step()

    for _ in range(2):
        step()
    with profile_all_threads() if all_threads else profile(activities=[ProfilerActivity.CPU]) as seen:
        step()
    return ranges_of(seen)


@pytest.mark.parametrize(("stage", "backwards"), [(2, 1), (2, 2), (1, 1)])
def test_each_bucket_goes_each_part_of_its_way_once(stage: int, backwards: int) -> None:
    once = Counter({(what, bucket): 1 for what in OF_A_STEP for bucket in range(LAYERS)})
    of_backward = OF_A_FLIGHT if stage == 2 else OF_A_FLIGHT + OF_WHOLE_GRADS
    for _ in range(backwards):
        once.update((what, bucket) for what in of_backward for bucket in range(LAYERS))
    for ranges in run_ranks(profiled_step, 2, stage, backwards, True):
        assert Counter((each.what, each.bucket) for each in ranges if each.bucket is not None) == once
        synced = [each for each in ranges if each.what == "settle"]
        assert len(synced) == (1 if stage == 2 else 2), "in step(), and in stage 1 where backward ends"


def test_workers_pack_and_land_in_the_order_of_launches_and_the_rest_follows() -> None:
    for ranges in run_ranks(profiled_step, 2, 2, 1, True):
        order = [each.bucket for each in ranges if each.what == "launch"]
        assert order == list(range(LAYERS)), "the last layer's gradients come first, and its bucket is the first"
        for what in OF_A_FLIGHT:
            assert [each.bucket for each in ranges if each.what == what] == order
        [sync] = [each for each in ranges if each.what == "settle"]
        for bucket in order:
            at = {each.what: each for each in ranges if each.bucket == bucket}
            assert at["launch"].start_ns <= at["pack"].start_ns
            for earlier, later in pairwise(["pack", "wait", "reduce", "let_go"]):
                assert at[earlier].stop_ns <= at[later].start_ns
            for inner in ("wait", "reduce", "let_go"):
                assert at["land"].start_ns <= at[inner].start_ns <= at[inner].stop_ns <= at["land"].stop_ns
            assert at["land"].stop_ns <= sync.stop_ns <= at["update"].start_ns
            for earlier, later in pairwise(OF_A_STEP):
                assert at[earlier].stop_ns <= at[later].start_ns
        gathers = [each.start_ns for each in ranges if each.what == "gather"]
        updates = [each.start_ns for each in ranges if each.what == "update"]
        assert all(gather < update for gather, update in zip(gathers, updates[1:], strict=False)), "the next bucket's"


def threads_of(ranges: list[Range]) -> dict[str, set[int]]:
    found: dict[str, set[int]] = {}
    for each in ranges:
        found.setdefault(each.what, set()).add(each.thread)
    return found


def test_autograd_s_thread_and_the_two_workers_are_told_apart() -> None:
    for ranges in run_ranks(profiled_step, 2, 2, 1, True):
        threads = threads_of(ranges)
        [trainer], [pack], [reduce] = threads["launch"], threads["pack"], threads["land"]
        assert len({trainer, pack, reduce}) == 3
        assert all(threads[what] == {trainer} for what in (*OF_A_STEP, "settle", "agree"))
        assert all(threads[what] == {reduce} for what in ("wait", "reduce", "let_go"))


def test_a_plain_profiler_sees_the_thread_that_trains() -> None:
    for ranges in run_ranks(profiled_step, 2, 2, 1, False):
        assert set(threads_of(ranges)) == {"launch", "settle", "agree", *OF_A_STEP}
