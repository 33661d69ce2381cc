"""Which parameters share a bucket: reverse registration order, one dtype, the cap."""

import time
from dataclasses import replace
from itertools import pairwise
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from zerox.plan import buckets
from zerox.plan.buckets import MIB, ParamSpec, default_cap_bytes, plan_buckets
from zerox.plan.owners import Load

ITEMSIZES = {"float32": 4, "bfloat16": 2, "float64": 8}


def spec(numel: int, dtype: str = "float32", name: str = "p") -> ParamSpec:
    return ParamSpec(name, numel, dtype, ITEMSIZES[dtype])


models = st.lists(st.builds(spec, st.integers(0, 6000), st.sampled_from(sorted(ITEMSIZES))), max_size=30)
caps = st.integers(1, 60_000)


@given(models, caps, st.integers(1, 9))
def test_every_parameter_is_in_exactly_one_bucket_of_its_dtype(
    params: list[ParamSpec], cap: int, world_size: int
) -> None:
    plans = plan_buckets(params, world_size, cap)
    assert sorted(index for plan in plans for index in plan.params) == list(range(len(params)))
    for plan in plans:
        assert {params[index].dtype for index in plan.params} == {plan.dtype}
        assert plan.layout.numels == tuple(params[index].numel for index in plan.params)
        assert plan.layout.world_size == world_size


@given(models, caps)
def test_buckets_are_filled_in_reverse_registration_order(params: list[ParamSpec], cap: int) -> None:
    plans = plan_buckets(params, 2, cap)
    for dtype in ITEMSIZES:
        order = [index for plan in plans if plan.dtype == dtype for index in sorted(plan.params, reverse=True)]
        assert order == sorted(order, reverse=True)
    firsts = [max(plan.params) for plan in plans]
    assert firsts == sorted(firsts, reverse=True)


@given(models, caps, st.integers(1, 9))
def test_in_a_bucket_large_parameters_come_first_each_kind_in_reverse_order(
    params: list[ParamSpec], cap: int, world_size: int
) -> None:
    with patch.multiple(buckets, ZERO_COPY_BYTES=1000, ZERO_COPY_SLICE_BYTES=4000):
        plans = plan_buckets(params, world_size, cap)
    for plan in plans:
        large = [index for index in plan.params if params[index].nbytes >= 1000]
        small = [index for index in plan.params if params[index].nbytes < 1000]
        assert list(plan.params) == sorted(large, reverse=True) + sorted(small, reverse=True)
        slice_bytes = plan.layout.shard_numel * ITEMSIZES[plan.dtype]
        assert plan.num_zero_copy == (len(large) if slice_bytes >= 4000 else 0)


@given(models, caps)
def test_a_bucket_keeps_the_cap_unless_one_parameter_alone_exceeds_it(params: list[ParamSpec], cap: int) -> None:
    for plan in plan_buckets(params, 2, cap):
        nbytes = [params[index].nbytes for index in plan.params]
        assert sum(nbytes) <= cap or len([each for each in nbytes if each > 0]) == 1


@given(models, caps)
def test_a_bucket_is_closed_only_by_a_parameter_that_did_not_fit(params: list[ParamSpec], cap: int) -> None:
    plans = plan_buckets(params, 2, cap)
    for dtype in ITEMSIZES:
        buckets = [plan.params for plan in plans if plan.dtype == dtype]
        for bucket, following in pairwise(buckets):
            assert sum(params[index].nbytes for index in bucket) + params[following[0]].nbytes > cap


def test_the_tiniest_cap_gives_each_parameter_a_bucket_and_a_huge_one_gives_one() -> None:
    params = [spec(10) for _ in range(5)]
    assert [plan.params for plan in plan_buckets(params, 2, 1)] == [(4,), (3,), (2,), (1,), (0,)]
    assert [plan.params for plan in plan_buckets(params, 2, 1 << 60)] == [(4, 3, 2, 1, 0)]


def test_dtypes_interleaved_in_the_model_fill_one_bucket_each() -> None:
    params = [spec(10, "bfloat16"), spec(10), spec(10, "bfloat16"), spec(10)]
    assert [plan.params for plan in plan_buckets(params, 2, MIB)] == [(3, 1), (2, 0)]


def test_no_parameters_need_no_buckets() -> None:
    assert plan_buckets([], 4, MIB) == []


@pytest.mark.parametrize(("world_size", "cap", "named"), [(2, 0, "0"), (2, -5, "-5"), (0, 1, "world_size.*0")])
def test_an_impossible_cap_or_world_size_is_refused_with_the_value(world_size: int, cap: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        plan_buckets([spec(3)], world_size, cap)


def test_the_default_cap_keeps_slices_large_enough_for_many_ranks() -> None:
    assert default_cap_bytes("gloo", 2) == default_cap_bytes("nccl", 8) == 16 * MIB
    assert default_cap_bytes("gloo", 1024) // 1024 == 256 * 1024
    assert default_cap_bytes("nccl", 1024) // 1024 == 512 * 1024
    assert default_cap_bytes("unheard of", 2) == 16 * MIB
    assert default_cap_bytes("none", 1) == 64 * MIB, "nothing is sent that could be hidden"


def llama_405b() -> list[ParamSpec]:
    hidden, inner, key_value, vocabulary = 16_384, 53_248, 1_024, 128_256
    layer = [
        hidden * hidden,
        hidden * key_value,
        hidden * key_value,
        hidden * hidden,
        hidden * inner,
        hidden * inner,
        hidden * inner,
        hidden,
        hidden,
    ]
    numels = [vocabulary * hidden, *(layer * 126), hidden, vocabulary * hidden]
    return [spec(numel, "bfloat16") for numel in numels]


def test_405_billion_parameters_over_16384_ranks_are_planned_in_under_a_second() -> None:
    params, world_size = llama_405b(), 16_384
    assert sum(param.numel for param in params) == pytest.approx(405e9, rel=0.01)
    start = time.process_time()
    plans = plan_buckets(params, world_size, default_cap_bytes("nccl", world_size))
    slices = [plan.layout.shard_numel + plan.layout.trailer_numel for plan in plans]
    own = [segment for plan in plans for segment in plan.layout.segments(world_size - 1)]
    assert time.process_time() - start < 1.0
    padding = sum(plan.layout.padding for plan in plans)
    assert padding < 0.01 * sum(param.numel for param in params)
    assert len(slices) == len(plans)
    assert own


@given(models, caps, st.integers(1, 9))
def test_every_parameter_starts_where_torch_s_allocator_would_start_it(
    params: list[ParamSpec], cap: int, world_size: int
) -> None:
    for plan in plan_buckets(params, world_size, cap):
        assert all(offset * ITEMSIZES[plan.dtype] % 64 == 0 for offset in plan.layout.offsets)


# ---- parameters that lie whole on one rank


def test_whole_parameters_have_buckets_of_their_own_and_owners_over_all_of_them() -> None:
    """Two of each kind a bucket, and costs that two ranks share only if both buckets are looked at together."""
    params = [replace(spec(100), cost=cost) for cost in (6, 2, 5, 3)]
    params = [params[0], spec(200), params[1], params[2], spec(300), params[3]]
    plans = plan_buckets(params, 2, 4 * 500)
    whole = [plan for plan in plans if plan.layout.owners is not None]
    assert [plan.params for plan in plans if plan.layout.owners is None] == [(4, 1)]
    assert [plan.params for plan in whole] == [(5, 3, 2, 0)]
    assert [plan.layout.owners for plan in whole] == [(1, 1, 0, 0)]
    one_each = [plan for plan in plan_buckets(params, 2, 1) if plan.layout.owners is not None]
    assert {plan.params[0]: plan.layout.owners for plan in one_each} == {0: (0,), 2: (0,), 3: (1,), 5: (1,)}


def test_what_ranks_own_already_counts() -> None:
    params = [replace(spec(100), cost=1)] * 2
    [plan] = plan_buckets(params, 3, MIB, [Load(5, 0), Load(0, 0), Load(4, 0)])
    assert plan.layout.owners == (1, 1)
