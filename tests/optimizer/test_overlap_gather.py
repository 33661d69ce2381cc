"""overlap_gather(): no forward reads a stale parameter, in whatever way modules run, and what waits is what must.

Gathers are held back throughout: a bucket arrives when somebody waits for it, and not before. So whoever reads without
waiting reads what the parameters were before the step, and training comes out different.
"""

from __future__ import annotations

import copy
import gc
import itertools
import pickle
import time
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tests.optimizer.overlap_models import (
    CAP_MB,
    COMPILED,
    EAGER,
    SILENT,
    Backwards,
    Compiling,
    Outside,
    batch,
    blocks_compiled_in_place,
    build,
    compiled_in_place,
    layer,
    train_step,
    under_way,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

STEPS = 5


def trained(rank: int, _: int, make: Callable[[], nn.Module], overlap: bool, stage: int) -> tuple[list[Tensor], int]:
    """The parameters after some steps and evaluations, and how many gathers steps left to the next forward."""
    model, optimizer = build(make, overlap, stage=stage)
    left = 0
    for step in range(STEPS):
        train_step(model, optimizer, rank, step)
        left += under_way(optimizer)
        if step in (1, 3):
            model.eval()
            with torch.no_grad():
                model(batch(rank, step), step).sum()
            model.train()
    optimizer.synchronize()
    assert under_way(optimizer) == 0
    return [p.detach().clone() for p in model.parameters()], left


# Gathers are alike in both stages, and a compiled model reads no gradient.
@pytest.mark.parametrize(
    ("make", "stage"),
    [*itertools.product(EAGER, (1, 2)), *itertools.product(COMPILED, (2,))],
    ids=lambda each: getattr(each, "__name__", each),
)
def test_training_is_bit_for_bit_that_without_overlap(make: Callable[[], nn.Module], stage: int) -> None:
    assert_bit_for_bit_that_without_overlap(make, stage)


def compiling_with_inductor() -> nn.Module:
    return Compiling("inductor")


@pytest.mark.deep
def test_what_inductor_compiles_trains_bit_for_bit_as_without_overlap() -> None:
    """What waits is Dynamo's part, alike under each backend; this one runs a C++ compiler for each rank."""
    assert_bit_for_bit_that_without_overlap(compiling_with_inductor, 2)


def assert_bit_for_bit_that_without_overlap(make: Callable[[], nn.Module], stage: int) -> None:
    with_overlap = run_ranks(trained, 2, make, True, stage)
    without = run_ranks(trained, 2, make, False, stage)
    for (params, left), (expected, none_left) in zip(with_overlap, without, strict=True):
        assert all(map(torch.equal, params, expected))
        assert none_left == 0
        assert left >= STEPS - 1


def stale_without_a_wait(rank: int, _: int) -> bool:
    model, optimizer = build(Backwards, overlap=True)
    memory = [bucket.buffer.flat.numpy() for bucket in optimizer.inside.buckets]  # read without operators
    for step in range(2):
        train_step(model, optimizer, rank, step)
    before = [each.copy() for each in memory]
    optimizer.synchronize()
    return all((a != b).any() for a, b in zip(before, memory, strict=True))


def test_a_held_gather_leaves_what_nobody_waits_for_stale() -> None:
    assert all(run_ranks(stale_without_a_wait, 2))


# ---- what else reads, and writes


def state_dict_read(rank: int, _: int) -> bool:
    model, optimizer = build(Backwards, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    assert under_way(optimizer) > 0
    read = {name: value.clone() for name, value in model.state_dict().items()}
    optimizer.synchronize()
    return all(torch.equal(read[name], p) for name, p in model.named_parameters())


def make_graphed_callables(module: nn.Module) -> None:
    """As torch's: what is put in the forward's place knows where parameters are, and calls no operators that read."""
    weights = [p.detach().numpy() for p in module.parameters()]

    def new_fwd(x: Tensor) -> Tensor:
        return x * float(sum(weight.sum() for weight in weights))

    module.forward = new_fwd  # type: ignore[method-assign]


def a_graphed_part(rank: int, _: int) -> bool:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(layer(), layer()), layer())
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, bucket_cap_mb=CAP_MB)
    make_graphed_callables(model[0])
    optimizer.overlap_gather(model)
    optimizer.inside.manager.params.hold_back(True)
    x = batch(rank, 7)
    for _step in range(2):
        optimizer.zero_grad()
        sum((p * p).sum() for p in model.parameters()).backward()  # type: ignore[union-attr]
        model(x)  # with gradients
        optimizer.step()
    assert under_way(optimizer) > 0
    out = model[0](x)
    optimizer.synchronize()
    return torch.equal(out, model[0](x))


def part_of_state_dict_read(rank: int, _: int) -> bool:
    model, optimizer = build(Backwards, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    read = model.layers[2].state_dict()["weight"].clone()  # type: ignore[union-attr, operator]
    optimizer.synchronize()
    return torch.equal(read, model.layers[2].weight)  # type: ignore[union-attr, arg-type, index]


def loaded_values_stay(rank: int, _: int) -> bool:
    model, optimizer = build(Backwards, overlap=True)
    start = copy.deepcopy(model.state_dict())
    for step in range(2):
        train_step(model, optimizer, rank, step)
    assert under_way(optimizer) > 0
    model.load_state_dict(start)
    optimizer.synchronize()
    return all(torch.equal(start[name], p) for name, p in model.named_parameters())


def a_part_that_is_called_by_itself(rank: int, _: int) -> bool:
    model, optimizer = build(Outside, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    assert under_way(optimizer) > 0
    x = batch(rank, 7)
    out = model.third(x)  # type: ignore[operator]
    optimizer.synchronize()
    return torch.equal(out, model.third(x))  # type: ignore[operator]


@pytest.mark.parametrize(
    "case",
    [
        state_dict_read,
        a_graphed_part,
        part_of_state_dict_read,
        loaded_values_stay,
        a_part_that_is_called_by_itself,
    ],
)
def test_is_whole(case: Callable[..., bool]) -> None:
    assert all(run_ranks(case, 2))


def halved_before_a_neighbour_has_read(rank: int, _: int, overlap: bool) -> list[Tensor]:
    model, optimizer = build(Backwards, overlap)
    optimizer.inside.manager.params.hold_back(rank == 1)  # it reads when it needs to, late
    for step in range(3):
        train_step(model, optimizer, rank, step)
        if rank == 1:
            time.sleep(0.1)
        with torch.no_grad():
            torch._foreach_mul_(list(model.layers[0].parameters()), 0.5)  # type: ignore[union-attr, operator]
            for param in model.layers[1:].parameters():  # type: ignore[union-attr, index, operator]
                param.mul_(0.5)
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def test_who_writes_a_parameter_waits_for_neighbours_that_have_still_to_read_it() -> None:
    [expected, _] = run_ranks(halved_before_a_neighbour_has_read, 2, False)
    for params in run_ranks(halved_before_a_neighbour_has_read, 2, True):
        assert all(map(torch.equal, params, expected))


def left_by_a_deleted_optimizer(rank: int, _: int) -> tuple[bool, int]:
    model, optimizer = build(Backwards, overlap=True)
    expected, without = build(Backwards, overlap=False)
    for step in range(2):
        train_step(model, optimizer, rank, step)
        train_step(expected, without, rank, step)
    assert under_way(optimizer) > 0
    del optimizer
    gc.collect()
    hooks = sum(
        len(m._forward_pre_hooks) + len(m._state_dict_pre_hooks) + len(m._load_state_dict_pre_hooks)
        for m in model.modules()
    )
    return all(map(torch.equal, model.parameters(), expected.parameters())), hooks


def test_a_deleted_optimizer_leaves_whole_parameters_and_no_hooks() -> None:
    assert run_ranks(left_by_a_deleted_optimizer, 2) == [(True, 0)] * 2


def new_parameters(rank: int, _: int, overlap: bool) -> list[Tensor]:
    """A layer is unfrozen, and another one added, between steps."""
    torch.manual_seed(0)
    model = Backwards()
    model.layers[0].requires_grad_(False)
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, bucket_cap_mb=CAP_MB)
    if overlap:
        optimizer.overlap_gather(model)
        optimizer.inside.manager.params.hold_back(True)
    for step in range(6):
        if step == 2:
            model.layers[0].requires_grad_(True)
        if step == 4:
            model.layers.append(layer())
            optimizer.add_param_group({"params": list(model.layers[-1].parameters())})
            if overlap:
                optimizer.overlap_gather(model)
        train_step(model, optimizer, rank, step)
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()]


def test_parameters_that_come_later_are_waited_for_too() -> None:
    for params, expected in zip(run_ranks(new_parameters, 2, True), run_ranks(new_parameters, 2, False), strict=True):
        assert all(map(torch.equal, params, expected))


def compiled_on_the_way(rank: int, _: int, overlap: bool) -> tuple[list[Tensor], int]:
    """A function that runs the model is compiled in mid-training."""
    model, optimizer = build(Outside, overlap)
    run: Callable[[Tensor, int], Tensor] = model
    left = 0
    for step in range(STEPS):
        if step == 2:
            run = torch.compile(lambda x, step: model(x, step) * 1.5, backend=SILENT, fullgraph=True)
        optimizer.zero_grad()
        run(batch(rank, step), 1).square().mean().backward()
        optimizer.step()
        left += under_way(optimizer)
    optimizer.synchronize()
    return [p.detach().clone() for p in model.parameters()], left


def test_what_is_compiled_on_the_way_waits_too() -> None:
    with_overlap, without = (run_ranks(compiled_on_the_way, 2, overlap) for overlap in (True, False))
    for (params, left), (expected, _) in zip(with_overlap, without, strict=True):
        assert all(map(torch.equal, params, expected))
        assert left >= STEPS


def turned_off(rank: int, _: int) -> tuple[int, int]:
    model, optimizer = build(Backwards, overlap=True)
    for step in range(2):
        train_step(model, optimizer, rank, step)
    left = under_way(optimizer)
    optimizer.overlap_gather(None)
    train_step(model, optimizer, rank, 2)
    return left, under_way(optimizer)


def test_it_can_be_turned_off() -> None:
    assert run_ranks(turned_off, 2) == [(4, 0)] * 2


@pytest.mark.parametrize("make", [Backwards, compiled_in_place])
def test_a_model_can_still_be_copied_and_saved_whole(make: Callable[[], nn.Module]) -> None:
    model, optimizer = build(make, overlap=True)
    train_step(model, optimizer, 0, 0)
    x = batch(0, 1)
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(twin(x, 0), model(x, 0))


def test_hooks_do_not_make_a_compiler_compile_each_block_anew() -> None:
    graphs = []
    for overlap in (False, True):
        model, _ = build(blocks_compiled_in_place, overlap)
        torch._dynamo.utils.counters.clear()
        model(batch(0, 0), 0)
        graphs.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert graphs[0] == graphs[1] < 4
