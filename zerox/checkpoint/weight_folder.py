"""The folder that save_weights() writes: its weight files are replaced together, and every other file in it stays.

New files are written beside the folder, in one that nobody reads, as place.py does it for a checkpoint. What else is in
the folder (a model's configuration, a tokenizer) is linked into the new one, and the two take each other's names in one
step of the system. So at any moment the folder has the weights from before or all of the new ones, for readers that
know nothing of zerox. Where a file system can't do that step, the old folder is ``aside`` for a moment, as a checkpoint
is, and the next save brings it back.
"""

from __future__ import annotations

import ctypes
import errno
import filecmp
import json
import os
import shutil
import stat
import warnings
from collections.abc import Mapping
from pathlib import Path

from zerox.checkpoint import manifest, place
from zerox.checkpoint.manifest import CheckpointError, some
from zerox.checkpoint.place import Kind, Target, check_replaceable, real
from zerox.plan.weight_split import OURS

KEPT = ".zerox-kept.json"  # in the new folder, while other files are linked into it: their names
AT_CWD, EXCHANGE = -100, 2  # AT_FDCWD, RENAME_EXCHANGE
NO_EXCHANGE = (errno.ENOSYS, errno.EINVAL, errno.EOPNOTSUPP)


def saving(folder: Path) -> Path:
    """Where the weights that will be at ``folder`` are written."""
    return folder.parent / f".{folder.name}.weights-saving"


def aside(folder: Path) -> Path:
    """Where a complete folder waits: the new one for its place, or the old one to be removed."""
    return folder.parent / f".{folder.name}.weights-replaced"


def find(path: Path) -> Path:
    """The folder of the weights at ``path``: the old one if a save was killed between two renames."""
    old = aside(real(path))
    return old if not path.exists() and old.is_dir() and any(map(is_weights, os.listdir(old))) else path


def exchange(one: Path, other: Path) -> bool:
    """Each takes the other's name, in one step. False where the system or the file system has no such step."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    if rename(AT_CWD, os.fsencode(one), AT_CWD, os.fsencode(other), EXCHANGE) == 0:
        return True
    number = ctypes.get_errno()
    if number in NO_EXCHANGE:
        return False
    raise OSError(number, os.strerror(number), str(other))


def is_weights(name: str) -> bool:
    return OURS.fullmatch(name) is not None


def check_contents(path: Path, folder: Path) -> None:
    """CheckpointError for a folder that is more than a model's files."""
    found = {each.name: each for each in os.scandir(folder)}
    way_out = f"save to another path, such as {path / 'model'}"
    if manifest.NAME in found:
        raise CheckpointError(f"{path} is a checkpoint of zerox.save(), which would not be one any more: {way_out}")
    if folders := sorted(name for name, each in found.items() if each.is_dir(follow_symlinks=False)):
        raise CheckpointError(f"{path} holds the folders {some(folders)}, and a model has files only: {way_out}")
    others = [each.name for each in found.values() if not (each.is_symlink() or each.is_file())]
    if others:
        raise CheckpointError(f"{path} holds {some(sorted(others))}, which is no file: {way_out}")


WEIGHTS = Kind("a model", "model", check_contents)


class WeightTarget(Target):
    """The place of one model's folder while its weights are saved."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self.folder = saving(self.place)
        self.aside = aside(self.place)

    def check(self) -> None:
        if not os.path.lexists(self.place) and place.find(self.path) != self.path:
            raise CheckpointError(
                f"{self.path} is a checkpoint of zerox.save() that {place.aside(self.place)} has: save to another path"
            )
        check_replaceable(self.path, self.place, WEIGHTS)

    def claim(self) -> None:
        if self._is_aside():  # a save was killed between two renames
            self.aside.rename(self.place)
            manifest.sync(self.place.parent)
        super().claim()
        if self.place.is_dir():
            self._bring_late()  # where a save was killed before it did

    def _is_aside(self) -> bool:
        """Whether the folder is there: with weights, or with what the new one has from it."""
        if os.path.lexists(self.place) or not self.aside.is_dir():
            return False
        inside = list(self.aside.iterdir())
        has_weights = any(is_weights(each.name) for each in inside)
        return has_weights or all(_is_same(each, self.folder / each.name) for each in inside)

    def check_leftovers(self) -> bool:
        _leftovers(self.aside, self.place)
        return _leftovers(self.folder, self.place) is not None

    def clear(self) -> None:
        _clear(self.folder, self.place)

    def give_up(self) -> None:
        super().give_up()
        if self.is_ours(self.aside):
            _clear(self.aside, self.place)

    def put(self, files: Mapping[str, int]) -> None:  # type: ignore[override]
        """Moves the complete folder where it belongs. ``files``: the bytes of those that were written, by name."""
        self.check_ours()
        for name, nbytes in files.items():
            if (has := (self.folder / name).stat().st_size) != nbytes:
                raise CheckpointError(f"{self.folder / name} has {has} bytes instead of {nbytes}")
        self.check()  # writing took a while
        self._keep()
        manifest.sync(self.folder)
        if self.place.exists() and any(self.place.iterdir()):
            _clear(self.aside, self.place)
            self._take_its_place()
        else:
            self.folder.rename(self.place)  # also in place of an empty folder
        manifest.sync(self.place)
        manifest.sync(self.place.parent)
        try:
            self._bring_late()
            _clear(self.aside, self.place)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"zerox: {self.path} was saved, but its predecessor can't be removed: {error}", stacklevel=2)

    def _keep(self) -> None:
        """Every file of the folder that is not replaced is in the new one too."""
        if not self.place.exists():
            return
        others = [each for each in sorted(self.place.iterdir()) if not is_weights(each.name)]
        if others:
            (self.folder / KEPT).write_text(json.dumps([each.name for each in others]))
            for each in others:
                _link(each, self.folder / each.name)
            (self.folder / KEPT).unlink()
        self.folder.chmod(stat.S_IMODE(self.place.stat().st_mode))

    def _take_its_place(self) -> None:
        self.folder.rename(self.aside)
        if exchange(self.aside, self.place):
            return
        self.aside.rename(self.folder)
        self.place.rename(self.aside)
        try:
            self.folder.rename(self.place)
        except OSError:
            self.aside.rename(self.place)
            raise

    def _bring_late(self) -> None:
        """Files that came or changed after they were linked, but for those that changed once more since."""
        for each in self.aside.iterdir() if self.aside.is_dir() else ():
            now = self.place / each.name
            is_newer = not os.path.lexists(now) or each.lstat().st_mtime_ns > now.lstat().st_mtime_ns
            if not is_weights(each.name) and is_newer and not _is_same(each, now):
                os.replace(each, now)


def _link(file: Path, target: Path) -> None:
    """The same file under another name, or a copy where the system allows no second name."""
    try:
        os.link(file, target, follow_symlinks=False)
    except OSError:
        shutil.copy2(file, target, follow_symlinks=False)
        if not target.is_symlink():
            manifest.sync(target)


def _is_same(file: Path, other: Path) -> bool:
    """Whether a file is there under both names, or a copy of it."""
    if not os.path.lexists(other):
        return False
    if os.path.samestat(file.lstat(), other.lstat()):
        return True
    if file.is_symlink() or other.is_symlink():
        return file.is_symlink() and other.is_symlink() and file.readlink() == other.readlink()
    return filecmp.cmp(file, other, shallow=False)


def _leftovers(folder: Path, kept: Path) -> list[Path] | None:
    """Files that a killed save left in a folder that only zerox writes in: weights, and links beside them to files of
    ``kept``, which may have others in their places since. Without weights only what ``kept`` has too.

    None if there is no folder. CheckpointError if anything else is in it.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder} is in the way, and zerox did not make it: move it elsewhere")
    found = sorted(folder.iterdir(), key=lambda file: file.name == KEPT)
    links, has_weights = _links_in(folder), any(is_weights(file.name) for file in found)
    others = [
        file.name
        for file in found
        if (file.is_dir() and not file.is_symlink())
        or not (has_weights or file.name in links or _is_same(file, kept / file.name))
    ]
    if others:
        raise CheckpointError(f"{folder} is zerox's own, and holds {some(sorted(others))}: move that elsewhere")
    return found


def _links_in(folder: Path) -> set[str]:
    """The names of links, perhaps unfinished copies, that a save began to make, and of its list of them."""
    try:
        return {KEPT, *map(str, json.loads((folder / KEPT).read_text()))}
    except FileNotFoundError:
        return set()
    except (ValueError, TypeError):  # it was killed before the first link
        return {KEPT}


def _clear(folder: Path, kept: Path) -> None:
    """Removes a folder that only zerox writes in."""
    files = _leftovers(folder, kept)
    # Weights last: alone they are known for what they are, whatever becomes of the others in ``kept`` after a kill.
    for file in sorted(files or (), key=lambda file: (is_weights(file.name), file.name == KEPT)):
        file.unlink(missing_ok=True)
    if files is not None:
        folder.rmdir()
