"""Where a checkpoint is written, how it takes its place, and which files may be removed for it.

A checkpoint is written beside its place, in a folder of its own, and takes its place when it is complete. At any moment
the place has the old checkpoint or the new one; while one takes the other's place, the old one is ``aside``.

zerox removes only what it wrote: of a checkpoint the files that its manifest lists, of the two folders beside it files
with names that zerox gives. Anything else that lies there stops the save before it begins.
"""

from __future__ import annotations

import fcntl
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from zerox.checkpoint import manifest
from zerox.checkpoint.manifest import CheckpointError, some


def real(path: Path) -> Path:
    """The folder that ``path`` stands for: links are followed, and a later chdir() changes nothing."""
    return Path(os.path.realpath(path))


def saving(place: Path) -> Path:
    """Where the checkpoint that will be at ``place`` is written."""
    return place.parent / f".{place.name}.saving"


def aside(place: Path) -> Path:
    """Where the old checkpoint waits until the new one has taken its place."""
    return place.parent / f".{place.name}.replaced"


def find(path: Path) -> Path:
    """The folder of the checkpoint ``path``: its predecessor's if a save was killed before it could replace it."""
    old = aside(real(path))
    return old if not path.exists() and (old / manifest.NAME).exists() else path


def candidates(folder: Path) -> set[Path]:
    """Paths in ``folder`` that may be checkpoints: also one that is aside, but none that is being written."""
    found = set()
    for each in folder.iterdir() if folder.is_dir() else ():
        if each.name.startswith(".") and each.name.endswith(".replaced"):
            found.add(each.with_name(each.name.removeprefix(".").removesuffix(".replaced")))
        elif not (each.name.startswith(".") and each.name.endswith(".saving")):
            found.add(each)
    return found


def remove(path: str | os.PathLike[str]) -> None:
    """Removes the checkpoint at ``path``: the files that its manifest lists, and then the folder.

    Not collective: one rank calls it. Raises CheckpointError, and removes nothing, if ``path`` is no checkpoint or has
    other files in it; OSError where the system refuses.
    """
    folder = real(find(Path(path)))
    for file in _files_of(Path(path), folder):
        file.unlink(missing_ok=True)
    folder.rmdir()


class Target:
    """The place of one checkpoint while it is saved. All ranks write in ``folder``; rank 0 calls the methods."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.place = real(path)
        self.folder = saving(self.place)
        self._descriptor: int | None = None  # of the folder, while it is ours

    def claim(self) -> None:
        """Makes ``folder``. CheckpointError, before anything is written, if the save would remove others' files.

        The folder is locked until :meth:`close`: of two jobs that save to one path at once, the second is refused.
        """
        self.check()
        if self.check_leftovers():  # by a save that was killed, unless it is still at work
            os.close(_lock(self.folder))
            self.clear()
        self.folder.mkdir(parents=True)
        try:
            self._descriptor = _lock(self.folder)
        except OSError:
            self.folder.rmdir()
            raise

    def check(self) -> None:
        """CheckpointError unless it may replace what is in its place."""
        check_replaceable(self.path, self.place, CHECKPOINT)

    def check_leftovers(self) -> bool:
        """Whether there is ``folder`` already. CheckpointError if that, or what is aside, has others' files."""
        _leftovers(aside(self.place))
        return _leftovers(self.folder) is not None

    def clear(self) -> None:
        """Removes ``folder``."""
        _clear(self.folder)

    def put(self, files: Mapping[str, tuple[int, int]]) -> None:
        """Moves the complete checkpoint where it belongs. ``files``: what its manifest lists."""
        self.check_ours()
        manifest.check(self.folder, files, contents=False)
        self.check()  # writing took a while
        old = aside(self.place)
        if self.place.exists() and any(self.place.iterdir()):
            _clear(old)
            self.place.rename(old)
        self.folder.rename(self.place)  # also in place of an empty folder
        manifest.sync(self.place.parent)
        try:
            _clear(old)
        except (CheckpointError, OSError) as error:
            warnings.warn(f"zerox: {self.path} was saved, but its predecessor can't be removed: {error}", stacklevel=2)

    def give_up(self) -> None:
        """Removes the files written so far: they may fill the disk."""
        if self.is_ours(self.folder):
            self.clear()

    def check_ours(self) -> None:
        if not self.is_ours(self.folder):
            raise CheckpointError(f"another job saved to {self.path} at the same time")

    def is_ours(self, folder: Path) -> bool:
        """Whether it is the one that claim() made: without locks, another job may have made it anew."""
        if self._descriptor is None or not folder.is_dir():
            return False
        return os.path.samestat(os.fstat(self._descriptor), folder.stat())

    def close(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _lock(folder: Path) -> int:
    """Opens and locks it. The system unlocks it when the process ends, however it ends."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise CheckpointError(f"another process is saving to it: it has locked {folder}") from None
    except OSError:  # network file systems may have no locks: put() notices another job
        pass
    return descriptor


class Kind(NamedTuple):
    """Of what is saved in a folder: what it is called, and one in another folder. ``check(path, place)`` raises
    CheckpointError for a folder with contents that it must not replace."""

    called: str
    example: str
    check: Callable[[Path, Path], object]


def check_replaceable(path: Path, place: Path, kind: Kind) -> None:
    """CheckpointError unless ``path`` is nothing, an empty folder, or one that ``kind`` may replace."""
    for each in (path, *path.parents):
        if each.is_symlink() and not each.exists():
            raise CheckpointError(
                f"{each} is a link to {os.readlink(each)}, which does not exist: make that folder, or remove the link"
            )
    if not os.path.lexists(place):
        return
    if not place.is_dir():
        raise CheckpointError(f"{path} is a file, and {kind.called} is a folder: save to another path")
    inside = f"save to a folder in it, such as {path / kind.example}"
    if os.path.ismount(place):
        raise CheckpointError(f"{path} is the root of a file system, which can't be replaced: {inside}")
    if any(place.iterdir()):
        kind.check(path, place)
        if not os.access(place, os.W_OK | os.X_OK):
            raise CheckpointError(f"{path} is {kind.called} that may not be written to: save to another path")
    if os.path.samefile(place, os.curdir):
        raise CheckpointError(f"{path} is this process's working folder, which must not be replaced: {inside}")


def _files_of(path: Path, place: Path) -> list[Path]:
    """The files of the checkpoint at ``place``, the manifest last. CheckpointError if it is none or has others."""
    has = {each.name: each.is_dir(follow_symlinks=False) for each in os.scandir(place)} if place.is_dir() else {}
    try:
        listed = {*manifest.read(place)["files"], manifest.NAME}
    except CheckpointError as error:
        way_out = f"give the checkpoint a path of its own, such as {path / 'checkpoint'}"
        holds = f" It holds {some(sorted(has))}, which would be lost: {way_out}" if has else ""
        raise CheckpointError(f"{error}.{holds}") from None
    if others := sorted(name for name, is_folder in has.items() if is_folder or name not in listed):
        raise CheckpointError(
            f"{path} is a checkpoint, and holds {some(others)}, which the checkpoint's {manifest.NAME} does not list "
            "and which would be lost: move that elsewhere, or choose another path"
        )
    return [place / name for name in sorted(has, key=lambda name: name == manifest.NAME)]


CHECKPOINT = Kind("a checkpoint", "checkpoint", _files_of)


def _leftovers(folder: Path) -> list[Path] | None:
    """Files that a killed save left in a folder that only zerox writes in; None if there is no folder.

    CheckpointError if anything else is in it.
    """
    if not os.path.lexists(folder):
        return None
    if folder.is_symlink() or not folder.is_dir():
        raise CheckpointError(f"{folder} is in the way, and zerox did not make it: move it elsewhere")
    found = list(os.scandir(folder))
    others = [e.name for e in found if e.is_dir(follow_symlinks=False) or not manifest.WRITTEN.fullmatch(e.name)]
    if others:
        raise CheckpointError(f"{folder} is zerox's own, and holds {some(sorted(others))}: move that elsewhere")
    return [folder / each.name for each in found]


def _clear(folder: Path) -> None:
    """Removes a folder that only zerox writes in."""
    files = _leftovers(folder)
    for file in files or ():
        file.unlink(missing_ok=True)
    if files is not None:
        folder.rmdir()
