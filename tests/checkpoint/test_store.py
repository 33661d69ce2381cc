"""save() and load(): all or nothing, at any number of ranks, and never the running optimizer in pieces."""

from __future__ import annotations

import io
import json
import os
import pickle
import random
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_entries import STEPS, build, train
from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, latest, load, save
from zerox.checkpoint import manifest, reader

EXTRA = {"step": 7, "sampler": torch.arange(5), "loss": [1.0, None, "x"]}


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def save_midway(rank: int, _: int, kind: str, path: str) -> list[Tensor]:
    model, optimizer = build(kind, 0)
    train(model, optimizer, rank, range(STEPS))
    optimizer.param_groups[0]["lr"] = 0.003
    save(path, model, optimizer, extra=EXTRA)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return values(model)


def load_and_go_on(rank: int, _: int, kind: str, path: str, options: dict[str, Any]) -> list[Tensor]:
    model, optimizer = build(kind, 1, **options)
    extra = load(path, model, optimizer)
    assert extra["sampler"].tolist() == EXTRA["sampler"].tolist()
    assert (extra["step"], extra["loss"]) == (EXTRA["step"], EXTRA["loss"])
    assert optimizer.param_groups[0]["lr"] == 0.003
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return values(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, kind: str) -> None:
    ended = run_ranks(save_midway, 2, kind, str(tmp_path / "x"))
    went_on = run_ranks(load_and_go_on, 2, kind, str(tmp_path / "x"), {"stage": 1})
    for ours, theirs in zip(went_on[0], ended[0], strict=True):
        assert same_bits(ours, theirs)
    assert [each.name for each in tmp_path.iterdir()] == ["x"], "nothing is left beside it"


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (2, 4)])
def test_other_ranks_go_on_from_the_same_place(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    """Which is what they save at once."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_ranks(save_midway, saved_by, "bf16 remainder", first)
    run_ranks(load_and_save, loaded_by, "bf16 remainder", first, second)
    ours = run_ranks(load_and_go_on, 1, "bf16 remainder", first, {})
    theirs = run_ranks(load_and_go_on, 1, "bf16 remainder", second, {})
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert same_bits(a, b)


def load_and_save(rank: int, _: int, kind: str, first: str, second: str) -> None:
    model, optimizer = build(kind, 1)
    save(second, model, optimizer, extra=load(first, model, optimizer))


# ---- damage


def alone(kind: str = "fp32", seed: int = 0) -> tuple[nn.Module, FusedShardedAdam]:
    model, optimizer = build(kind, seed)
    train(model, optimizer, 0, range(STEPS))
    return model, optimizer


def everything(model: nn.Module, optimizer: FusedShardedAdam) -> list[Tensor]:
    state = [each for bucket in optimizer._buckets for each in (*bucket.moments, bucket.steps)]
    return [*values(model), *(each.clone() for each in state)]


def refusal(path: Path, model: nn.Module, optimizer: FusedShardedAdam) -> str | None:
    try:
        load(path, model, optimizer)
    except CheckpointError as error:
        return str(error)
    return None


def test_damaged_files_are_named_and_change_nothing(tmp_path: Path) -> None:
    """200 ways to damage a checkpoint: truncated, a byte changed, emptied, missing, replaced by another file."""
    rng = random.Random(0)
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer, extra=EXTRA)
    whole = {file.name: file.read_bytes() for file in (tmp_path / "x").iterdir()}
    assert len(whole) == 4
    train(model, optimizer, 0, range(STEPS, STEPS + 1))
    before, lr = everything(model, optimizer), optimizer.param_groups[0]["lr"]
    for _ in range(200):
        name = rng.choice(sorted(whole))
        file, content = tmp_path / "x" / name, whole[name]
        place = rng.randrange(len(content))
        damaged = {
            "truncated": content[:place],
            "changed": content[:place] + bytes([content[place] ^ 1 << rng.randrange(8)]) + content[place + 1 :],
            "longer": content + b"x",
            "another": whole[rng.choice([each for each in whole if each != name])],
            "missing": None,
        }
        how = rng.choice(sorted(damaged))
        if damaged[how] is None:
            file.unlink()
        else:
            file.write_bytes(damaged[how])
        said = refusal(tmp_path / "x", model, optimizer)
        if said is None:  # a manifest whose white space changed, or a file that was replaced by itself
            assert name == manifest.NAME, (how, name)
            assert json.loads(file.read_text()) == json.loads(whole[name])
            before = everything(model, optimizer)
        else:
            assert str(tmp_path / "x") in said
            assert name in said, (how, said)
        for ours, theirs in zip(everything(model, optimizer), before, strict=True):
            assert same_bits(ours, theirs)
        file.write_bytes(content)
    assert optimizer.param_groups[0]["lr"] == lr


def test_alone_it_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    assert load(tmp_path / "x", model, optimizer) is None
    assert [str(each.message) for each in recwarn] == []


class Evil:
    def __reduce__(self) -> Any:
        return os.mkdir, ("/tmp/zerox-was-here",)


@pytest.mark.parametrize("file", [".metadata", "host.pt"])
def test_nothing_that_a_checkpoint_asks_for_is_run(tmp_path: Path, file: str) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    evil = tmp_path / "x" / file
    if file == ".metadata":
        evil.write_bytes(pickle.dumps(Evil()))
    else:
        torch.save(Evil(), evil)
    known = manifest.read(tmp_path / "x")
    files = {**known["files"], file: manifest.checksum(evil)}
    manifest.write(tmp_path / "x", files, {})
    with pytest.raises(CheckpointError, match="mkdir"):
        load(tmp_path / "x", model, optimizer)
    assert not Path("/tmp/zerox-was-here").exists()


def member_of_memory_format(name: str) -> bytes:
    """A pickle of getattr(_MEM_FORMAT_ENCODING, name): what Python 3.11.0 to 3.11.4 and 3.12 make of its members."""
    return (
        b"cbuiltins\ngetattr\n(ctorch.distributed.checkpoint.metadata\n_MEM_FORMAT_ENCODING\nV"
        + name.encode()
        + b"\ntR."
    )


def test_members_of_dcp_s_enumeration_are_read_and_nothing_else_of_it() -> None:
    assert unpickled(member_of_memory_format("TORCH_CONTIGUOUS_FORMAT")).name == "TORCH_CONTIGUOUS_FORMAT"
    with pytest.raises(KeyError):
        unpickled(member_of_memory_format("__class__"))
    with pytest.raises(pickle.UnpicklingError, match=r"getattr of .* does not belong"):
        unpickled(member_of_memory_format("x").replace(b"_MEM_FORMAT_ENCODING", b"Metadata"))


def unpickled(content: bytes) -> Any:
    return reader._Unpickler(io.BytesIO(content)).load()


def test_what_was_saved_of_another_model_is_listed(tmp_path: Path) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    before = everything(model, optimizer)
    other = nn.ModuleDict({"inner": nn.Linear(72, 131), "extra": nn.Linear(2, 2)})
    theirs = FusedShardedAdam(other.named_parameters())
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "x", other, theirs)
    for line in (
        "missing: model.extra.weight",
        "unexpected: model.branch.bias",
        "and ",
    ):
        assert line in str(error.value)
    with pytest.raises(CheckpointError, match=r"model.inner.weight was saved as \[130, 72\], and is \[131, 72\]"):
        load(tmp_path / "x", other, theirs, strict=False)
    bf16, its = build("bf16 remainder", 0)
    with pytest.raises(CheckpointError, match=r"was saved as torch[.]float32, and is torch[.]bfloat16"):
        load(tmp_path / "x", bf16, its, strict=False)
    for ours, then in zip(everything(model, optimizer), before, strict=True):
        assert same_bits(ours, then)


def test_not_strict_takes_what_fits(tmp_path: Path) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    half = nn.ModuleDict({"inner": nn.Linear(72, 130), "extra": nn.Linear(2, 2)})
    kept = half["extra"].weight.detach().clone()
    its = FusedShardedAdam(half.named_parameters())
    load(tmp_path / "x", half, its, strict=False)
    assert torch.equal(half["inner"].weight, dict(model.named_parameters())["inner.weight"])
    assert torch.equal(its.state[half["inner"].weight]["exp_avg"], optimizer.state[model.inner.weight]["exp_avg"])  # type: ignore[index, union-attr]
    assert torch.equal(half["extra"].weight, kept)


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    model, optimizer = alone()
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no zerox[.]json"):
        load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="nowhere is no checkpoint"):
        load(tmp_path / "nowhere", model, optimizer)
    manifest.write(tmp_path, {}, {})
    (tmp_path / manifest.NAME).write_text((tmp_path / manifest.NAME).read_text().replace('"format": 1', '"format": 9'))
    with pytest.raises(CheckpointError, match="is of format 9: this zerox reads format 1"):
        load(tmp_path, model, optimizer)


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer, extra=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(manifest, "sync", full)
        with pytest.raises(CheckpointError, match=r"could not be saved: OSError.*No space left"):
            save(tmp_path / "x", model, optimizer, extra=2)
    assert load(tmp_path / "x", model, optimizer) == 1
    save(tmp_path / "x", model, optimizer, extra=3)
    assert load(tmp_path / "x", model, optimizer) == 3


def test_a_disk_that_fails_after_the_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is there now would be taken for what was there before."""
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader.CheckpointReader, "read_data", broken)
    with pytest.raises(CheckpointError, match=r"model and optimizer have a part of it: .*Input/output error"):
        load(tmp_path / "x", model, optimizer)


# ---- the last one


def test_latest_is_the_last_one_that_is_complete(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    model, optimizer = alone()
    for name in ("b", "c", "a"):  # saved last is not last by name
        save(tmp_path / name, model, optimizer)
    assert latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "host.pt").write_bytes(b"")
    assert latest(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / manifest.NAME).unlink()
    assert latest(tmp_path) == tmp_path / "b"
    (tmp_path / "b").rename(tmp_path / ".b.replaced")  # as a save that is killed between two renames leaves it
    assert latest(tmp_path) == tmp_path / "b"
    load(tmp_path / "b", model, optimizer)
    save(tmp_path / "b", model, optimizer)
    (tmp_path / "b").rename(tmp_path / ".b.saving")
    assert latest(tmp_path) is None, "it never took its place"
