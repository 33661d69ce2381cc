"""The constructors' ``exchange``: each class does what it says, and ZEROX_EXCHANGE wins over it."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable, Sequence
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zerox
from tests.ranks import run_ranks
from zerox.engine import Engine
from zerox.plan import combinations
from zerox.plan.choices import some
from zerox.plan.rulings import Refused, Row
from zerox.ranks import exchange as chosen
from zerox.ranks.exchange import EXCHANGES, choose_exchange

KINDS: dict[str, Callable[..., Engine]] = {
    "adam": zerox.FusedShardedAdam,
    "sgd": zerox.FusedShardedSGD,
    "lion": zerox.FusedShardedLion,
    "any": lambda params, **options: zerox.ShardedOptimizer(params, torch.optim.SGD, lr=0.1, **options),
}


def made(kind: str = "adam", **options: Any) -> Engine:
    return KINDS[kind]([nn.Parameter(torch.ones(8))], **options)


def exchange_and_readers(rank: int, world_size: int, kind: str) -> list[tuple[str, bool]]:
    """By option: what it came to, and whether ranks read each other's memory."""
    found = []
    for option in (None, *EXCHANGES):
        ranks = made(kind, exchange=option).inside.ranks
        found.append((ranks.exchange, any(ranks.neighbours.processes)))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_each_class_exchanges_as_its_option_says(kind: str) -> None:
    """That native sums are the backend's is in test_buts.py."""
    expected = [("direct", True), ("direct", True), ("messages", False), ("native", False)]
    assert run_ranks(exchange_and_readers, 2, kind) == [expected] * 2


def wins(rank: int, world_size: int, options: Sequence[str | None]) -> list[tuple[str, list[tuple[str, str]]]]:
    """By option, beside ZEROX_EXCHANGE=messages: the exchange, and what was warned of, with the file of the line."""
    found = []
    with patch.dict(os.environ, {"ZEROX_EXCHANGE": "messages"}), patch.object(chosen, "_said", set()):
        for option in options:
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                optimizer = made(exchange=option)
            said = [(str(each.message), each.filename) for each in caught if each.category is UserWarning]
            found.append((optimizer.inside.ranks.exchange, said))
    return found


def test_the_variable_wins_over_the_option_and_says_so_once() -> None:
    options = ["native", "native", "messages", None, "direct"]
    expected = {
        option: f"zerox: exchange={option!r} has no effect, since ZEROX_EXCHANGE=messages wins over it: "
        "unset the variable, or leave exchange out"
        for option in ("native", "direct")
    }
    by_rank = run_ranks(wins, 2, options)
    for found in by_rank:
        assert [exchange for exchange, _ in found] == ["messages"] * len(options)
    assert [said for _, said in by_rank[0]] == [
        *([(expected["native"], __file__)], [], [], []),
        [(expected["direct"], __file__)],
    ]
    assert not any(said for _, said in by_rank[1]), "one rank says it"


def differing(rank: int, world_size: int) -> list[str]:
    """Ranks whose groups would match: by the default, and by the variable."""
    found = []
    for variable, option in (("", "direct"), ("messages", "native")):
        environment = patch.dict(os.environ, {"ZEROX_EXCHANGE": variable})
        with environment, pytest.raises(ValueError, match="ranks must agree") as error:
            made(exchange=option if rank == 1 else None)
        found.append(str(error.value))
    made()
    return found


def test_the_option_is_compared_where_it_comes_to_the_same_exchange() -> None:
    for messages in run_ranks(differing, 2):
        for message, option in zip(messages, ("direct", "native"), strict=True):
            expected = f"zerox: ranks must agree: rank 0 has exchange=None; rank 1 has exchange='{option}'"
            assert message.startswith(expected)


@pytest.mark.parametrize("kind", KINDS)
def test_another_word_is_refused_by_one_rank_too(kind: str) -> None:
    with pytest.raises(
        ValueError, match=r"exchange must be one of \(None, 'direct', 'messages', 'native'\), got 'nccl'"
    ):
        made(kind, exchange="nccl")


def test_in_a_param_group_it_is_refused() -> None:
    with pytest.raises(ValueError, match="exchange='native' in a param group would have no effect"):
        zerox.FusedShardedAdam([{"params": [nn.Parameter(torch.ones(8))], "exchange": "native"}])


def test_the_default_is_that_of_the_backend() -> None:
    with patch.dict(os.environ):
        os.environ.pop("ZEROX_EXCHANGE", None)
        assert [choose_exchange(None, backend, 0) for backend in ("gloo", "nccl")] == ["direct", "native"]
        assert [choose_exchange(each, "nccl", 0) for each in EXCHANGES] == list(EXCHANGES)


@pytest.mark.parametrize("class_", [None, torch.optim.SGD])
def test_the_estimate_takes_it_and_refuses_other_words(class_: Any) -> None:
    """Slices of 8192 elements and 64 flags, in four bytes."""
    params = [torch.empty(4 * 8192, requires_grad=True)]
    of_class = {} if class_ is None else {"optimizer_class": class_, "lr": 0.1}
    received = {
        ("gloo", None): 0, ("gloo", "direct"): 0, ("gloo", "messages"): 3, ("gloo", "native"): 1,
        ("nccl", None): 1, ("nccl", "direct"): 4, ("nccl", "messages"): 4, ("nccl", "native"): 1,
    }  # fmt: skip
    for (backend, exchange), slices in received.items():
        found = zerox.estimate(params, 4, backend=backend, exchange=exchange, bucket_cap_mb=1024, **of_class)
        assert found.exchange == 2 * (4 + slices) * (8192 + 64) * 4, (backend, exchange)
    with pytest.raises(ValueError, match="exchange must be one of"):
        zerox.estimate(params, 4, exchange="nccl", **of_class)


def test_the_estimate_knows_that_native_gradients_are_all_packed() -> None:
    """Others that are large go from where autograd left them. One rank alone exchanges nothing."""
    params = [torch.empty(1 << 22, device="meta", requires_grad=True)]
    slices = 2 * (1 << 22) * 4  # two buckets
    alone, both = ({each: zerox.estimate(params, n, exchange=each) for each in EXCHANGES} for n in (1, 2))
    assert alone["direct"] == alone["messages"] == alone["native"]
    assert both["direct"].exchange < both["messages"].exchange < 0.6 * slices
    assert slices <= both["native"].exchange - slices // 2 < slices + 4096, "and one slice is received"
    assert both["messages"].peak < both["native"].peak


def refused(rank: int, world_size: int) -> list[str]:
    """Where what the variable asks for, and what the backend has by default, does not go with the stage."""
    row = Row(some("exchange", '"native"'), some("stage", "2"), Refused("this test says so", "Leave it out"))
    found = []
    with patch.object(combinations, "ROWS", (row,)), patch.dict(os.environ, {"ZEROX_EXCHANGE": "native"}):
        for call in (made, lambda: zerox.estimate([nn.Parameter(torch.ones(8))], 2, backend="nccl")):
            with pytest.raises(ValueError, match="this test says so") as error:
                call()
            found.append(str(error.value))
        made(stage=1)
    return found


def test_options_are_refused_beside_the_exchange_that_it_comes_to() -> None:
    expected = 'zerox: exchange="native" does not go with stage=2: this test says so. Leave it out'
    assert run_ranks(refused, 2) == [[expected] * 2] * 2
