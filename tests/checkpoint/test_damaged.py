"""Checkpoints that were damaged, or made to do harm, and disks that are full or fail."""

from __future__ import annotations

import contextlib
import gc
import io
import json
import os
import pickle
import random
import re
import resource
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.checkpoint.test_entries import STEPS, train
from tests.checkpoint.test_store import EXTRA, alone, everything, save_midway
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load, save
from zerox.checkpoint import manifest, reader
from zerox.checkpoint.records import Record


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
    found = elements_in(tmp_path / "x" / "__0_0.distcp")
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
            for tensor, (start, stop) in found.items() if name == "__0_0.distcp" and how == "changed" else ():
                assert said.endswith(f"with it {tensor}") or not start <= place < stop, said
        for ours, theirs in zip(everything(model, optimizer), before, strict=True):
            assert same_bits(ours, theirs)
        file.write_bytes(content)
    assert optimizer.param_groups[0]["lr"] == lr


def elements_in(file: Path) -> dict[str, tuple[int, int]]:
    """Of each tensor in a checkpoint's file, where its elements start and end."""
    found = {}
    known = reader.CheckpointReader(file.parent).read_metadata()
    for index, place in (known.storage_data or {}).items():
        with file.open("rb", buffering=0) as stream:
            tensor = known.state_dict_metadata[index.fqn]
            assert isinstance(tensor, TensorStorageMetadata)
            nbytes = tensor.size.numel() * tensor.properties.dtype.itemsize
            start = place.offset + Record(stream, place.offset, place.length).elements(nbytes)
        found[index.fqn] = (start, start + nbytes)
    return found


def test_a_missing_file_is_told_with_what_was_in_it(tmp_path: Path) -> None:
    """And nothing that the others have."""
    run_ranks(save_midway, 2, "fp32", str(tmp_path / "x"))
    places = (reader.CheckpointReader(tmp_path / "x").read_metadata().storage_data or {}).items()
    lost = dict.fromkeys(index.fqn for index, place in places if place.relative_path == "__1_0.distcp")
    assert len(lost) < len({index.fqn for index, _ in places})
    (tmp_path / "x" / "__1_0.distcp").unlink()
    with pytest.raises(CheckpointError, match=r"__1_0[.]distcp .* No such file .*, and with it ") as error:
        load(tmp_path / "x", *alone())
    first = ", ".join(list(lost)[: manifest.MOST_NAMES])
    assert str(error.value).endswith(f", and with it {first} and {len(lost) - manifest.MOST_NAMES} more")


def test_a_file_of_another_checkpoint_under_this_one_s_manifest_is_told(tmp_path: Path) -> None:
    """Somebody put it together by hand, and mended the checksums: what the metadata says is not what is there."""
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    data = tmp_path / "x" / "__0_0.distcp"
    data.write_bytes(bytes(8) + data.read_bytes())
    files = {**manifest.read(tmp_path / "x")["files"], data.name: manifest.checksum(data)}
    manifest.write(tmp_path / "x", files, {})
    with pytest.raises(
        CheckpointError, match=r"__0_0[.]distcp does not have (model|optimizer)[.].*: at byte \d+ there"
    ):
        load(tmp_path / "x", model, optimizer)


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


def test_a_full_disk_leaves_the_previous_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer, extra=1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as broken:
        broken.setattr(manifest, "sync", full)
        with pytest.raises(CheckpointError, match=r"could not be saved: OSError.*No space left"):
            save(tmp_path / "x", model, optimizer, extra=2)
    assert [each.name for each in tmp_path.iterdir()] == ["x"], "and its room is there again"
    assert load(tmp_path / "x", model, optimizer) == 1
    save(tmp_path / "x", model, optimizer, extra=3)
    assert load(tmp_path / "x", model, optimizer) == 3


@pytest.mark.parametrize("room", [1, 500, 2_000, 20_000, 60_000, 100_000])
def test_a_disk_that_is_full_says_so_whatever_was_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, room: int
) -> None:
    """In the system's words with the file's name: torch.save() would say "unexpected pos 704 vs 598"."""
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(CheckpointError) as error:
            save(tmp_path / "x", model, optimizer, extra=torch.zeros(10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    said = str(error.value)
    assert re.search(r"x could not be saved: OSError: \[Errno 27\] File too large: '.*/[.]x[.]saving/", said), said
    assert [each.name for each in tmp_path.iterdir()] == ["x"]
    assert load(tmp_path / "x", model, optimizer) is None


def test_a_disk_that_fails_after_the_check_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or what is there now would be taken for what was there before."""
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)

    def broken(*_: Any) -> None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(reader.CheckpointReader, "read_data", broken)
    with pytest.raises(CheckpointError, match=r"model and optimizer have a part of it: .*Input/output error"):
        load(tmp_path / "x", model, optimizer)


def test_an_optimizer_whose_save_failed_goes_when_it_is_deleted(tmp_path: Path) -> None:
    """Without the garbage collector: its state may be most of the memory."""
    model, optimizer = alone()
    watched = weakref.ref(optimizer)
    (tmp_path / "file").touch()
    gc.collect()
    gc.disable()
    try:
        with contextlib.suppress(CheckpointError):
            save(tmp_path / "file", model, optimizer)
        with contextlib.suppress(CheckpointError):
            load(tmp_path / "file", model, optimizer)
        del optimizer
        assert watched() is None
    finally:
        gc.enable()
