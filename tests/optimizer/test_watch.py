"""zerox.integrations.watch: what it says of each step is what happened, on the host's clock and nobody's time."""

from __future__ import annotations

import gc
import threading
import time
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.engine import Engine
from zerox.integrations.watch import Watch
from zerox.residency.residency import Residency

NAMES = {"skipped_steps", "step_ms", "exposed_ms", "resident_bytes", "peak_bytes"}


def make(**options: Any) -> tuple[nn.Sequential, Engine]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 4))
    kind = ShardedOptimizer if "optimizer_class" in options else FusedShardedAdam
    return model, kind(model.parameters(), **options)


def backward(model: nn.Module, rank: int = 0, scale: float = 1.0) -> None:
    torch.manual_seed(rank)
    (model(torch.randn(3, 8)).square().mean() * scale).backward()


def norms(rank: int, _: int, stage: int) -> None:
    model, optimizer = make(stage=stage)
    watch = Watch(optimizer)
    expected = {}
    for step, clip in enumerate(("clip", "none", "inf", "of some", "together", "1-norm", "late"), start=1):
        backward(model, rank)
        if clip == "clip":
            expected[step] = optimizer.clip_grad_norm_(1e-3)
        elif clip == "inf":
            expected[step] = optimizer.clip_grad_norm_(float("inf"))
        elif clip == "of some":
            optimizer.clip_grad_norm_(1.0, parameters=model[0].parameters())
        elif clip == "together":
            expected[step] = zerox.clip_grad_norm_([optimizer], 1.0)
        elif clip == "1-norm":
            optimizer.clip_grad_norm_(1.0, norm_type=1.0)
        elif clip == "late":
            optimizer.clip_grad_norm_(float("inf"))
            backward(model, rank)  # the norm is not of all
        optimizer.step()
        optimizer.zero_grad()
    taken = dict(watch.take())
    assert list(taken) == [1, 2, 3, 4, 5, 6, 7]
    for step, figures in taken.items():
        assert figures.keys() - {"grad_norm"} == NAMES
        assert figures.get("grad_norm") == (float(expected[step]) if step in expected else None), step
    assert watch.take() == []


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_norm_is_that_of_the_last_clip_of_all(stage: int, world_size: int) -> None:
    run_ranks(norms, world_size, stage)


def skips(rank: int, world_size: int) -> None:
    model, optimizer = make()
    watch = Watch(optimizer)
    scaler = zerox.GradScaler("cpu", init_scale=4.0)
    for step in range(4):
        backward(model, rank, scale=4.0 * (float("inf") if rank == world_size - 1 and step in (1, 2) else 1.0))
        scaler.scale(torch.zeros(1))
        scaler.unscale_(optimizer)
        optimizer.clip_grad_norm_(1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    taken = watch.take()
    assert [(step, figures["skipped_steps"]) for step, figures in taken] == [(1, 0.0), (2, 2.0)]
    assert all(0 < figures["grad_norm"] < float("inf") for _, figures in taken)


@pytest.mark.parametrize("world_size", [1, 2])
def test_skipped_steps_are_counted_and_have_no_figures(world_size: int) -> None:
    run_ranks(skips, world_size)


LATE_S = 0.6  # far more than a busy machine adds


def update_late(optimizer: Engine) -> None:
    """In its next step, once ranks have synchronized."""
    update = optimizer.inside.update
    runs = update.runs

    def late_runs(*args: Any) -> Any:
        del update.runs  # type: ignore[method-assign]
        time.sleep(LATE_S)
        return runs(*args)

    update.runs = late_runs  # type: ignore[method-assign]


def late(rank: int, _: int, options: dict[str, Any], overlaps: bool, where: str) -> list[dict[str, float]]:
    """Rank 1 comes late by LATE_S to one place of the second step."""
    model, optimizer = make(**options)
    if overlaps:
        optimizer.overlap_gather(model)
    watch = Watch(optimizer)
    for step in range(3):
        if rank == 1 and step == 1 and where == "backward":
            time.sleep(LATE_S)
        backward(model, rank)
        if rank == 1 and step == 1 and where == "step":
            time.sleep(LATE_S)
        if rank == 1 and step == 1 and where == "update":
            update_late(optimizer)
        optimizer.step()
        optimizer.zero_grad()
    return [figures for _, figures in watch.take()]


@pytest.mark.parametrize("where", ["backward", "step", "update"])
@pytest.mark.parametrize(
    ("options", "overlaps"),
    [
        *(({"stage": stage}, False) for stage in (1, 2, 3)),
        ({"stage": 2}, True),
        *(({"stage": stage, "optimizer_class": torch.optim.NAdam}, False) for stage in (1, 2, 3)),
    ],
)
def test_a_rank_that_is_late_shows_as_exposed_time_of_the_others(
    options: dict[str, Any], overlaps: bool, where: str
) -> None:
    waits, comes_late = run_ranks(late, 2, options, overlaps, where)
    exposed, of_late = ([figures["exposed_ms"] for figures in each] for each in (waits, comes_late))
    # What an update leaves to the next forward is waited for there, but where ranks first tell that all could update.
    is_left = (overlaps or options["stage"] == 3) and "optimizer_class" not in options
    slow = 2 if where == "update" and is_left else 1
    assert 750 * LATE_S < exposed.pop(slow) < waits[slow]["step_ms"] + 50
    assert max(exposed) < 500 * LATE_S
    assert max(of_late) < 500 * LATE_S, "it waited for nobody"
    assert comes_late[1]["step_ms"] > 200


def residents(rank: int, world_size: int) -> None:
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(8)))
    nbytes = 64 * 64 * 4
    options = {"stage": 3, "bucket_cap_mb": nbytes / 2**20, "resident_mb": 3 * nbytes / 2**20}
    optimizer = FusedShardedAdam(model.parameters(), **options)
    watch = Watch(optimizer)
    for _ in range(3):
        model(torch.ones(2, 64)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    with optimizer.whole():
        pass
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    seen = [figures["resident_bytes"] for _, figures in watch.take()]
    assert isinstance(optimizer.inside.gather, Residency) == (world_size > 1)
    page = 4096
    if world_size == 1:
        assert seen == [8 * nbytes] * 4
    else:
        assert all(3 * nbytes <= each < 3 * (nbytes + page) for each in seen[1:3]), seen
        assert 8 * nbytes <= seen[3] < 8 * (nbytes + page)


@pytest.mark.parametrize("world_size", [1, 2])
def test_resident_bytes_are_the_most_parameters_that_were_whole(world_size: int) -> None:
    run_ranks(residents, world_size)


def test_peak_bytes_on_the_cpu_are_the_process_s() -> None:
    model, optimizer = make()
    watch = Watch(optimizer)
    backward(model)
    optimizer.step()
    big = torch.ones(60 << 20, dtype=torch.uint8)
    optimizer.step()
    before, after = (figures["peak_bytes"] for _, figures in watch.take())
    with open("/proc/self/status") as status:
        [peak] = [int(line.split()[1]) * 1024 for line in status if line.startswith("VmHWM")]
    assert before <= after <= peak + 2**20
    assert after >= big.numel()


def test_figures_go_to_a_writer_by_name() -> None:
    model, optimizer = make()
    watch = Watch(optimizer)
    seen: list[tuple[str, float, int]] = []
    for _ in range(2):
        backward(model)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    watch.write_to(lambda *figure: seen.append(figure), prefix="run/", wait=True)
    assert {name for name, _, _ in seen} == {f"run/{name}" for name in (*NAMES, "grad_norm")}
    assert {step for _, _, step in seen} == {1, 2}


def test_a_watch_keeps_nothing_alive_and_ends() -> None:
    _, optimizer = make()
    watch, other = Watch(optimizer), Watch(optimizer)
    dead = weakref.ref(other)
    del other
    assert dead() is None
    optimizer.step()
    watch.close()
    optimizer.step()
    assert len(watch.take()) == 1
    gone = weakref.ref(optimizer)
    gc.disable()
    try:
        del optimizer
        assert gone() is None
    finally:
        gc.enable()


def test_no_more_than_the_last_thousand_steps_are_kept() -> None:
    _, optimizer = make()
    watch = Watch(optimizer)
    for _ in range(1003):
        optimizer.step()
    assert [step for step, _ in watch.take()] == list(range(4, 1004))


def test_others_optimizers_are_refused() -> None:
    with pytest.raises(TypeError, match="Watch is for optimizers of zerox, got SGD"):
        Watch(torch.optim.SGD([torch.zeros(1)], lr=1.0))


def sends_nothing(rank: int, _: int) -> None:
    """A watch costs no message: one rank watches, and the other does not."""
    model, optimizer = make()
    before = optimizer.inside.manager.traffic[0]
    watch = Watch(optimizer) if rank == 0 else None
    for _ in range(2):
        backward(model, rank)
        optimizer.step()
    counts = [None, None]
    dist.all_gather_object(counts, optimizer.inside.manager.traffic[0] - before)
    assert counts[0] == counts[1]
    assert watch is None or len(watch.take()) == 2


def test_a_watch_sends_nothing() -> None:
    run_ranks(sends_nothing, 2)


def test_threads_may_take_while_another_one_trains() -> None:
    model, optimizer = make()
    watch = Watch(optimizer)
    taken: list[int] = []
    done = threading.Event()

    def take() -> None:
        while not done.is_set():
            taken.extend(step for step, _ in watch.take())

    thread = threading.Thread(target=take)
    thread.start()
    for _ in range(200):
        backward(model)
        optimizer.step()
    done.set()
    thread.join()
    taken.extend(step for step, _ in watch.take())
    assert taken == list(range(1, 201))
