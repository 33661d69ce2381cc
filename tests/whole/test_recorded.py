"""With parameters that lie whole on one rank, trainings have the bits that were recorded of cut ones: tests/bits."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any
from unittest.mock import patch

import pytest

from tests.bits import __main__ as bits
from tests.bits.recording import train_all
from tests.bits.test_bits import OF_TORCH, has_last_bits_of_torch
from tests.whole.rig import whole


def train_whole(rank: int, world_size: int, asked: Sequence[Any], folder: str) -> list[Any]:
    with whole():
        return train_all(rank, world_size, asked, folder)


def less_messages(told: Any) -> Any:
    return {key: value for key, value in told.items() if key != "messages"} if isinstance(told, dict) else told


def assert_only_messages_differ(world_size: int, least: int) -> None:
    """And the backend's own collectives are refused."""
    with patch.object(bits, "train_all", train_whole):
        found = bits.found_here(f"{world_size} ranks")
    recorded = json.loads(bits.RECORDED.read_text())["trainings"]
    same_messages = 0
    for name, now in found.items():
        if not has_last_bits_of_torch() and any(kind in name for kind in OF_TORCH):
            continue
        if "over native" in name:
            assert all("must each lie whole on one rank" in told for told in now), name
            continue
        assert list(map(less_messages, now)) == list(map(less_messages, recorded[name])), name
        same_messages += now == recorded[name]
    assert len(found) >= least
    assert same_messages < len(found) / 2, "slices are cut otherwise"


def test_only_the_messages_differ_from_what_was_recorded() -> None:
    """Of four ranks: those of three take minutes, and what they have of their own is in test_bits.py."""
    assert_only_messages_differ(4, 12)


@pytest.mark.deep
def test_only_the_messages_of_two_ranks_differ_from_what_was_recorded() -> None:
    assert_only_messages_differ(2, 100)
