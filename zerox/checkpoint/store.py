"""save() and load(): model and optimizer as a checkpoint that any number of ranks loads."""

from __future__ import annotations

import contextlib
import json
import os
import time
import warnings
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load

from zerox._C import SyncPoint
from zerox.checkpoint import manifest
from zerox.checkpoint.arguments import check_arguments
from zerox.checkpoint.blocks import memory_order
from zerox.checkpoint.entries import entries
from zerox.checkpoint.everyone import Everyone, FailingAs
from zerox.checkpoint.groups import check_rules, fill_groups, groups_by_name, groups_to_fill
from zerox.checkpoint.manifest import FORMAT, FORMAT_WITH_OWN, HOST, METADATA, OWN, CheckpointError, some
from zerox.checkpoint.masks import check_masks, masks_of, take_masks
from zerox.checkpoint.names import MODEL, OPTIMIZER, fill_others, parameter_names, split_model
from zerox.checkpoint.own_params import all_names, gather_host_parts
from zerox.checkpoint.parts import write_parts
from zerox.checkpoint.place import Target, candidates, find
from zerox.checkpoint.reader import CheckpointReader, load_file
from zerox.checkpoint.saved_state import SavedState
from zerox.checkpoint.saved_tables import spread_tables, table_entries
from zerox.checkpoint.unwrapped import RanksOwn
from zerox.checkpoint.writer import CheckpointWriter, save_object
from zerox.engine import Engine
from zerox.ranks.calls import named
from zerox.ranks.process_group import GroupArgument
from zerox.state.state_dict import say_rounded


@named("zerox.save()")
def save(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Engine,
    extra: Any = None,
    process_group: GroupArgument = None,
) -> None:
    """Saves model, optimizer and ``extra`` (tensors, numbers, strings, and lists and dicts of these) in a folder.

    Each rank writes its own segments of the optimizer's state and its part of the model. ``path`` has either what was
    there before or all of the new checkpoint, also if a rank is killed. Parameters have the names of ``model``.
    Collective over ``process_group`` (default: the optimizer's own, and all model axes), whose ranks see one file
    system. DTensors are saved as the whole tensors that they are parts of, and stages of a pipeline
    (``norm_group``) each write theirs. What is each rank's own, as parameters that no DistributedDataParallel has
    beside others that one has, is saved under its rank.

    A new path, an empty folder, a checkpoint, or a link to one of these is replaced. Anything else, also a checkpoint
    with other files in it, is refused before anything is written. Raises CheckpointError on all ranks for that, if one
    of them could not write, and if one died; ValueError for a ``process_group`` without all of the optimizer's ranks;
    TypeError, on this rank alone, for what is no model or no optimizer of zerox, as a wrapper around one.
    """
    check_arguments("zerox.save()", path, model, optimizer)
    path, ranks = Path(path), Everyone.of(optimizer, process_group)
    failure = not_saved(path)
    with FailingAs(failure):
        optimizer.inside.sync(SyncPoint.SAVE)
    tensors: dict[str, Tensor] = {}
    host: dict[str, Any] = {}
    subgroup_of: dict[str, tuple[int, int]] = {}
    record: dict[str, Any] = {}
    with ranks.failing_together(failure):
        loading = optimizer.inside.loading
        if failed := loading.half_loaded or loading.failed or optimizer.inside.update.failure:
            raise CheckpointError(failed)
        names = parameter_names(model, optimizer)
        optimizer.inside.gather.prepare_checkpoint()
        tensors, others = split_model(model, optimizer)
        own = RanksOwn(model, optimizer, names, ranks)
        said = own.describe(model)
        tensors |= entries(optimizer, names)
        subgroup_of = optimizer.inside.grads.subgroups.by_name(
            {names[m.number]: m.group for m in optimizer.inside.members}
        )
        orders = {names[m.number]: memory_order(m) for m in optimizer.inside.members}
        host = {
            "groups": groups_by_name(optimizer, names),
            "memory_order": {name: order for name, order in orders.items() if order},
            "model": others,
            "extra": extra,
            **masks_of(optimizer),
        }
    with FailingAs(failure):
        tensors |= table_entries(spread_tables(optimizer), names, model)
    if own.is_asked or ranks.may_be_others:
        own.learn(ranks.gather(said, failure))
    if own.are_some:
        with ranks.failing_together(failure):
            own.take_out(model, tensors, host["model"])
            of_own, record = own.to_save()
            tensors |= of_own
        host[OWN] = ranks.gather(record, failure)
    write(path, tensors, gather_host_parts(ranks, tensors, host, subgroup_of, failure), ranks)


def write(path: Path, tensors: dict[str, Tensor], host: dict[str, Any], ranks: Everyone) -> None:
    """A whole checkpoint, of ``tensors`` from all ranks and of ``host`` from rank 0. Raises CheckpointError."""
    target = Target(path)
    try:
        _write(target, tensors, host, ranks)
    except CheckpointError:
        with contextlib.suppress(CheckpointError, OSError):  # the error that is raised is the first one
            target.give_up()
        raise
    finally:
        target.close()


def _write(target: Target, tensors: dict[str, Tensor], host: dict[str, Any], ranks: Everyone) -> None:
    folder, failure = target.folder, not_saved(target.path)
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            target.claim()
    writer = CheckpointWriter(folder)
    write_parts(tensors, writer, ranks, failure)
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            writer.written[HOST] = save_object(host, folder / HOST)
            writer.written[METADATA] = manifest.checksum(folder / METADATA)
    files = {name: each for part in ranks.gather(writer.written, failure) for name, each in part.items()}
    with ranks.failing_together(failure):
        if ranks.rank == 0:
            about = {"saved_at": time.time(), "saved_by_ranks": ranks.size, "torch": str(torch.__version__)}
            manifest.write(folder, files, about, FORMAT_WITH_OWN if OWN in host else FORMAT)
            target.put(files)


def not_saved(path: Path) -> str:
    return f"zerox: {path} could not be saved"


def not_loaded(path: Path) -> str:
    return f"zerox: {path} could not be loaded"


@named("zerox.load()")
def load(
    path: str | os.PathLike[str],
    model: nn.Module,
    optimizer: Engine,
    strict: bool = True,
    process_group: GroupArgument = None,
) -> Any:
    """Loads what :func:`save` saved, on any number of ranks and in any stage and buckets; returns ``extra``.

    With parameters that are each rank's own it is for as many ranks as saved it: CheckpointError on all others.
    State that was saved with another ``state_dtype`` or ``master_weights`` is converted, with a warning where it is
    rounded. Nothing is changed unless all files are as they were written. Raises CheckpointError on all ranks for files
    that are not, and for tensors that are missing, unexpected, or of another shape or dtype, naming them; without
    ``strict`` missing and unexpected ones are left alone. Collective over ``process_group`` (default: the optimizer's
    own). Only files that the checkpoint's manifest lists are read, and only in the checkpoint's folder.
    """
    check_arguments("zerox.load()", path, model, optimizer)
    path, ranks = Path(path), Everyone.of(optimizer, process_group)
    with FailingAs(not_loaded(path)):
        optimizer.inside.sync(SyncPoint.SAVE)
    first: dict[str, Any] = {}
    known: set[str] = set()
    opened = open_checkpoint(path, ranks)
    host: dict[str, Any] = {}
    options: list[tuple[dict[str, Any], dict[str, Any]]] = []
    rounded: list[str] = []
    params = optimizer.inside.gather
    params.prepare_checkpoint()
    with params.updating():
        with ranks.failing_together(not_loaded(path)):
            host, names = opened.host(), parameter_names(model, optimizer)
            own = RanksOwn(model, optimizer, names, ranks)
            own.learn_from(host, opened.tensors, ranks, strict)
            groups = own.groups(host)
            check_rules(optimizer, names, groups, own.names)
            check_masks(optimizer, host)
            state = SavedState(optimizer, names, opened.tensors, host)
            tensors, others = split_model(model, optimizer)
            own.take_out(model, tensors, others)
            known = {*tensors, *state.known()}
        known = all_names(ranks, known, not_loaded(path))
        with ranks.failing_together(not_loaded(path)):
            first = {name: tensor for name, tensor in tensors.items() if name in opened.tensors}
            first |= own.to_read(host, opened.tensors)
            lines = own.names_differ(host, opened.tensors) if strict else []
            lines += names_differ({*tensors, *state.needed()}, known, opened.tensors) if strict else []
            complain(path, [*lines, *misfits(first, opened.tensors), *state.misfits()])
            options = groups_to_fill(optimizer, names, groups, own.names) + own.empty_groups(host)
        with ranks.failing_together(not_loaded(path)):  # after all checks: what one rank refuses changes nothing on any
            fill_groups(optimizer, options)
            with optimizer.inside.loading.pulls.of_all:
                optimizer.inside.loading.start_states()
        params.mark_written()  # each rank its shards, now that none reads any more
        part = f"zerox: {path} could not be read to its end, and model and optimizer have a part of it"
        with ranks.failing_together(part), optimizer.inside.loading.pulls.load:
            rounded = state.load(opened.read, first)
            take_masks(optimizer, host)
            own.take_state(host, opened.tensors)
            optimizer.inside.loading.note_loaded()
            kept = {name: value for name, value in host["model"].items() if name in others}
            fill_others(model, kept | own.others_saved(host))
        if strict:
            optimizer.inside.loading.half_loaded = ""
    say_rounded(dict.fromkeys(rounded))
    return host["extra"]


def latest(folder: str | os.PathLike[str]) -> Path | None:
    """The checkpoint in ``folder`` that was saved last and is complete; None if there is none, or no such folder.

    It is searched for: no pointer to it could be wrong. A checkpoint with a file that is missing or of another size is
    passed over; changed bytes are found by :func:`load`. Not collective.
    """
    found = []
    for path in candidates(Path(folder)):
        try:
            about = manifest.read(place := find(path))
            manifest.check(place, about["files"], contents=False)
        except (CheckpointError, OSError):
            continue
        found.append((about.get("saved_at", 0.0), path))
    return max(found)[1] if found else None


@dataclass
class Opened:
    """A checkpoint whose files are as they were written. ``tensors``: their metadata, by name."""

    folder: Path
    reader: CheckpointReader
    tensors: dict[str, TensorStorageMetadata]

    def host(self) -> dict[str, Any]:
        """Raises CheckpointError."""
        found: dict[str, Any] = load_file(self.folder / HOST)
        return found

    def read_metadata(self, listed: Collection[str]) -> None:
        """Raises CheckpointError, also if a tensor would be read from a file that the manifest has not ``listed``."""
        file = self.folder / METADATA
        try:
            metadata = self.reader.read_metadata()
            self.tensors |= metadata.state_dict_metadata  # type: ignore[arg-type]
            named = {str(place.relative_path) for place in (metadata.storage_data or {}).values()}
        except Exception as error:  # unpickling raises anything
            raise CheckpointError(f"{file} is damaged: {error}") from None
        if unlisted := sorted(named - set(listed)):
            raise CheckpointError(f"{file} names {some(unlisted)}, which {self.folder / manifest.NAME} does not list")

    def read(self, tensors: dict[str, Any]) -> None:
        """Into ``tensors``, by name; each rank on its own."""
        with warnings.catch_warnings():  # that other ranks don't take part
            warnings.filterwarnings("ignore", message="torch.distributed is disabled", category=UserWarning)
            dcp_load(tensors, storage_reader=self.reader, no_dist=True)


def open_checkpoint(path: Path, ranks: Everyone) -> Opened:
    """Collective: ranks share the work of reading it. Raises CheckpointError for files that are not as written."""
    failure = not_loaded(path)
    folder, about = path, {}
    with ranks.failing_together(failure):
        folder = find(path)
        about = manifest.read(folder)
    everyones = {json.dumps(each, sort_keys=True) for each in ranks.gather(about, failure)}
    opened = Opened(folder, CheckpointReader(folder), {})
    with ranks.failing_together(failure):
        if len(everyones) > 1:
            raise CheckpointError(f"{path} is not the same checkpoint on all ranks")
        files = about["files"]
        # Each rank checks what the rank of its number wrote: most of what it reads next is then in its machine's
        # memory.
        names = sorted(files, key=lambda name: (not name.startswith("__"), len(name), name))
        own = {name: files[name] for name in names[ranks.rank :: ranks.size]}
        manifest.check(folder, own, opened.reader.damaged_tensors, contents=False)
    with ranks.failing_together(failure):  # no rank reads gigabytes of one that is known to be damaged
        manifest.check(folder, own, opened.reader.damaged_tensors, contents=True)
    with ranks.failing_together(failure):
        opened.read_metadata(files)
    return opened


def names_differ(needed: Collection[str], known: Collection[str], saved: Mapping[str, Any]) -> list[str]:
    """Lines for tensors that are missing, and for others."""
    found = {name for name in saved if name.startswith((MODEL, OPTIMIZER))}
    return [f"missing: {name}" for name in sorted(set(needed) - found)] + [
        f"unexpected: {name}" for name in sorted(found - set(known))
    ]


def misfits(tensors: Mapping[str, Tensor], saved: Mapping[str, TensorStorageMetadata]) -> list[str]:
    """Lines for tensors that had another shape or dtype."""
    found = []
    for name, now in sorted(tensors.items()):
        then = saved[name]
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
