"""Slices of a tensor, saved by some ranks and loaded by others."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.ranks import run_ranks
from zerox.checkpoint.sliced_tensor import SlicedTensor
from zerox.plan.span import Span

SHAPES = {"vector": (1000,), "matrix": (13, 37), "conv": (3, 4, 5, 2), "scalar": (), "one": (1, 1)}
DTYPES = {"vector": torch.float32, "matrix": torch.bfloat16, "conv": torch.uint8, "scalar": torch.int64}


def whole(name: str) -> Tensor:
    shape = SHAPES[name]
    values = torch.randn(shape, generator=torch.Generator().manual_seed(len(name))) * 100
    values = values.to(DTYPES.get(name, torch.float64))
    return values.to(memory_format=torch.channels_last) if name == "conv" else values


def memory_of(tensor: Tensor) -> Tensor:
    return tensor.as_strided((tensor.numel(),), (1,))


def cuts(numel: int, world_size: int) -> list[Span]:
    """Uneven, and some of them empty."""
    ends = [0, *sorted(numel * (i * i + 1) // (world_size * world_size + 1) for i in range(1, world_size)), numel]
    return [Span(start, stop) for start, stop in pairwise(ends)]


def sliced(tensors: dict[str, Tensor], rank: int, world_size: int) -> dict[str, Tensor]:
    found: dict[str, Tensor] = {}
    for name, tensor in tensors.items():
        span = cuts(tensor.numel(), world_size)[rank]
        values = memory_of(tensor)[span.start : span.stop].clone()
        found[name] = SlicedTensor(tensor.shape, tensor.stride(), span, values)
    return found


def save(rank: int, world_size: int, path: str) -> None:
    dcp.save(sliced({name: whole(name) for name in SHAPES}, rank, world_size), checkpoint_id=path)


def load(rank: int, world_size: int, path: str) -> bool:
    into: dict[str, Tensor] = {}
    values: dict[str, Tensor] = {}
    for name in SHAPES:
        expected = whole(name)
        span = cuts(expected.numel(), world_size)[rank]
        values[name] = torch.zeros(span.numel, dtype=expected.dtype)
        into[name] = SlicedTensor(expected.shape, expected.stride(), span, values[name])
    dcp.load(into, checkpoint_id=path)
    for name in SHAPES:
        span = cuts(whole(name).numel(), world_size)[rank]
        assert torch.equal(values[name], memory_of(whole(name))[span.start : span.stop]), name
    return dist.get_world_size() == world_size


@pytest.mark.parametrize("loaded_by", [1, 2, 3])
@pytest.mark.parametrize("saved_by", [1, 2, 4])
def test_what_some_ranks_save_any_ranks_load(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    run_ranks(save, saved_by, str(tmp_path))
    assert run_ranks(load, loaded_by, str(tmp_path)) == [True] * loaded_by


def test_dcp_s_own_tools_see_whole_tensors(tmp_path: Path) -> None:
    run_ranks(save, 3, str(tmp_path / "dcp"))
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "whole.pt")
    found = torch.load(tmp_path / "whole.pt", weights_only=True)
    for name in SHAPES:
        assert torch.equal(found[name], whole(name)), name
        assert found[name].dtype == whole(name).dtype


def test_it_is_no_tensor_to_compute_with() -> None:
    slice_ = SlicedTensor((4, 3), (3, 1), Span(2, 7), torch.arange(5.0))
    assert repr(slice_) == "SlicedTensor(5 elements of (4, 3), torch.float32, cpu)"
    with pytest.raises(RuntimeError, match="this rank has a slice of it"):
        slice_ + 1
    with pytest.raises(ValueError, match="a slice of 5 elements needs as many values"):
        SlicedTensor((4, 3), (3, 1), Span(2, 7), torch.arange(6.0))


def test_rectangles_are_views_of_the_values() -> None:
    values = torch.arange(8.0)
    slice_ = SlicedTensor((4, 3), (3, 1), Span(2, 10), values)
    assert [shard.tolist() for shard in slice_._shards] == [[[0.0]], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0]]]
    for shard in slice_._shards:
        shard.fill_(9.0)
    assert values.tolist() == [9.0] * 8
