"""Ranks of one machine find each other whatever the machine's name is, and report it soon if they can't."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import pytest
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from tests import nameless_host
from tests.example import SMALLEST, run
from tests.test_example_cli import text  # noqa: F401

ROOT = Path(__file__).parents[1]


def test_the_example_s_ranks_meet_where_the_host_s_name_does_not_resolve(
    text: Path,  # noqa: F811
    tmp_path: Path,
) -> None:
    ended = run("--data", text, "--steps=2", "--quiet", *SMALLEST, "--ranks=2", within=nameless_host.prefix(tmp_path))
    assert ended.returncode == 0, ended.stderr
    assert "2 ranks on cpu" in ended.stdout
    assert "resolve" not in ended.stderr, "gloo too needs no name"


@pytest.mark.parametrize(
    ("rank", "host", "under_torchrun", "gives_up"),
    [
        ("0", "nowhere-zerox.invalid", False, True),
        ("1", "127.0.0.1", True, True),
        ("1", "127.0.0.1", False, False),  # rank 0 may be late
    ],
)
def test_ranks_that_can_t_meet_say_so_in_one_line(
    rank: str,
    host: str,
    under_torchrun: bool,
    gives_up: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import ranks

    assert ranks.MEETING_S <= 20, "with the start of Python this is said within 30 s"
    monkeypatch.setattr(ranks, "MEETING_S", 0.5)
    variables = {"RANK": rank, "WORLD_SIZE": "2", "MASTER_ADDR": host, "MASTER_PORT": "9"}
    for name, value in (variables | {"TORCHELASTIC_USE_AGENT_STORE": str(under_torchrun)}).items():
        monkeypatch.setenv(name, value)
    start = time.monotonic()
    said = rf"^rank {rank} found no way to rank 0 at {host}:9 in 0.5 s \(.*\): .*--ranks"
    if gives_up:
        with pytest.raises(ranks.BadInput, match=said):
            ranks.find_rank_0()
    else:
        ranks.find_rank_0()
        assert re.search(said + ".*still trying$", capsys.readouterr().err)
    assert time.monotonic() - start < 15


@pytest.mark.parametrize("exit_status", [2, 1, -9])
def test_torchrun_s_own_words_follow_a_crash_and_no_refusal(exit_status: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "examples")
    import ranks

    def fails(_: list[str]) -> None:
        raise ChildFailedError("train_gpt.py", {0: ProcessFailure(0, 1, exit_status, "no file")})

    monkeypatch.setattr(ranks, "torchrun", fails)
    if exit_status == ranks.BAD_INPUT:
        assert ranks.start(2) == 2
    else:
        with pytest.raises(ChildFailedError, match=f"exitcode  : {exit_status} "):
            ranks.start(2)


def test_whatever_starts_ranks_uses_the_loopback_address() -> None:
    """torchrun by itself uses the host's name, and waits for five minutes if that does not resolve."""
    listed = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    starts = re.compile(r"torchrun (?:-\S+ [\w.]+ )*--nproc|--standalone\b[^\n]*\n?[^\n]*nproc")
    found: dict[str, bool] = {}
    for name in listed:
        if name.endswith((".py", ".md", ".sh", "Makefile")) and name != f"tests/{Path(__file__).name}":
            for match in starts.finditer((ROOT / name).read_text()):
                found[name] = found.get(name, True) and "local-addr" in match[0]
    assert {"README.md", "examples/ranks.py", "bench/moments.py"} <= set(found), "they were not recognised"
    assert [name for name, is_local in found.items() if not is_local] == []
