"""The models of a step, of a network and of buckets give what can be worked out."""

from __future__ import annotations

import json
import tracemalloc
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bench import network
from bench.network import MODELS, Flight, Network, bound_bytes, named_parameters, round_s, step_s
from zerox.options import OptimizerOptions, Planned
from zerox.plan.buckets import ParamSpec, plan_buckets

# As published by the models' authors, by name and exactly.
NUMELS = {
    "gpt2-124m": 124_439_808,
    "llama-8b": 8_030_261_248,
    "llama-70b": 70_553_706_496,
    "llama-405b": 405_853_388_800,
}


@pytest.mark.parametrize("name", list(MODELS))
def test_models_have_as_many_parameters_as_published(name: str) -> None:
    params = [param for _, param in named_parameters(name, torch.bfloat16)]
    assert sum(param.numel() for param in params) == NUMELS[name]
    assert all(param.is_meta and param.dtype is torch.bfloat16 for param in params)


def test_a_plan_of_405_b_parameters_over_16384_ranks_takes_no_memory_to_speak_of() -> None:
    named = named_parameters("llama-405b", torch.bfloat16)
    tracemalloc.start()
    plans = OptimizerOptions().plan([Planned(name, param, "adam") for name, param in named], "gloo", 16_384)
    assert all(plan.layout.segments(16_383) is not None for plan in plans)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert sum(sum(plan.layout.numels) for plan in plans) == NUMELS["llama-405b"]


def test_a_flight_is_hidden_behind_compute_and_costs_its_time_after_it() -> None:
    assert step_s([Flight(ready_s=1.0, pack_s=0.25, reduce_s=0.25)], compute_s=2.0, latency_s=0.0) == 2.0
    assert step_s([Flight(ready_s=2.0, pack_s=0.25, reduce_s=0.25)], compute_s=2.0, latency_s=0.0) == 2.5


def test_the_wire_takes_buckets_one_by_one_and_a_latency_does_not_hold_it_up() -> None:
    flights = [Flight(ready_s=0.5, way_s=1.0), Flight(ready_s=1.0, way_s=1.0)]
    reduced_s = 0.5 + 2 * 1.0 + 0.25
    assert step_s(flights, compute_s=1.0, latency_s=0.25) == reduced_s + 2 * 1.0 + 0.25


def test_buckets_land_one_by_one() -> None:
    flights = [Flight(ready_s=1.0, reduce_s=1.0), Flight(ready_s=1.0, reduce_s=1.0), Flight(ready_s=4.0, reduce_s=1.0)]
    assert step_s(flights[:2], compute_s=1.0, latency_s=0.0) == 1.0 + 2 * 1.0
    assert step_s(flights, compute_s=1.0, latency_s=0.0) == 4.0 + 1.0


def test_the_third_bucket_is_packed_when_the_first_has_reduced() -> None:
    flights = [Flight(ready_s=0.0, pack_s=2.0, way_s=1.0) for _ in range(3)]
    first_reduced_s = 2.0 + 1.0 + 3.0
    assert step_s(flights, compute_s=1.0, latency_s=3.0) == (first_reduced_s + 2.0 + 1.0 + 3.0) + 3 * 1.0 + 3.0


NET = Network(latency_s=25e-6, bytes_per_s=10e9, post_s=5e-6, copy_bytes_per_s=float("inf"))


def test_rounds_take_what_the_formulas_say() -> None:
    posting, moving = 10_000, 1_000_000  # bytes a slice: of 1 us and of 100 us on the wire, beside 10 us to post
    assert round_s(NET, "direct", 65, posting) == pytest.approx(2 * (64 * 10e-6 + 25e-6))
    assert round_s(NET, "direct", 65, moving) == pytest.approx(2 * (64 * 100e-6 + 25e-6))
    assert round_s(NET, "ring", 65, moving) == pytest.approx(2 * 64 * (25e-6 + 10e-6 + 100e-6))


@pytest.mark.parametrize("world_size", [64, 256, 1024])
def test_native_wins_below_the_bound_and_only_there(world_size: int) -> None:
    assert bound_bytes(NET, world_size, "ring") == 0
    bound = bound_bytes(NET, world_size, "log_steps")
    for slice_bytes, is_as_fast in ((bound, True), (bound - 1, False)):
        direct_s, rival_s = (round_s(NET, name, world_size, slice_bytes) for name in ("direct", "log_steps"))
        assert (direct_s <= network.SLACK * rival_s) == is_as_fast
    # What is sent in the time that it takes to post it: less, by the latencies of the other.
    assert 0.5 < bound / (2 * NET.post_s * NET.bytes_per_s) < 1.0
    assert bound_bytes(replace(NET, post_s=10e-6), world_size, "log_steps") > 1.5 * bound


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
        assert flight.reduce_s == pytest.approx(slices * shard_bytes / 1e9)
        assert flight.way_s == pytest.approx(3 * shard_bytes / 10e9 + steps * 35e-6)


def test_the_model_finds_the_default_bucket_size_good_for_the_direct_exchange() -> None:
    rows = network.sweep(NET, "llama-8b", 1_024, "gloo", "direct")
    [default] = [row for row in rows if row["default"]]
    assert default["cap_mib"] == 256
    assert 1.0 <= default["over_best"] < 1.1
    smallest = min(rows, key=lambda row: row["cap_mib"])
    assert smallest["over_best"] > 1.5


def test_formulas_are_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network.main(["--models", "gpt2-124m", "--ranks", "64", "--latency-us=30", f"--json={tmp_path / 'x.json'}"])
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["network"]["latency_s"] == pytest.approx(30e-6)
    bounds = [row for row in result["rows"] if row["part"] == "bound"]
    assert [row["direct_us"] for row in bounds] == [
        round_s(Network(latency_s=30e-6), "direct", 64, 1024 * kib) * 1e6 for kib in (4, 64, 1024)
    ]
    assert min(row["over_best"] for row in result["rows"] if row["part"] == "cap") == 1.0
    assert len(capsys.readouterr().out.splitlines()) == 2 + 2 + len(result["rows"])
