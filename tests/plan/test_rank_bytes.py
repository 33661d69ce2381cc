"""Bytes of a rank, from a plan written down by hand."""

from __future__ import annotations

from dataclasses import replace

import pytest

from zerox.plan.buckets import BucketPlan, ParamSpec, plan_buckets
from zerox.plan.form import EIGHT_BIT, FLOAT32, LOW_16_BITS, Form
from zerox.plan.kept import PERIOD_BYTES, SPACED_BYTES, Kept, mask_bytes
from zerox.plan.layout import Layout
from zerox.plan.plan import Plan, TablePlan, TrainedPlan, Wire
from zerox.plan.rank_bytes import Site, flow_of, heaviest_shard, parameter_bytes, peak_of, state_bytes
from zerox.plan.stage import stage_of

FP32 = Wire(grad_itemsize=4, itemsize=4, sum_itemsize=4, is_grads=True, is_wider=False)
ALIGN = 256  # elements: shards end with a block of 8-bit state


def bucket_of(numel: int, itemsize: int, world_size: int, form: Form = FLOAT32) -> BucketPlan:
    [plan] = plan_buckets([ParamSpec("w", numel, "x", itemsize, form)], world_size, 1 << 40)
    return plan


def site(stage: int = 2, world_size: int = 4, near: int = 1, mesh: tuple[int, int] | None = None) -> Site:
    return Site(stage_of(stage), "gloo", world_size, near, on_host=True, exchange="direct", mesh=mesh)


def plan_of(*trained: TrainedPlan, tables: tuple[TablePlan, ...] = (), loose_bytes: int = 0) -> Plan:
    return Plan(("w", "t"), trained, (), tables, loose_bytes)


def test_a_parameter_is_planned_once() -> None:
    each = TrainedPlan(bucket_of(8, 4, 1), (), FP32)
    for trained, names in (((each, each), ("w", "t")), ((each,), ())):
        with pytest.raises(AssertionError, match=r"planned twice|0 parameters"):
            Plan(names, trained)


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_are_whole_or_a_shard_and_what_may_be_whole_beside_it(stage: int) -> None:
    numel = 4 * ALIGN * 10
    plan = plan_of(TrainedPlan(bucket_of(numel, 4, 4), (), FP32), loose_bytes=12 if stage < 3 else 0)
    found = parameter_bytes(plan, site(stage), None)
    assert found == (numel * 4 + 12 if stage < 3 else numel * 4 // 4 + numel * 4)
    if stage == 3:
        with pytest.raises(ValueError, match="the bucket of w, which is whole"):
            parameter_bytes(plan, site(stage), 1e-3)
        assert parameter_bytes(plan, site(3, mesh=(2, 2)), None) == 2 * numel + 4 * numel, "over one axis only"


def test_state_is_that_of_a_shard_in_the_form_of_each() -> None:
    shard = ALIGN * 10
    kept = (Kept("a", EIGHT_BIT, 2), Kept("b", FLOAT32, 3), Kept("remainder", LOW_16_BITS, 1, is_master=True))
    each = TrainedPlan(bucket_of(4 * shard, 2, 4), kept, FP32)
    assert state_bytes(plan_of(each), site(), ()) == (2 * shard, shard + 4 * shard // 256 + 4 * shard)
    masks = state_bytes(plan_of(each), site(), {0})[1] - state_bytes(plan_of(each), site(), {1})[1]
    assert masks == mask_bytes(shard) == shard // 8 + 4


def test_large_arrays_are_spaced_on_the_host_alone() -> None:
    kept, numel = Kept("a", FLOAT32, 2), SPACED_BYTES // 4
    assert kept.nbytes(numel, on_host=True) == 4 * numel + PERIOD_BYTES
    assert kept.nbytes(numel, on_host=False) == 4 * numel
    assert kept.nbytes(numel - 1, on_host=True) == 4 * (numel - 1)


def test_a_row_of_a_table_has_scales_of_its_own() -> None:
    kept = (Kept("a", EIGHT_BIT, 2), Kept("master", FLOAT32, 1, is_master=True))
    table = TablePlan(1, num_rows=1000, width=300, itemsize=2, kept=kept)
    assert table.most_rows(4) == 4 * 64, "16 blocks of 64 rows over 4 ranks"
    assert state_bytes(plan_of(tables=(table,)), site(), ()) == (256 * 300 * 4, 256 * (300 + 2 * 4))
    assert parameter_bytes(plan_of(tables=(table,)), site(2), None) == 1000 * 300 * 2
    own, by_rows = 256 * 300 * 2, 1000 * 300 * 2 // 8
    assert parameter_bytes(plan_of(tables=(table,)), site(3), None) == own + by_rows
    on_device = replace(site(3), on_host=False)
    assert parameter_bytes(plan_of(tables=(table,)), on_device, None) == own + 1000 * 300 * 2


@pytest.mark.parametrize(("near", "received"), [(1, 3), (2, 2), (4, 0)])
def test_slices_come_from_ranks_that_cannot_be_read(near: int, received: int) -> None:
    each = TrainedPlan(bucket_of(4 * ALIGN, 4, 4), (), FP32)
    layout = each.bucket.layout
    flow = flow_of(each, site(near=near))
    slice_bytes = 4 * (layout.shard_numel + layout.trailer_numel)
    assert (flow.flat, flow.received, flow.reducing) == (4 * slice_bytes, received * slice_bytes, 0)
    assert flow.shard == 4 * layout.shard_numel


def test_on_a_mesh_sums_are_float32_and_are_rounded_for_a_narrow_wire() -> None:
    wire = Wire(grad_itemsize=4, itemsize=2, sum_itemsize=4, is_grads=False, is_wider=False)
    each = TrainedPlan(bucket_of(4 * ALIGN, 4, 4), (), wire)
    layout = each.bucket.layout
    padded = layout.shard_numel + layout.trailer_numel
    flow = flow_of(each, site(mesh=(2, 2)))
    assert flow.received == 2 * (2 - 1) * 2 * padded
    assert flow.reducing == (2 - 1) * 4 * padded + (2 + 1) * 4 * padded + 4 * layout.shard_numel


def test_large_gradients_are_not_packed_unless_they_are_cast_or_divided() -> None:
    [large] = plan_buckets([ParamSpec("w", 1 << 22, "x", 4)], 2, 1 << 40)
    assert large.num_zero_copy == 1
    flags = 2 * large.layout.trailer_numel * 4
    here = site(world_size=2)
    assert flow_of(TrainedPlan(large, (), FP32), here).flat <= flags + 2 * 64 * 4
    assert flow_of(TrainedPlan(large, (), replace(FP32, is_grads=False)), here).flat > large.nbytes
    [alone] = plan_buckets([ParamSpec("w", 1 << 22, "x", 4)], 1, 1 << 40)
    assert flow_of(TrainedPlan(alone, (), FP32), site(world_size=1)).flat < large.nbytes
    assert flow_of(TrainedPlan(alone, (), FP32, divisor=3.0), site(world_size=1)).flat >= large.nbytes


def test_a_wire_that_keeps_up_takes_less() -> None:
    flows = [flow_of(TrainedPlan(bucket_of(4 * ALIGN * n, 4, 4), (), FP32), site()) for n in (1, 3, 3)]
    for stage in (2, 3):
        assert peak_of(flows, site(stage), keeps_up=True) < peak_of(flows, site(stage), keeps_up=False)


# ---- parameters with owners


def dealt(numels: tuple[int, ...], owners: tuple[int, ...], world_size: int) -> TrainedPlan:
    layout = Layout(numels, world_size, owners=owners)
    bucket = BucketPlan(tuple(range(len(numels))), "x", 4, layout)
    return TrainedPlan(bucket, (Kept("a", FLOAT32, 2),), FP32)


def test_the_rank_that_owns_most_over_all_buckets_is_what_counts() -> None:
    """And not the sum of each bucket's longest shard, which are different ranks'."""
    first, second = dealt((4096, 4096), (2, 2), 4), dealt((12288, 1024), (1, 0), 4)
    plan = Plan(("a", "b", "c", "d"), (first, replace(second, bucket=replace(second.bucket, params=(2, 3)))))
    assert heaviest_shard(plan) == 1
    here = replace(site(), shard=1)
    assert state_bytes(plan, here, ()) == (0, 4 * (256 + 12288))
    assert parameter_bytes(plan, replace(here, stage=stage_of(3)), None) - plan_nbytes(plan) == 4 * (256 + 12288)


def plan_nbytes(plan: Plan) -> int:
    return sum(bucket.nbytes for bucket in plan.buckets)


def test_a_flow_counts_what_this_rank_gets() -> None:
    each = dealt((4096, 12288), (2, 1), 4)
    layout = each.bucket.layout
    flags = layout.trailer_numel
    for shard, own in enumerate((256, 12288, 4096, 256)):
        flow = flow_of(each, replace(site(near=2), shard=shard))
        assert flow.shard == 4 * own
        assert flow.flat == 4 * (layout.numel + 4 * flags)
        assert flow.received == (4 - 2) * 4 * (own + flags)
    column = 4096 + 256 + 2 * flags
    flow = flow_of(each, replace(site(mesh=(2, 2)), shard=3))
    assert flow.received == (2 - 1) * 4 * column
    assert flow.reducing == 4 * ((2 - 1) * (256 + flags) + column + 256 + flags)
