"""Saved in one form by some ranks, loaded in another by others: every pair of choices, in as few runs as that takes."""

from __future__ import annotations

import itertools
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.checkpoint.test_entries import STEPS, train
from tests.kernels import stored
from tests.kernels.shards import same_bits
from tests.optimizer.models import make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load, save

Form = tuple[int, int, Any, Any]  # ranks, stage, master_weights, state_dtype
RANKS, STAGES = (1, 2, 3, 4), (1, 2, 3)
MASTERS, MOMENTS = ("remainder", "fp32", None), (torch.float32, torch.bfloat16, "8bit")


def build(form: Form, seed: int) -> tuple[Any, FusedShardedAdam]:
    _, stage, master, moments = form
    model = make_model(torch.bfloat16, seed)
    options = {"stage": stage, "master_weights": master, "state_dtype": moments}
    return model, FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.03 * stage, **options)


def pairwise_cover() -> list[tuple[Form, Form]]:
    """(saved, loaded): any two choices of any two of the eight are together in one of these."""
    factors = [RANKS, STAGES, MASTERS, MOMENTS] * 2
    missing = {(i, a, j, b) for i, j in itertools.combinations(range(8), 2) for a in factors[i] for b in factors[j]}
    found = []
    while missing:
        best: list[Any] = []
        # Greedy: the first choice is a pair that is missing, each next one what most of the missing ones want.
        i, a, j, b = min(missing, key=str)
        chosen = {i: a, j: b}
        for factor in range(8):
            if factor not in chosen:
                wins = {
                    each: sum(_pair(factor, each, other, value) in missing for other, value in chosen.items())
                    for each in factors[factor]
                }
                chosen[factor] = max(factors[factor], key=lambda each: wins[each])
        best = [chosen[factor] for factor in range(8)]
        missing -= {_pair(i, best[i], j, best[j]) for i, j in itertools.combinations(range(8), 2)}
        found.append((tuple(best[:4]), tuple(best[4:])))
    return found  # type: ignore[return-value]


def _pair(i: int, a: Any, j: int, b: Any) -> tuple[int, Any, int, Any]:
    return (i, a, j, b) if i < j else (j, b, i, a)


PAIRS = pairwise_cover()
DIAGONAL = [
    (ranks, stage, master, moments)
    for ranks, (stage, master, moments) in zip(
        itertools.cycle(RANKS), itertools.product((2, 3), MASTERS, MOMENTS), strict=False
    )
]


def test_the_cover_has_every_pair() -> None:
    assert len(PAIRS) <= 24
    factors = [RANKS, STAGES, MASTERS, MOMENTS] * 2
    seen = {
        (i, each[i], j, each[j])
        for pair in PAIRS
        for each in [(*pair[0], *pair[1])]
        for i, j in itertools.combinations(range(8), 2)
    }
    assert len(seen) == sum(len(a) * len(b) for a, b in itertools.combinations(factors, 2))


def values(model: Any) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def save_midway(rank: int, _: int, form: Form, path: str) -> tuple[list[Tensor], dict[str, Any], list[Tensor]]:
    model, optimizer = build(form, 0)
    train(model, optimizer, rank, range(STEPS))
    save(path, model, optimizer)
    then, full = values(model), optimizer.full_state_dict()
    train(model, optimizer, rank, range(STEPS, STEPS + 1))
    return then, full, values(model)


def load_into(rank: int, _: int, form: Form, path: str) -> tuple[list[Tensor], dict[str, Any], list[Tensor], list[str]]:
    model, optimizer = build(form, 1)
    train(model, optimizer, rank, range(5, 6))  # what is loaded replaces whatever there was
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        load(path, model, optimizer)
    then, full = values(model), optimizer.full_state_dict()
    train(model, optimizer, rank, range(STEPS, STEPS + 1))
    return then, full, values(model), [str(each.message) for each in said if "zerox" in str(each.message)]


def as_kept(name: str, wide: Tensor, moments: Any) -> Tensor:
    """What a moment is once it is stored so."""
    if moments == "8bit":
        if wide.numel() < 4096:
            return wide
        flat, signed = wide.reshape(-1), name == "exp_avg"
        return stored.decode(*stored.encode(flat, signed), signed).reshape(wide.shape)
    return wide.to(moments).float()


@pytest.mark.parametrize(("saved", "loaded"), PAIRS, ids=str)
def test_every_form_loads_every_other(tmp_path: Path, saved: Form, loaded: Form) -> None:
    then, full, _ = run_ranks(save_midway, saved[0], saved, str(tmp_path / "x"))[0]
    results = run_ranks(load_into, loaded[0], loaded, str(tmp_path / "x"))
    for now, _, _, _ in results:
        assert all(same_bits(a, b) for a, b in zip(now, then, strict=True)), "the parameters are what they were"
    _, found, _, said = results[0]
    for number, state in full["state"].items():
        ours = found["state"][number]
        assert ours["step"] == state["step"]
        for name in ("exp_avg", "exp_avg_sq"):
            assert same_bits(ours[name], as_kept(name, state[name], loaded[3])), (number, name)
        if loaded[2] is not None:
            value = state.get("master", then[number].float())
            off = (ours["master"].view(torch.int32) - value.view(torch.int32)).abs()
            assert int(off.max()) <= (0 if saved[2] == loaded[2] else 1)
            assert float((off > 0).float().mean()) < 1e-3, "only masters in the middle between two parameters"
    # Small parameters keep float32 moments beside 8-bit ones.
    finer = saved[3] is torch.float32 or saved[3] == "8bit"
    expected = {
        "exp_avg to torch.bfloat16": loaded[3] is torch.bfloat16 and finer,
        "exp_avg to 8 bits": loaded[3] == "8bit" and saved[3] != "8bit",
        "masters to the parameters' dtype": saved[2] is not None and loaded[2] is None,
    }
    told = " ".join(said)
    assert {what: what in told for what in expected} == expected
    assert len(said) == (1 if any(expected.values()) else 0)


@pytest.mark.parametrize("form", DIAGONAL, ids=str)
def test_in_its_own_form_training_goes_on_bit_for_bit(tmp_path: Path, form: Form) -> None:
    _, _, ended = run_ranks(save_midway, form[0], form, str(tmp_path / "x"))[0]
    for _, _, went_on, said in run_ranks(load_into, form[0], form, str(tmp_path / "x")):
        assert all(same_bits(a, b) for a, b in zip(went_on, ended, strict=True))
        assert said == []
