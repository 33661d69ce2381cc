"""Pairs of options with parameters on an accelerator, which tests/optimizer/test_pairs.py leaves out.

A captured step() is one that is told it is being captured, as in test_capturable.py.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.accelerator.fake import expect_no_races, machine, mesh_of_four, run_fake_ranks
from tests.optimizer.combined import STEPS, Training, outcome, trained
from tests.optimizer.made import ON_MESH
from tests.optimizer.ways import (
    Pair,
    Way,
    is_inner,
    needs_accelerator,
    not_refused,
    pairs_with,
    plain_twin,
    way_of,
    ways,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox import engine as engine_module
from zerox.calls.capture import is_capturing
from zerox.plan.choices import TABLES, Setting, some
from zerox.plan.combinations import OF_STAGE_3, But
from zerox.ranks.group import Ranks
from zerox.residency.device_memory import BY_TYPE

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
HERE = threading.local()  # of the rank that this thread is


@pytest.fixture(autouse=True)
def any_device(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """FusedShardedAdam takes the fake accelerator's tensors, and its ranks."""
    monkeypatch.setattr(engine_module, "find_ranks", lambda *_, **__: HERE.ranks)
    monkeypatch.setattr(engine_module, "check_params", lambda *_, **__: None)
    monkeypatch.setattr(engine_module, "is_capturing", lambda *_: HERE.captures)
    monkeypatch.setattr(
        Ranks, "broadcast", lambda *_, **__: None
    )  # which the backend has not: they are the same already
    on_host = Ranks.all_reduce

    def all_reduce(self: Ranks, values: torch.Tensor, op: Any) -> None:
        """The backend has none either. Of counts, which are the same on all ranks."""
        on_host(self, values, op) if values.is_cpu else values.mul_(self.size)

    monkeypatch.setattr(Ranks, "all_reduce", all_reduce)
    machine().take_races()
    yield monkeypatch
    expect_no_races()


def step_of(training: Training) -> None:
    """Captured where it may be, but for the first one."""
    HERE.captures = training.way["capturable"] == "True" and training.steps_made > 0
    if HERE.captures:
        training.optimizer.synchronize()
    training.optimizer.step()
    HERE.captures = False


def train_here(ranks: Ranks, way: Way) -> str:
    HERE.ranks, HERE.captures = ranks, False
    training = Training(ranks.rank, way, ranks.device)
    training.run(step_of)
    return training.digest_of_params()


def kind_of(way: Way, world_size: int) -> str:
    if world_size == 1 or way["process_group"] == '"alone"':
        return "alone"
    if way["backend"] == "gloo":
        return "via host"
    return "native" if way["exchange"] == '"native"' else "direct"


@pytest.mark.parametrize("world_size", [1, 2, 4])
def test_pairs_on_an_accelerator_train_with_the_bits_of_the_cpu(world_size: int) -> None:
    # The fake accelerator has no sparse tensors: tests/gpu/test_rows.py trains tables.
    drawn = [{**way, TABLES: "False"} for way in ways(accelerator=True)]
    many = [way for way in drawn if world_size > 1 or way["backend"] == "nccl"]
    many = [way for way in many if (way["process_group"] == ON_MESH) is (world_size == 4)]
    assert many
    twins = {tuple(twin.values()): twin for twin in map(plain_twin, many)}
    digests = run_ranks(trained, world_size, list(twins.values()), timeout_s=300)[0]
    expected = dict(zip(twins, digests, strict=True))
    wrong = []
    for way in many:
        params, _ = expected[tuple(plain_twin(way).values())]
        kind = kind_of(way, world_size)
        mesh = mesh_of_four() if world_size == 4 else ()
        size = 1 if kind == "alone" else world_size
        run = functools.partial(run_fake_ranks, train_here, size, kind, way, mesh=mesh)
        found = outcome(run)
        if found != [params] * len(found):
            wrong.append(f"{way}: {found}")
    assert not wrong, "\n".join(wrong)


def test_every_pair_that_needs_an_accelerator_is_drawn() -> None:
    drawn = [set(way.items()) for way in ways(accelerator=True)]
    for pair in not_refused():
        way = way_of(*pair)
        if way is not None and needs_accelerator(way) and not is_inner(way):
            assert any({(each.option, each.value) for each in pair} <= way for way in drawn)


# ---- pairs with a But


def raises_where_it_is_captured(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    over_gloo = Ranks(0, 2, "gloo", "direct", None, None, torch.device("cuda"))
    HERE.ranks = Ranks.alone()
    inside = FusedShardedAdam([torch.nn.Parameter(torch.ones(3))]).inside
    with pytest.raises(RuntimeError, match=r"can't be captured over gloo.*use nccl"):
        is_capturing(over_gloo, True, inside.manager, inside.calls.record)


def hides_nothing(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def left_after(ranks: Ranks) -> list[int]:
        HERE.ranks, HERE.captures = ranks, False
        training = Training(ranks.rank, way, ranks.device)
        left = []

        def step(training: Training) -> None:
            step_of(training)
            left.append(len(training.optimizer.inside.manager.params.missing))

        training.run(step)
        return left

    for left in run_fake_ranks(left_after, 2, "native"):
        assert left[0] > 0, "a step that is not captured hides its gather"
        assert left[1:] == [0] * (STEPS - 1)


def goes_through_the_host(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def waits_of_step(ranks: Ranks) -> list[str]:
        HERE.ranks, HERE.captures = ranks, False
        training = Training(ranks.rank, way, ranks.device)
        training.backwards(0)
        machine().take_waits(ranks.device.index)
        training.optimizer.step()
        waits: list[str] = machine().take_waits(ranks.device.index)
        training.backwards(1)
        assert training.optimizer.inside.gather.residents.counts.fetched_bytes > 0
        return waits

    monkeypatch.delitem(BY_TYPE, "fake")
    for waits in run_fake_ranks(waits_of_step, 2, kind_of(way, 2)):
        assert "copy between host and device" in waits, "others read the shard there"


def lookups_take_memory(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    def bytes_of_a_lookup(ranks: Ranks) -> tuple[int, int]:
        """The most, and what is left."""
        HERE.ranks, HERE.captures = ranks, False
        table = torch.nn.Embedding(70, 4).to(ranks.device)
        groups = [{"params": table.parameters(), "sparse": True, "weight_decay": 0.0}]
        residents = FusedShardedAdam(groups, stage=3).inside.gather.residents
        residents.take_most_bytes()
        table(torch.tensor([3], device=ranks.device))
        return residents.take_most_bytes(), residents.resident_bytes

    assert run_fake_ranks(bytes_of_a_lookup, 2, kind_of(way, 2)) == [(70 * 4 * 4, 0)] * 2


SHOWN: dict[frozenset[Setting], Callable[[Way, Any], None]] = {
    **{
        frozenset((one, other)): goes_through_the_host
        for one in OF_STAGE_3
        for other in (*some("device", "cuda"), *some("backend", "nccl"))
    },
    **{
        frozenset((one, other)): lookups_take_memory
        for one in some(TABLES, "True")
        for other in (*some("device", "cuda"), *some("backend", "nccl"))
    },
    frozenset(some("capturable", "True") + some("backend", "gloo")): raises_where_it_is_captured,
    frozenset(some("capturable", "True") + some("overlap_gather", "called")): hides_nothing,
}
BUTS = [pair for pair in pairs_with(But) if needs_accelerator(way_of(*pair) or {"device": "cpu"})]


@pytest.mark.parametrize("pair", BUTS, ids=lambda pair: " with ".join(map(str, pair)))
def test_a_but_is_what_the_table_says(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    assert frozenset(pair) in SHOWN, "nothing shows it"
    way = way_of(*pair)
    assert way is not None
    SHOWN[frozenset(pair)](way, monkeypatch)


def test_what_is_shown_is_in_the_table() -> None:
    assert set(SHOWN) == set(map(frozenset, BUTS))


# ---- sums that wait on the inner axis of a mesh


class Waiting(Training):
    """All but one of each step's backwards are inside no_sync(outer=True)."""

    def backwards(self, step: int) -> None:
        for micro in range(3):
            with self.optimizer.no_sync(outer=True):
                self.model(self.batch(step, micro)).backward()
            if micro == 0 and step == 1:
                self.optimizer.zero_grad(set_to_none=False)  # what waits is replaced
        self.model(self.batch(step, 3)).backward()


def way_on_mesh(device: str, backend: str) -> Way:
    way = way_of(*some("process_group", ON_MESH), *some("device", device), *some("backend", backend))
    assert way is not None
    return way


def waits_on_cpu(rank: int, _: int) -> str:
    training = Waiting(rank, way_on_mesh("cpu", "gloo"))
    training.run()
    return training.digest_of_params()


def waits_here(ranks: Ranks, way: Way) -> str:
    HERE.ranks, HERE.captures = ranks, False
    training = Waiting(ranks.rank, way, ranks.device)
    training.run(step_of)
    return training.digest_of_params()


@pytest.mark.parametrize("backend", ["nccl", "gloo"])
def test_sums_wait_on_an_accelerator_with_the_bits_of_the_cpu(backend: str) -> None:
    way = way_on_mesh("cuda", backend)
    kind = "via host" if backend == "gloo" else "direct"
    found = run_fake_ranks(waits_here, 4, kind, way, mesh=mesh_of_four())
    assert found == run_ranks(waits_on_cpu, 4)
