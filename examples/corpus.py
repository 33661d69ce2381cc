"""Text as bytes: finds files, splits them into train and held out, and draws windows of them.

Without a path the corpus is the sources of Python's standard library, which come with every Python.
"""

import os
import platform
import sysconfig
import zlib
from dataclasses import dataclass
from pathlib import Path

import torch

HELD_OUT_ONE_IN = 10  # one file in ten, or the last tenth of a single file

# Installed packages are not the library; its tests and tables would be two thirds of the bytes.
SKIPPED_FOLDERS = {"__pycache__", "site-packages", "dist-packages"}
SKIPPED_IN_LIBRARY = {"test", "tests", "idle_test", "encodings", "pydoc_data"}


class BadInput(Exception):
    """An option or a file that cannot be used; the message is the one line the user gets."""


@dataclass(frozen=True)
class Corpus:
    """Two texts, one uint8 tensor each, and a line saying where they come from."""

    train: torch.Tensor
    held_out: torch.Tensor
    source: str

    def __str__(self) -> str:
        return f"{self.source}: {len(self.train) / 1e6:.2f} MB to train, {len(self.held_out) / 1e6:.2f} MB held out"


def load_corpus(path: Path | None, context: int) -> Corpus:
    """The text at `path`, a file or a folder (None: the standard library); BadInput if a side has no whole window."""
    try:
        if path is None:
            corpus = _load_library()
        elif path.is_dir():
            corpus = _load_folder(path, _find_files(path, suffix="", skipped=SKIPPED_FOLDERS), f"folder {path}")
        else:
            corpus = _load_file(path)
    except OSError as error:
        raise BadInput(f"cannot read {error.filename or path}: {error.strerror or error}") from error
    for side, text in (("training", corpus.train), ("held-out", corpus.held_out)):
        if len(text) <= context:
            raise BadInput(
                f"too little text in the {corpus.source}: {len(text)} bytes of {side} text, "
                f"but one window of --context {context} takes {context + 1}"
            )
    return corpus


def _load_library() -> Corpus:
    root = Path(sysconfig.get_paths()["stdlib"])
    files = _find_files(root, suffix=".py", skipped=SKIPPED_FOLDERS | SKIPPED_IN_LIBRARY)
    if not files:
        raise BadInput(f"this Python has no sources of its library under {root}; name a text with --data")
    return _load_folder(root, files, f"Python {platform.python_version()} standard library")


def _find_files(root: Path, suffix: str, skipped: set[str]) -> list[Path]:
    """Every visible regular file below `root`, in one order on every machine; links to folders are not followed."""

    def stop(error: OSError) -> None:
        raise error  # os.walk would pass over a folder that it may not read

    found = []
    for folder, subfolders, names in os.walk(root, onerror=stop):
        subfolders[:] = [name for name in subfolders if name not in skipped and not name.startswith(".")]
        found += [Path(folder, name) for name in names if name.endswith(suffix) and not name.startswith(".")]
    return sorted(path for path in found if path.is_file())


def _load_folder(root: Path, files: list[Path], source: str) -> Corpus:
    """Whole files are held out, chosen by a hash of their names: new files never move an old one to the other side."""
    train, held_out = bytearray(), bytearray()
    num_files = 0
    for path in files:
        content = path.read_bytes()
        if b"\0" in content:
            continue  # a picture or an archive among the texts
        num_files += 1
        name = path.relative_to(root).as_posix()
        side = held_out if zlib.crc32(name.encode(errors="replace")) % HELD_OUT_ONE_IN == 0 else train
        side += content
    source = f"{source} ({num_files} files)"
    if not train or not held_out:  # too few files for the hash to fill both sides
        return _split(_as_tensor(train + held_out), source)
    return Corpus(_as_tensor(train), _as_tensor(held_out), source)


def _load_file(path: Path) -> Corpus:
    """One file, mapped instead of read, so that it may be larger than memory; its end is held out."""
    num_bytes = path.stat().st_size
    if not path.is_file():
        raise BadInput(f"cannot read {path}: neither a file nor a folder")
    path.open("rb").close()  # for the operating system's own words when it is not ours to read
    if num_bytes == 0:
        raise BadInput(f"cannot use {path}: the file is empty")
    return _split(torch.from_file(str(path), shared=False, size=num_bytes, dtype=torch.uint8), f"file {path}")


def _split(text: torch.Tensor, source: str) -> Corpus:
    cut = len(text) - len(text) // HELD_OUT_ONE_IN
    return Corpus(text[:cut], text[cut:], source)


def _as_tensor(content: bytearray) -> torch.Tensor:
    return torch.frombuffer(content, dtype=torch.uint8) if content else torch.empty(0, dtype=torch.uint8)


class RandomWindows:
    """Endless random batches of the text: one stream of windows for each seed, from which ranks take turns.

    So any number of ranks sees the same windows in the same order, and with the state of `generator` goes on where
    others stopped.
    """

    def __init__(self, text: torch.Tensor, shape: tuple[int, int], seed: int, rank: int, world_size: int):
        self.text = text
        self.batch, self.context = shape
        self.rank, self.world_size = rank, world_size
        self.generator = torch.Generator().manual_seed(seed * 65536)

    def draw(self) -> torch.Tensor:
        """(batch, context + 1) bytes as int64: the first `context` are the input, the last `context` the targets."""
        num_windows = self.batch * self.world_size
        starts = torch.randint(len(self.text) - self.context, (num_windows, 1), generator=self.generator)
        starts = starts[self.rank :: self.world_size]
        return self.text[starts + torch.arange(self.context + 1)].long()


def even_windows(text: torch.Tensor, context: int, max_windows: int) -> torch.Tensor:
    """(windows, context + 1) bytes as int64 at even distances over the whole text: the same for every model."""
    num_windows = min(max_windows, len(text) // (context + 1))
    starts = torch.linspace(0, len(text) - context - 1, num_windows, dtype=torch.float64).long()
    return text[starts[:, None] + torch.arange(context + 1)].long()
