"""bench.host: what the host does in small steps and operators."""

from __future__ import annotations

from bench import host
from tests.ranks import run_ranks


def rows(_: int, __: int) -> list[host.Row]:
    return host.time_on_ranks(rounds=12)


def test_each_is_timed_on_all_ranks_at_once() -> None:
    for found in run_ranks(rows, 2):
        assert [(row["what"], row["of"]) for row in found] == [
            *(("clip, step, zero_grad", of) for of in ("zerox", "zerox, dp of 1", "zerox, DTensors", "AdamW, fused")),
            ("torch's clip", "plain gradients"),
            *((f"{whose} clip", "placeholders") for whose in ("torch's", "optimizer's")),
            *(
                (f"operator on {which}", f"stage {stage}")
                for stage in (2, 3)
                for which in ("no parameter", "a parameter")
            ),
        ]
        assert all(row["ranks"] == 2 and 0 < row["tenth_us"] <= row["median_us"] for row in found)
        step, operator = found[0], found[-1]
        assert step["tenth_us"] > 10 * operator["tenth_us"], "one is an operator, the other dozens"
