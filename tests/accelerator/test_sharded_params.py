"""Sharded parameters (ZeRO stage 3) on an accelerator: rooms come and go in the order of its streams."""

from __future__ import annotations

import gc
import threading
import time
from collections.abc import Iterator
from contextlib import suppress

import pytest
import torch
from torch import Tensor

from tests.accelerator.fake import machine, on_stream, run_fake_ranks
from tests.accelerator.sharded import (
    CAP_MB,
    KINDS,
    LIMITS,
    WAYS,
    WIDTH,
    Training,
    assert_as_in_stage_2,
    ranks_of_threads,
)
from tests.residency.test_faults import handler
from zerox import _C as C
from zerox import FusedShardedAdam
from zerox.grads.placeholder import ShardedGrad
from zerox.ranks.group import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")
ONE_AT_A_TIME = threading.Lock()


@pytest.fixture(autouse=True, params=WAYS)
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from ranks_of_threads(monkeypatch, request.param)


def trained(ranks: Ranks, stage: int, limit: str, two_streams: bool, frozen: bool) -> list[Tensor]:
    training = Training(ranks, stage, limit, frozen)
    side = machine().new_stream(ranks.device.index) if two_streams else 0
    for step in range(3):
        waits = training.step(step, side)
        assert ranks.via_host or not waits, f"the host waited for the device: {waits}"
    if stage == 3 and limit != "inf":
        assert training.residents.counts.fetches > 3 * len(training.residents.resident), "buckets came and went"
    return training.values()


@pytest.mark.parametrize("two_streams", [False, True], ids=["one stream", "two streams"])
@pytest.mark.parametrize("limit", LIMITS)
@pytest.mark.parametrize(("world_size", "kind"), [(2, kind) for kind in KINDS] + [(3, "direct")])
def test_a_training_has_the_bits_of_stage_2(world_size: int, kind: str, limit: str, two_streams: bool) -> None:
    """And no race. The host waits for the device in step() only."""
    assert_as_in_stage_2(world_size, kind, trained, limit, two_streams, False)


@pytest.mark.parametrize("kind", KINDS)
def test_frozen_parameters_come_and_go_too(kind: str) -> None:
    assert_as_in_stage_2(2, kind, trained, "two buckets", False, True)


def written(ranks: Ranks, stage: int, limit: str) -> list[Tensor]:
    """Parameters are written between steps: by operators, by moving them, and inside whole()."""
    training = Training(ranks, stage, limit)
    layers = training.model.layers
    training.step(0)
    with torch.no_grad():
        layers[1].weight.mul_(2)
        layers[2].bias.copy_(torch.arange(WIDTH))
    training.step(1)
    layers[3].weight.data = layers[3].weight.detach() / 2
    layers[4].weight.data, layers[5].weight.data = layers[5].weight.data, layers[4].weight.data
    training.step(2)
    with training.optimizer.whole():
        with torch.no_grad():
            layers[0].weight.add_(1)
        training.step(3)
        with torch.no_grad():
            layers[0].weight.add_(1)
    with suppress(ZeroDivisionError), training.optimizer.whole(), torch.no_grad():
        layers[0].weight.add_(0 if stage == 2 else 7)  # taken back
        raise ZeroDivisionError
    training.model.load_state_dict({name: value / 2 for name, value in training.model.state_dict().items()})
    training.step(4)
    return training.values()


@pytest.mark.parametrize("limit", ["released at once", "inf"])
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_between_steps_counts_as_in_stage_2(kind: str, limit: str) -> None:
    assert_as_in_stage_2(2, kind, written, limit)


def shards_written(ranks: Ranks, stage: int) -> list[Tensor]:
    """As zerox.load() does it, which the threads that are ranks here can't call: into all shards, frozen ones too."""
    training = Training(ranks, stage, "two buckets", frozen=True)
    training.step(0)
    gather = training.optimizer.inside.gather
    with torch.no_grad(), gather.updating():
        gather.mark_written()
        if stage == 3:
            ranks.barrier("nobody reads")
        for values in [each.buffer.own for each in gather.all] if stage == 3 else training.model.parameters():
            values.mul_(2)
    read = training.values()
    training.step(1)
    return [*read, *training.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_into_shards_is_read_by_all(kind: str) -> None:
    assert_as_in_stage_2(2, kind, shards_written)


def without_inputs(ranks: Ranks, stage: int) -> list[Tensor]:
    """A region of compiled code, as in evaluation, that reads parameters by their addresses and shows none."""
    training = Training(ranks, stage, "released at once")
    training.step(0)
    with ONE_AT_A_TIME:  # ranks are threads, and a region concerns all optimizers of a process
        with machine().CompiledRegion():
            assert stage == 2 or all(training.residents.resident)
            read = machine().read_by_address(list(training.model.parameters()))
        assert stage == 2 or not any(training.residents.resident)
    return read


@pytest.mark.parametrize("kind", KINDS)
def test_a_region_that_shows_no_inputs_has_all_parameters(kind: str) -> None:
    assert_as_in_stage_2(2, kind, without_inputs)


def read_beside(ranks: Ranks, is_told: bool) -> None:
    """A kernel on another stream, which no operator shows, reads while buckets come and go."""
    training = Training(ranks, 3, "two buckets")
    training.step(0)
    index, param = ranks.device.index, training.model.layers[0].weight
    side = machine().new_stream(index)
    with training.optimizer.whole():
        machine().wait_stream(index, side, 0)
        with on_stream(side, index):
            machine().read_by_address([param])
        if is_told:
            machine().record_stream(param, index, side)
    training.step(1)
    machine().wait_stream(index, 0, side)


@pytest.mark.parametrize("is_told", [False, True])
def test_a_stream_that_a_parameter_was_told_of_counts_as_a_reader(is_told: bool) -> None:
    run_fake_ranks(read_beside, 2, "direct", is_told)
    assert bool(machine().take_races()) is not is_told


def outlived(ranks: Ranks, stage: int) -> list[Tensor]:
    training = Training(ranks, stage, "released at once")
    training.step(0)
    del training.optimizer
    if stage == 3:
        del training.residents
    again = Training(ranks, stage, "two buckets")
    again.model = training.model
    y = training.model(training.batch(1))
    y.square().sum().backward()
    return [*training.values(), y.detach().cpu(), *[param.grad.cpu() for param in training.model.parameters()]]


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_outlives_its_optimizer(kind: str) -> None:
    assert_as_in_stage_2(2, kind, outlived)


def taken_over(ranks: Ranks, stage: int) -> list[Tensor]:
    """A second optimizer takes rooms and shards over, while what the first one has queued is still running."""
    machine().set_busy_us(0, 3000)
    training = Training(ranks, stage, "released at once")
    training.step(0)
    y = training.model(training.batch(1))
    options = {"resident_mb": LIMITS["two buckets"]} if stage == 3 else {}
    if stage == 3:
        shards = [each.buffer.own.data_ptr() for each in training.optimizer.inside.gather.all]
        fetches = training.residents.counts.fetches
        del training.residents
    del training.optimizer
    training.optimizer = FusedShardedAdam(
        training.model.named_parameters(), lr=0.01, stage=stage, bucket_cap_mb=CAP_MB, **options
    )
    if stage == 3:
        residents = training.optimizer.inside.gather.residents
        assert [each.buffer.own.data_ptr() for each in training.optimizer.inside.gather.all] == shards
        assert (residents.counts.fetches, fetches > 0) == (0, True)
    read = [y.detach().cpu(), *training.values()]
    training.step(2)
    training.step(3)
    return [*read, *training.values()]


@pytest.mark.parametrize("kind", KINDS)
def test_a_new_optimizer_takes_rooms_and_shards_over(kind: str) -> None:
    assert_as_in_stage_2(2, kind, taken_over)
    assert not machine().take_races()


@pytest.fixture
def no_garbage() -> Iterator[None]:
    """Tests before leave some, and live bytes are the whole machine's."""
    gc.collect()
    gc.disable()
    yield
    gc.enable()


def await_what_comes_ahead(residents: C.Residency, quiet_s: float = 0.2) -> None:
    """Until for so long no bucket was on its way, whose memory comes before the bucket, and goes after the last one."""
    began = arrived = 0
    start = since = time.monotonic()
    while began != arrived or time.monotonic() - since < quiet_s:
        if events := residents.take_events():
            began += sum(event.kind == C.ResidencyEvent.Kind.FETCH for event in events)
            arrived += sum(event.kind == C.ResidencyEvent.Kind.ARRIVE for event in events)
            since = time.monotonic()
        assert time.monotonic() < start + 30, f"{began} buckets set out and {arrived} arrived"
        time.sleep(0.01)


def bytes_of_rooms(ranks: Ranks, all_here: threading.Barrier) -> tuple[int, int]:
    """What is resident after a forward, as the residents say and as releasing it frees."""
    training = Training(ranks, 3, "two buckets")
    training.residents.record(True)
    with torch.no_grad():
        training.model(training.batch(0))
    await_what_comes_ahead(training.residents)
    said = training.residents.resident_bytes
    all_here.wait()  # live bytes are the whole machine's: the other rank waits
    before = machine().live_bytes()
    if ranks.rank == 0:
        training.residents.release_all()
    freed = before - machine().live_bytes()
    all_here.wait()
    return said, freed


@pytest.mark.usefixtures("no_garbage")
def test_released_rooms_give_their_memory_back() -> None:
    said, freed = run_fake_ranks(bytes_of_rooms, 2, "direct", threading.Barrier(2))[0]
    assert 0 < said == freed <= LIMITS["two buckets"] * 2**20


def handler_of_faults(ranks: Ranks) -> int:
    training = Training(ranks, 3, "released at once")
    training.step(0)
    return handler()


@pytest.mark.usefixtures("no_garbage")
def test_no_read_can_fault_so_there_is_no_handler() -> None:
    before = handler()
    assert run_fake_ranks(handler_of_faults, 2, "direct") == [before] * 2


def left_for_the_host(ranks: Ranks, stage: int) -> list[Tensor]:
    """The module gets new parameters there, with copies of placeholders; the optimizer keeps its own."""
    training = Training(ranks, stage)
    own = list(training.model.parameters())
    training.model(training.batch(0)).square().sum().backward()
    with training.optimizer.whole():
        training.model.cpu()
    for param, moved in zip(own, training.model.parameters(), strict=True):
        assert type(param.grad) is type(moved.grad) is ShardedGrad
        assert (param.grad.device, moved.grad.device) == (ranks.device, torch.device("cpu"))
        with pytest.raises(RuntimeError, match="only a copy of the placeholder"):
            moved.grad.norm()
    training.optimizer.step()
    with training.optimizer.whole():
        return [param.detach().cpu() for param in own]


def test_a_model_may_leave_for_the_host_with_its_gradients() -> None:
    assert_as_in_stage_2(2, "direct", left_for_the_host)
