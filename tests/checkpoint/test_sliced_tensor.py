"""Slices of a tensor, saved by some ranks and loaded by others."""

from __future__ import annotations

import copy
import dataclasses
import io
import pickle
from itertools import pairwise
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from tests.ranks import run_ranks
from zerox.plan.span import Span
from zerox.sliced_tensor import SlicedTensor

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


def sample() -> SlicedTensor:
    return SlicedTensor((4, 3), (3, 1), Span(2, 7), torch.arange(5.0))


def test_it_is_no_tensor_to_compute_with() -> None:
    slice_ = sample()
    assert repr(slice_) == "SlicedTensor(elements 2 to 7 of (4, 3), torch.float32, cpu)"
    with pytest.raises(RuntimeError, match=r"this rank has SlicedTensor\(elements 2 to 7.*full_state_dict"):
        slice_ + 1
    with pytest.raises(ValueError, match="a segment of 5 elements needs as many values"):
        SlicedTensor((4, 3), (3, 1), Span(2, 7), torch.arange(6.0))


def through_torch_save(slice_: SlicedTensor) -> SlicedTensor:
    file = io.BytesIO()
    torch.save(slice_, file)
    file.seek(0)
    found: SlicedTensor = torch.load(file, weights_only=True)
    return found


WAYS = {
    "deepcopy": copy.deepcopy,
    "torch.save": through_torch_save,
    "pickle": lambda slice_: pickle.loads(pickle.dumps(slice_)),
    "clone": torch.clone,
    "to": lambda slice_: slice_.to("cpu", copy=True),
    "detach and clone": lambda slice_: slice_.detach().clone(),
}


@pytest.mark.parametrize("way", WAYS)
def test_it_can_be_copied_pickled_and_moved(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("ZEROX_STATE_PULL", "0")  # files of each rank
    slice_ = sample()
    copied = WAYS[way](slice_)
    slice_.own.zero_()
    assert type(copied) is SlicedTensor
    assert (tuple(copied.shape), copied.stride(), copied.span) == ((4, 3), (3, 1), Span(2, 7))
    assert copied.own.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0]


def test_rectangles_are_views_of_the_values() -> None:
    values = torch.arange(8.0)
    slice_ = SlicedTensor((4, 3), (3, 1), Span(2, 10), values)
    items = slice_.__create_write_items__("x", slice_)
    shards = [slice_.__get_tensor_shard__(item.index) for item in items]
    assert [shard.tolist() for shard in shards] == [[[0.0]], [[1.0, 2.0, 3.0], [4.0, 5.0, 6.0]], [[7.0]]]
    for shard in shards:
        shard.fill_(9.0)
    assert values.tolist() == [9.0] * 8
    with pytest.raises(LookupError, match="no slice of 'x' starts at"):
        slice_.__get_tensor_shard__(dataclasses.replace(items[0].index, offset=torch.Size([3, 1])))
