"""Several shards in one call: the bits of each alone; and which buckets go together."""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench.trace import profile_all_threads, ranges_of
from tests.kernels.rule import VARIANT_IDS, VARIANTS
from tests.kernels.shards import Shard, options_table, same_bits, segments_of
from zerox import ops
from zerox.rules.adam import ADAM
from zerox.rules.rule import Rule
from zerox.update.update import LEAST_IN_A_LAUNCH, launches, ranges, update

KINDS = [
    (torch.float64, None, torch.float32),
    (torch.float32, None, torch.float32),
    (torch.float32, None, torch.uint8),
    (torch.bfloat16, "remainder", torch.float32),
    (torch.bfloat16, "remainder", torch.bfloat16),
    (torch.float16, "fp32", torch.float32),
]


def shards_of(
    dtype: torch.dtype, master: str | None, state_dtype: torch.dtype, rule: Rule, config: dict[str, Any]
) -> list[Shard]:
    found = []
    for seed, numels in enumerate([(256, 5000), (1,), (70_000,), ()]):
        segments = segments_of(*numels) if len(numels) > 0 else torch.zeros(1, 5, dtype=torch.int64)
        own: dict[str, Any] = {"segments": segments, "master_kind": master, "state_dtype": state_dtype}
        found.append(Shard(sum(numels), dtype, step=seed, seed=seed, rule=rule, config=config, **own))
    return found


@pytest.mark.parametrize(("rule", "config"), VARIANTS, ids=VARIANT_IDS)
@pytest.mark.parametrize(("dtype", "master", "state_dtype"), KINDS, ids=str)
def test_many_at_once_have_the_bits_of_each_alone(
    dtype: torch.dtype, master: str | None, state_dtype: torch.dtype, rule: Rule, config: dict[str, Any]
) -> None:
    together = shards_of(dtype, master, state_dtype, rule, config)
    alone = copy.deepcopy(together)
    options = options_table(rule, **config)
    for shard in alone:
        shard.update(options, 0.5)
    Shard.update_together(together, options, torch.tensor(0.5, dtype=torch.float64))
    for ours, theirs in zip(together, alone, strict=True):
        for a, b in zip(ours.tensors(), theirs.tensors(), strict=True):
            assert same_bits(a, b)
    assert not same_bits(together[0].param, shards_of(dtype, master, state_dtype, rule, config)[0].param)


def test_shards_of_one_kind_are_one_call(monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[int] = []
    plain = ops.update_
    monkeypatch.setattr(
        ops, "update_", lambda rule, shards, *args: (calls.append(len(shards)), plain(rule, shards, *args))
    )

    kinds = [(torch.float32, None), (torch.float32, None), (torch.bfloat16, "remainder"), (torch.float32, None)]
    mixed = [Shard(300, dtype, master_kind=master, step=2, seed=i) for i, (dtype, master) in enumerate(kinds)]
    mixed += [Shard(300, step=2, grad_dtype=torch.bfloat16), Shard(300, step=2, config={"amsgrad": True})]
    expected = copy.deepcopy(mixed)
    for shard in expected:
        shard.update(options_table())
    calls.clear()
    update(ADAM, [each.for_op() for each in mixed], options_table(), None)
    assert calls == [2, 1, 1, 1, 1]
    for ours, theirs in zip(mixed, expected, strict=True):
        assert same_bits(ours.param, theirs.param)


def buckets_of(*numels: int, device: str = "meta") -> list[Any]:
    return [SimpleNamespace(param_shard=torch.empty(numel, device=device), rule=ADAM) for numel in numels]


def test_small_buckets_go_together_in_the_order_of_their_gathers() -> None:
    large, half = LEAST_IN_A_LAUNCH, LEAST_IN_A_LAUNCH // 2
    buckets = buckets_of(half, 10, large, half, half - 1, 7, 3)
    assert list(launches(range(7), buckets, [None] * 7)) == [[0, 1, 2], [3, 4, 5], [6]]
    assert list(launches([6, 5, 2, 0, 1, 3, 4], buckets, [None] * 7)) == [[6, 5, 2], [0, 1, 3], [4]]
    divisors = [None, 1.0, 1.0, None, None, None, None]
    assert list(launches(range(7), buckets, divisors)) == [[0], [1, 2], [3, 4, 5], [6]], "one scale a launch"
    assert list(launches([], buckets, [])) == []


def test_on_the_cpu_each_bucket_is_gathered_as_soon_as_it_is_updated() -> None:
    assert list(launches([1, 0, 2], buckets_of(5, 5, 5, device="cpu"), [None] * 3)) == [[1], [0], [2]]


@pytest.mark.parametrize("run", [[3], [0, 2, 1]], ids=str)
def test_a_profile_shows_each_bucket_of_a_run(run: list[int]) -> None:
    with profile_all_threads() as seen, ranges(run):
        pass
    assert {(each.what, each.bucket) for each in ranges_of(seen)} == {("update", index) for index in run}


def test_nothing_to_update_is_no_call() -> None:
    update(ADAM, [], options_table(), None)
    ops.update_("adam", [], options_table())
