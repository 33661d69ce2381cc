"""optimizer.whole(): every parameter whole and in place; what is written inside, and what is not."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.ranks import run_ranks
from tests.residency.models import Gpt, array, entropy
from tests.residency.rig import assert_as_in_stage_2, assert_same, batch, made, residents, train, values
from zerox import FusedShardedAdam, load, save


def trained(rank: int, **options: Any) -> tuple[nn.Module, FusedShardedAdam]:
    model, optimizer = made(**options)
    train(model, optimizer, rank, entropy, steps=1)
    residents(optimizer).release_all()
    return model, optimizer


def read_by_one_rank(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    expected = values(model)
    residents(optimizer).release_all()
    if rank == 0:
        with optimizer.whole():
            with optimizer.whole():
                assert all(residents(optimizer).resident)
            assert all(residents(optimizer).resident)
            before = residents(optimizer).counts.faults
            found = [torch.from_numpy(array(param).copy()) for param in model.parameters()]
            assert residents(optimizer).counts.faults == before
        assert_same(found, expected)
        assert not all(residents(optimizer).resident)
    dist.barrier()
    train(model, optimizer, rank, entropy, steps=1)


def test_one_rank_reads_alone_and_calls_nest() -> None:
    run_ranks(read_by_one_rank, 2)


def written(rank: int, world_size: int, by_numpy: bool) -> None:
    model, optimizer = trained(rank)
    with optimizer.whole():
        for param in model.parameters():
            if by_numpy:
                array(param)[...] *= 2
            else:
                param.data.mul_(2)
        inside = values(model)
    residents(optimizer).release_all()
    assert_same(values(model), inside)
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("by_numpy", [False, True])
def test_what_all_ranks_write_inside_is_kept(by_numpy: bool) -> None:
    run_ranks(written, 2, by_numpy)


def written_differently(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    before = values(model)
    named = r"rank 0 has parameter 'blocks.1.up.weight' .*; rank 1 has parameter 'blocks.1.up.weight'"
    with pytest.raises(ValueError, match=named), optimizer.whole(), torch.no_grad():
        model.get_parameter("blocks.1.up.weight").fill_(float(rank))
    assert_same(values(model), before)
    train(model, optimizer, rank, entropy, steps=1)


def test_ranks_that_write_other_values_raise_with_the_parameters_name_and_nothing_is_written() -> None:
    run_ranks(written_differently, 2)


class Oops(Exception):
    pass


def raised(rank: int, world_size: int, only_on: int | None) -> None:
    model, optimizer = trained(rank, resident_mb=float("inf"))  # what was written is not released by the way
    before = values(model)
    raises = only_on is None or only_on == rank
    expected = Oops if raises else ValueError
    told = "" if raises else "rank 1 raised Oops.*inside optimizer.whole"

    def write() -> None:
        with optimizer.whole(), torch.no_grad():
            model.get_parameter("norm.bias").fill_(7.0)
            if raises:
                raise Oops

    with pytest.raises(expected, match=told):
        write()
    assert_same(values(model), before)
    train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("only_on", [None, 1])
def test_an_exception_inside_takes_back_what_was_written_on_all_ranks(only_on: int | None) -> None:
    run_ranks(raised, 2, only_on)


def raised_in_an_inner_one(rank: int, world_size: int) -> None:
    model, optimizer = trained(rank)
    weight = model.get_parameter("blocks.0.up.weight")
    before = weight.detach().clone()

    def write() -> None:
        with optimizer.whole(), torch.no_grad():
            weight.fill_(9)
            raise Oops

    with optimizer.whole():
        with pytest.raises(Oops):
            write()
        assert same_bits(torch.from_numpy(array(weight).copy()), before)
    train(model, optimizer, rank, entropy, steps=1)


def test_an_exception_in_an_inner_one_takes_back_at_once() -> None:
    run_ranks(raised_in_an_inner_one, 2)


def saved_inside(rank: int, world_size: int, path: str) -> None:
    model, optimizer = trained(rank)
    with optimizer.whole():
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(5)
        save(path, model, optimizer)
        with torch.no_grad():
            for param in model.parameters():
                param.fill_(6)
    load(path, model, optimizer)
    assert all((param == 5).all() for param in model.parameters())
    one, other = model.get_parameter("norm.weight"), model.get_parameter("norm.bias")
    with optimizer.whole(), torch.no_grad():
        one.fill_(1)
    one.data, other.data = other.data, one.data
    save(path, model, optimizer)
    load(path, model, optimizer)
    assert (one == 5).all()
    assert (other == 1).all()


def test_what_was_written_or_moved_is_saved(tmp_path: Path) -> None:
    run_ranks(saved_inside, 2, str(tmp_path / "saved"))


def stepped_inside(rank: int, world_size: int) -> None:
    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage)
        with optimizer.whole():
            with torch.no_grad():
                model.get_parameter("norm.weight").mul_(2)
            entropy(model, batch(0, rank)).backward()
            optimizer.step()
            seen = [torch.from_numpy(array(param).copy()) for param in model.parameters()]
            seen += train(model, optimizer, rank, entropy)
        return [*seen, *train(model, optimizer, rank, entropy)]

    assert_as_in_stage_2(run)


def test_a_training_inside_has_the_same_bits() -> None:
    run_ranks(stepped_inside, 2)


@pytest.mark.parametrize("stage", [1, 2])
def test_in_other_stages_parameters_are_whole_anyway(stage: int) -> None:
    model = Gpt()
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage)
    before = copy.deepcopy(model)
    with optimizer.whole(), torch.no_grad():
        for param in model.parameters():
            param.mul_(2)
    for ours, theirs in zip(model.parameters(), before.parameters(), strict=True):
        assert torch.equal(ours, theirs * 2)
