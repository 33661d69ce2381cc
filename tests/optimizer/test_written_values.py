"""Values that are written into parameters between steps are what the next step starts from, masters included."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.optimizer.masters import join
from tests.optimizer.models import backward, batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.rules.rule import MASTERS, REMAINDER

KINDS = [
    (torch.float64, None),
    (torch.float32, None),
    (torch.bfloat16, None),
    (torch.bfloat16, "fp32"),
    (torch.float16, "fp32"),
    (torch.bfloat16, "remainder"),
]


def write_by_load_state_dict(model: nn.Module, values: list[Tensor]) -> None:
    names = [name for name, _ in model.named_parameters()]
    model.load_state_dict(dict(zip(names, values, strict=True)), strict=False)


@torch.no_grad()
def write_by_copy(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.copy_(value)


def write_by_data_copy(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data.copy_(value)


@torch.no_grad()
def write_by_foreach(model: nn.Module, values: list[Tensor]) -> None:
    torch._foreach_copy_(list(model.parameters()), values)


def write_by_new_data(model: nn.Module, values: list[Tensor]) -> None:
    for p, value in zip(model.parameters(), values, strict=True):
        p.data = value.clone()


def write_by_to(model: nn.Module, values: list[Tensor]) -> None:
    dtype = values[0].dtype
    model.to(torch.float64 if dtype is not torch.float64 else torch.float32)
    model.to(dtype)
    write_by_copy(model, values)


WAYS = [
    write_by_load_state_dict,
    write_by_copy,
    write_by_data_copy,
    write_by_foreach,
    write_by_new_data,
    write_by_to,
]


def one_step(rank: int, optimizer: FusedShardedAdam, model: nn.Module, step: int) -> None:
    backward(model, batch(rank, step, dtype=next(model.parameters()).dtype))
    optimizer.step()
    optimizer.zero_grad()


def values_of(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def built(dtype: torch.dtype, master: str | None) -> tuple[nn.Module, FusedShardedAdam]:
    model = make_model(dtype)
    return model, FusedShardedAdam(model.parameters(), lr=1e-2, eps=1e-4, master_weights=master, bucket_cap_mb=0.03)


def exact_values(optimizer: FusedShardedAdam) -> list[Tensor]:
    """Masters of this rank's shards, and the parameters themselves where there are none."""
    found = []
    for bucket in optimizer.inside.buckets:
        shard = bucket.param_shard
        if bucket.master is None:
            found.append(shard.clone())
        elif bucket.master.spec == REMAINDER:
            found.append(join(shard, bucket.master.values))
        else:  # one that no step has seen since something else was written counts no more
            master = bucket.master.values
            found.append(torch.where(master.to(shard.dtype) == shard, master, shard.float()))
    return found


def written_then_stepped(
    rank: int, _: int, dtype: torch.dtype, master: str | None, write: Callable[[nn.Module, list[Tensor]], None]
) -> None:
    model, optimizer = built(dtype, master)
    for step in range(2):
        one_step(rank, optimizer, model, step)
    # Of the other sign: an element that is written with the value it has keeps its master.
    values = [-(p * 0.5 + torch.where(p < 0, -0.1, 0.1)).to(dtype) for p in values_of(model)]
    write(model, values)
    # The twin is built on these values: its masters are exactly them. It has the moments and step counts.
    twin = make_model(dtype)
    write_by_copy(twin, values)
    fresh = FusedShardedAdam(twin.parameters(), lr=1e-2, eps=1e-4, master_weights=master, bucket_cap_mb=0.03)
    for ours, theirs in zip(optimizer.inside.buckets, fresh.inside.buckets, strict=True):
        theirs.steps.copy_(ours.steps)
        for key, stored in theirs.state.items():
            if stored.spec not in MASTERS:
                stored.values.copy_(ours.state[key].values)
    one_step(rank, optimizer, model, 2)
    one_step(rank, fresh, twin, 2)
    if master != "remainder":
        for p, q in zip(model.parameters(), twin.parameters(), strict=True):
            assert torch.equal(p, q)
        for a, b in zip(exact_values(optimizer), exact_values(fresh), strict=True):
            assert torch.equal(a, b)
        return
    # Which 16 bits belong to a value that somebody wrote can't be told from the pair: old ones stay, less than half a
    # unit in bf16's last place.
    for bucket, a, b in zip(optimizer.inside.buckets, exact_values(optimizer), exact_values(fresh), strict=True):
        unit = torch.finfo(torch.bfloat16).eps * b.abs().clamp(min=1e-2)
        assert ((a - b).abs() <= unit).all(), bucket.plan
    for p, value in zip(model.parameters(), values, strict=True):
        assert p.numel() == 0 or (p - value).abs().max() < 0.1, "a step from the old value ends further away"


@pytest.mark.parametrize("write", WAYS, ids=lambda way: way.__name__)
@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
def test_the_next_step_starts_from_what_was_written(
    dtype: torch.dtype, master: str | None, write: Callable[[nn.Module, list[Tensor]], None]
) -> None:
    run_ranks(written_then_stepped, 2, dtype, master, write)


def swapped(rank: int, _: int, dtype: torch.dtype, master: str | None, how: str) -> list[Tensor]:
    model, optimizer = built(dtype, master)
    average = copy.deepcopy(values_of(model))
    for step in range(4):
        one_step(rank, optimizer, model, step)
        for mean, value in zip(average, model.parameters(), strict=True):
            mean.lerp_(value.detach(), 0.5)
        if how == "never":
            continue
        kept = values_of(model)
        write = write_by_data_copy if how == "copied" else write_by_new_data
        write(model, average)
        model(batch(rank, 100 + step, dtype=dtype))
        write(model, kept)
    return values_of(model) + exact_values(optimizer)


@pytest.mark.parametrize("how", ["copied", "new storage"])
@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
def test_swapping_an_average_in_and_back_changes_nothing(dtype: torch.dtype, master: str | None, how: str) -> None:
    for never, swap in zip(*(run_ranks(swapped, 2, dtype, master, each) for each in ("never", how)), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(never, swap, strict=True))


def masked(rank: int, _: int, dtype: torch.dtype, master: str | None) -> None:
    """Half of the elements are set to zero after each step: the masters of the others are none the worse for it."""
    models = [make_model(dtype) for _ in range(2)]
    optimizers = [
        FusedShardedAdam(model.parameters(), lr=1e-4, weight_decay=0.0, master_weights=master) for model in models
    ]
    keep = [torch.arange(p.numel()).reshape(p.shape) % 2 == 0 for p in models[0].parameters()]
    for step in range(4):
        for index, (model, optimizer) in enumerate(zip(models, optimizers, strict=True)):
            # Both get the same gradients, since these don't depend on the values that were set to zero.
            for i, p in enumerate(model.parameters()):
                generator = torch.Generator().manual_seed(100 * step + 10 * rank + i)
                p.grad = torch.randn(p.shape, generator=generator).to(dtype)
            optimizer.step()
            optimizer.zero_grad()
            if index == 1:
                for p, mask in zip(model.parameters(), keep, strict=True):
                    p.data.mul_(mask)
    for p, q, mask in zip(models[0].parameters(), models[1].parameters(), keep, strict=True):
        assert torch.equal(p[mask], q[mask])
        assert not q[~mask].any()
    for bucket, a, b in zip(optimizers[0].inside.buckets, *map(exact_values, optimizers), strict=True):
        for segment in bucket.own_segments:
            span = slice(segment.span.start, segment.span.stop)
            kept = torch.arange(segment.param_start, segment.param_start + segment.span.numel) % 2 == 0
            assert torch.equal(a[span][kept], b[span][kept])


@pytest.mark.parametrize(("dtype", "master"), KINDS, ids=str)
def test_writing_some_elements_leaves_the_masters_of_others(dtype: torch.dtype, master: str | None) -> None:
    run_ranks(masked, 2, dtype, master)


def reordered(rank: int, _: int, stage: int) -> None:
    """The same values in another order in memory, before and after backward: nothing but the strides may change."""

    def run(change: str) -> list[Tensor]:
        generator = torch.Generator().manual_seed(0)
        square = nn.Parameter(torch.randn(70, 70, generator=generator))
        image = nn.Parameter(torch.randn(16, 8, 3, 3, generator=generator))
        optimizer = FusedShardedAdam([square, image], lr=1e-2, stage=stage)
        for step in range(3):
            if change == "before backward":
                image.data = image.data.to(memory_format=torch.channels_last)
                square.data = square.data.t().contiguous().t()
            factors = [torch.randn(p.shape, generator=generator) for p in (square, image)]
            sum((p * (f + rank)).sum() for p, f in zip((square, image), factors, strict=True)).backward()
            if change == "before step":
                image.data = image.data.to(memory_format=torch.channels_last)
            if change == "in place" and step == 1:
                square.data = square.data.t()
            elif step == 1:
                square.data.copy_(square.data.t().clone())
            optimizer.step()
            optimizer.zero_grad()
        return [square.detach().clone(), image.detach().clone()]

    wanted = run("never")
    for change in ("before backward", "before step", "in place"):
        for found, expected in zip(run(change), wanted, strict=True):
            assert torch.equal(found, expected), change


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.filterwarnings("ignore:zerox. parameter .* got another order in memory")
def test_another_order_in_memory_is_taken_back(stage: int) -> None:
    run_ranks(reordered, 2, stage)


def laid_out_late(_: int, __: int, stage: int) -> list[str]:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1), nn.Flatten(), nn.LazyLinear(1))
    images = torch.randn(2, 3, 8, 8)
    model(images)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    strides = [param.stride() for param in model.parameters()]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for step in range(2):
            model.to(memory_format=torch.channels_last if step == 0 else torch.preserve_format)
            model(images).sum().backward()
            optimizer.step()
        assert [param.stride() for param in model.parameters()] == strides
    assert all(each.filename == __file__ for each in caught), [each.filename for each in caught]
    return [str(each.message) for each in caught]


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_another_order_in_memory_is_undone_with_a_warning(stage: int) -> None:
    """Not of a kernel of one pixel, whose elements lie in the same order."""
    for found in run_ranks(laid_out_late, 2, stage):
        (text,) = found
        assert text.startswith("zerox: parameter '1.weight' and 1 more got another order in memory")
        assert "before you build the optimizer" in text


def state_in_another_order(rank: int, _: int, stage: int) -> None:
    """State has the order in which parameters were laid out, until the next step and after it."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 40, 3), nn.Conv2d(40, 8, 3))
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    for _ in range(2):
        model(torch.randn(2, 3, 8, 8) + rank).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    whole, share = optimizer.full_state_dict(), copy.deepcopy(optimizer.state_dict())

    def is_as_before() -> bool:
        now = optimizer.full_state_dict()
        return rank != 0 or all(
            torch.equal(value, whole["state"][number][key])
            for number, state in now["state"].items()
            for key, value in state.items()
        )

    def lay_out_anew() -> None:
        model.to(memory_format=torch.contiguous_format)
        model.to(memory_format=torch.channels_last)

    lay_out_anew()
    anew = copy.deepcopy(optimizer.state_dict())
    assert is_as_before()
    everyones = [whole]
    dist.broadcast_object_list(everyones, 0)
    for state in (share, anew, everyones[0]):
        lay_out_anew()
        optimizer.load_state_dict(state)
        assert is_as_before()


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.filterwarnings("ignore:zerox. parameter .* got another order in memory")
def test_state_keeps_its_order_where_parameters_get_another(stage: int) -> None:
    run_ranks(state_in_another_order, 2, stage)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p: torch.zeros(5, 4), [r"\(5, 4\)", r"\(4, 5\)"]),
        (lambda p: p.double(), ["float64", "float32"]),
    ],
    ids=["shape", "dtype"],
)
def test_a_parameter_that_no_longer_fits_is_named(change: Callable[[Tensor], Tensor], words: list[str]) -> None:
    param = nn.Parameter(torch.zeros(4, 5))
    optimizer = FusedShardedAdam([("the one", param)])
    param.data = change(param.data)
    with pytest.raises(RuntimeError, match="'the one' is .*" + ".*".join(words)):
        optimizer.step()
