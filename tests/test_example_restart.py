"""examples/train_gpt.py resumes from its checkpoints: the loss curve joins, whichever ranks died, or resume."""

import importlib.util
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.example import EXAMPLE, SMALLEST, run
from tests.test_example_cli import assert_refused

ROOT = Path(__file__).parents[1]
TINY = [each for each in SMALLEST if not each.startswith("--batch")]
STEPS, EVERY = 24, 8


def train(folder: Path, ranks: int, batch: int, *arguments: object) -> tuple[list[float], str]:
    """The loss of every step, and what was printed."""
    losses = folder / "losses.json"
    common = [*TINY, "--quiet", f"--data={ROOT / 'README.md'}", f"--steps={STEPS}", f"--losses={losses}"]
    ended = run(*common, f"--batch={batch}", *arguments, ranks=ranks if ranks > 1 else None)
    assert ended.returncode == 0, ended.stderr
    return json.loads(losses.read_text()), ended.stdout


def held_out(said: str) -> list[str]:
    return re.findall(r"held-out loss [\d.]+", said)


def saved(folder: Path, *arguments: object) -> list[object]:
    return [f"--save-dir={folder}", f"--save-every={EVERY}", *arguments]


@pytest.fixture(scope="module")
def never_stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], str]:
    """The losses of a training on two ranks of 4 windows, and what it printed."""
    return train(tmp_path_factory.mktemp("zero_copy"), 2, 4)


def test_a_run_that_goes_on_is_the_run_that_never_stopped(
    tmp_path: Path, never_stopped: tuple[list[float], str]
) -> None:
    zero_copy, at_once = never_stopped
    kept, _ = train(tmp_path, 2, 4, *saved(tmp_path / "x"))
    assert kept == zero_copy
    assert sorted(each.name for each in (tmp_path / "x").iterdir()) == ["step-000016", "step-000024"]
    shutil.rmtree(tmp_path / "x" / "step-000024")  # as if it had been stopped after step 16
    went_on, said = train(tmp_path, 2, 4, *saved(tmp_path / "x", "--resume"))
    assert f"going on from {tmp_path / 'x' / 'step-000016'} (step 16)\n" in said
    assert len(went_on) == STEPS
    assert went_on == zero_copy
    assert held_out(said) == held_out(at_once) != []
    again, said = train(tmp_path, 2, 4, *saved(tmp_path / "x", "--resume"))
    assert "no step was left to do" in said
    assert again == zero_copy
    assert held_out(said) == held_out(at_once)


def test_any_number_of_ranks_draws_the_same_windows(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also if one number of ranks goes on where another stopped."""
    spec = importlib.util.spec_from_file_location("corpus", EXAMPLE.with_name("corpus.py"))
    assert spec is not None
    assert spec.loader is not None
    corpus = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, "corpus", corpus)  # dataclasses look there
    spec.loader.exec_module(corpus)
    text = torch.randint(256, (2000,), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))

    def ranks(world_size: int) -> list:
        return [corpus.RandomWindows(text, (12 // world_size, 7), 5, rank, world_size) for rank in range(world_size)]

    def drawn(draws: list) -> list[list[int]]:
        return sorted(window for each in draws for window in each.draw().tolist())

    alone = ranks(1)
    expected = [drawn(alone) for _ in range(6)]
    # The windows that one rank drew when each rank had a stream of its own.
    starts = torch.randint(len(text) - 7, (12, 1), generator=torch.Generator().manual_seed(5 * 65536))
    assert expected[0] == sorted(text[starts + torch.arange(8)].tolist())
    state = None
    for world_size in (2, 4, 3):
        draws = ranks(world_size)
        for each in draws if state is not None else []:
            each.generator.set_state(state)
        assert [drawn(draws), drawn(draws)] == expected[:2]
        expected, state = expected[2:], draws[-1].generator.get_state()


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> tuple[list[float], Path]:
    """The losses of a training on two ranks of 6 windows, and its checkpoints as if it had stopped after step 16."""
    folder = tmp_path_factory.mktemp("stopped")
    zero_copy, _ = train(folder, 2, 6, *saved(folder / "x"))
    shutil.rmtree(folder / "x" / "step-000024")
    return zero_copy, folder / "x"


@pytest.mark.parametrize(("ranks", "batch"), [(1, 12), (3, 4), (4, 3)])
def test_other_ranks_go_on_with_the_same_text(
    tmp_path: Path, stopped: tuple[list[float], Path], ranks: int, batch: int
) -> None:
    """12 windows a step, however ranks share them: losses are the same but for the order of sums."""
    zero_copy, checkpoints = stopped
    shutil.copytree(checkpoints, tmp_path / "x")
    went_on, _ = train(tmp_path, ranks, batch, *saved(tmp_path / "x", "--resume"))
    assert went_on[:16] == zero_copy[:16]
    assert went_on[16:] == pytest.approx(zero_copy[16:], rel=1e-4)
    others = [abs(a - b) / b for a, b in zip(zero_copy[16:], zero_copy[15:], strict=False)]
    assert max(others) > 1e-2, "other text has other losses"


def test_torchrun_starts_anew_where_the_last_checkpoint_was(
    tmp_path: Path, never_stopped: tuple[list[float], str]
) -> None:
    zero_copy, _ = never_stopped
    losses, output = tmp_path / "again.json", tmp_path / "output"
    launcher = ["-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1", "--nproc-per-node=2"]
    launcher += ["--max-restarts=2"]
    options = [*TINY, "--quiet", "--batch=4", f"--data={ROOT / 'README.md'}", f"--steps={STEPS}", f"--losses={losses}"]
    command = [sys.executable, *launcher, EXAMPLE, *options, *saved(tmp_path / "x", "--resume")]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with output.open("w") as file:
        running = subprocess.Popen(list(map(str, command)), stdout=file, stderr=file, env=environment)
        try:
            wait_for(lambda: (tmp_path / "x" / "step-000008").exists())
            os.kill(workers(running.pid)[1], signal.SIGKILL)
            assert running.wait(240) == 0, output.read_text()
        finally:
            left = [*workers(running.pid), running.pid] if running.poll() is None else []
            for process in left:  # torchrun that is killed leaves its ranks behind
                os.kill(process, signal.SIGKILL)
            running.wait()
    found = re.findall(r"going on from .*step-0000(\d\d)", output.read_text())
    assert found in (["08"], ["16"], ["24"]), output.read_text()
    assert json.loads(losses.read_text()) == zero_copy


def wait_for(happened: object) -> None:
    end = time.monotonic() + 120
    while not happened():  # type: ignore[operator]
        assert time.monotonic() < end
        time.sleep(0.002)


def workers(launcher: int) -> list[int]:
    """torchrun's processes that train, by rank."""
    found = {}
    for process in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((process / "stat").read_text().rpartition(")")[2].split()[1])
            environment = (process / "environ").read_bytes().split(b"\0")
        except OSError:
            continue  # it is gone
        ranks = [int(each.partition(b"=")[2]) for each in environment if each.startswith(b"RANK=")]
        if parent == launcher and ranks:
            found[ranks[0]] = int(process.name)
    return [found[rank] for rank in sorted(found)]


def test_what_does_not_go_together_is_refused(tmp_path: Path) -> None:
    assert_refused(run(*SMALLEST, "--resume"), "--resume goes on from a checkpoint in --save-dir")
    assert_refused(run(*SMALLEST, "--compare", f"--save-dir={tmp_path}"), "--compare trains a second model")
    (tmp_path / "file").touch()
    assert_refused(run(*SMALLEST, f"--save-dir={tmp_path / 'file'}"), "--save-dir")
    assert_refused(run(*SMALLEST, f"--losses={tmp_path / 'file' / 'losses'}"), "--losses")


def test_a_checkpoint_that_cannot_be_written_ends_the_training_in_one_line(tmp_path: Path) -> None:
    """And the next run resumes from the one before."""
    train(tmp_path, 1, 4, *saved(tmp_path / "x"))
    shutil.rmtree(tmp_path / "x" / "step-000024")
    common = [*TINY, "--quiet", "--batch=4", f"--data={ROOT / 'README.md'}", f"--steps={STEPS}"]
    again = [*common, *saved(tmp_path / "x", "--resume")]
    ended = run(*again, within=["prlimit", "--fsize=10000"])
    assert_refused(ended, "step-000024 could not be saved: OSError: [Errno 27] File too large")
    assert [each.name for each in (tmp_path / "x").iterdir()] == ["step-000016"], "the disk has its room back"
    assert "step-000016 (step 16)" in run(*again).stdout


def test_another_training_is_not_gone_on_with(tmp_path: Path) -> None:
    train(tmp_path, 1, 4, *saved(tmp_path / "x"))
    common = [
        *TINY,
        "--batch=4",
        f"--data={ROOT / 'README.md'}",
        f"--steps={STEPS}",
        *saved(tmp_path / "x", "--resume"),
    ]
    assert_refused(run(*common, "--seed=3"), "was trained with --seed 0, not 3")
    assert_refused(run(*common, "--width=32"), "was saved as [16], and is [32]")
    assert_refused(run(*common, "--heads=4"), "was trained with --heads 2, not 4")
    (tmp_path / "x" / "step-000024" / "host.pt").write_bytes(b"x" * 5)
    # A file of another size: the checkpoint counts as absent, and the run resumes from the one before it.
    ended = run(*common)
    assert "going on from" in ended.stdout
    assert "step-000016" in ended.stdout


def test_another_number_of_windows_is_told(tmp_path: Path) -> None:
    train(tmp_path, 1, 4, *saved(tmp_path / "x"))
    _, said = train(tmp_path, 1, 2, *saved(tmp_path / "x", "--resume"))
    assert "(step 24), 2 windows a step instead of 4\n" in said


def test_a_training_begun_anew_keeps_its_own_checkpoints(tmp_path: Path) -> None:
    """In a folder in which another training left checkpoints of later steps."""
    folder = tmp_path / "x"
    train(tmp_path, 1, 4, *saved(folder))
    (folder / "step-by-step").mkdir()
    (folder / "step-000001").mkdir()
    (folder / "step-000001" / "notes.txt").write_text("no checkpoint, and not this training's to remove")
    train(tmp_path, 1, 4, *saved(folder), "--steps=10")
    expected = [f"step-0000{step}" for step in ("01", "08", "10", "16", "24")]
    assert sorted(each.name for each in folder.glob("step-0*")) == expected
    _, said = train(tmp_path, 1, 4, *saved(folder), "--steps=10", "--resume")
    assert "step-000010 (step 10)" in said
    assert (folder / "step-by-step").is_dir()
    assert (folder / "step-000001" / "notes.txt").exists()
