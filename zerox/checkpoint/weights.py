"""load_weights(): files of weights, straight into what each rank keeps of the model."""

from __future__ import annotations

import hashlib
import os
import pickle
from collections.abc import Mapping, Sequence
from ctypes import string_at
from pathlib import Path
from typing import NamedTuple

import torch
from torch import nn

from zerox._C import SyncPoint
from zerox.checkpoint.arguments import a_kind_of, check_weights_arguments
from zerox.checkpoint.everyone import Everyone, FailingAs, text_of
from zerox.checkpoint.loaded_weights import bring_home, check_homes, give_out_loaded, share_loaded
from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.own_params import all_names
from zerox.checkpoint.pretrained_names import names_of_pretrained
from zerox.checkpoint.store import not_loaded
from zerox.checkpoint.weight_files import Stored, WeightFiles, find_weights
from zerox.checkpoint.weight_names import (
    LoadedKeys,
    Rename,
    complain,
    is_extra_state,
    matched,
    misfits,
    missing,
    renamed,
    say_extra_state,
    scales_of,
)
from zerox.checkpoint.weight_parts import Weight, held_by_others, model_of, weights_of
from zerox.checkpoint.weight_places import Placed, stored_as
from zerox.checkpoint.weight_reader import WeightReader
from zerox.engine import Engine
from zerox.optimizer.core import Core
from zerox.ranks.calls import named
from zerox.ranks.group import CPU
from zerox.residency.residency import Residency


@named("zerox.load_weights()")
@torch.no_grad()
def load_weights(
    optimizer: Engine, path: str | os.PathLike[str], *, rename: Rename | None = None, strict: bool = True
) -> LoadedKeys:
    """Loads a model's weights from files into the parameters that ``optimizer`` has, and into the model's buffers.

    ``path``: a safetensors file; a folder of Hugging Face's, or its index of several files; a folder that
    :func:`zerox.save` wrote on any number of ranks; a file of ``torch.save(model.state_dict(), ...)``. In a folder
    model.safetensors counts before model.safetensors.index.json, and that before pytorch_model.bin, as in transformers.
    Nothing is downloaded, and nothing that a file asks for is run.

    Each rank reads the elements that it keeps and no others, and ranks give each other what several need: no rank has
    the model whole with ``stage=3``, and each byte is read once. Elements of another dtype are converted, as copy_()
    does. Masters become the parameters' values, and what a mask leaves out stays 0; moments, step counts and param
    groups stay as they are.

    ``rename``: what a name in the files is called in the model; None leaves that tensor out; ``(name, index)`` says
    that it is what the model's weight has at this index (numbers and slices), where several tensors make up one. A
    function, or a dict of those names that change. Without it a model of transformers is asked for its files' names. A
    weight with several names (modules that share it) is read by any of them. A parameter that only another optimizer
    of zerox has is left to that one's call.

    Returns ``(missing_keys, unexpected_keys)`` as ``model.load_state_dict`` does. Collective over the optimizer's ranks
    and all model axes. Raises CheckpointError on all ranks, with nothing changed, for files that are damaged or not
    there on some rank, for two tensors of one name, for shapes that differ, and if ``strict`` for names that are
    missing or unexpected, in torch's words; also if the model is not known (the error says how to name it). If a file
    can't be read to its end, or a rank dies meanwhile, CheckpointError too: then parameters have a part of it, and
    ``step()`` raises until they are loaded anew. TypeError on this rank alone for other arguments than these.
    """
    check_weights_arguments("zerox.load_weights()", optimizer, path)
    if rename is not None and not callable(rename) and not isinstance(rename, Mapping):
        raise TypeError(f"zerox.load_weights(): rename is {a_kind_of(rename)}: pass a function or a dict")
    path, core, ranks = Path(path), optimizer.inside, Everyone.of(optimizer, None)
    failure = not_loaded(path)
    with FailingAs(failure):
        core.sync(SyncPoint.SAVE)
    files = _agree_on_files(core, path, ranks, failure)
    with FailingAs(failure):
        core.gather.prepare_checkpoint()
    reader, before = WeightReader(files), core.loading.half_loaded
    try:
        with core.gather.updating():
            chosen = _choose(optimizer, files, rename, strict, ranks, failure)
            loaded = [weight for weight, *_ in chosen.pairs]
            with ranks.failing_together(failure):
                check_homes(core, loaded)
                # As they will lie once all is at home.
                parts = {each.names: each.parts for each in weights_of(optimizer, chosen.model, at_home=True)}
                for weight, name, stored in chosen.pairs:
                    reader.plan(name, stored, parts[weight.names])
            _read_all(core, path, ranks, loaded, reader)
        give_out_loaded(core, loaded)
        core.loading.half_loaded = before if chosen.keys.missing_keys else ""  # a part does not mend another load
    finally:
        reader.close()
    return chosen.keys


def _agree_on_files(core: Core, path: Path, ranks: Everyone, failure: str) -> WeightFiles:
    """Rank 0 looks, and tells the others. Collective."""
    seen: WeightFiles | None = None
    with ranks.failing_together(failure):
        _refuse(core)
        if ranks.rank == 0:
            seen = find_weights(path)
    given = ranks.gather(str(path), failure)
    with ranks.failing_together(failure):
        if other := next((each for each in given if each != given[0]), ""):
            raise CheckpointError(f"ranks were given different paths: rank 0 {given[0]}, and some other {other}")
    data = b"" if seen is None else pickle.dumps(seen)
    with FailingAs(failure):
        return pickle.loads(_of_first(core, ranks, data, failure))  # type: ignore[no-any-return]


def _of_first(core: Core, ranks: Everyone, data: bytes, failure: str) -> bytes:
    """Rank 0's bytes, which may be many: gathered, each rank would have those of all. Collective."""
    nbytes = max(ranks.gather(len(data), failure))
    values = torch.zeros(nbytes, dtype=torch.uint8, device=CPU)
    if data:
        values.copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
    core.ranks.broadcast(values, "the names of tensors in files")
    data = string_at(values.data_ptr(), nbytes)
    for axis in core.grads.model.axes:
        data = axis.gather_objects(data if axis.coordinate == 0 else b"")[0]
    return data


class Chosen(NamedTuple):
    """``pairs``: weights of the model, each with the tensor that it gets and the name of that. ``keys``: others."""

    model: nn.Module
    pairs: list[tuple[Weight, str, Stored]]
    keys: LoadedKeys


def _choose(
    optimizer: Engine, files: WeightFiles, rename: Rename | None, strict: bool, ranks: Everyone, failure: str
) -> Chosen:
    """Collective. CheckpointError on all ranks for what does not fit."""
    weights: list[Weight] = []
    names: dict[str, str] = {}
    parts: dict[str, list[Placed]] = {}
    stored: dict[str, Stored] = {}
    scales: dict[str, str] = {}
    known: set[str] = set()
    model = nn.Module()
    with ranks.failing_together(failure):
        model = model_of(optimizer)
        weights = weights_of(optimizer, model)
        names, parts = renamed(files, names_of_pretrained(model, files) if rename is None else rename)
        stored, scales = stored_as(files, names, parts, weights), scales_of(names, parts, files)
        known = {name for weight in weights for name in weight.names} | held_by_others(optimizer, model)
    known = all_names(ranks, known, failure)
    named = repr([*sorted(names.items()), *sorted(parts.items())])
    said = "" if ranks.has_own_params else hashlib.sha256(named.encode()).hexdigest()
    told = ranks.gather((strict, said), failure)
    with ranks.failing_together(failure):
        if any(each != told[0] for each in told):
            raise CheckpointError("ranks were given different arguments: rename= and strict= must be alike on all")
        found = matched(weights, stored)
        others = [name for name in names if name not in known and not is_extra_state(name)]
        keys = LoadedKeys(missing(weights, found), others)
        complain(type(model).__name__, keys if strict else LoadedKeys([], []), misfits(weights, stored, scales))
        if ranks.rank == 0:
            say_extra_state(names)
    return Chosen(model, [(weights[place], names[name], stored[name]) for place, name in found.items()], keys)


def _refuse(core: Core) -> None:
    """CheckpointError where no rank could tell what is whose."""
    if core.calls.own.are_some:
        raise CheckpointError(
            "some parameters of the optimizer are each rank's own (no DistributedDataParallel has them), and a file "
            "has one tensor of a name: load into the model on each rank before the optimizer is built, or call "
            "zerox.load()"
        )
    if isinstance(core.gather, Residency) and not core.gather.residents.has_shards:
        raise CheckpointError("unshard() was called, and there are no shards any more: build a new optimizer")


def _read_all(core: Core, path: Path, ranks: Everyone, loaded: Sequence[Weight], reader: WeightReader) -> None:
    """Inside the gather's updating(), after all checks. Collective."""
    part = f"zerox: {path} could not be read to its end, and parameters have a part of it"
    bring_home(core, loaded)
    core.loading.half_loaded = f"{part}: call zerox.load_weights() or zerox.load() again"
    core.gather.mark_written()  # each rank its shards, now that none reads any more
    with core.loading.pulls.of_all:
        with ranks.failing_together(part):
            reader.run()
        try:
            share_loaded(core, loaded)
        except RuntimeError as error:
            raise CheckpointError(f"{part}: {text_of(error)}") from error
    core.loading.note_changes()
    core.calls.record.has_looked = False
