"""bench.scale counts in closed form what the extension counts, and its model of a step gives what can be worked out."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from bench import host, network, planning, probes, scale, step_check, traffic_check, wire
from bench.network import Network, bound_bytes, direct_s, ring_s
from bench.shapes import MODELS
from bench.step_model import CORE, WIRE, Flight, Line, Place, Task, predict, simulate
from bench.systems import Training
from bench.traffic import EXCHANGES, NATIVE, Itemsizes, Sent, sent_by_scatter, sent_in_step
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.plan import buckets
from zerox.plan.buckets import MIB, ParamSpec, plan_buckets
from zerox.plan.stage import stage_of

# As published by the models' authors, by name and exactly.
NUMELS = {
    "gpt2-124m": 124_439_808,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}
# Large enough that gradients are sent straight from where they are: slices of a MiB, parameters of 256 KiB.
STRAIGHT_GPT = Training(layers=1, width=256, vocabulary=8_192, context=8, batch=1)


def on_rank(_: int, __: int, function: Callable[..., Any], *args: Any) -> Any:
    return function(*args)


@pytest.mark.parametrize("name", list(MODELS))
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    assert MODELS[name]().numel == NUMELS[name]


def test_nothing_is_allocated_for_a_plan() -> None:
    params = MODELS["llama-405b"]().named_parameters(torch.bfloat16)
    assert sum(param.numel() for _, param in params) == NUMELS["llama-405b"]
    assert sum(param.untyped_storage().nbytes() for _, param in params) == 2 * len(params)


def test_a_plan_of_405_b_parameters_over_16384_ranks_takes_no_memory_to_speak_of() -> None:
    row = planning.row_of("llama-405b", 16_384, "gloo")
    assert row["plan_peak_bytes"] < 50e6
    assert row["bucket_bytes"] == pytest.approx(row["slice_bytes"] * 16_384, rel=1e-6)
    # Each gradient byte and each parameter byte goes to somebody else, but for one part in W.
    assert row["native_bytes"] == pytest.approx(2 * 2 * row["numel"], rel=0.01)
    assert row["native_messages"] == 2 * row["buckets"] * (16_384 - 1)


def test_what_goes_straight_is_counted_apart() -> None:
    row = planning.row_of("gpt2-124m", 8, "gloo")
    assert row["native_messages"] == 2 * row["buckets"] * 7
    assert row["direct_messages"] > row["native_messages"]
    assert row["direct_bytes"] <= row["native_bytes"]
    over_nccl = planning.row_of("gpt2-124m", 8, "nccl")  # one all-to-all
    assert over_nccl["direct_messages"] == over_nccl["native_messages"]


@given(st.lists(st.integers(2, 300_000), min_size=1, max_size=12), st.integers(2, 6), st.data())
def test_a_scatter_sends_each_other_rank_its_segments_and_one_message_more(
    numels: list[int], world_size: int, data: st.DataObject
) -> None:
    """Peer by peer, where the closed form takes all and leaves out its own."""
    rank = data.draw(st.integers(0, world_size - 1))
    with patch.multiple(buckets, STRAIGHT_BYTES=40_000, STRAIGHT_SLICE_BYTES=1):
        [plan] = plan_buckets([ParamSpec("p", numel, "f", 4) for numel in numels], world_size, 2**40)
    layout, messages, numel = plan.layout, 0, 0
    for peer in set(range(world_size)) - {rank}:
        straight = [segment for segment in layout.segments(peer) if segment.slot < plan.num_straight]
        end = min(max(layout.end_of(plan.num_straight) - layout.shard_span(peer).start, 0), layout.shard_numel)
        messages += len(straight) + 1
        numel += sum(segment.span.numel for segment in straight) + layout.shard_numel - end + layout.trailer_numel
    assert sent_by_scatter(plan, rank, "direct", Itemsizes(4, 4)) == Sent(messages, 4 * numel)


@pytest.mark.parametrize("world_size", [2, 4])
def test_traffic_in_closed_form_is_what_the_extension_counts(world_size: int) -> None:
    rows = run_ranks(on_rank, world_size, traffic_check.count, STRAIGHT_GPT)[0]  # raises where they differ
    assert [(row["stage"], row["exchange"]) for row in rows] == [(s, e) for s in (1, 2) for e in EXCHANGES]
    assert all(row["straight"] > 0 for row in rows)
    by_kind = {(row["stage"], row["exchange"]): row for row in rows}
    for stage in (1, 2):
        native = by_kind[stage, NATIVE]["messages"]
        assert native == (4 - stage) * by_kind[stage, NATIVE]["buckets"] * (world_size - 1)
        assert by_kind[stage, "direct"]["messages"] > native


def test_a_flight_is_hidden_where_cores_are_to_spare_and_costs_its_time_where_not() -> None:
    flight = Flight(ready_s=1.0, pack_s=0.25, land_s=0.25, update_s=0.5, take_s=0.125)
    hidden = predict(Place(compute_s=2.0, cores=2), [flight])
    assert (hidden.step_s, hidden.exposed_s) == (2.0 + 0.5 + 0.125, 0.125)
    assert (hidden.left_s, hidden.landed_s) == ((1.25,), (1.5,))
    shared = predict(Place(compute_s=2.0), [flight])
    assert (shared.backward_end_s, shared.step_s) == (2.5, 2.0 + 0.5 + 0.5 + 0.125)
    assert (shared.left_s, shared.landed_s) == ((1.5,), (2.0,))


def test_the_wire_takes_buckets_one_by_one_and_a_latency_does_not_hold_it_up() -> None:
    flights = [Flight(ready_s=0.5, scatter_s=1.0), Flight(ready_s=1.0, scatter_s=1.0)]
    outcome = predict(Place(compute_s=1.0, latency_s=0.25), flights)
    assert outcome.landed_s == (1.75, 2.75)
    assert outcome.step_s == 2.75 + 0.25  # an empty gather still travels


def test_the_third_bucket_is_packed_when_the_first_has_landed() -> None:
    flights = [Flight(ready_s=1.0, scatter_s=1.0) for _ in range(3)]
    outcome = predict(Place(compute_s=1.0, cores=4), flights)
    assert outcome.left_s == (1.0, 1.0, 2.0)


def test_step_gathers_behind_updates() -> None:
    flights = [Flight(ready_s=1.0, update_s=1.0, gather_s=0.75), Flight(ready_s=1.0, update_s=1.0, gather_s=0.75)]
    outcome = predict(Place(compute_s=1.0, settle_s=0.5), flights)
    assert outcome.step_s == 1.0 + 0.5 + 2 * 1.0 + 0.75
    assert outcome.exposed_s == 0.5 + 0.75


def test_tasks_that_wait_for_each_other_are_an_error() -> None:
    with pytest.raises(ValueError, match=r"\['a', 'b'\]"):
        simulate({"a": Task(CORE, 1.0, ("b",)), "b": Task(WIRE, 1.0, ("a",)), "c": Task(CORE, 1.0)}, 1.0)


@pytest.mark.parametrize(("fixed_s", "per_byte_s"), [(0.001, 1e-9), (0.0, 1e-9), (0.002, 0.0)])
def test_a_line_is_found_again_from_its_points(fixed_s: float, per_byte_s: float) -> None:
    found = Line.through((nbytes, fixed_s + per_byte_s * nbytes) for nbytes in (1_000, 50_000, 1_000_000))
    assert (found.fixed_s, found.per_byte_s) == pytest.approx((fixed_s, per_byte_s), rel=1e-6, abs=1e-12)


def test_a_line_gives_no_negative_time() -> None:
    found = Line.through([(1_000, 1e-6), (2_000, 4e-6), (4_000, 9e-6)])
    assert found.fixed_s == 0.0
    assert found.per_byte_s > 0


NET = Network(latency_s=25e-6, bytes_per_s=10e9, post_s=5e-6, copy_bytes_per_s=float("inf"))


def test_rounds_take_what_the_formulas_say() -> None:
    posting, moving = 10_000, 1_000_000  # bytes a slice: of 1 us and of 100 us on the wire, beside 10 us to post
    assert direct_s(NET, 65, posting) == pytest.approx(2 * (64 * 10e-6 + 25e-6))
    assert direct_s(NET, 65, moving) == pytest.approx(2 * (64 * 100e-6 + 25e-6))
    assert ring_s(NET, 65, moving) == pytest.approx(2 * 64 * (25e-6 + 10e-6 + 100e-6))


@pytest.mark.parametrize("world_size", [64, 256, 1024])
def test_native_wins_below_the_bound_and_only_there(world_size: int) -> None:
    assert bound_bytes(NET, world_size, "ring") == bound_bytes(NET, world_size, "gloo") == 0
    bound = bound_bytes(NET, world_size, "log steps")
    log_steps = network.RIVALS["log steps"]
    assert direct_s(NET, world_size, bound) <= network.SLACK * log_steps(NET, world_size, bound)
    assert direct_s(NET, world_size, bound - 1) > network.SLACK * log_steps(NET, world_size, bound - 1)
    # What is sent in the time that it takes to post it: less, by the latencies of the other.
    assert 0.5 < bound / (2 * NET.post_s * NET.bytes_per_s) < 1.0
    assert bound_bytes(replace(NET, post_s=10e-6), world_size, "log steps") > 1.5 * bound


@pytest.mark.parametrize(("exchange", "steps", "slices"), [("direct", 0, 4), ("ring", 3, 0)])
def test_a_bucket_s_way_over_the_network_is_its_bytes_and_steps(exchange: str, steps: int, slices: int) -> None:
    net = replace(NET, copy_bytes_per_s=1e9)
    numels = [1_024_000, 512_000]
    specs = [ParamSpec("p", numel, "bf16", network.ITEMSIZE) for numel in reversed(numels)]
    flights = network.flights_of(net, plan_buckets(specs, 4, 1), sum(numels), compute_s=3.0, exchange=exchange)
    assert [flight.ready_s for flight in flights] == pytest.approx([1 + 2 * 2 / 3, 3.0])
    for flight, numel in zip(flights, numels, strict=True):
        shard_bytes = numel // 4 * network.ITEMSIZE
        assert flight.pack_s == pytest.approx(4 * shard_bytes / 1e9)
        assert flight.land_s == pytest.approx(slices * shard_bytes / 1e9)
        assert flight.scatter_s == flight.gather_s == pytest.approx(3 * shard_bytes / 10e9 + steps * 35e-6)


def test_the_model_finds_the_default_bucket_size_good_for_the_direct_exchange() -> None:
    rows = network.sweeps(NET, ["llama-8b"], [1_024], "gloo")
    [default] = [row for row in rows if row["is_default"] and row["exchange"] == "direct"]
    assert default["cap_bytes"] == 256 * MIB
    assert 1.0 <= default["over_best"] < 1.1
    smallest = min((row for row in rows if row["exchange"] == "direct"), key=lambda row: row["cap_bytes"])
    assert smallest["over_best"] > 1.5


def test_host_work_is_measured_and_drawn_out_in_straight_lines(capsys: pytest.CaptureFixture[str]) -> None:
    rows = host.run([10, 20], [1, 4], [2, 16], rounds=3)
    assert [row["ranks"] for row in rows if "ranks" in row] == [2, 16] * 2
    assert [row["buckets"] for row in rows if "buckets" in row] == [1, 4]
    assert all(row["step_us"] > 0 and row["construct_ms"] > 0 for row in rows[:-1])
    assert host.slope([{"x": 1, "y": 5.0}, {"x": 3, "y": 9.0}], "x", "y") == (3.0, 2.0)
    lines = {"construct_us_a_param": 9.0, "backward_us_a_param": 1.0, "step_us_a_param": 2.0}
    lines |= {"flight_us_a_bucket": 10.0, "step_us_a_bucket": 20.0, "bucket_us_a_rank": 100.0}
    assert "10 ranks: 11 ms of host work" in host.said(lines, params=200, buckets=10, world_size=10)
    assert "results agree" in capsys.readouterr().out


def test_over_fake_ranks_each_bucket_sends_what_it_would_to_real_ones() -> None:
    ours = host.over_fake_ranks(64, "messages")
    ours.sample()
    assert isinstance(ours.optimizer, FusedShardedAdam)
    [plan] = [bucket.plan for bucket in ours.optimizer.inside.buckets]
    expected = sent_in_step([plan], 0, stage_of(2), "messages", Itemsizes(4, 4))
    assert ours.optimizer.inside.manager.traffic == (expected.messages, expected.nbytes) == (2 * 63, expected.nbytes)


def test_a_gradient_is_seen_when_it_comes_and_a_probe_has_one_bucket() -> None:
    training = Training(layers=1, width=64, vocabulary=64, context=8, batch=1)
    measured = run_ranks(on_rank, 2, step_check.measure, training, 3)[0]
    arrivals = measured.compute.arrivals_s
    assert len(arrivals) == len(list(training.model().parameters()))
    assert 0 < min(arrivals) <= max(arrivals) <= measured.compute.end_s
    rows = step_check.rows_of(measured, training)
    assert [row["exchange"] for row in rows] == list(EXCHANGES)
    for row in rows:
        assert row["error"] == pytest.approx(row["predicted_ms"] / row["steady_ms"] - 1)
        assert row["predicted_ms"] > row["alone_ms"] >= row["compute_ms"]


def measured_in(flight: Line) -> step_check.Measured:
    """One rank's numbers, made up: 1.5 s of compute, and all gradients there after 1 s of it."""
    params = list(STRAIGHT_GPT.model().parameters())
    compute = probes.Compute([1.0] * len(params), 1.5)
    lines = dict.fromkeys(EXCHANGES, flight)
    return step_check.Measured(
        2, 2, compute, Line(0.0, 0.0), dict.fromkeys(EXCHANGES, 0.0), lines, lines, {name: [1.0] for name in EXCHANGES}
    )


def test_each_bucket_costs_a_flight_and_a_gather() -> None:
    nothing = measured_in(Line(0.0, 0.0)).predicted(STRAIGHT_GPT, "direct")
    some = measured_in(Line(0.25, 0.0)).predicted(STRAIGHT_GPT, "direct")
    assert nothing.step_s == 1.5
    assert some.step_s == pytest.approx(1.5 + 2 * 0.25 * len(some.left_s))


def test_both_ways_to_exchange_are_checked_and_timed() -> None:
    rows = run_ranks(on_rank, 2, wire.measure, (1_024, 65_536), 3)[0]
    assert [row["slice_bytes"] for row in rows] == [1_024, 65_536]
    assert all(row[f"{name}_us"] > 0 for row in rows for name in ("direct", "native", "post"))
    known = [
        {"slice_bytes": 2**power, "native_over_direct": ratio} for power, ratio in ((10, 0.5), (12, 0.9), (14, 1.2))
    ]
    assert wire.bound_of(known) == 4_096
    assert wire.bound_of(known[2:]) is None


def test_parts_are_chosen_written_and_drawn(tmp_path: Path) -> None:
    files = [f"--{name}={tmp_path / f'scale.{name}'}" for name in ("json", "png")]
    assert scale.main(["--only", "plan", "bound", "cap", "--models", "gpt2-124m", "--planned", "8", *files]) == 0
    rows = json.loads((tmp_path / "scale.json").read_text())["rows"]
    assert {row["part"] for row in rows} == {"plan", "process", "bound", "cap"}
    assert (tmp_path / "scale.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("option", "named"), [("--ranks=1", "--ranks"), ("--only=all", "--only"), ("--latency-us=-1", "--latency-us")]
)
def test_a_wrong_option_ends_with_its_name(option: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        scale.main([option])
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]
