"""python -m zerox convert: a checkpoint to torch's own files and back, and a training goes on from either."""

from __future__ import annotations

import copy
import subprocess
import sys
from pathlib import Path
from typing import Any, BinaryIO

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from tests.checkpoint.test_entries import STEPS, build, train
from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, backward, batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD, load, save
from zerox.__main__ import main


def converted(*arguments: object) -> None:
    assert main(["convert", *map(str, arguments)]) == 0


def save_some(rank: int, _: int, kind: str, path: str) -> dict[str, Any]:
    model, optimizer = build(kind, 0)
    train(model, optimizer, rank, range(STEPS))
    save(path, model, optimizer, extra={"epoch": 3})
    return {"model": model.state_dict(), "optimizer": optimizer.full_state_dict()}


@pytest.mark.parametrize("kind", KINDS)
def test_a_file_has_what_the_optimizer_itself_gives(tmp_path: Path, kind: str) -> None:
    """And a checkpoint made of that file is loaded without a loss."""
    expected = run_ranks(save_some, 3, kind, str(tmp_path / "x"))[0]
    converted(tmp_path / "x", tmp_path / "x.pt")
    found = torch.load(tmp_path / "x.pt", weights_only=True)
    assert found["extra"] == {"epoch": 3}
    check_same(found, expected)
    converted(tmp_path / "x.pt", tmp_path / "again")
    check_same(run_ranks(load_some, 2, kind, str(tmp_path / "again"))[0], expected)


def check_same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["model"].keys() == expected["model"].keys()
    for name, tensor in expected["model"].items():
        assert same_bits(found["model"][name], tensor), name
    assert found["optimizer"]["state"].keys() == expected["optimizer"]["state"].keys()
    for number, state in expected["optimizer"]["state"].items():
        for what, tensor in state.items():
            assert same_bits(found["optimizer"]["state"][number][what], tensor), (number, what)
    for ours, theirs in zip(found["optimizer"]["param_groups"], expected["optimizer"]["param_groups"], strict=True):
        assert {key: ours[key] for key in theirs} == theirs


def load_some(_: int, __: int, kind: str, path: str) -> dict[str, Any]:
    model, optimizer = build(kind, 1)
    assert load(path, model, optimizer) == {"epoch": 3}
    return {"model": model.state_dict(), "optimizer": optimizer.full_state_dict()}


def test_weights_are_a_plain_state_dict_or_safetensors(tmp_path: Path) -> None:
    expected = run_ranks(save_some, 2, "bf16 remainder", str(tmp_path / "x"))[0]
    converted(tmp_path / "x", tmp_path / "weights.pt", "--weights")
    converted(tmp_path / "x", tmp_path / "weights.safetensors")
    converted(tmp_path / "x", tmp_path / "fp32.safetensors", "--fp32")
    plain = torch.load(tmp_path / "weights.pt", weights_only=True)
    make_model(torch.bfloat16, 1).load_state_dict(plain)
    safe, wide = load_file(tmp_path / "weights.safetensors"), load_file(tmp_path / "fp32.safetensors")
    for name, tensor in expected["model"].items():
        assert same_bits(plain[name], tensor)
        assert same_bits(safe[name], tensor)
    names = [name for name, _ in make_model().named_parameters()]
    finer = 0
    for number, state in expected["optimizer"]["state"].items():
        assert same_bits(wide[names[number]], state["master"])
        finer += int((wide[names[number]] != safe[names[number]].float()).sum())
    assert finer > 1000


@pytest.mark.parametrize(
    ("make", "make_ours", "key", "options"),
    [
        (torch.optim.AdamW, FusedShardedAdam, "exp_avg", {}),
        (torch.optim.SGD, FusedShardedSGD, "momentum_buffer", {"momentum": 0.9}),
    ],
)
def test_a_file_of_torch_s_own_optimizer_becomes_a_checkpoint(
    tmp_path: Path, make: Any, make_ours: Any, key: str, options: dict[str, Any]
) -> None:
    """Of an optimizer that knew no names, with a parameter that never had a gradient."""
    model = make_model()
    del model.head  # it is tied, and without names it could not be told which is which
    model.head = nn.Identity()
    optimizer = make(model.parameters(), lr=0.02, **options)
    backward(model, batch(0, 0))
    optimizer.step()
    torch.save({"net": model.state_dict(), "opt": optimizer.state_dict(), "epoch": 4}, tmp_path / "adamw.pt")
    converted(tmp_path / "adamw.pt", tmp_path / "x", "--model-key", "net", "--optimizer-key", "opt")
    other = make_model(seed=1)
    other.head = nn.Identity()
    ours = make_ours(other.named_parameters(), **options)
    backward(other, batch(0, 5))  # state that must go
    ours.step()
    ours.zero_grad()
    assert load(tmp_path / "x", other, ours) == {"epoch": 4}
    assert ours.param_groups[0]["lr"] == 0.02
    for (name, p), q in zip(model.named_parameters(), other.parameters(), strict=True):
        assert same_bits(q.detach(), p.detach())
        state = optimizer.state.get(p, {"step": 0, key: torch.zeros_like(p)})
        steps = 0 if name.startswith(("unused", "branch")) else 1
        assert int(ours.state[q]["step"]) == int(state.get("step", 1)) == steps
        assert same_bits(ours.state[q][key], state[key])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ({"weights": {}}, "should be a dict with 'model' and 'optimizer', and has ['weights']"),
        ([1], "should be a dict with 'model' and 'optimizer', and has a list"),
    ],
)
def test_files_of_something_else_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], content: Any, says: str
) -> None:
    torch.save(content, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "x")]) == 1
    assert says in capsys.readouterr().err
    assert not (tmp_path / "x").exists()


def test_what_can_t_be_told_apart_is_not_guessed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = nn.BatchNorm1d(4)
    optimizer = torch.optim.AdamW(model.parameters())
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "x.pt")
    assert main(["convert", str(tmp_path / "x.pt"), str(tmp_path / "x")]) == 1
    assert "the model has 5 tensors and the optimizer 2 parameters without names" in capsys.readouterr().err
    named = torch.optim.AdamW(model.named_parameters())
    torch.save({"model": model.state_dict(), "optimizer": named.state_dict()}, tmp_path / "named.pt")
    converted(tmp_path / "named.pt", tmp_path / "x")


def test_nothing_is_overwritten_and_a_damaged_checkpoint_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model, optimizer = build("fp32", 0)
    save(tmp_path / "x", model, optimizer)
    (tmp_path / "x.pt").touch()
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "x.pt")]) == 1
    assert "x.pt exists" in capsys.readouterr().err
    (tmp_path / "x" / "__0_0.distcp").write_bytes(b"")
    command = [sys.executable, "-m", "zerox", "convert", str(tmp_path / "x"), str(tmp_path / "y.pt")]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout) == (1, "")
    assert "__0_0.distcp of the checkpoint has 0 bytes instead of" in ended.stderr
    assert len(ended.stderr.splitlines()) == 1
    assert not (tmp_path / "y.pt").exists()


def test_a_file_whose_writing_stops_halfway_is_not_there(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    save(tmp_path / "x", *build("fp32", 0))

    def full(_: Any, file: BinaryIO) -> None:
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    assert main(["convert", str(tmp_path / "x"), str(tmp_path / "x.pt")]) == 1
    assert "No space left" in capsys.readouterr().err
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_channels_last_in_eight_bits_is_decoded_in_its_own_order(tmp_path: Path) -> None:
    """In a file, and for a model whose blocks lie otherwise, which encodes the same values anew."""
    model = nn.Conv2d(16, 32, 3).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    optimizer = FusedShardedAdam(model.named_parameters(), state_dtype="8bit")
    model(torch.randn(2, 16, 5, 5)).square().sum().backward()
    optimizer.step()
    save(tmp_path / "x", model, optimizer)
    converted(tmp_path / "x", tmp_path / "x.pt")
    found: dict[str, Tensor] = torch.load(tmp_path / "x.pt", weights_only=True)["optimizer"]["state"][0]
    assert same_bits(found["exp_avg"], optimizer.full_state_dict()["state"][0]["exp_avg"].contiguous())
    plain = nn.Conv2d(16, 32, 3)
    its = FusedShardedAdam(plain.named_parameters(), state_dtype="8bit")
    with pytest.warns(UserWarning, match="rounded, since .* exp_avg to 8 bits, exp_avg_sq to 8 bits"):
        load(tmp_path / "x", plain, its)
    encoded = FusedShardedAdam(copy.deepcopy(plain).named_parameters(), state_dtype="8bit")
    with pytest.warns(UserWarning, match="rounded"):
        encoded.load_state_dict(torch.load(tmp_path / "x.pt", weights_only=True)["optimizer"])
    for key in ("exp_avg", "exp_avg_sq"):
        assert same_bits(its.full_state_dict()["state"][0][key], encoded.full_state_dict()["state"][0][key])
