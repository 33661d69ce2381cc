"""Parameters, state and norms are the same bits however buckets, stages and overlap are chosen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.bucket_manager.rig import same_bits
from tests.bucket_manager.test_zero_copy import from_bytes
from tests.optimizer.models import KINDS, make_optimizer, train
from tests.own_state import own_state
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import _C

TINY, SMALL, WHOLE = 1e-6, 0.03, 64.0  # MiB: every parameter a bucket of its own, some buckets, one

# Every kind of state, and wires that are wider or narrower than the parameters.
CASES: dict[str, dict[str, Any]] = {kind: {"dtype": dtype, **options} for kind, (dtype, options) in KINDS.items()}
CASES |= {
    f"{kind}, {wire} on the wire": {**CASES[kind], "reduce_dtype": wire}
    for kind, wire in (
        ("fp32", torch.bfloat16),
        ("bf16 remainder", torch.float32),
        ("fp16 fp32", torch.float32),
        ("fp64", torch.float32),
    )
}

# Every case is trained by the most ranks that a test has, in the hardest way. Of cases these are tried in all ways: how
# ranks, a stage and accumulation cut a bucket and its gradients does not depend on what is stored in it.
FEW = ("fp32", "bf16 remainder", "three rules, 8-bit state", "fp32, torch.bfloat16 on the wire")
FEW_KINDS = FEW[:3]


def train_rank(rank: int, world_size: int, options: dict[str, Any], isa: str = "") -> Any:
    _C.select_isa(isa)
    try:
        return train(rank, **options)
    finally:
        _C.select_isa("")


def train_zero_copy(rank: int, world_size: int, options: dict[str, Any], nbytes: int) -> Any:
    with from_bytes(nbytes):
        return train_rank(rank, world_size, options)


def whole_state(results: list[Any]) -> dict[tuple[str, str], torch.Tensor]:
    """The ranks' state put together, by parameter and kind. Step counts, one a part, must agree among themselves."""
    parts: dict[tuple[str, str], list[tuple[int, torch.Tensor]]] = {}
    for _, state, _ in results:
        for (name, start), tensors in state.items():
            for key, tensor in tensors.items():
                parts.setdefault((name, key), []).append((start, tensor))
    whole = {}
    for (name, key), pieces in parts.items():
        tensors = [tensor for _, tensor in sorted(pieces, key=lambda piece: piece[0])]
        if key == "step":
            assert all(torch.equal(each, tensors[0]) for each in tensors), name
            tensors = tensors[:1]
        whole[name, key] = torch.cat(tensors)
    return whole


def assert_same(results: list[Any], reference: list[Any]) -> None:
    for params, _, norms in results:
        for got, expected in zip(params, reference[0][0], strict=True):
            assert same_bits(got, expected)
        assert norms == reference[0][2]
    state, expected_state = whole_state(results), whole_state(reference)
    assert state.keys() == expected_state.keys()
    for key, tensor in state.items():
        assert same_bits(tensor, expected_state[key]), key


@pytest.mark.parametrize(("case", "world_size"), thinned(CASES, FEW, [1, 2, 3], [3]))
def test_bucket_sizes_and_stages_don_t_show(world_size: int, case: str) -> None:
    common = {**CASES[case], "clip": 0.1, "accumulate": 2}
    reference = run_ranks(train_rank, world_size, {**common, "stage": 2, "bucket_cap_mb": WHOLE})
    more = [(2, TINY), (1, WHOLE)] if case in FEW else []
    for stage, cap in [(2, SMALL), (1, TINY), *more]:
        assert_same(run_ranks(train_rank, world_size, {**common, "stage": stage, "bucket_cap_mb": cap}), reference)


WAYS = [(world_size, *way) for world_size in (1, 2) for way in ((1, 1), (2, 1), (2, 2))]  # ranks, stage, accumulate


@pytest.mark.parametrize(("case", "way"), thinned(CASES, FEW, WAYS, [WAYS[-1]]), ids=str)
def test_gradients_that_are_not_packed_don_t_show(case: str, way: tuple[int, int, int]) -> None:
    world_size, stage, accumulate = way
    options = {**CASES[case], "clip": 0.1, "accumulate": accumulate, "stage": stage, "bucket_cap_mb": SMALL}
    reference = run_ranks(train_rank, world_size, options)
    for nbytes in (4, 8000):
        assert_same(run_ranks(train_zero_copy, world_size, options, nbytes), reference)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("world_size", [2, 3])
def test_overlap_and_repetition_don_t_show(world_size: int, stage: int) -> None:
    options = {"clip": 0.1, "bucket_cap_mb": SMALL, "stage": stage}
    reference = run_ranks(train_rank, world_size, options)
    assert_same(run_ranks(train_rank, world_size, {**options, "hold": True}), reference)
    assert_same(run_ranks(train_rank, world_size, options), reference)


@pytest.mark.parametrize("case", CASES)
def test_instruction_sets_don_t_show(case: str) -> None:
    options = {"clip": 0.1, "bucket_cap_mb": SMALL, **CASES[case]}
    reference = run_ranks(train_rank, 2, options, "scalar")
    for isa in set(_C.supported_isas()) - {"scalar"}:
        assert_same(run_ranks(train_rank, 2, options, isa), reference)


def step_with_threads(rank: int, world_size: int, kind: str, num_threads: int) -> Any:
    """Gradients by hand: those of matrix products differ with the number of threads."""
    dtype, options = KINDS[kind]
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(n, generator=generator).to(dtype)) for n in (400_003, 5, 70_000, 130_001)]
    before = torch.get_num_threads()
    torch.set_num_threads(num_threads)
    try:
        optimizer = make_optimizer(params, lr=1e-2, **options)
        norms = []
        for step in range(2):
            generator = torch.Generator().manual_seed(10 * rank + step)
            for param in params:
                param.grad = torch.randn(param.shape, generator=generator).to(dtype)
            norms.append(float(optimizer.clip_grad_norm_(0.1)))
            optimizer.step()
            optimizer.zero_grad()
    finally:
        torch.set_num_threads(before)
    kept = own_state(optimizer)
    state = {(str(i), 0): dict(kept[p]) for i, p in enumerate(params) if p in kept}
    return [p.detach() for p in params], state, norms


@pytest.mark.parametrize(("kind", "world_size"), thinned(KINDS, FEW_KINDS, [1, 2], [2]))
def test_numbers_of_threads_don_t_show(world_size: int, kind: str) -> None:
    one, *others = (run_ranks(step_with_threads, world_size, kind, num_threads) for num_threads in (1, 2, 4))
    for results in others:
        for (params, state, norms), (expected, expected_state, expected_norms) in zip(results, one, strict=True):
            assert all(same_bits(a, b) for a, b in zip(params, expected, strict=True))
            assert norms == expected_norms
            for place, tensors in expected_state.items():
                assert all(same_bits(state[place][key], tensor) for key, tensor in tensors.items())


def test_the_comparison_can_fail() -> None:
    reference = run_ranks(train_rank, 2, {"clip": 0.1})
    with pytest.raises(AssertionError):
        assert_same(run_ranks(train_rank, 2, {"clip": 0.1000001}), reference)
    state = reference[0][1]
    first = next(iter(state))
    state[first]["exp_avg"][-1] += 1.0
    with pytest.raises(AssertionError, match="exp_avg"):
        assert_same(reference, run_ranks(train_rank, 2, {"clip": 0.1}))
