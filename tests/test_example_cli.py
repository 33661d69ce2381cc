"""examples/train_gpt.py from the outside: its exit codes, its one-line refusals, and what a comparison writes."""

import json
import subprocess
from pathlib import Path

import pytest

from tests.example import SMALLEST, run


@pytest.fixture
def text(tmp_path: Path) -> Path:
    path = tmp_path / "text.txt"
    path.write_text("the quick brown fox jumps over the lazy dog\n" * 50)
    return path


KNOWN = "adamw, sgd, lion, muon"
BAD_OPTIONS = {
    "--steps=-3": "'-3' is not a whole number of 1 or more",
    "--batch=0": "'0' is not a whole number of 1 or more",
    "--lr=nan": "'nan' is not a number above 0",
    "--dtype=fp8": "invalid choice: 'fp8'",
    "--heads=3": "--heads 3 does not divide --width 128",
    "--stage=7": "stage",
    "--data=no/such/file": "cannot read no/such/file: No such file or directory",
    "--nonsense": "--nonsense",
    "--batch=100000000": "--batch 100000000 and this model take ",
    "--optimizer=Sophia": f"--optimizer Sophia is none of {KNOWN}, nor a class of torch.optim",
    "--optimizer=lr_scheduler": f"--optimizer lr_scheduler is none of {KNOWN}, nor a class of torch.optim",
    "--optimizer=RMSprop --state-dtype=8bit": f"--state-dtype is for {KNOWN}: RMSprop keeps its state as it",
    "--optimizer=lion --compare": "torch.optim has no Lion",
    "--optimizer=lion --adamw-lr=0.1": "--adamw-lr is for --optimizer muon",
    "--uneven --compare": "--uneven does not go with --compare",
    "--meta --compare": "--compare copies the model, which has no values to copy with --meta",
    "--uneven --save-dir=here": "--uneven does not go with --save-dir",
}


@pytest.mark.parametrize("option", BAD_OPTIONS)
def test_a_bad_option_ends_with_one_line_that_names_it(option: str) -> None:
    ended = run(*option.split(), "--device=cpu", "--ranks=2")  # not torchrun's 45 lines for the two of them
    assert_refused(ended, BAD_OPTIONS[option])


def assert_refused(ended: subprocess.CompletedProcess, reason: str) -> None:
    lines = ended.stderr.splitlines()
    assert ended.returncode == 2, ended.stderr
    assert len(lines) == 1, ended.stderr
    assert reason in lines[0]


@pytest.mark.parametrize(("num_bytes", "reason"), [(0, "the file is empty"), (40, "too little text")])
def test_too_little_text_is_refused_with_its_size(tmp_path: Path, num_bytes: int, reason: str) -> None:
    path = tmp_path / "short.txt"
    path.write_bytes(b"x" * num_bytes)
    assert_refused(run("--data", path, *SMALLEST), reason)


def test_out_that_cannot_be_written_is_refused_before_training(text: Path) -> None:
    assert_refused(run("--compare", "--out", text, "--data", text, *SMALLEST), "File exists")


def test_alone_it_trains_and_reports(text: Path) -> None:
    ended = run("--data", text, "--steps=2", *SMALLEST)
    assert ended.returncode == 0, ended.stderr
    for expected in ("1 rank on cpu", "bytes per rank", "moments", "zerox: held-out loss", "\ndef "):
        assert expected in ended.stdout


@pytest.mark.parametrize("stage", [1, 3])
def test_a_model_on_meta_trains_as_on_one_rank(text: Path, tmp_path: Path, stage: int) -> None:
    """The first losses: ranks draw other windows later."""
    options = ["--data", text, "--steps=3", "--meta", f"--stage={stage}", "--quiet", *SMALLEST]
    first = []
    for ranks in (1, 2):
        ended = run(*options, "--losses", tmp_path / "losses.json", ranks=ranks)
        assert ended.returncode == 0, ended.stderr
        losses = json.loads((tmp_path / "losses.json").read_text())
        assert losses[-1] < losses[0]
        first.append(losses[0])
    assert first[0] == pytest.approx(first[1], rel=0.05)


def test_a_class_that_can_t_be_sharded_is_refused_with_the_reason(text: Path) -> None:
    assert_refused(run("--data", text, "--optimizer=Adafactor", *SMALLEST), "torch.optim.Adafactor can't be sharded")


@pytest.mark.parametrize("optimizer", ["sgd", "lion", "muon", "RMSprop"])
def test_it_trains_with_any_optimizer(text: Path, optimizer: str) -> None:
    """Beside torch's own, where there is one."""
    compare = [] if optimizer == "lion" else ["--compare", "--out", text.parent]
    ended = run("--data", text, "--steps=3", "--optimizer", optimizer, *compare, *SMALLEST)
    assert ended.returncode == 0, ended.stderr
    if compare:
        zerox, torch = json.loads((text.parent / "compare.json").read_text())["systems"]
        assert zerox["loss"] == pytest.approx(torch["loss"], abs=1e-4)
        assert zerox["memory_bytes"]["moments"] == pytest.approx(torch["memory_bytes"]["moments"], rel=0.1)


def test_compared_on_two_ranks_the_curves_agree(text: Path, tmp_path: Path) -> None:
    options = ["--data", text, "--steps=3", "--accumulate=2", "--compare", "--out", tmp_path, "--quiet", *SMALLEST]
    ended = run(*options, "--ranks=2")
    assert ended.returncode == 0, ended.stderr
    assert (tmp_path / "compare.png").read_bytes().startswith(b"\x89PNG")
    comparison = json.loads((tmp_path / "compare.json").read_text())
    zerox, torch = comparison["systems"]
    assert comparison["ranks"] == 2
    assert zerox["loss"] == pytest.approx(torch["loss"], abs=1e-4)
    assert zerox["held_out_loss"] == pytest.approx(torch["held_out_loss"], abs=1e-4)
    assert comparison["distances"]["zerox_from_unfused"] < 1e-5
    # Half the moments on each of two ranks, but for padding.
    assert zerox["memory_bytes"]["moments"] < 0.6 * torch["memory_bytes"]["moments"]


@pytest.mark.parametrize("stage", [1, 3])
def test_ranks_with_unequal_shares_train_on_all_tokens(text: Path, tmp_path: Path, stage: int) -> None:
    options = ["--data", text, "--steps=6", "--accumulate=2", "--quiet", f"--stage={stage}", *SMALLEST]
    ended = run(*options, "--uneven", "--batch=4", "--losses", tmp_path / "losses.json", ranks=2)
    assert ended.returncode == 0, ended.stderr
    losses = json.loads((tmp_path / "losses.json").read_text())
    assert len(losses) == 6, "of the steps that one rank follows too"
    assert losses[-1] < losses[0] < 6
