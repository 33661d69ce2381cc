"""save() and load(): model and optimizer as a checkpoint that any number of ranks loads."""

from __future__ import annotations

import os
import pickle
import shutil
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint.filesystem import FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save

from zerox.checkpoint import manifest
from zerox.checkpoint.entries import entries
from zerox.checkpoint.groups import fill_groups, groups_by_name
from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.reader import CheckpointReader
from zerox.optimizer import FusedShardedAdam

MODEL, OPTIMIZER = "model.", "optimizer."
HOST = "host.pt"  # what is no tensor of model or optimizer


def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: FusedShardedAdam,
    extra: Any = None,
    process_group: dist.ProcessGroup | None = None,
) -> None:
    """Saves model, optimizer and ``extra`` (tensors, numbers, strings, and lists and dicts of these) in a folder.

    Each rank writes its own slices of the optimizer's state and its part of the model. ``path`` has either what was
    there before or all of the new checkpoint, also if a rank is killed. Collective over ``process_group`` (default:
    all ranks), which sees one file system. Raises RuntimeError on all ranks if one of them could not write.
    """
    path, ranks = Path(path), Everyone(process_group)
    optimizer.synchronize()
    folder, failure = manifest.saving(path), f"{path} could not be saved"
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)
            folder.mkdir(parents=True)
    tensors, others = split_model(model)
    tensors |= optimizer_tensors(optimizer)
    with ranks.failing_together(failure), ranks.dcp_options() as options:
        dcp_save(tensors, storage_writer=FileSystemWriter(folder), **options)
    found: dict[str, tuple[int, int]] = {}
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            host = {"groups": groups_by_name(optimizer), "extra": extra, "model": others}
            torch.save(host, folder / HOST)
            manifest.sync(folder / HOST)
        written = sorted(file.name for file in folder.glob(f"__{ranks.rank}_*"))
        own = [*written, *([".metadata", HOST] if ranks.rank == 0 else [])]
        found = {name: manifest.checksum(folder / name) for name in own}
    files = {name: each for part in ranks.gather(found) for name, each in part.items()}
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            manifest.write(folder, files, {"torch": str(torch.__version__), "saved_by_ranks": ranks.size})
            manifest.place(path)


def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: FusedShardedAdam,
    strict: bool = True,
    process_group: dist.ProcessGroup | None = None,
) -> Any:
    """Loads what :func:`save` saved, on any number of ranks and in any stage and buckets; returns ``extra``.

    Nothing is changed unless all files are as they were written. Raises CheckpointError on all ranks for files that
    are not, and for tensors that are missing, unexpected, or of another shape or dtype, naming them; without ``strict``
    missing and unexpected ones are left alone. Collective over ``process_group``.
    """
    path, ranks = Path(path), Everyone(process_group)
    optimizer.synchronize()
    tensors: dict[str, Tensor] = {}
    host: dict[str, Any] = {}
    folder, failure = path, f"{path} could not be loaded"
    with ranks.failing_together(failure):
        folder = manifest.find(path)
        files = manifest.read(folder)["files"]
        share = sorted(files)[ranks.rank :: ranks.size]
        manifest.check(folder, {name: files[name] for name in share})
    with ranks.failing_together(failure):
        host = torch.load(folder / HOST, weights_only=True, map_location="cpu")
        tensors = split_model(model)[0] | optimizer_tensors(optimizer)
        saved = read_metadata(folder)
        complain(folder, differences(tensors, names_of(model, optimizer), saved, strict))
        tensors = {name: tensor for name, tensor in tensors.items() if name in saved}
        fill_groups(optimizer, host["groups"], strict)
    with ranks.failing_together(failure), ranks.dcp_options() as options:
        dcp_load(tensors, storage_reader=CheckpointReader(folder), **options)
    return host["extra"]


def split_model(model: nn.Module) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the model's state_dict(), named for the checkpoint, and what else is in it."""
    state = model.state_dict()
    tensors = {MODEL + name: value for name, value in state.items() if isinstance(value, Tensor)}
    return tensors, {name: value for name, value in state.items() if not isinstance(value, Tensor)}


def optimizer_tensors(optimizer: FusedShardedAdam) -> dict[str, Tensor]:
    return {OPTIMIZER + name: tensor for name, tensor in entries(optimizer._buckets).items()}


def names_of(model: nn.Module, optimizer: FusedShardedAdam) -> set[str]:
    """Of all tensors that this training has, on whichever rank."""
    found = set(split_model(model)[0])
    for bucket in optimizer._buckets:
        for member in bucket.members:
            whats = ["step", *(bucket.state_shards() if member.param.numel() else []), *bucket.moments.scales]
            found |= {f"{OPTIMIZER}{member.name}.{what}" for what in whats}
    return found


def read_metadata(folder: Path) -> dict[str, TensorStorageMetadata]:
    """Of the tensors in a checkpoint. Raises CheckpointError."""
    try:
        found: dict[str, TensorStorageMetadata] = CheckpointReader(folder).read_metadata().state_dict_metadata  # type: ignore[assignment]
    except (pickle.UnpicklingError, EOFError, AttributeError, OSError) as error:
        raise CheckpointError(f"{folder / '.metadata'} is damaged: {error}") from None
    return found


def differences(
    tensors: dict[str, Tensor], names: set[str], saved: dict[str, TensorStorageMetadata], strict: bool
) -> list[str]:
    """Why what was saved can't be loaded into ``tensors``, a line each."""
    found = []
    if strict:
        found += [f"missing: {name}" for name in sorted(names - set(saved))]
        found += [f"unexpected: {name}" for name in sorted(set(saved) - names)]
    for name, tensor in sorted(tensors.items()):
        if name in saved:
            then, now = saved[name], tensor
            if then.size != now.shape:
                found.append(f"{name} was saved as {list(then.size)}, and is {list(now.shape)}")
            elif then.properties.dtype != now.dtype:
                found.append(f"{name} was saved as {then.properties.dtype}, and is {now.dtype}")
    return found


MOST_LINES = 20


def complain(folder: Path, found: list[str]) -> None:
    if found:
        more = [f"and {len(found) - MOST_LINES} more"] if len(found) > MOST_LINES else []
        lines = "\n  ".join([*found[:MOST_LINES], *more])
        raise CheckpointError(f"{folder} was saved of something else:\n  {lines}")


class Everyone:
    """The ranks that save or load together."""

    def __init__(self, group: dist.ProcessGroup | None) -> None:
        self.group = group
        self.alone = not (dist.is_available() and dist.is_initialized())
        self.rank = 0 if self.alone else dist.get_rank(group)
        self.size = 1 if self.alone else dist.get_world_size(group)

    @contextmanager
    def dcp_options(self) -> Iterator[dict[str, Any]]:
        """Who takes part. That there is one process only is no reason for DCP to warn."""
        with warnings.catch_warnings():
            if self.alone:
                warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            yield {"no_dist": True} if self.alone else {"process_group": self.group}

    def gather(self, value: Any) -> list[Any]:
        if self.alone:
            return [value]
        found: list[Any] = [None] * self.size
        dist.all_gather_object(found, value, group=self.group)
        return found

    @contextmanager
    def failing_together(self, what: str) -> Iterator[None]:
        """An exception inside, on any rank, becomes one on all, at the end."""
        error: Exception | None = None
        try:
            yield
        except Exception as raised:
            error = raised
        told = self.gather(None if error is None else f"{type(error).__name__}: {error}")
        failed = [rank for rank, text in enumerate(told) if text is not None]
        if not failed:
            return
        if isinstance(error, CheckpointError):
            raise error
        where = "" if self.alone else f" on rank {failed[0]}"
        raise CheckpointError(f"{what}{where}: {told[failed[0]]}") from error
