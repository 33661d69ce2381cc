"""The folder of save_weights(): what it replaces, what it keeps, and what is there whenever the save is killed."""

from __future__ import annotations

import fcntl
import itertools
import json
import os
import resource
import shutil
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from tests.checkpoint.test_killed import Killed, until
from tests.checkpoint.test_place import no_locks, save_from_a_folder_of_its_own, tree
from tests.checkpoint.weights_in_the_way import IN_THE_WAY, a_project
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load_weights, save, save_weights
from zerox.checkpoint import weight_folder, weight_saving, weight_writer
from zerox.checkpoint.weight_folder import KEPT, WeightTarget, find, is_weights
from zerox.plan.weight_split import INDEX, ONE

FEW, MANY = "5GB", 20  # one file, or three of them
CONFIG = '{"model_type": "none"}'


class Small(nn.Module):
    """All of whose elements are ``value``."""

    def __init__(self, value: float) -> None:
        super().__init__()
        self.first, self.second = (nn.Parameter(torch.full((3,), value)) for _ in range(2))
        self.register_buffer("third", torch.full((4,), value))


def put(path: Any, value: float, size: Any = FEW) -> Any:
    model = Small(value)
    save_weights(FusedShardedAdam(model.named_parameters()), path, size)
    return path


def value_in(folder: Path) -> float:
    """As any reader has it, which knows nothing of zerox: of all weights, which are of one save."""
    if (folder / ONE).exists():
        found = load_file(folder / ONE)
    else:
        index = json.loads((folder / INDEX).read_text())["weight_map"]
        found = {name: load_file(folder / file)[name] for name, file in index.items()}
    assert found.keys() == {"first", "second", "third"}
    [value] = set(torch.cat(list(found.values())).tolist())
    return float(value)


def loaded(path: Path) -> float:
    """As load_weights() has it."""
    model = Small(0.0)
    load_weights(FusedShardedAdam(model.named_parameters()), path)
    return float(model.first[0].detach())


def with_config(path: Path, value: float = 1.0, size: Any = FEW) -> Path:
    put(path, value, size)
    (path / "config.json").write_text(CONFIG)
    (path / "tokenizer.json").symlink_to("config.json")
    return path


def others_in(folder: Path) -> dict[str, Any]:
    return {name: what for name, what in tree(folder).items() if not name.startswith("model")}


OTHERS = {"config.json": CONFIG.encode(), "tokenizer.json": "config.json"}


@pytest.mark.parametrize("make", IN_THE_WAY, ids=lambda make: make.__name__)
def test_what_is_no_model_s_folder_is_refused_and_nothing_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], tuple[Any, str]]
) -> None:
    monkeypatch.chdir(tmp_path)  # and back
    path, says = make(tmp_path)
    before = tree(tmp_path)
    with pytest.raises(CheckpointError, match=says) as refused:
        put(path, 1.0)
    assert str(refused.value).startswith(f"zerox: weights could not be saved to {Path(path)}: ")
    assert "\n" not in str(refused.value)
    assert tree(tmp_path) == before


def save_into(rank: int, _: int, folder: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        put(folder, 1.0)
    return str(refused.value)


def test_all_ranks_refuse_together(tmp_path: Path) -> None:
    a_project(tmp_path)
    before = tree(tmp_path)
    for said in run_ranks(save_into, 2, str(tmp_path)):
        assert "holds the folders data" in said
    assert tree(tmp_path) == before


def test_ranks_with_other_working_folders_are_told(tmp_path: Path) -> None:
    for rank in range(2):
        (tmp_path / str(rank)).mkdir()
    for said in run_ranks(save_from_a_folder_of_its_own, 2, str(tmp_path), save_into):
        assert "1/.x.weights-saving, which rank 0 made, is not there: all ranks must see one file system" in said
    assert sorted(tree(tmp_path)) == ["0", "1"]


# ---- what is replaced, and what is kept


@pytest.mark.parametrize(("before", "after"), list(itertools.product((FEW, MANY), repeat=2)), ids=str)
def test_weight_files_are_replaced_and_all_others_stay(tmp_path: Path, before: Any, after: Any) -> None:
    path = with_config(tmp_path / "x", 1.0, before)
    (path / "model-00004-of-00004.safetensors").write_bytes(b"of a model with more files")
    (path / "pytorch_model.bin").write_bytes(b"another format")
    path.chmod(0o750)
    inode = (path / "config.json").stat().st_ino
    put(path, 2.0, after)
    assert value_in(path) == 2.0
    assert others_in(path) == {**OTHERS, "pytorch_model.bin": b"another format"}
    assert (path / "config.json").stat().st_ino == inode, "it is the same file"
    assert stat.S_IMODE(path.stat().st_mode) == 0o750
    files = sorted(name for name in tree(path) if name.startswith("model"))
    assert files == ([ONE] if after == FEW else [*(f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)), INDEX])
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_an_empty_folder_is_taken_and_a_missing_one_is_made(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    for name in ("empty", "not/there/yet"):
        assert value_in(put(tmp_path / name, 3.0)) == 3.0


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    with_config(tmp_path / "disk" / "run")
    (tmp_path / "link").symlink_to("disk/run")
    for value in (2.0, 3.0):
        assert value_in(put(tmp_path / "link", value)) == value
    assert os.readlink(tmp_path / "link") == "disk/run"
    assert others_in(tmp_path / "disk" / "run") == OTHERS
    assert [each.name for each in (tmp_path / "disk").iterdir()] == ["run"]


def test_a_relative_path_is_where_it_was_when_the_save_began(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "elsewhere").mkdir()
    write_parts = weight_saving.write_parts

    def wander(*args: Any) -> None:
        os.chdir(tmp_path / "elsewhere")
        write_parts(*args)

    monkeypatch.setattr(weight_saving, "write_parts", wander)
    put(Path("x"), 1.0)
    assert value_in(tmp_path / "x") == 1.0
    assert list((tmp_path / "elsewhere").iterdir()) == []


def no_links(*_: Any, **__: Any) -> None:
    raise OSError(1, "Operation not permitted")


def test_where_there_are_no_links_other_files_are_copied(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_config(tmp_path / "x")
    monkeypatch.setattr(os, "link", no_links)
    put(path, 2.0)
    assert value_in(path) == 2.0
    assert others_in(path) == OTHERS
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("has_links", [True, False])
def test_files_that_come_or_change_while_weights_are_written_are_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, has_links: bool
) -> None:
    path = with_config(tmp_path / "x")
    exchange = weight_folder.exchange

    def late(one: Path, other: Path) -> bool:
        (path / "notes.txt").write_text("mine")
        (path / "new").write_text("of another")
        os.replace(path / "new", path / "config.json")
        return exchange(one, other)

    monkeypatch.setattr(weight_folder, "exchange", late)
    if not has_links:
        monkeypatch.setattr(os, "link", no_links)
    put(path, 2.0)
    assert value_in(path) == 2.0
    assert others_in(path) == {**OTHERS, "config.json": b"of another", "notes.txt": b"mine"}
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_a_folder_that_comes_while_weights_are_written_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = with_config(tmp_path / "x")
    write_parts = weight_saving.write_parts

    def write(*args: Any) -> None:
        write_parts(*args)
        (path / "runs").mkdir()

    monkeypatch.setattr(weight_saving, "write_parts", write)
    with pytest.raises(CheckpointError, match="holds the folders runs"):
        put(path, 2.0)
    assert value_in(path) == 1.0
    assert others_in(path) == {**OTHERS, "runs": None}
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


# ---- killed


STEPS = ("rename", "replace", "mkdir", "unlink", "rmdir", "fsync", "link", "pwrite", "posix_fallocate", "open")


def put_unless_killed(path: Path, size: Any, survived: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Saves 2.0, killed after so many steps; returns whether there were no more."""
    doing = partial(until, iter(range(survived, -1, -1)), Killed())
    with monkeypatch.context() as killing:
        for name in STEPS:
            killing.setattr(os, name, partial(doing, getattr(os, name)))
        killing.setattr(weight_folder, "exchange", partial(doing, weight_folder.exchange))
        try:
            put(path, 2.0, size)
        except Killed:
            return False
    return True


def no_exchange(*_: Any) -> bool:
    return False


@pytest.mark.parametrize("system", ["usual", "no exchange", "no links"])
@pytest.mark.parametrize(("before", "after"), [(FEW, MANY), (MANY, FEW)], ids=str)
def test_at_every_step_the_folder_has_the_old_weights_or_the_new_ones(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, before: Any, after: Any
) -> None:
    """And its other files, and the next save leaves nothing beside it."""
    if system == "no exchange":
        monkeypatch.setattr(weight_folder, "exchange", no_exchange)
    if system == "no links":
        monkeypatch.setattr(os, "link", no_links)
    path = tmp_path / "x"
    for survived in itertools.count():
        with_config(path, 1.0, before)
        is_over = put_unless_killed(path, after, survived, monkeypatch)
        found = path if system != "no exchange" else find(path)
        assert loaded(path) == value_in(found), "zerox knows where they are"
        assert value_in(found) in ((2.0,) if is_over else (1.0, 2.0)), f"killed after {survived} steps"
        assert others_in(found) == OTHERS, f"killed after {survived} steps"
        if is_over:
            break
        put(path, 3.0, after)
        assert value_in(path) == 3.0
        assert others_in(path) == OTHERS
        assert [each.name for each in tmp_path.iterdir()] == ["x"], f"killed after {survived} steps"
        for file in path.iterdir():
            file.unlink()
        path.rmdir()
    assert survived > 20


@pytest.mark.parametrize("system", ["usual", "no exchange"])
@pytest.mark.parametrize("had_weights", [False, True])
def test_after_a_kill_at_any_step_the_next_save_goes_on_with_what_others_did_since(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str, had_weights: bool
) -> None:
    """And in a folder that had a configuration alone."""
    if system == "no exchange":
        monkeypatch.setattr(weight_folder, "exchange", no_exchange)
    path = tmp_path / "x"
    for survived in itertools.count():
        with_config(path, 1.0, FEW)
        for file in path.iterdir():
            if not had_weights and is_weights(file.name):
                file.unlink()
        is_over = put_unless_killed(path, MANY, survived, monkeypatch)
        expected: dict[str, Any] = dict(OTHERS)
        if had_weights and path.exists():
            (path / "newer").write_text("of another kind")
            os.replace(path / "newer", path / "config.json")
            expected["config.json"] = b"of another kind"
        put(path, 3.0, FEW)
        assert value_in(path) == 3.0, f"killed after {survived} steps"
        assert others_in(path) == expected, f"killed after {survived} steps"
        assert [each.name for each in tmp_path.iterdir()] == ["x"], f"killed after {survived} steps"
        if is_over:
            break
        shutil.rmtree(path)
    assert survived > 20


@pytest.mark.parametrize("system", ["usual", "no exchange"])
def test_what_fails_at_any_step_is_told_and_leaves_nothing_beside_the_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, system: str
) -> None:
    """Each step of the system fails once, and then no more."""
    if system == "no exchange":
        monkeypatch.setattr(weight_folder, "exchange", no_exchange)
    path = with_config(tmp_path / "x")
    failed = 0
    for survived in itertools.count():
        steps = iter(range(survived, -1, -1))
        doing = partial(until, steps, OSError(5, "Input/output error"))
        old = value_in(path)
        with monkeypatch.context() as failing:
            for name in set(STEPS) - {"link", "unlink", "rmdir"}:  # of these the next test
                failing.setattr(os, name, partial(doing, getattr(os, name)))
            failing.setattr(weight_folder, "exchange", partial(doing, weight_folder.exchange))
            try:
                put(path, old + 1.0, MANY)
            except CheckpointError as error:
                failed += "Input/output error" in str(error)
            else:
                assert value_in(path) == old + 1.0
                if next(steps, None) is not None:
                    break
        assert value_in(path) in (old, old + 1.0)
        assert others_in(path) == OTHERS
        beside = {each.name for each in tmp_path.iterdir()} - {"x"}
        is_kept = value_in(path) != old  # the disk may not know of the new one
        assert beside <= ({".x.weights-replaced"} if is_kept else set()), f"failed after {survived} steps"
    assert failed == survived > 20


def test_a_predecessor_that_can_t_be_removed_is_told_and_the_new_one_is_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_config(tmp_path / "x")
    rmdir = Path.rmdir

    def refuses(folder: Path) -> None:
        if folder.name == ".x.weights-replaced":
            raise PermissionError("not this one")
        rmdir(folder)

    with monkeypatch.context() as patched:
        patched.setattr(Path, "rmdir", refuses)
        with pytest.warns(UserWarning, match="x was saved, but its predecessor can't be removed: not this one"):
            put(path, 2.0)
    assert value_in(path) == 2.0
    put(path, 3.0)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_what_a_killed_save_left_is_removed(tmp_path: Path) -> None:
    """Half files, and links and unfinished copies that it had listed."""
    path = with_config(tmp_path / "x")
    half = tmp_path / ".x.weights-saving"
    half.mkdir()
    for name in (ONE, INDEX, "model-00001-of-00002.safetensors"):
        (half / name).write_text("half")
    (half / KEPT).write_text('["config.json"]')
    (half / "config.json").write_text(CONFIG[:5])
    (tmp_path / ".x.weights-replaced").mkdir()
    (tmp_path / ".x.weights-replaced" / ONE).write_text("old")
    put(path, 2.0)
    assert others_in(path) == OTHERS
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


@pytest.mark.parametrize("listed", ["", "[", "3", "{}"])
def test_a_list_of_links_that_was_not_finished_lists_nothing(tmp_path: Path, listed: str) -> None:
    half = tmp_path / ".x.weights-saving"
    half.mkdir()
    (half / KEPT).write_text(listed)
    put(tmp_path / "x", 1.0)
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_two_folders_take_each_other_s_names(tmp_path: Path) -> None:
    for name in "ab":
        (tmp_path / name).mkdir()
        (tmp_path / name / name).touch()
    assert weight_folder.exchange(tmp_path / "a", tmp_path / "b")
    assert tree(tmp_path) == {"a": None, "b": None, "a/b": b"", "b/a": b""}
    with pytest.raises(FileNotFoundError, match="gone"):
        weight_folder.exchange(tmp_path / "a", tmp_path / "gone")


# ---- disks and other jobs


@pytest.mark.parametrize("room", [1, 90, 300, 700])
def test_a_disk_that_is_full_says_so_with_the_file_s_name(tmp_path: Path, room: int) -> None:
    """Before weights are written."""
    path = with_config(tmp_path / "x")
    model = nn.Linear(10, 20)
    optimizer = FusedShardedAdam(model.named_parameters())
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (room, limits[1]))
    try:
        with pytest.raises(CheckpointError, match=r"\[Errno 27\] File too large: '.*/[.]x[.]weights-saving/model[.]"):
            save_weights(optimizer, path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert value_in(path) == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["x"], "and its room is there again"


def test_room_for_all_files_is_taken_before_weights_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_parts, taken = weight_saving.write_parts, []

    def look(folder: Path, *args: Any) -> None:
        taken.extend((file.stat().st_size, 512 * file.stat().st_blocks) for file in folder.iterdir())
        write_parts(folder, *args)

    monkeypatch.setattr(weight_saving, "write_parts", look)
    model = nn.Sequential(nn.Linear(200, 200), nn.Linear(200, 200))
    save_weights(FusedShardedAdam(model.named_parameters()), tmp_path / "x", "200KB")
    assert len(taken) == 2
    assert all(room >= nbytes > 160_000 for nbytes, room in taken)


def fills(rank: int, _: int, folder: Path) -> str:
    """The disk is full on rank 1 alone, in the middle."""
    model = nn.Linear(60, 80)
    optimizer = FusedShardedAdam(model.named_parameters())
    if rank == 1:
        write = os.pwrite

        def full(descriptor: int, data: Any, start: int) -> int:
            raise OSError(28, "No space left on device")

        weight_writer.os.pwrite = full  # type: ignore[assignment]
    try:
        with pytest.raises(CheckpointError) as error:
            save_weights(optimizer, folder)
    finally:
        if rank == 1:
            weight_writer.os.pwrite = write
    return str(error.value)


def test_a_disk_that_fills_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    path = with_config(tmp_path / "x")
    for said in run_ranks(fills, 2, path):
        assert "on rank 1: OSError: [Errno 28] No space left on device: " in said
        assert f"{tmp_path}/.x.weights-saving/{ONE}" in said
    assert value_in(path) == 1.0
    assert [each.name for each in tmp_path.iterdir()] == ["x"]


def test_the_disk_has_every_file_before_the_folder_takes_its_place(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = with_config(tmp_path / "x")
    synced: set[int] = set()
    fsync, exchange = os.fsync, weight_folder.exchange
    seen = []

    def noted_fsync(descriptor: int) -> None:
        fsync(descriptor)
        synced.add(os.fstat(descriptor).st_ino)

    def looking_exchange(one: Path, other: Path) -> bool:
        seen.append(one)
        files = [one, *(file for file in one.iterdir() if file.name.startswith("model"))]
        assert synced >= {file.stat().st_ino for file in files}
        return exchange(one, other)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(weight_folder, "exchange", looking_exchange)
    model = Small(2.0)
    model.register_buffer("void", torch.empty(0))  # in a file that has a header only
    save_weights(FusedShardedAdam(model.named_parameters()), path, 10)
    assert len(list(path.glob("model-*"))) == 4
    assert len(seen) == 1
    assert tmp_path.stat().st_ino in synced


def test_of_two_jobs_that_save_to_one_path_the_second_is_refused(tmp_path: Path) -> None:
    put(tmp_path / "x", 1.0)
    first = WeightTarget(tmp_path / "x")
    first.claim()
    (first.folder / ONE).write_text("half")
    with pytest.raises(CheckpointError, match="another process is saving to it"):
        put(tmp_path / "x", 2.0)
    assert [each.name for each in first.folder.iterdir()] == [ONE], "what the first one wrote is there"
    first.close()  # as its death does
    assert value_in(put(tmp_path / "x", 3.0)) == 3.0


def test_where_a_file_system_has_no_locks_the_first_of_two_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fcntl, "flock", no_locks)
    write_parts = weight_saving.write_parts

    def write(*args: Any) -> None:
        write_parts(*args)
        monkeypatch.setattr(weight_saving, "write_parts", write_parts)
        put(tmp_path / "x", 2.0)

    monkeypatch.setattr(weight_saving, "write_parts", write)
    with pytest.raises(CheckpointError, match=r"another job saved to .*x at the same time"):
        put(tmp_path / "x", 1.0)
    assert value_in(tmp_path / "x") == 2.0


def test_a_checkpoint_and_weights_lie_side_by_side(tmp_path: Path) -> None:
    """Where both are written at once, and neither finds the other's folder."""
    model = Small(1.0)
    optimizer = FusedShardedAdam(model.named_parameters())
    for _ in range(2):
        save(tmp_path / "x", model, optimizer)
        put(tmp_path / "y", 1.0)
    with pytest.raises(CheckpointError, match=r"holds model[.]safetensors, which would be lost"):
        save(tmp_path / "y", model, optimizer)
    assert sorted(each.name for each in tmp_path.iterdir()) == ["x", "y"]
