"""What bench.kernels times beside each other, and the bytes that it counts for each."""

from __future__ import annotations

import torch

from bench import jobs, kernels, timing

CPU = torch.device("cpu")


def test_states_in_fewer_bits_are_timed_beside_float32_and_its_bytes() -> None:
    [narrow, *_] = [kind for kind in jobs.TRAINED if kind.state == "8bit"]
    job = jobs.Job("lion", narrow, "", (1024,))
    calls = jobs.update_calls(job, 1, CPU)
    assert list(calls) == ["zerox", jobs.MASKED, jobs.WIDE, jobs.CEILING]
    timings = {who: timing.Timing.of([1.0, 1.0]) for who in calls}
    moved = {row["who"]: row["bytes"] for row in kernels.rows_of(job, timings, 1.0, None)}
    assert moved[jobs.WIDE] == 20 * 1024 > moved["zerox"]
