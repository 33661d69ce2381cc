"""How much of sharded parameters is whole at a time, what is fetched for it, and what it takes in memory."""

from __future__ import annotations

import itertools
import time
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

from tests.ranks import run_ranks
from tests.residency.models import Gpt, array, entropy
from tests.residency.rig import batch, build, made, residents, run_by_way, train
from tests.thinned import thinned
from zerox import FusedShardedAdam, estimate
from zerox._C import room_bytes

MIB = 2**20


class Chain(nn.Module):
    """Layers of one bucket each, in the order of forward."""

    def __init__(self, count: int = 6, width: int = 64) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width, bias=False) for _ in range(count))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = torch.tanh(layer(x))
        return x


BUCKET = 64 * 64 * 4


def fetches_a_step(rank: int, world_size: int, resident: float, steps: int) -> list[int]:
    model = Chain()
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=resident)
    found = []
    for _ in range(steps):
        before = residents(optimizer).counts.fetches
        model(torch.ones(2, 64, requires_grad=True)).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(residents(optimizer).counts.fetches - before)
        assert residents(optimizer).counts.faults == 0
    return found


@pytest.mark.parametrize("room", [1, 2, 3, 6, float("inf")])
def test_what_is_resident_at_the_turn_is_not_fetched_twice(room: float) -> None:
    """Forward fetches all of six buckets, backward all but those that are still there."""
    for found in run_ranks(fetches_a_step, 2, room * BUCKET / MIB, 3):
        assert found[1:] == [12 - min(room, 6)] * 2


def fetches_of_evaluations(
    rank: int, world_size: int, room: int, passes: int, layer_s: float = 0.0
) -> tuple[int, int, int]:
    """Fetches, those ahead of reads, and reads that waited, once their order is known. ``layer_s``: of computing."""
    model = Chain()
    for layer in model.layers:
        layer.register_forward_hook(lambda *_: time.sleep(layer_s))
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=room * BUCKET / MIB)

    def run(count: int) -> None:
        with torch.no_grad():
            for _ in range(count):
                model(torch.ones(2, 64))

    run(2)
    before = residents(optimizer).counts
    run(passes)
    after = residents(optimizer).counts
    dist.barrier()
    return tuple(getattr(after, name) - getattr(before, name) for name in ("fetches", "prefetches", "waits"))  # type: ignore[return-value]


@pytest.mark.parametrize("room", [2, 3, 5])
def test_what_is_needed_latest_goes_first(room: int) -> None:
    """Of six buckets that are read round and round, no order of releases leaves more than one less than fit in place
    for five reads. What was not read for longest would always be what is needed next: all would be fetched."""
    for fetches, prefetches, waits in run_ranks(fetches_of_evaluations, 2, room, 50):
        assert prefetches == 0
        assert fetches == waits
        assert abs(fetches - 300 * (1 - (room - 1) / 5)) <= 3


def test_what_comes_by_message_is_fetched_ahead() -> None:
    for _, prefetches, waits in run_ranks(run_by_way, 2, "messages", fetches_of_evaluations, 3, 20, 0.005):
        assert prefetches > 100
        assert waits < 20


def most_resident(rank: int, world_size: int) -> tuple[int, int, int]:
    """While buckets come ahead: in bytes, the limit, and how many came so."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(8)))
    optimizer = build(model, bucket_cap_mb=0.02, resident_mb=0.05)
    residents(optimizer).record(True)
    for step in range(30):
        model(torch.ones(4, 64) * step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    most = max(each.resident_bytes for each in residents(optimizer).take_events())
    return most, int(0.05 * MIB), residents(optimizer).counts.prefetches


def test_what_comes_ahead_stays_within_the_limit() -> None:
    for most, limit, prefetches in run_ranks(run_by_way, 2, "messages", most_resident):
        assert most <= limit
        assert prefetches > 0


def resident_bytes(rank: int, world_size: int, room: int) -> tuple[int, int, int]:
    model = Chain()
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=room * BUCKET / MIB)
    most, most_with_spare = 0, 0

    def look(*_: Any) -> None:
        nonlocal most, most_with_spare
        most = max(most, residents(optimizer).resident_bytes)
        most_with_spare = max(most_with_spare, residents(optimizer).room_bytes)

    for layer in model.layers:
        layer.register_forward_hook(look)
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    return most, most_with_spare, residents(optimizer).resident_bytes


@pytest.mark.parametrize("room", [1, 2, 4])
def test_the_limit_holds(room: int) -> None:
    for most, most_with_spare, after_step in run_ranks(resident_bytes, 2, room):
        assert most == room * BUCKET
        assert most_with_spare == room * BUCKET
        assert after_step == 0


def all_at_once(rank: int, world_size: int) -> list[str]:
    model = Chain()
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=2 * BUCKET / MIB)
    found = []
    for _ in range(2):
        torch._foreach_norm(list(model.parameters()))
        found.append(residents(optimizer).resident_bytes // BUCKET)
    return found


def test_an_operator_that_reads_more_than_the_limit_passes_it_for_as_long_as_it_runs() -> None:
    assert run_ranks(all_at_once, 2) == [[2, 2]] * 2


def warned(rank: int, world_size: int) -> tuple[int, int]:
    """How many warnings an operator's reads give, said each time and said once."""
    model = Chain()
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=2 * BUCKET / MIB)
    found = []
    for always in (True, False):
        torch.set_warn_always(always)
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            for _ in range(3):
                torch._foreach_norm(list(model.parameters()))
        expected = "aten::_foreach_norm reads parameters of 0.046875 MiB at once, more than resident_mb=0.03125"
        found.append(sum(expected in str(each.message) for each in told))
    assert residents(optimizer).resident_bytes == 2 * BUCKET
    return found[0], found[1]


def test_an_operator_that_passes_the_limit_is_named_once() -> None:
    for each_time, once in run_ranks(warned, 2):
        assert each_time >= 3
        assert once <= 1  # it may have been said in a test before


class OfThree(torch.autograd.Function):
    """Reads three parameters at once, in backward by their addresses."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, *weights: Tensor) -> Tensor:
        ctx.save_for_backward(*weights)
        return x * sum(float(array(weight).sum()) for weight in weights)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        total = sum(float(array(weight).sum()) for weight in ctx.saved_tensors)
        return grads[0] * total, *(grads[0].sum() * torch.ones_like(weight) for weight in ctx.saved_tensors)


def three_at_once(rank: int, world_size: int) -> list[int]:
    model = Chain(3)
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=BUCKET / MIB)
    found = []
    for _ in range(3):
        before = residents(optimizer).counts
        OfThree.apply(torch.ones(1, requires_grad=True), *model.parameters()).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        after = residents(optimizer).counts
        assert after.faults == before.faults
        found.append(after.fetches - before.fetches)
    return found


def test_a_node_that_reads_three_buckets_fetches_each_once_where_one_may_be_whole() -> None:
    """Three in forward and three in backward, less what is there at first."""
    assert run_ranks(three_at_once, 2) == [[4, 6, 6]] * 2


def reused(rank: int, world_size: int) -> tuple[int, int, int]:
    """Spare bytes while all is released, and once a bucket is back; and the bytes of a bucket."""
    model = Chain(2, 1024)
    optimizer = build(model, bucket_cap_mb=4)
    one = residents(optimizer)
    one.release_all()
    before = one.room_bytes
    model.layers[0].weight.sum()
    assert one.resident_bytes == 4 * MIB
    assert one.room_bytes == before  # nothing is made anew
    after = one.room_bytes - one.resident_bytes
    return before, after, 4 * MIB


def test_memory_that_a_bucket_leaves_is_used_for_the_next() -> None:
    """New memory takes three times as long to fill."""
    assert run_ranks(reused, 2) == [(8 * MIB, 4 * MIB, 4 * MIB)] * 2


def too_small(rank: int, world_size: int) -> None:
    model = Chain()
    with pytest.raises(ValueError, match=r"resident_mb=0.01 is less than bucket 0 \(layers.5.weight\).* 0.016 MiB"):
        build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=0.01)
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB, resident_mb=BUCKET / MIB)
    train_once(model, optimizer)


def train_once(model: nn.Module, optimizer: FusedShardedAdam) -> None:
    model(torch.ones(2, 64)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def test_a_limit_below_the_largest_bucket_is_refused_with_its_name() -> None:
    run_ranks(too_small, 2)


@pytest.mark.parametrize("resident_mb", [0, -1.0, float("nan")])
def test_a_limit_that_is_none_is_refused(resident_mb: float) -> None:
    with pytest.raises(ValueError, match="resident_mb must be a positive number, inf or None"):
        FusedShardedAdam(Gpt().parameters(), stage=3, resident_mb=resident_mb)


def steady(rank: int, world_size: int) -> tuple[int, int, int]:
    """Mappings, open files and bytes after many evaluations and steps, beside those after a few."""
    model, optimizer = made(resident_mb=0.02)

    def look() -> tuple[int, int, int]:
        import os

        with open("/proc/self/maps") as maps:
            return sum(1 for _ in maps), len(os.listdir("/proc/self/fd")), room_bytes()

    def run(steps: int, evaluations: int) -> None:
        train(model, optimizer, rank, entropy, steps=steps)
        with torch.no_grad():
            for step in range(evaluations):
                model(batch(step, rank))

    run(20, 20)
    before = look()
    run(200, 500)
    after = look()
    return tuple(a - b for a, b in zip(after, before, strict=True))  # type: ignore[return-value]


def test_nothing_grows_over_many_steps_and_evaluations() -> None:
    for maps, files, room in run_ranks(steady, 2, timeout_s=120):
        assert maps <= 4
        assert files <= 0
        assert room == 0


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(weight)
        return x * weight.sum()

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        (weight,) = ctx.saved_tensors
        return grads[0] * weight.sum(), (grads[0].sum() * torch.ones_like(weight))


def many_calls(rank: int, world_size: int) -> list[int]:
    model = Chain(1)
    optimizer = build(model, bucket_cap_mb=BUCKET / MIB)
    weight = next(model.parameters())
    for _ in range(20_000):
        out = Doubled.apply(torch.ones(1), weight)
    found = [residents(optimizer).num_calls]
    out.sum().backward()
    optimizer.step()
    found.append(residents(optimizer).num_calls)
    return found


def test_calls_of_functions_that_never_run_backward_are_forgotten() -> None:
    assert run_ranks(many_calls, 2) == [[1 << 14, 0]] * 2


def lasting(rank: int, world_size: int, resident_mb: float | None, dtype: torch.dtype, num_frozen: int) -> None:
    options: dict[str, Any] = {"resident_mb": resident_mb}
    model = Chain(8, 512).to(dtype)
    for param in itertools.islice(model.parameters(), num_frozen):
        param.requires_grad_(False)
    options["process_group"] = init_device_mesh("cpu", (2, 2)) if world_size == 4 else None
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, bucket_cap_mb=1, **options)
    model_bytes = sum(param.nbytes for param in model.parameters())
    formula = estimate(model.parameters(), world_size, stage=3, bucket_cap_mb=1, **options)
    for step in range(2):
        if step:
            optimizer.step()
        model(torch.ones(2, 512, dtype=dtype)).sum().backward()
    found = optimizer.memory_bytes()
    room = residents(optimizer).room_bytes
    limit = (resident_mb or 3) * MIB
    if num_frozen == 0 and world_size == 2:  # of buckets of one size, as many as fit
        assert room == (model_bytes if limit >= model_bytes else limit // MIB * MIB)
        assert found.parameters == formula.parameters - (min(limit, model_bytes) - room)
    assert found.parameters <= formula.parameters
    assert found.master == formula.master
    assert found.moments == formula.moments
    assert found.gradients == formula.gradients


KEPT = list(itertools.product([None, 1.125, 2.25, float("inf")], [0, 7], [torch.float32, torch.bfloat16]))
# How many ranks share a bucket does not depend on what of it is frozen or stays: each value once, and all on three.
FEW_KEPT = [
    (None, 0, torch.float32),
    (1.125, 0, torch.bfloat16),
    (1.125, 7, torch.bfloat16),
    (2.25, 0, torch.float32),
    (float("inf"), 7, torch.float32),
]


@pytest.mark.parametrize(("kept", "world_size"), thinned(KEPT, FEW_KEPT, [2, 3, 4], [3]), ids=str)
def test_memory_is_the_estimate(world_size: int, kept: tuple[float | None, int, torch.dtype]) -> None:
    resident_mb, num_frozen, dtype = kept
    run_ranks(lasting, world_size, resident_mb, dtype, num_frozen)
