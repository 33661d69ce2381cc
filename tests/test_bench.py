"""The kernel benchmark counts bytes as it says, checks results before it times, and leaves its numbers in a file."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from bench import __main__ as everything
from bench import common, jobs, kernels, limits, memory, moments, step, systems, timing
from bench import rows as tables
from bench.common import on_ranks
from bench.shard import UPDATES

CPU = torch.device("cpu")
TINY = {"tiny": (1000, 3)}


@pytest.mark.parametrize(
    ("op", "kind", "state", "slices", "expected"),
    [
        ("adam", "fp32", "fp32", 1, 28),
        ("adam", "bf16 + remainder", "fp32", 1, 26),
        ("adam", "bf16 + fp32", "fp32", 1, 30),
        ("adam", "fp16 + fp32", "fp32", 1, 30),
        ("adam", "fp32", "bf16", 1, 20),
        ("adam", "fp32", "8bit", 1, 16 + 1 / 16),
        ("adam", "bf16 + remainder", "8bit", 1, 14 + 1 / 16),
        ("sgd", "fp32", "fp32", 1, 12),
        ("sgd", "bf16 + remainder", "fp32", 1, 10),
        ("sgd momentum", "fp32", "fp32", 1, 20),
        ("sgd momentum", "bf16 + fp32", "fp32", 1, 22),
        ("lion", "fp32", "fp32", 1, 20),
        ("lion", "fp32", "bf16", 1, 16),
        ("lion", "fp32", "8bit", 1, 14 + 1 / 32),
        ("flatten", "fp32", "fp32", 1, 8),
        ("reduce", "bf16", "fp32", 8, 18),
        ("norm", "fp16", "fp32", 1, 2),
    ],
)
def test_bytes_are_those_that_must_move(op: str, kind: str, state: str, slices: int, expected: float) -> None:
    [found] = {each for each in (*jobs.TRAINED, *jobs.SENT) if (each.name, each.state) == (kind, state)}
    assert jobs.Job(op, found, "", (500, 12), slices).nbytes == 512 * expected


@pytest.mark.parametrize(("in_place", "bytes_an_element"), [(3, 28), (2, 20), (1, 12)])
def test_the_ceiling_moves_the_bytes_that_it_says_and_its_streams_start_on_pages_of_their_own(
    in_place: int, bytes_an_element: int
) -> None:
    stream = limits.Stream(bytes_an_element * 100_001 + bytes_an_element - 1, in_place)
    assert stream.numel == 100_001
    starts = [argument.value for argument in stream.arguments[: in_place + 1]]
    assert len({start // limits.PAGE for start in starts}) == in_place + 1
    assert len({start % (4 * 8192) for start in starts}) == in_place + 1
    parts = [
        room[(start - room.data_ptr()) // 4 :][: stream.numel] for room, start in zip(stream.rooms, starts, strict=True)
    ]
    for value, part in enumerate(parts):
        part.fill_(2.0**value)
    stream()
    for value, part in enumerate(parts):
        assert torch.equal(part, torch.full_like(part, 2.0**value + (0 if value == 1 else 2.0)))
    assert [int(room.count_nonzero()) for room in stream.rooms] == [stream.numel] * (in_place + 1), "nothing beyond"


class Broken:
    def __init__(self, *_: Any, **__: Any) -> None:
        raise RuntimeError("no compiler\nand a long story")


@pytest.mark.parametrize(
    ("peer", "reason"),
    [
        (jobs.Peer("x", "no_such_package.optim", "Adam"), "no_such_package is not installed"),
        (jobs.Peer("x", __name__, "Broken"), "RuntimeError: no compiler"),
        (jobs.Peer("x", "torch.optim", "SGD", options={"lr": 0.0}), "changes nothing"),
        (jobs.Peer("x", __name__, "Broken", devices=("cuda",)), "not for cpu"),
    ],
)
def test_a_peer_that_cannot_take_part_is_named_with_the_reason(
    peer: jobs.Peer, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jobs, "PEERS", (peer, jobs.PEERS[0]))
    [told] = jobs.missing_peers(CPU)
    assert told.startswith("x: ")
    assert told.endswith(reason)
    calls = jobs.update_calls(jobs.Job("adam", jobs.TRAINED[0], "", (1000,)), 1, CPU)
    assert list(calls) == ["zerox", jobs.MASKED, jobs.CEILING, "torch AdamW(fused)"]


@pytest.mark.parametrize(
    ("op", "theirs"), [("sgd", ["torch SGD(fused)"]), ("sgd momentum", ["torch SGD(fused)"]), ("lion", [])]
)
def test_a_rule_is_timed_beside_those_who_do_the_same(op: str, theirs: list[str]) -> None:
    calls = jobs.update_calls(jobs.Job(op, jobs.TRAINED[0], "", (1000,)), 1, CPU)
    assert list(calls) == ["zerox", jobs.MASKED, jobs.CEILING, *theirs]


def test_spread_and_median_are_of_the_samples() -> None:
    found = timing.Timing.of([1.0, 2.0, 3.0, 4.0, 100.0])
    assert (found.p50_ms, found.p25_ms, found.p75_ms, found.samples) == (3.0, 2.0, 4.0, 5)
    assert found.spread == pytest.approx(2 / 3)


def test_rivals_take_turns_and_go_through_all_buffers() -> None:
    seen: list[tuple[str, int]] = []
    calls = {name: lambda i, name=name: seen.append((name, i)) for name in "ab"}
    timings = timing.time_in_turn(calls, 3, CPU, 0.0)
    assert all(each.samples == timing.LEAST_SAMPLES for each in timings.values())
    samples = [name for name, index in seen if index == 0][-2 * timing.CALLS :]
    assert {"a", "b"} == set(samples)
    for name in "ab":
        assert [index for who, index in seen if who == name][:6] == [0, 1, 2, 0, 1, 2]


def test_buffers_leave_the_cache() -> None:
    assert timing.cache_bytes(CPU) > 2**16
    assert timing.num_sets_for(2**40, CPU) == 1
    assert timing.num_sets_for(1, CPU) == 16


def test_every_op_is_checked_and_timed(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(kernels, "sizes_for", lambda *_: TINY)
    monkeypatch.setattr(kernels, "CHECK_PARAMS", (3000, 1, 77))
    monkeypatch.setattr(kernels, "roof_gb_per_s", lambda *_: 100.0)
    monkeypatch.setattr(jobs, "PEERS", jobs.PEERS[:1])  # others may be installed, and need long to build
    kernels.main(["--device=cpu", "--quick", "--seconds=0", f"--json={tmp_path / 'out.json'}"])
    result = json.loads((tmp_path / "out.json").read_text())
    assert {row["op"] for row in result["rows"]} == {"flatten", "reduce of 2", "reduce of 8", "norm", *UPDATES}
    ours = [row for row in result["rows"] if row["who"] == "zerox"]
    assert len(ours) == 3 + 2 * 3 + 3 + 8 + 4 + 8 + 8
    for op, update in UPDATES.items():
        timed = [(row["kind"], row["state"]) for row in ours if row["op"] == op]
        wanted = [kind for kind in jobs.TRAINED if update.rule.wanted_states([update.group]) or kind.state == "fp32"]
        assert timed == [(kind.name, kind.state) for kind in wanted]
    assert result["command"].startswith("python -m bench.kernels --device=cpu --quick")
    assert {"commit", "cpu", "threads", "skipped"} <= set(result)
    p50 = {tuple(row[key] for key in ("op", "kind", "state", "who")): row["p50_ms"] for row in result["rows"]}
    for row in result["rows"]:
        assert row["gb_per_s"] == pytest.approx(row["bytes"] / row["p50_ms"] / 1e6)
        assert row["of_roof"] == pytest.approx(row["gb_per_s"] / 100)
        assert (row["theirs_over_ours"] is None) == (row["who"] == "zerox") != (row["bytes_floor_ms"] is None)
        assert row["instructions_floor_ms"] is None
        if row["who"] == "zerox":
            assert row["of_roof"] == pytest.approx(row["bytes_floor_ms"] / row["p50_ms"])
        if row["op"] in UPDATES:
            streamed = p50[row["op"], row["kind"], row["state"], jobs.CEILING]
            assert row["of_ceiling"] == pytest.approx(streamed / row["p50_ms"])
        else:
            assert row["of_ceiling"] is None
    assert len(capsys.readouterr().out.splitlines()) == 3 + len(result["rows"])


def test_on_a_gpu_instructions_have_a_floor_of_their_own() -> None:
    gpu = limits.Gpu(processors=100, clock_hz=1e9)
    update = jobs.Job("adam", jobs.TRAINED[1], "", (10**6, 10**6))
    clocks = limits.work()["adam, bf16 + remainder, fp32"]["clocks"]
    assert clocks > 0
    assert gpu.instructions_ms(update.name, update.numel) == pytest.approx(2e6 * clocks / 1e11 * 1e3)
    timing_ms = {"zerox": timing.Timing(1.0, 1.0, 1.0, 5), "torch": timing.Timing(2.0, 2.0, 2.0, 5)}
    rows = kernels.rows_of(update, timing_ms, 1000.0, gpu)
    assert [row["instructions_floor_ms"] for row in rows] == [gpu.instructions_ms(update.name, update.numel), None]
    assert rows[0]["bytes_floor_ms"] == pytest.approx(2e6 * 26 / 1e12 * 1e3)
    for kind in jobs.SENT:
        for op, num_slices in (("flatten", 1), ("norm", 1), ("reduce", 2), ("reduce", 8)):
            assert gpu.instructions_ms(jobs.Job(op, kind, "", (1,), num_slices).name, 1) > 0


@pytest.mark.parametrize("op", list(jobs.OPS))
def test_a_wrong_result_is_not_timed(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    name = {"flatten": "flatten_", "reduce": "reduce_", "norm": "norm_"}.get(op, "update_")
    monkeypatch.setattr(jobs.ops, name, lambda *_: None)
    monkeypatch.setattr(kernels, "time_in_turn", None)
    with pytest.raises(jobs.WrongResult, match="the result is wrong"):
        kernels.main(["--device=cpu", "--only", op])


def test_the_table_of_moments_reads_what_the_example_prints_and_knows_the_bound() -> None:
    printed = "bytes per rank\n  moments        3,450,880  3,450,880\n\nzerox: held-out loss 1.5077 nats per byte, 4 ms"
    assert moments.read(printed) == (1.5077, 3450880)
    with pytest.raises(ValueError, match="no result"):
        moments.read("interrupted")
    runs = {"fp32": ([1.0, 2.0], 400), "bf16": ([1.001, 2.01], 200), "8bit": ([1.0, 2.02], 100)}
    found = [{"state_dtype": name, "losses": losses, "moments_bytes": n} for name, (losses, n) in runs.items()]
    assert moments.missed(found) == ["8bit"]
    assert "| 8bit | 1.5100 | 1.0200 | +0.67% | 100 |" in moments.table(found)


def test_moments_are_trained_told_and_judged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(
        moments, "train", lambda name, seed, steps: (1.0 + 0.1 * seed + 0.02 * (name == "bf16"), 8 * steps)
    )
    file = tmp_path / "moments.json"
    assert moments.main(["--steps=3", "--seeds=2", f"--json={file}"]) == 1
    said = capsys.readouterr()
    assert "| bf16 | 1.0700 | 0.1000 | +1.90% | 24 |" in said.out
    assert said.err == "further than 0.5% from fp32 moments: bf16\n"
    rows = json.loads(file.read_text())["rows"]
    assert rows[0] == {"state_dtype": "fp32", "losses": [1.0, 1.1], "moments_bytes": 24}


def test_steps_of_tables_are_timed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables, "CASES", ((300, 8, 64),))
    file = tmp_path / "rows.json"
    tables.main(["--rounds=3", f"--json={file}"])
    [row] = json.loads(file.read_text())["rows"]
    assert row["as_fast"] == pytest.approx(row["sparse_adam_ms"] / row["zerox_ms"])
    assert row["zerox_ms"] > 0


def test_every_state_dtype_of_the_table_is_one_that_the_example_takes() -> None:
    command = moments.command("8bit", seed=2, steps=7)
    assert command[command.index("--state-dtype") + 1] == "8bit"
    example = Path(moments.ROOT / "examples/optimizers.py").read_text()
    assert all(f'"{name}": ' in example for name in moments.STATE_DTYPES)


TINY_GPT = systems.Training(layers=1, width=64, vocabulary=64, context=8, batch=2)


@dataclass(frozen=True)
class SmallTraining(systems.Training):
    width: int = 64
    vocabulary: int = 4096


@pytest.mark.parametrize(
    "training",
    [TINY_GPT, replace(TINY_GPT, dtype="bf16", max_norm=0.5)],
    ids=step.describe,
)
def test_every_system_trains_alike_and_is_timed(training: systems.Training) -> None:
    rows = on_ranks(step.time_on_ranks, 2, training, list(systems.ALL_SYSTEMS), [1], 0.0)
    assert [row["system"] for row in rows] == [*systems.ALL_SYSTEMS, "zerox, buckets of 1 MiB"]
    [ddp] = [row for row in rows if row["system"] == systems.DDP.name]
    assert ddp["as_fast"] == 1.0
    assert all(row["samples"] >= step.LEAST_ROUNDS and row["p50_ms"] > row["update_ms"] > 0 for row in rows)
    assert ddp["tokens_per_s"] == pytest.approx(2 * 2 * 8 / ddp["p50_ms"] * 1e3)


def check_a_system_that_forgets_to_clip() -> str:
    """What check() says of zerox that doesn't clip beside DDP that does."""
    training = replace(TINY_GPT, max_norm=1e-3)
    built = [systems.DDP(training), systems.Zerox(training)]
    built[1].clip = lambda max_norm: None  # type: ignore[method-assign]
    try:
        step.check(built, training)
    except jobs.WrongResult as error:
        return str(error)
    return "nothing"


def test_a_system_that_trains_otherwise_is_not_timed() -> None:
    assert "zerox, stage 2 does not train as DDP" in on_ranks(check_a_system_that_forgets_to_clip, 2)


def test_ratios_are_taken_round_by_round() -> None:
    rounds = {systems.DDP.name: [10.0, 20.0, 30.0], systems.NoCommunication.name: [5.0, 4.0, 6.0], "x": [5.0, 5.0, 5.0]}
    samples = {name: [(ms, ms / 2) for ms in each] for name, each in rounds.items()}
    facts = {"ranks": 2, **asdict(TINY_GPT)}
    row = step.rows_of(samples, facts)[-1]
    assert (row["as_fast"], row["of_floor"], row["p50_ms"], row["update_ms"]) == (4.0, 1.0, 5.0, 2.5)
    assert step.rows_of({"x": [(5.0, 1.0), (6.0, 1.0)]}, facts)[0]["as_fast"] is None


def test_the_update_is_what_comes_after_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [0.0]

    def takes(seconds: float) -> None:
        now_s[0] += seconds

    system = SimpleNamespace(training=TINY_GPT, backward=lambda _: takes(0.25), update=lambda: takes(0.125))
    monkeypatch.setattr(timing.time, "perf_counter", lambda: now_s[0])
    monkeypatch.setattr(step.dist, "barrier", lambda: None)
    assert step.timed_ms(system, [torch.empty(0)] * 3) == (375.0, 125.0)  # type: ignore[arg-type]


def test_steps_are_written_and_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(common, "Training", SmallTraining)
    file = tmp_path / "new/step.json"
    small = ["--layers=1", "--width=64", "--batch=1", "--clip", "--seconds=0"]
    step.main([*small, "--systems", "fused", "--caps", "1", f"--json={file}"])
    rows = json.loads(file.read_text())["rows"]
    assert [row["system"] for row in rows] == ["DDP + AdamW(fused)", "zerox, buckets of 1 MiB"]
    assert [row["as_fast"] is not None and row["of_floor"] is None for row in rows] == [True, True]
    assert rows[0]["as_fast"] == 1.0
    assert {(row["ranks"], row["batch"], row["max_norm"]) for row in rows} == {(2, 1, 1.0)}
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)


def test_buckets_have_the_size_that_is_asked_for() -> None:
    training = replace(TINY_GPT, vocabulary=8192)  # 2 MiB of embedding
    counts = [len(systems.Zerox(training, cap).ours.inside.buckets) for cap in (1, 64)]
    assert counts[0] > counts[1] == 1


def test_systems_are_chosen_by_words() -> None:
    ours = [f"zerox, stage {number}" for number in (2, 1, 3)]
    assert step.names_for(["stage", "fsdp2, not"]) == ["FSDP2, not resharded", *ours]
    with pytest.raises(SystemExit, match="nobody"):
        step.names_for(["nobody"])


@pytest.mark.parametrize(
    ("option", "named"),
    [("--ranks=0", "--ranks"), ("--dtype=fp8", "--dtype"), ("--batch=0", "--batch")],
)
def test_a_wrong_option_ends_with_its_name(option: str, named: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as end:
        step.main([option])
    assert end.value.code == 2
    assert named in capsys.readouterr().err.splitlines()[-1]


def test_memory_is_weighed_beside_the_estimate(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(common, "Training", SmallTraining)
    file = tmp_path / "new/memory.json"
    options = ["--ranks", "2", "--layers=1", "--width=64"]
    memory.main([*options, "--systems", "DDP + AdamW", "zerox, stage", "hidden", f"--json={file}"])
    rows = {row["system"]: row for row in json.loads(file.read_text())["rows"]}
    ours = ["zerox, stage 2", "zerox, gather hidden", "zerox, stage 1", "zerox, stage 3"]
    assert list(rows) == ["DDP + AdamW(fused)", *ours]
    numel = 2 * 4096 * 64  # the rest is small beside both embeddings
    assert rows["DDP + AdamW(fused)"]["kept"] == pytest.approx(5 * 4 * numel, rel=0.2)  # with DDP's buckets
    assert rows["zerox, stage 2"]["kept"] == pytest.approx((1 + 2 / 2) * 4 * numel, rel=0.2)
    for name in ("zerox, stage 2", "zerox, stage 1"):
        least, most = rows[name]["estimate"]
        assert 0.9 * least < rows[name]["peak"] < 1.5 * most, "activations are large beside a model so small"
        assert rows[name]["of_rival"] == rows[name]["peak"] / rows["DDP + AdamW(fused)"]["peak"]
    assert rows["zerox, stage 2"]["of_rival"] < 1


@pytest.mark.parametrize("quick", [False, True])
def test_what_make_bench_runs_are_commands_that_there_are(quick: bool) -> None:
    for name in everything.RUNS:
        _, _, module, *arguments = everything.command(name, Path("somewhere"), quick)
        assert import_module(module).make_parser().parse_args(arguments).json == Path("somewhere") / f"{name}.json"
