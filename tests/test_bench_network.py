"""The model of a network gives what can be worked out."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from bench import network
from bench.network import Network, bound_bytes, direct_s, ring_s

NET = Network(latency_s=25e-6, bytes_per_s=10e9, post_s=5e-6, copy_bytes_per_s=float("inf"))


def test_rounds_take_what_the_formulas_say() -> None:
    posting, moving = 10_000, 1_000_000  # bytes a slice: of 1 us and of 100 us on the wire, beside 10 us to post
    assert direct_s(NET, 65, posting) == pytest.approx(2 * (64 * 10e-6 + 25e-6))
    assert direct_s(NET, 65, moving) == pytest.approx(2 * (64 * 100e-6 + 25e-6))
    assert ring_s(NET, 65, moving) == pytest.approx(2 * 64 * (25e-6 + 10e-6 + 100e-6))


@pytest.mark.parametrize("world_size", [64, 256, 1024])
def test_native_wins_below_the_bound_and_only_there(world_size: int) -> None:
    assert bound_bytes(NET, world_size, "ring") == bound_bytes(NET, world_size, "gloo") == 0
    bound = bound_bytes(NET, world_size, "log_steps")
    log_steps = network.RIVALS["log_steps"]
    assert direct_s(NET, world_size, bound) <= network.SLACK * log_steps(NET, world_size, bound)
    assert direct_s(NET, world_size, bound - 1) > network.SLACK * log_steps(NET, world_size, bound - 1)
    # What is sent in the time that it takes to post it: less, by the latencies of the other.
    assert 0.5 < bound / (2 * NET.post_s * NET.bytes_per_s) < 1.0
    assert bound_bytes(replace(NET, post_s=10e-6), world_size, "log_steps") > 1.5 * bound


def test_formulas_are_written_and_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    network.main(["--ranks", "64", "--latency-us=30", f"--json={tmp_path / 'x.json'}"])
    result = json.loads((tmp_path / "x.json").read_text())
    assert result["network"]["latency_s"] == pytest.approx(30e-6)
    assert [row["direct_us"] for row in result["rows"]] == [
        direct_s(Network(latency_s=30e-6), 64, 1024 * kib) * 1e6 for kib in (4, 64, 1024)
    ]
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(result["rows"])
