"""What somebody, or a disk, put in the place of a checkpoint's files: nothing hangs, and nothing else is read."""

from __future__ import annotations

import json
import os
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest

from tests.checkpoint.in_the_way import put, small
from zerox import CheckpointError, latest, load
from zerox.checkpoint import manifest
from zerox.checkpoint.reader import CheckpointReader

LARGE = 30 * 2**30  # of a file that has no blocks on the disk


def as_manifest(**changes: Any) -> Callable[[Path], None]:
    """Makes one whose own checksum is right."""

    def make(file: Path) -> None:
        content = {**json.loads(file.read_text()), **changes}
        del content[manifest.CRC]
        file.write_text(json.dumps({**content, manifest.CRC: manifest._crc(content)}))

    return make


def also_listing(name: str, about: Any) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        as_manifest(files={**json.loads(file.read_text())["files"], name: about})(file)

    return make


def a_pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def a_device(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def a_folder(file: Path) -> None:
    file.unlink()
    file.mkdir()


def grown(file: Path) -> None:
    os.truncate(file, LARGE)


def with_content(content: bytes) -> Callable[[Path], None]:
    def make(file: Path) -> None:
        file.write_bytes(content)

    return make


MANIFESTS = {
    "brackets": (with_content(b"[" * 100_000), "zerox.json is damaged"),
    "braces": (with_content(b'{"a":' * 100_000), "zerox.json is damaged"),
    "no text": (with_content(b"\xff\xfe"), "zerox.json is damaged"),
    "a long number": (with_content(b"9" * 100_000), "zerox.json is damaged"),
    "a list": (with_content(b"[]"), "zerox.json is damaged"),
    "empty": (with_content(b""), "zerox.json is damaged"),
    "a pipe": (a_pipe, "zerox.json can't be read: it is no regular file"),
    "a device": (a_device, "zerox.json can't be read: it is no regular file"),
    "a folder": (a_folder, "zerox.json can't be read: Is a directory"),
    "grown": (grown, "zerox.json is damaged"),
    "no files": (as_manifest(files=None), "zerox.json is damaged"),
    "files as a list": (as_manifest(files=[".metadata", "host.pt"]), "zerox.json is damaged"),
    "a date in words": (as_manifest(saved_at="today"), "zerox.json is damaged"),
    "a date that is none": (as_manifest(saved_at=float("nan")), "zerox.json is damaged"),
    "too few files": (as_manifest(files={}), "zerox.json does not list .metadata, host.pt"),
    "a size in words": (also_listing("__1_0.distcp", ["much", 0]), "zerox.json is damaged at '__1_0.distcp'"),
    "no checksum": (also_listing("__1_0.distcp", [5]), "zerox.json is damaged at '__1_0.distcp'"),
    "above": (also_listing("../secret", [6, 0]), "lists '../secret', which is no file of a checkpoint"),
    "beside": (also_listing("../y/__0_0.distcp", [6, 0]), "lists '../y/__0_0.distcp', which is no file"),
    "absolute": (also_listing("/etc/passwd", [6, 0]), "lists '/etc/passwd', which is no file of a checkpoint"),
    "itself": (also_listing(manifest.NAME, [6, 0]), "lists 'zerox.json', which is no file of a checkpoint"),
    "somebody's": (also_listing("train.py", [6, 0]), "lists 'train.py', which is no file of a checkpoint"),
    "two lines": (also_listing("host.pt\n", [6, 0]), "which is no file of a checkpoint"),
}


@pytest.mark.parametrize("kind", MANIFESTS)
def test_a_strange_manifest_is_refused_and_looked_past(tmp_path: Path, kind: str) -> None:
    make, says = MANIFESTS[kind]
    put(tmp_path / "x", extra="good")
    make(put(tmp_path / "y") / manifest.NAME)
    with pytest.raises(CheckpointError) as refused:
        load(tmp_path / "y", *small())
    assert says in str(refused.value)
    assert len(str(refused.value)) < 600
    assert latest(tmp_path) == tmp_path / "x"


def never(*_: Any) -> NoReturn:
    raise AssertionError("contents were read before kinds and sizes")


@pytest.mark.parametrize("name", ["__0_0.distcp", ".metadata", "host.pt"])
@pytest.mark.parametrize("make", [a_pipe, a_device, a_folder, grown], ids=lambda make: make.__name__)
def test_kinds_and_sizes_come_before_contents(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], name: str
) -> None:
    make(put(tmp_path / "x") / name)
    monkeypatch.setattr(manifest, "checksum", never)
    with pytest.raises(CheckpointError, match=f"{name} .*(no regular file|Is a directory|{LARGE} bytes instead of)"):
        load(tmp_path / "x", *small())
    assert latest(tmp_path) is None


def test_a_pipe_for_metadata_does_not_hinder_saying_what_else_is_lost(tmp_path: Path) -> None:
    """The names of lost tensors are looked for in it."""
    path = put(tmp_path / "x")
    (path / "__0_0.distcp").unlink()
    a_pipe(path / ".metadata")
    with pytest.raises(CheckpointError, match=r"__0_0[.]distcp .*can't be read: No such file"):
        load(path, *small())


@pytest.mark.parametrize("name", ["../y/__0_0.distcp", "__7_0.distcp", "absolute"])
def test_tensors_are_read_from_listed_files_only(tmp_path: Path, name: str) -> None:
    """Whose checksums hold: all of another file would."""
    path = put(tmp_path / "x")
    put(tmp_path / "y")
    (path / "__7_0.distcp").write_bytes((path / "__0_0.distcp").read_bytes())
    name = str(tmp_path / "y" / "__0_0.distcp") if name == "absolute" else name
    metadata = CheckpointReader(path).read_metadata()
    for place in (metadata.storage_data or {}).values():
        place.relative_path = name
    metadata.storage_meta = None
    (path / ".metadata").write_bytes(pickle.dumps(metadata))
    mend(path)
    with pytest.raises(CheckpointError, match=r"[.]metadata names .*, which .*zerox[.]json does not list"):
        load(path, *small())


@pytest.mark.parametrize(
    "content", [b"", b"hello", pickle.dumps(3), pickle.dumps({"a": 1}), b"\x80\x04" + b"(" * 10**6]
)
def test_metadata_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = put(tmp_path / "x")
    (path / ".metadata").write_bytes(content)
    mend(path)
    with pytest.raises(CheckpointError, match=r"[.]metadata is damaged"):
        load(path, *small())


@pytest.mark.parametrize("content", [b"", b"hello", pickle.dumps(3), b"PK\x03\x04 and no more"], ids=str)
def test_a_host_file_that_is_none_is_refused(tmp_path: Path, content: bytes) -> None:
    path = put(tmp_path / "x")
    (path / "host.pt").write_bytes(content)
    mend(path)
    with pytest.raises(CheckpointError) as refused:
        load(path, *small())
    assert "host.pt" in str(refused.value)
    assert "\n" not in str(refused.value)


def mend(path: Path) -> None:
    """The manifest to what the files are now."""
    files = {name: manifest.checksum(path / name) for name in manifest.read(path)["files"]}
    manifest.write(path, files, {"saved_at": 0.0})
