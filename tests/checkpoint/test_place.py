"""What a save may replace and remove, and what it must leave alone."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.in_the_way import (
    IN_THE_WAY,
    a_checkpoint_of_dcp,
    a_checkpoint_with_notes,
    a_file,
    a_link_to_nothing,
    a_project,
    put,
    small,
)
from tests.ranks import run_ranks
from zerox import CheckpointError, latest, load, remove, save
from zerox.__main__ import main
from zerox.checkpoint import manifest
from zerox.checkpoint.place import Target


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Everything in it, with what it has."""
    found: dict[str, bytes | str | None] = {}
    for each in folder.rglob("*"):
        name = str(each.relative_to(folder))
        found[name] = os.readlink(each) if each.is_symlink() else each.read_bytes() if each.is_file() else None
    return found


@pytest.mark.parametrize("make", IN_THE_WAY, ids=lambda make: make.__name__)
def test_what_is_not_a_checkpoint_s_own_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], tuple[Any, str]]
) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    path, says = make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=says) as refused:
        save(path, *small())
    assert "zerox" in str(refused.value)
    assert tree(tmp_path) == before


def test_a_checkpoint_that_may_not_be_written_to_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = put(tmp_path / "x")
    before = tree(tmp_path)
    path.chmod(0o555)
    if os.geteuid() == 0:  # who may write everywhere
        monkeypatch.setattr(os, "access", lambda _, mode: not mode & os.W_OK)
    with pytest.raises(CheckpointError, match="x is a checkpoint that may not be written to: save to another path"):
        save(path, *small())
    path.chmod(0o755)
    assert tree(tmp_path) == before


def test_a_predecessor_that_can_t_be_removed_is_told_and_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "x", extra="old")
    rmdir = Path.rmdir

    def refuses(folder: Path) -> None:
        if folder.name == ".x.replaced":
            raise PermissionError("not this one")
        rmdir(folder)

    monkeypatch.setattr(Path, "rmdir", refuses)
    with pytest.warns(UserWarning, match="x was saved, but its predecessor can't be removed: not this one"):
        put(tmp_path / "x", extra="new")
    assert load(tmp_path / "x", *small()) == "new"


def save_into(rank: int, _: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        save(folder, *small())
    return str(refused.value)


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    a_project(tmp_path)
    before = tree(tmp_path)
    for said in run_ranks(save_into, 2, str(tmp_path)):
        assert "holds data, train.py, which would be lost" in said
    assert tree(tmp_path) == before


# ---- what is replaced


@pytest.mark.parametrize("last", ["link", "link/", "link/.", "through/link", "./link"])
def test_a_link_is_followed_and_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, last: str) -> None:
    """Onto the disk that it leads to, however often."""
    monkeypatch.chdir(tmp_path)
    disk = tmp_path / "disk"
    (disk / "run").mkdir(parents=True)
    (tmp_path / "link").symlink_to("disk/run")
    (tmp_path / "through").symlink_to(tmp_path)
    model, optimizer = small()
    for count in range(3):
        save(last, model, optimizer, extra=count)
        assert load(last, model, optimizer) == count
        assert load(disk / "run", model, optimizer) == count
    assert os.readlink("link") == "disk/run"
    assert [each.name for each in disk.iterdir()] == ["run"]
    assert {each.name for each in tmp_path.iterdir()} == {"link", "through", "disk"}
    assert latest(".") == Path("link")
    assert latest(tmp_path / "through") == tmp_path / "through" / "link"
    assert main(["convert", last, "x.pt"]) == 0
    (disk / "run").rename(disk / ".run.replaced")  # as a save that is killed between two renames leaves it
    assert load("link", model, optimizer) == 2
    assert latest(tmp_path) == tmp_path / "link"


def test_an_empty_folder_is_taken_and_a_missing_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "not/there/yet"):
        assert load(put(tmp_path / name, extra=name), *small()) == name


def test_a_relative_path_is_where_it_was_when_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    written = manifest.write

    def wander(*args: Any) -> None:
        os.chdir(tmp_path / "elsewhere")
        written(*args)

    monkeypatch.setattr(manifest, "write", wander)
    put(Path("x"))
    assert latest(tmp_path) == tmp_path / "x"
    assert list((tmp_path / "elsewhere").iterdir()) == []


def save_from_a_folder_of_its_own(rank: int, _: int, folder: str, save_into: Callable[[int, int, str], str]) -> str:
    os.chdir(f"{folder}/{rank}")
    try:
        return save_into(rank, 2, "x")
    finally:
        os.chdir("/")


def test_ranks_with_other_working_folders_are_told(tmp_path: Path) -> None:
    """Or a part of the checkpoint would be elsewhere."""
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for said in run_ranks(save_from_a_folder_of_its_own, 2, str(tmp_path), save_into):
        assert "1/.x.saving, which rank 0 made, is not there: all ranks must see one file system" in said
    assert sorted(tree(tmp_path)) == ["0", "1"]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    """Its folder where it was at work, and the old checkpoint, from which it had begun to remove files."""
    put(tmp_path / "x", extra=1)
    half = tmp_path / ".x.saving"
    half.mkdir()
    for name in ("__0_0.distcp", "__12_0.distcp", ".metadata", ".metadata.tmp", "host.pt", manifest.NAME):
        (half / name).write_text("half")
    old = put(tmp_path / "y").rename(tmp_path / ".x.replaced")
    (old / "__0_0.distcp").unlink()
    assert load(put(tmp_path / "x", extra=2), *small()) == 2
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_file_that_comes_while_the_checkpoint_is_written_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tmp_path / "x", extra=1)
    written = manifest.write

    def write(*args: Any) -> None:
        written(*args)
        (tmp_path / "x" / "notes.txt").write_text("mine")

    monkeypatch.setattr(manifest, "write", write)
    with pytest.raises(CheckpointError, match=r"holds notes[.]txt"):
        put(tmp_path / "x", extra=2)
    assert load(tmp_path / "x", *small()) == 1
    assert (tmp_path / "x" / "notes.txt").read_text() == "mine"
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_what_is_not_whole_takes_nothing_s_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    put(tmp_path / "x", extra=1)
    written = manifest.write

    def write(folder: Path, *args: Any) -> None:
        written(folder, *args)
        (folder / "__0_0.distcp").write_bytes(b"")

    monkeypatch.setattr(manifest, "write", write)
    with pytest.raises(CheckpointError, match=r"__0_0[.]distcp of the checkpoint has 0 bytes instead of"):
        put(tmp_path / "x", extra=2)
    assert load(tmp_path / "x", *small()) == 1


def test_the_disk_has_every_file_before_the_checkpoint_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: set[int] = set()
    fsync, rename = os.fsync, Path.rename

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def looking_rename(path: Path, target: Path) -> Path:
        if path.is_dir():  # DCP renames its .metadata too
            assert synced >= {each.stat().st_ino for each in (path, *path.iterdir())}
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(Path, "rename", looking_rename)
    put(tmp_path / "x")
    assert tmp_path.stat().st_ino in synced


# ---- two jobs


def no_locks(*_: Any) -> None:
    raise OSError(95, "Operation not supported")


def test_of_two_jobs_that_save_to_one_path_the_second_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "x", extra=1)
    first = Target(tmp_path / "x")
    first.claim()
    (first.folder / "__0_0.distcp").write_text("half")
    with pytest.raises(CheckpointError, match="another process is saving to it"):
        put(tmp_path / "x", extra=2)
    assert [each.name for each in first.folder.iterdir()] == ["__0_0.distcp"], "what the first one wrote is there"
    first.close()  # as its death does
    assert load(put(tmp_path / "x", extra=3), *small()) == 3


def test_where_a_file_system_has_no_locks_the_first_of_two_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rather than make one checkpoint of files of two."""
    monkeypatch.setattr(fcntl, "flock", no_locks)
    written = manifest.write

    def write(*args: Any) -> None:
        written(*args)
        monkeypatch.setattr(manifest, "write", written)
        put(tmp_path / "x", extra="second")

    monkeypatch.setattr(manifest, "write", write)
    with pytest.raises(CheckpointError, match=r"another job saved to .*x at the same time"):
        put(tmp_path / "x", extra="first")
    assert load(tmp_path / "x", *small()) == "second"


def test_without_locks_nobody_touches_what_another_job_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fcntl, "flock", lambda *_: None)
    first, second = Target(tmp_path / "x"), Target(tmp_path / "x")
    first.claim()
    second.claim()
    (second.folder / "host.pt").write_text("half")
    with pytest.raises(CheckpointError, match="another job saved to"):
        first.put({})
    first.give_up()
    assert (second.folder / "host.pt").exists()
    second.give_up()
    assert list(tmp_path.iterdir()) == []
    first.close()
    second.close()


# ---- removal


def test_a_checkpoint_is_removed_and_nothing_else(tmp_path: Path) -> None:
    remove(put(tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []
    put(tmp_path / "x").rename(tmp_path / ".x.replaced")
    remove(tmp_path / "x")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("removed", [0, 1, 3])
def test_a_removal_that_breaks_off_can_be_done_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removed: int
) -> None:
    path = put(tmp_path / "x")
    unlink, left = Path.unlink, [removed]

    def breaks_off(file: Path, missing_ok: bool = False) -> None:
        if left[0] == 0:
            raise OSError("no more")
        left[0] -= 1
        unlink(file, missing_ok)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "unlink", breaks_off)
        with pytest.raises(OSError, match="no more"):
            remove(path)
    remove(path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("make", [a_project, a_checkpoint_with_notes, a_checkpoint_of_dcp, a_file, a_link_to_nothing])
def test_what_is_not_a_checkpoint_s_own_is_not_removed(tmp_path: Path, make: Callable[[Path], tuple[Any, str]]) -> None:
    path, _ = make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=r"is no checkpoint|does not list"):
        remove(path)
    assert tree(tmp_path) == before
