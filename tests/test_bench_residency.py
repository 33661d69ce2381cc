"""bench.residency: what each limit of resident parameters costs, and its picture."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

from bench import residency
from bench.residency import Kind, Seen
from bench.systems import Training
from tests.ranks import run_ranks

SMALL = Training(layers=1, width=64, vocabulary=512, context=16, batch=1)


def timed(rank: int, world_size: int) -> tuple[list[dict[str, Any]], list[Seen]]:
    with patch.object(residency, "CAP_MIB", 0.02):
        return residency.time_on_ranks(SMALL, 0.01)


def test_limits_are_timed_and_drawn(tmp_path: Path) -> None:
    rows, seen = run_ranks(timed, 2)[0]
    by_name = {row["system"]: row for row in rows}
    assert list(by_name)[:2] == ["zerox, stage 2", "FSDP2, resharded"]
    assert by_name["zerox, stage 2"]["of_stage_2"] == 1.0
    least, whole = by_name["stage 3, least"], by_name["stage 3, inf"]
    params_mib = sum(param.nbytes for param in SMALL.model().parameters()) / 2**20
    assert whole["fetches"] == whole["waits"] > 0
    assert params_mib / 2 <= whole["fetched_mib"] <= params_mib / 2 * 1.1
    assert least["fetched_mib"] > 1.5 * whole["fetched_mib"]
    assert [each.name for each in seen] == list(by_name)[2:]
    for each in seen:
        kinds = [kind for kind, *_ in each.events]
        assert kinds.count(Kind.STEP) == 1
        assert kinds.count(Kind.FETCH) == kinds.count(Kind.ARRIVE) > 0
        assert max(nbytes for *_, nbytes in each.events) <= each.limit
    residency.save_residency(seen, "a step", tmp_path / "new" / "step.png")
    assert (tmp_path / "new" / "step.png").read_bytes().startswith(b"\x89PNG")


def test_a_wait_lasts_until_its_read_goes_on() -> None:
    events = [(Kind.WAIT, 3, 1_000_000, 0), (Kind.FETCH, 3, 1_500_000, 8), (Kind.WAIT, 4, 2_000_000, 8)]
    events += [(Kind.GO_ON, 3, 3_000_000, 8), (Kind.GO_ON, 4, 5_000_000, 8), (Kind.GO_ON, 5, 6_000_000, 8)]
    assert residency.waits_ms(Seen("", 8.0, events), 1_000_000) == [(0.0, 2.0), (1.0, 4.0)]


@pytest.mark.parametrize(
    ("width", "names"),
    [(512, ["least", "64 MiB", "default", "inf"]), (1024, ["least", "P/4", "default", "inf"])],
)
def test_equal_limits_of_resident_parameters_are_measured_once(width: int, names: list[str]) -> None:
    training = Training(width=width, layers=8)
    assert residency.distinct_limits(training) == names
    limits = residency.limits_mb(training)
    assert len({limits[name] for name in names}) == len(names)
