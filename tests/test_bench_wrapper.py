"""bench.wrapper: what a wrapper adds, sends and compiles, beside torch's, and what the first look takes."""

from __future__ import annotations

from bench import wrapper
from bench.systems import Training
from tests.ranks import run_ranks

SMALL = Training(layers=1, width=64, vocabulary=64, context=8)


def rows(_: int, __: int) -> list[wrapper.Row]:
    return wrapper.measure_on_ranks(SMALL, 12, 0.0, "aot_eager", 256)


def test_each_is_measured_beside_torchs() -> None:
    for found in run_ranks(rows, 2):
        assert [(row["ranks"], row["what"], row["unit"]) for row in found] == [
            (2, "forward adds", "us"),
            (2, "forward adds, with buffers", "us"),
            (2, "constructor", "MiB"),
            (2, "first look", "ms"),
            (2, "compiled step", "ms"),
        ]
        constructor = found[2]
        sent_mib = sum(param.nbytes for param in SMALL.model().parameters()) / wrapper.MIB
        assert all(sent_mib < constructor[whose] for whose in ("torchs", "zerox"))
        assert all(row["torchs"] > 0 and row["zerox"] > 0 for row in found[2:])
