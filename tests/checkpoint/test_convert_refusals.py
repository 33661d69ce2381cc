"""python -m zerox convert with files of something else: one line that says what is wrong and what to do."""

from __future__ import annotations

import io
import os
import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch import nn

from tests.checkpoint.in_the_way import put
from tests.checkpoint.test_damaged import Evil
from zerox.__main__ import main
from zerox.checkpoint import manifest


def trained(kind: str, **options: Any) -> dict[str, Any]:
    model = nn.Linear(3, 2)
    optimizer = getattr(torch.optim, kind)(model.named_parameters(), lr=0.1, **options)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()
    return {"model": model.state_dict(), "optimizer": optimizer.state_dict()}


def adamw(**changes: Any) -> dict[str, Any]:
    """``changes`` replace parts of the file, or of the optimizer's state in it."""
    content = trained("AdamW")
    for name, value in changes.items():
        (content if name in content else content["optimizer"])[name] = value
    return content


def bytes_of(content: Any) -> bytes:
    stream = io.BytesIO()
    torch.save(content, stream)
    return stream.getvalue()


NO_FILE = "was not written by torch.save(), or is damaged"
NO_MODEL = "'model' is not a model's state_dict(), which has tensors by their names: see --model-key"
NO_OPTIMIZER = (
    "'optimizer' is not an optimizer's state_dict(), which has 'state' and 'param_groups': see --optimizer-key"
)
NO_RULE = "this is not the state of AdamW, Adam or SGD"
# What torch.save() is to write (made when it is wanted: optimizers take seconds to import), and what is said of it.
FILES: dict[str, tuple[Any, list[str]]] = {
    "text": (b"hello", [NO_FILE]),
    "empty": (b"", [NO_FILE]),
    "bytes": (bytes(range(256)), [NO_FILE]),
    "half": (lambda: bytes_of(adamw())[:2000], [NO_FILE]),
    "a plain pickle": (pickle.dumps(Evil()), [NO_FILE]),
    "a command": (Evil(), ["asks for posix.mkdir", "save tensors, numbers, strings, and lists and dicts of these"]),
    "a module": ({"model": nn.Linear(2, 2), "optimizer": {}}, ["asks for torch.nn.modules.linear.Linear"]),
    "a list": ([1], ["should be a dict with 'model' and 'optimizer', and has a list"]),
    "numbers": ({"model": 3, "optimizer": 4}, [NO_MODEL]),
    "names that are none": (lambda: adamw(model=[3]), [NO_MODEL]),
    "no optimizer": (lambda: adamw(optimizer=4), [NO_OPTIMIZER]),
    "no state": (lambda: adamw(optimizer={"param_groups": []}), [NO_OPTIMIZER]),
    "no groups": (lambda: adamw(optimizer={"state": {}}), [NO_OPTIMIZER]),
    "groups of nothing": (lambda: adamw(param_groups=[3]), [NO_OPTIMIZER]),
    "a group of nothing": (lambda: adamw(param_groups=[{"lr": 0.1}]), [NO_OPTIMIZER]),
    "state in a list": (lambda: adamw(optimizer={"state": [1], "param_groups": []}), [NO_OPTIMIZER]),
    "state of nothing": (lambda: adamw(state={0: 1}), [NO_OPTIMIZER]),
    "state of nobody": (lambda: adamw(state={7: {}}), ["has state of parameter 7, which no param group has"]),
    "half a state": (
        lambda: adamw(state={1: {"step": 1}}),
        ["the state of 'bias' has no exp_avg, exp_avg_sq", NO_RULE],
    ),
    "no tensor": (
        lambda: adamw(state={1: {"step": 1, "exp_avg": "much", "exp_avg_sq": 0}}),
        ["exp_avg of 'bias' is a str"],
    ),
    "RMSprop": (lambda: trained("RMSprop"), ["param group 0 has", "centered", NO_RULE]),
    "Adagrad": (lambda: trained("Adagrad"), ["param group 0 has", "initial_accumulator_value", NO_RULE]),
    "NAdam": (lambda: trained("NAdam"), ["the state of 'weight' has mu_product", NO_RULE]),
    "Adamax": (lambda: trained("Adamax"), ["the state of 'weight' has no exp_avg_sq and has exp_inf", NO_RULE]),
}


def refused(capsys: pytest.CaptureFixture[str], *arguments: object) -> str:
    """What it said, which is one line."""
    assert main(["convert", *map(str, arguments)]) == 1
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("zerox convert: ")
    assert err.count("\n") == 1, err
    assert "weights_only" not in err
    return err


@pytest.mark.parametrize("kind", FILES)
def test_a_file_of_something_else_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    content, says = FILES[kind]
    content = content() if callable(content) else content
    (tmp_path / "x.pt").write_bytes(content if isinstance(content, bytes) else bytes_of(content))
    said = refused(capsys, tmp_path / "x.pt", tmp_path / "x")
    for each in (*says, str(tmp_path / "x.pt")):
        assert each in said
    assert [each.name for each in tmp_path.iterdir()] == ["x.pt"]
    assert not Path("/tmp/zerox-was-here").exists()


def test_a_pipe_a_missing_file_and_one_of_safetensors_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    os.mkfifo(tmp_path / "pipe")
    save_file({"a": torch.ones(2)}, tmp_path / "weights.safetensors")
    assert "it is no regular file" in refused(capsys, tmp_path / "pipe", tmp_path / "x")
    for target in ("x", "x.pt", "x.safetensors"):
        says = "gone does not exist: give a checkpoint's folder, or a file of torch.save()"
        assert says in refused(capsys, tmp_path / "gone", tmp_path / target)
        says = "weights.safetensors is a file of safetensors, which has weights alone and no optimizer's state: load it"
        assert says in refused(capsys, tmp_path / "weights.safetensors", tmp_path / target)
    assert "is no checkpoint: it has no zerox.json" in refused(capsys, tmp_path, tmp_path / "x.pt")


@pytest.mark.parametrize("name", ["x.safetensors", "x.pt", "x.pth", "x.bin"])
def test_no_folder_gets_the_name_of_a_file(tmp_path: Path, capsys: pytest.CaptureFixture[str], name: str) -> None:
    torch.save(adamw(), tmp_path / "adamw.pt")
    said = refused(capsys, tmp_path / "adamw.pt", tmp_path / name)
    assert f"{name} is the name of a file: give a folder's" in said
    assert not (tmp_path / name).exists()


def test_a_checkpoint_that_is_not_what_it_says_is_told_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Put together by hand, with checksums that hold."""
    evil, other = put(tmp_path / "evil"), put(tmp_path / "other")
    torch.save(Evil(), evil / "host.pt")
    (other / "__0_0.distcp").write_bytes(bytes((other / "__0_0.distcp").stat().st_size))
    for path in (evil, other):
        files = {name: manifest.checksum(path / name) for name in manifest.read(path)["files"]}
        manifest.write(path, files, {})
    assert "host.pt asks for posix.mkdir" in refused(capsys, evil, tmp_path / "x.pt")
    assert "__0_0.distcp does not have model." in refused(capsys, other, tmp_path / "x.pt")
    assert not (tmp_path / "x.pt").exists()


def test_nothing_lies_over_what_is_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = put(tmp_path / "x")
    (tmp_path / "link.pt").symlink_to("gone")
    (tmp_path / ".x.pt.saving").write_text("mine")
    assert "link.pt exists, and nothing is overwritten" in refused(capsys, path, tmp_path / "link.pt")
    assert ".x.pt.saving exists: another conversion writes it, or was killed" in refused(
        capsys, path, tmp_path / "x.pt"
    )
    assert "no, where y.pt is to be, is no folder" in refused(capsys, path, tmp_path / "no" / "y.pt")
    assert (tmp_path / ".x.pt.saving").read_text() == "mine"
    assert os.readlink(tmp_path / "link.pt") == "gone"


def test_a_reader_that_has_enough_is_no_error() -> None:
    """``python -m zerox env | head -1``"""
    here, there = os.pipe()
    os.close(here)  # it has ended before the first line
    ended = subprocess.run(
        [sys.executable, "-m", "zerox", "env"], stdout=there, stderr=subprocess.PIPE, text=True, check=False
    )
    os.close(there)
    assert (ended.returncode, ended.stderr) == (141, "")  # as a program that SIGPIPE ends
