"""Ranks that want different things, or of which one alone is refused: an error on all of them, at once."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import nn

import zerox.engine
import zerox.ranks.group
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

FLOAT32 = torch.float32


def weight(*shape: int, dtype: torch.dtype = FLOAT32, device: str = "cpu", frozen: bool = False) -> nn.Parameter:
    return nn.Parameter(torch.ones(*shape or (3,), dtype=dtype, device=device), requires_grad=not frozen)


def named(**params: nn.Parameter) -> dict[str, Any]:
    return {"params": list(params.items())}


def error_of(call: Callable[[], object]) -> str:
    try:
        call()
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "no error"


def args_of(ours: dict[str, Any], theirs: dict[str, Any], rank: int) -> dict[str, Any]:
    return named(a=weight(), b=weight(4)) | (theirs if rank == 1 else ours)


# What all ranks but one have, what rank 1 has, and what each side is called.
PARAMS: list[tuple[Callable[[], dict[str, Any]], str, str]] = [
    (lambda: named(a=weight()), "trainable parameter 'b' (4,) torch.float32 on cpu in group 0", "nothing"),
    (lambda: named(b=weight(4), a=weight()), "parameter 'a' (3,)", "parameter 'b' (4,)"),
    (lambda: named(a=weight(), c=weight(4)), "parameter 'b'", "parameter 'c'"),
    (lambda: named(a=weight(), b=weight(2, 2)), "'b' (4,)", "'b' (2, 2)"),
    (lambda: named(a=weight(dtype=torch.half), b=weight(4)), "'a' (3,) torch.float32", "'a' (3,) torch.float16"),
    (lambda: named(a=weight(frozen=True), b=weight(4)), "trainable parameter 'a'", "frozen parameter 'a'"),
    (lambda: {"params": [weight(), weight(4)]}, "parameter 'a'", "parameter 'param 0'"),
    (
        lambda: {"params": [named(a=weight()), named(b=weight(4))]},
        "trainable parameter 'a' (3,) torch.float32 on cpu in group 0",
        "param group 1 with amsgrad=False",
    ),
]
OPTIONS: list[tuple[dict[str, Any], dict[str, Any], str, str]] = [
    ({}, {"lr": 0.5}, "param group 0 with lr=0.001", "param group 0 with lr=0.5"),
    ({}, {"betas": (0.9, 0.99)}, "betas=(0.9, 0.999)", "betas=(0.9, 0.99)"),
    ({}, {"eps": 1e-6}, "eps=1e-08", "eps=1e-06"),
    ({}, {"weight_decay": 0.0}, "weight_decay=0.01", "weight_decay=0.0"),
    ({}, {"amsgrad": True}, "amsgrad=False", "amsgrad=True"),
    ({}, {"maximize": True}, "maximize=False", "maximize=True"),
    ({}, {"decoupled_weight_decay": False}, "decoupled_weight_decay=True", "decoupled_weight_decay=False"),
    ({}, {"stage": 1}, "stage=2", "stage=1"),
    ({}, {"bucket_cap_mb": 4}, "bucket_cap_mb=None", "bucket_cap_mb=4"),
    ({}, {"reduce_dtype": torch.bfloat16}, "reduce_dtype=None", "reduce_dtype=torch.bfloat16"),
    ({}, {"master_weights": None}, "master_weights='auto'", "master_weights=None"),
    ({}, {"exchange": "direct"}, "exchange=None", "exchange='direct'"),
    ({}, {"lr": torch.tensor(1e-3)}, "lr=0.001", "lr=tensor(0.0010000000474974513, torch.float32, cpu)"),
    # A tensor's repr has four digits.
    ({"lr": torch.tensor(0.1)}, {"lr": torch.tensor(0.10000001)}, "lr=tensor(0.1", "lr=tensor(0.1"),
]


def disagree(rank: int, world_size: int) -> list[str]:
    both: list[tuple[dict[str, Any], dict[str, Any]]] = [({}, theirs()) for theirs, _, _ in PARAMS]
    both += [(ours, theirs) for ours, theirs, _, _ in OPTIONS]
    found = [args_of(*each, rank) for each in both]
    messages = [error_of(lambda: FusedShardedAdam(**found[0]))]
    find_ranks, ranks = zerox.engine.find_ranks, zerox.ranks.group.find_ranks(None)
    zerox.engine.find_ranks = lambda *_, **__: ranks  # new groups take longer than all the rest
    try:
        return messages + [error_of(lambda kwargs=each: FusedShardedAdam(**kwargs)) for each in found[1:]]  # type: ignore[misc]
    finally:
        zerox.engine.find_ranks = find_ranks


def test_what_ranks_disagree_about_is_named_with_both_sides_on_all_ranks() -> None:
    sides = [(ours, theirs) for _, ours, theirs in PARAMS] + [(ours, theirs) for _, _, ours, theirs in OPTIONS]
    for messages in run_ranks(disagree, 3):
        for message, (ours, theirs) in zip(messages, sides, strict=True):
            start, _, end = message.partition("; rank 1 has ")
            assert start.startswith("ValueError: zerox: ranks must agree: rank 0 has "), message
            assert ours in start, message
            assert theirs in end, message
            assert start.split(" has ")[1] != end, message


def disagree_about_the_exchange(rank: int, world_size: int, by: str) -> list[str]:
    exchange = "native" if rank == 1 else "direct"
    variable, option = (exchange, None) if by == "variable" else ("", exchange)
    with patch.dict(os.environ, {"ZEROX_EXCHANGE": variable}):
        message = error_of(lambda: FusedShardedAdam([weight()], exchange=option))
    return [message, error_of(lambda: FusedShardedAdam([weight()]))]


@pytest.mark.parametrize("by", ["variable", "option"])
def test_ranks_with_another_exchange_are_told_before_their_groups_fail_to_match(by: str) -> None:
    for message, after in run_ranks(disagree_about_the_exchange, 3, by):
        assert message.startswith("ValueError: zerox: ranks must agree: ")
        source = "(the option, ZEROX_EXCHANGE or the default) over gloo"
        for rank_and_exchange in ("rank 1 has exchange='native' (", f"has exchange='direct' {source}"):
            assert rank_and_exchange in message
        assert after == "no error"


def group_options_of_the_user_s_own(rank: int, world_size: int) -> str:
    """What has no value that could be told to others is not compared: it prints an address here."""
    group = {"params": [weight()], "schedule": object(), "name": "head", "scale": 0.5}
    return error_of(lambda: FusedShardedAdam([group]))


def test_a_group_s_own_objects_are_no_disagreement() -> None:
    assert run_ranks(group_options_of_the_user_s_own, 2) == ["no error"] * 2


def rank_1_alone_is_wrong() -> list[tuple[dict[str, Any], str]]:
    """What rank 1 passes, and what it raises."""
    shared = weight()
    return [
        ({"lr": -1.0}, "ValueError: Invalid learning rate: -1.0"),
        ({"betas": (0.9, 1.0)}, "ValueError: Invalid beta parameter at index 1: 1.0"),
        ({"betas": 0.9}, "TypeError: "),
        ({"eps": -1.0}, "ValueError: Invalid epsilon value: -1.0"),
        ({"weight_decay": -1.0}, "ValueError: Invalid weight_decay value: -1.0"),
        ({"params": []}, "ValueError: optimizer got an empty parameter list"),
        ({"params": shared}, "TypeError: params argument given to the optimizer should be an iterable"),
        (
            {"params": [{"params": [shared]}, {"params": [shared]}]},
            "ValueError: some parameters appear in more than one parameter group",
        ),
        ({"params": [shared * 2]}, "ValueError: can't optimize a non-leaf Tensor"),
        (named(a=weight(dtype=torch.complex64)), "ValueError: zerox: parameter 'a' must be one of "),
        (named(a=weight(device="meta")), "ValueError: zerox: parameter 'a' is on the meta device"),
        ({"stage": 4}, "ValueError: zerox: stage must be one of [1, 2, 3], got 4"),
        ({"reduce_dtype": torch.int8}, "ValueError: zerox: reduce_dtype must be one of "),
        ({"state_dtype": torch.int8}, "ValueError: zerox: state_dtype must be "),
        ({"master_weights": "fp64"}, "ValueError: zerox: master_weights must be one of "),
        (
            {"exchange": "pigeon"},
            "ValueError: zerox: exchange must be one of (None, 'direct', 'messages', 'native'), got 'pigeon'",
        ),
        ({"bucket_cap_mb": 0}, "ValueError: zerox: bucket_cap_mb must be a positive number or None, got 0"),
        ({"capturable": True}, "ValueError: zerox: capturable=True does not go with parameters on cpu: "),
    ]


def construct_with_one_wrong_rank(rank: int, world_size: int) -> list[str]:
    messages = [
        error_of(lambda w=wrong: FusedShardedAdam(**args_of({}, w, rank)))  # type: ignore[misc]
        for wrong, _ in rank_1_alone_is_wrong()
    ]
    os.environ["ZEROX_EXCHANGE"] = "pigeon" if rank == 1 else "direct"
    try:
        messages.append(error_of(lambda: FusedShardedAdam([weight()])))
    finally:
        del os.environ["ZEROX_EXCHANGE"]
    optimizer = FusedShardedAdam([weight()])  # ranks are in step
    optimizer.step()
    return messages


def test_what_one_rank_alone_refuses_in_the_constructor_the_others_hear_at_once() -> None:
    expected = [message for _, message in rank_1_alone_is_wrong()]
    expected.append("ValueError: ZEROX_EXCHANGE must be one of ('direct', 'messages', 'native'), got 'pigeon'")
    for rank, messages in enumerate(run_ranks(construct_with_one_wrong_rank, 3)):
        for message, start in zip(messages, expected, strict=True):
            assert message.startswith(start if rank == 1 else f"ValueError: zerox: rank 1 raised {start}"), message


def refuse_without_waiting(rank: int, world_size: int) -> str:
    """Rank 0 has its error before any other rank has come; the group's timeout is a minute."""
    message = error_of(lambda: FusedShardedAdam([weight()], lr=-1.0)) if rank == 0 else ""
    torch.distributed.barrier()
    return message or error_of(lambda: FusedShardedAdam([weight()]))


def test_whoever_refuses_does_not_wait_for_the_others() -> None:
    own = "Invalid learning rate: -1.0"
    assert run_ranks(refuse_without_waiting, 2) == [
        f"ValueError: {own}",
        f"ValueError: zerox: rank 0 raised ValueError: {own}",
    ]


def wrong_groups() -> list[tuple[Callable[[list[nn.Parameter]], dict[str, Any]], str]]:
    return [
        (lambda _: {"params": [weight()], "lr": -1.0}, "ValueError: Invalid learning rate: -1.0"),
        (lambda known: {"params": known}, "ValueError: some parameters appear in more than one parameter group"),
        (lambda _: {"params": {weight()}}, "TypeError: optimizer parameters need to be organized in ordered"),
        (
            lambda _: {"params": [weight(dtype=torch.complex64)]},
            "ValueError: zerox: parameter 'param 1' must be one of",
        ),
    ]


def add_wrong_groups(rank: int, world_size: int, wrong_rank: int | None) -> tuple[list[str], int]:
    known = [weight()]
    optimizer = FusedShardedAdam(known)
    messages = []
    for wrong, _ in wrong_groups():
        group = wrong(known) if wrong_rank in (rank, None) else {"params": [weight()]}
        messages.append(error_of(lambda g=group: optimizer.add_param_group(g)))  # type: ignore[misc]
    added = weight(2)
    optimizer.add_param_group({"params": [added]})
    added.grad = torch.ones(2)
    optimizer.step()
    assert not torch.equal(added, torch.ones(2)), "what is added after a refusal is trained"
    return messages, len(optimizer.param_groups)


@pytest.mark.parametrize("wrong_rank", [None, 1])
def test_a_group_that_one_rank_or_all_refuse_is_added_on_none(wrong_rank: int | None) -> None:
    for rank, (messages, num_groups) in enumerate(run_ranks(add_wrong_groups, 3, wrong_rank)):
        assert num_groups == 2
        for message, (_, own) in zip(messages, wrong_groups(), strict=True):
            told = wrong_rank is not None and rank != wrong_rank
            assert message.startswith(f"ValueError: zerox: rank 1 raised {own}" if told else own), message


def unfreeze_on_one_rank(rank: int, world_size: int, stage: int) -> tuple[str, str, bool]:
    optimizer = FusedShardedAdam(**named(a=weight(), b=weight(4, frozen=True)), stage=stage)
    a, b = optimizer.param_groups[0]["params"]
    b.requires_grad_(rank == 1)
    (a.sum() + b.sum()).backward()
    refused = error_of(optimizer.step)
    untouched = torch.equal(a, torch.ones(3))
    b.requires_grad_(True)
    again = error_of(optimizer.step)
    return refused, again, untouched and not torch.equal(a, torch.ones(3))


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_unfrozen_on_one_rank_only_is_named_and_the_step_can_be_repeated(stage: int) -> None:
    for refused, again, stepped in run_ranks(unfreeze_on_one_rank, 2, stage):
        assert refused.startswith(
            "ValueError: zerox: ranks must agree: rank 0 has nothing; rank 1 has trainable parameter 'b'"
        )
        assert again == "no error"
        assert stepped


def in_another_order(rank: int, world_size: int) -> str:
    values = torch.ones(3, 4)
    param = nn.Parameter(values if rank == 0 else torch.ones(4, 3).t())
    return error_of(lambda: FusedShardedAdam([("a", param)]))


def test_parameters_that_lie_in_another_order_are_refused() -> None:
    """Gradients are sent as they lie: those of other elements would be averaged."""
    for said in run_ranks(in_another_order, 2):
        assert "rank 0 has trainable parameter 'a' (3, 4) torch.float32 on cpu in group 0" in said
        assert "rank 1 has trainable parameter 'a' (3, 4) torch.float32 on cpu with strides [1, 3]" in said
