"""Which weights share a file: as huggingface_hub splits and names them."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from hypothesis import example, given
from hypothesis import strategies as st

from zerox.plan.weight_split import OURS, bytes_of, index_text, name_files, split


@given(st.lists(st.integers(0, 40), min_size=1, max_size=12), st.integers(1, 60))
@example([6, 6, 2, 6, 2, 2], 10)
@example([3, 50, 4, 50, 50], 20)
def test_files_are_those_of_huggingface_hub(nbytes: list[int], most: int) -> None:
    weights = {f"w{place}": torch.zeros(size, dtype=torch.uint8) for place, size in enumerate(nbytes)}
    theirs = split_torch_state_dict_into_shards(
        weights, filename_pattern="model{suffix}.safetensors", max_shard_size=most
    )
    names = split({name: each.nbytes for name, each in weights.items()}, most)
    ours = dict(zip(name_files(len(names)), names, strict=True))
    wanted = {file: sorted(each) for file, each in theirs.filename_to_tensors.items()}
    if 0 not in nbytes:  # of several empty tensors huggingface_hub thinks that they share their memory
        assert {file: sorted(each) for file, each in ours.items()} == wanted
        index = json.loads(index_text(ours, sum(nbytes), 7))
        assert index["weight_map"] == theirs.tensor_to_filename
        assert index["metadata"] == {"total_parameters": 7, **theirs.metadata}
    assert sorted(name for each in names for name in each) == sorted(weights)
    assert all(OURS.fullmatch(file) for file in ours)


def test_a_model_without_weights_has_one_empty_file() -> None:
    assert split({}, 10) == [[]]


@pytest.mark.parametrize(
    ("given", "wanted"),
    [("5GB", 5 * 10**9), ("1.5 MB", 1_500_000), ("2gib", 2**31), ("3KiB", 3072), (" 1TB ", 10**12), (7, 7)],
)
def test_sizes_have_units_of_ten_and_two(given: Any, wanted: int) -> None:
    assert bytes_of(given) == wanted


@pytest.mark.parametrize("given", ["5", "GB", "5GiBi", "-1GB", "five GB", "", "0KB", 0, -3, "5 G B", "1e3MB"])
def test_what_is_no_size_is_refused(given: Any) -> None:
    with pytest.raises(ValueError, match=r"is no size|has no place"):
        bytes_of(given)


@pytest.mark.parametrize("given", [None, 1.5, True, b"5GB"])
def test_what_is_neither_number_nor_string_is_refused(given: Any) -> None:
    with pytest.raises(TypeError, match="is no size"):
        bytes_of(given)


@pytest.mark.parametrize(
    ("name", "is_ours"),
    [
        ("model.safetensors", True),
        ("model-00001-of-00002.safetensors", True),
        ("model-123456-of-123456.safetensors", True),
        ("model.safetensors.index.json", True),
        ("model.fp16.safetensors", False),
        ("model-00001.safetensors", False),
        ("adapter_model.safetensors", False),
        ("pytorch_model.bin", False),
        ("config.json", False),
    ],
)
def test_only_names_of_the_layout_are_replaced(name: str, is_ours: bool) -> None:
    assert (OURS.fullmatch(name) is not None) == is_ours
