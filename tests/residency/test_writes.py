"""Parameters written outside step(), with sharded parameters: nothing is lost, and nothing is read half old."""

from __future__ import annotations

import time
from collections.abc import Callable
from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.ranks import run_ranks
from tests.residency.models import entropy
from tests.residency.rig import assert_as_in_stage_2, made, run_by_way, train, values


def fill(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for param in model.parameters():
            param.mul_(2).add_(1)


def load(model: nn.Module, rank: int) -> None:
    torch.manual_seed(5)
    model.load_state_dict({name: torch.randn_like(value) for name, value in model.state_dict().items()})


def average(model: nn.Module, rank: int) -> None:
    """As an exponential moving average does, of all parameters in one operator."""
    torch.manual_seed(6)
    others = [torch.randn(param.shape) for param in model.parameters()]
    torch._foreach_lerp_([param.data for param in model.parameters()], others, 0.25)


def normalise(model: nn.Module, rank: int) -> None:
    """Each write needs other ranks' elements from before it."""
    with torch.no_grad():
        for param in model.parameters():
            param.div_(param.norm())
            param.sub_(param.flip(0))


def swap(model: nn.Module, rank: int) -> None:
    first, second = model.get_submodule("blocks.0.up"), model.get_submodule("blocks.1.up")
    assert isinstance(first.weight, Tensor)
    assert isinstance(second.weight, Tensor)
    with torch.no_grad():
        kept = first.weight.clone()
        first.weight.copy_(second.weight)
        second.weight.copy_(kept)


def one_rank_is_late(model: nn.Module, rank: int) -> None:
    with torch.no_grad():
        for index, param in enumerate(model.parameters()):
            if index % 2 == rank:
                time.sleep(0.02)
            param.div_(param.norm())


def new_data(model: nn.Module, rank: int) -> None:
    for param in model.parameters():
        param.data = param.detach() * 3


def raw_kernel(model: nn.Module, rank: int) -> None:
    """An operator of somebody else's, whose kernel writes without a version; before, one of that name only read."""
    for schema in ("(Tensor x) -> ()", "(Tensor(a!) x) -> ()"):
        library = torch.library.Library("zerox_tests", "DEF")
        library.define("raw" + schema)
        writes = "!" in schema

        def kernel(x: Tensor, writes: bool = writes) -> None:
            array = x.detach().numpy()
            if writes:
                array *= 2

        library.impl("raw", kernel, "CPU")
        with torch.no_grad():
            for param in model.parameters():
                torch.ops.zerox_tests.raw(param)
        library._destroy()


WRITES: dict[str, Callable[[nn.Module, int], None]] = {
    each.__name__: each for each in (fill, load, average, normalise, swap, one_rank_is_late, new_data, raw_kernel)
}


def write_between_steps(rank: int, world_size: int, name: str, hostile: bool) -> None:
    def run(stage: int) -> list[Tensor]:
        model, optimizer = made(stage, hostile)
        seen = train(model, optimizer, rank, entropy, steps=2)
        WRITES[name](model, rank)
        seen += values(model)
        return [*seen, *train(model, optimizer, rank, entropy, steps=2)]

    assert_as_in_stage_2(run)


@pytest.mark.parametrize(
    ("world_size", "way", "hostile"),
    [(2, "memory", True), (3, "memory", False), (2, "messages", True), (3, "two machines", True)],
)
@pytest.mark.parametrize("name", WRITES)
def test_what_all_ranks_write_is_as_in_stage_2(name: str, world_size: int, way: str, hostile: bool) -> None:
    run_ranks(run_by_way, world_size, way, write_between_steps, name, hostile)


def write_on_one_rank(rank: int, world_size: int) -> None:
    model, optimizer = made(process_group=dist.new_group(timeout=timedelta(seconds=1)))
    told = r"blocks.0.up.weight.* written here and not on all ranks: .*whole\(\).*rank 1 did not come within 1 s"
    if rank == 0:
        with pytest.raises(RuntimeError, match=told), torch.no_grad():
            model.get_parameter("blocks.0.up.weight").zero_()
    else:
        time.sleep(3)  # in no collective call, by which it would say that it does not write
    dist.barrier()
    with pytest.raises(RuntimeError, match=r"rank 1 did not come|is gone|written here"):
        optimizer.step()
    dist.barrier()


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_a_write_on_one_rank_raises_after_the_timeout(way: str) -> None:
    run_ranks(run_by_way, 2, way, write_on_one_rank)


def different_writes(rank: int, world_size: int) -> list[Tensor]:
    """Each rank writes other values: the owner's count, from the next read on."""
    model, optimizer = made(hostile=True)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(float(rank))
    found = values(model)
    del optimizer
    return found


def test_where_ranks_write_other_values_each_has_the_owners() -> None:
    first, second = run_ranks(different_writes, 2)
    for ours, theirs in zip(first, second, strict=True):
        assert same_bits(ours, theirs)
        assert set(ours.unique().tolist()) <= {0.0, 1.0}
    assert len({float(value) for param in first for value in param.unique()}) == 2
