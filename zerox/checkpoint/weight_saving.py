"""save_weights(): the model's weights alone, as files that other libraries read."""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from torch import Tensor, nn

from zerox._C import SyncPoint
from zerox.checkpoint.arguments import check_weights_arguments
from zerox.checkpoint.everyone import Everyone, FailingAs
from zerox.checkpoint.manifest import CheckpointError, some, sync
from zerox.checkpoint.names import EXTRA_STATE, naming_in, parameter_names
from zerox.checkpoint.unwrapped import RanksOwn
from zerox.checkpoint.weight_folder import WeightTarget
from zerox.checkpoint.weight_parts import Weight, held_by_others, model_of, weights_of
from zerox.checkpoint.weight_plan import INSTEAD, Plan, agree
from zerox.checkpoint.weight_writer import make_files, sync_files, write_parts
from zerox.engine import Engine
from zerox.plan.weight_split import INDEX, bytes_of, index_text
from zerox.ranks.calls import named, warn_caller


@named("zerox.save_weights()")
def save_weights(optimizer: Engine, folder: str | os.PathLike[str], max_shard_size: int | str = "5GB") -> None:
    """Writes the model's weights as Hugging Face's libraries do: safetensors files, and an index if there are several.

    ``max_shard_size``: of one file, as "5GB" or in bytes; a larger weight has a file of its own. The files are those
    that transformers' ``save_pretrained`` would write: ``from_pretrained`` reads them, where a ``config.json`` lies
    beside them. They have parameters and persistent buffers in their own dtypes, and of several names of one
    parameter the one from which transformers ties the others, else the first. With 16-bit parameters they have the
    16-bit values, not the masters; a warning says so once.

    Each rank writes what it keeps, from where it lies: no weight is gathered, and none is whole on any rank that does
    not have it whole anyway. ``folder`` has either the weights from before or all of the new ones, also if a rank is
    killed. A new path and a folder without folders in it are taken: weight files in it that have the layout's names
    are replaced, all others stay. Collective over the optimizer's ranks and all model axes, which see one file system.

    Raises CheckpointError on all ranks for a folder that can't be taken, if one of them could not write, and if one
    died; TypeError and ValueError, on this rank alone, for arguments of another kind.
    """
    check_weights_arguments("zerox.save_weights()", optimizer, folder)
    most_bytes = bytes_of(max_shard_size)
    path, ranks = Path(folder), Everyone.of(optimizer, None)
    failure = f"zerox: weights could not be saved to {path}"
    with FailingAs(failure):
        optimizer.inside.sync(SyncPoint.SAVE)
        optimizer.inside.gather.prepare_checkpoint()
    model, weights = _weights(optimizer, ranks, failure)
    plan = agree(weights, most_bytes, ranks, failure)
    _write(WeightTarget(path), plan, weights, ranks, failure)
    if ranks.rank == 0:  # now that no rank waits for it: warnings may be errors
        _say_what_is_missing(optimizer, model)


def _weights(optimizer: Engine, ranks: Everyone, failure: str) -> tuple[nn.Module, dict[str, Weight]]:
    """The model, and its weights by the names that files have for them. Collective."""
    with ranks.failing_together(failure):
        if failed := optimizer.inside.loading.half_loaded or optimizer.inside.loading.failed:
            raise CheckpointError(failed)
        model = model_of(optimizer)
        own = RanksOwn(model, optimizer, parameter_names(model, optimizer), ranks)
        said = own.describe(model)
        if others := held_by_others(optimizer, model):
            raise CheckpointError(
                f"{some(sorted(others))} of the model are another optimizer's, and one optimizer saves what it has: "
                "give all parameters to one, in param groups"
            )
        ties = _ties(model)
        weights = {_name(weight, ties): weight for weight in weights_of(optimizer, model)}
    if own.is_asked:
        own.learn(ranks.gather(said, failure))
    with ranks.failing_together(failure):
        if own.are_some:
            raise CheckpointError(
                "parameters that no DistributedDataParallel has are each rank's own, and such files have one tensor of "
                f"a name: {INSTEAD}, under each rank"
            )
    return model, weights


def _ties(model: nn.Module) -> set[str]:
    """Names that transformers ties from others when it loads."""
    bare, found = naming_in(model), set[str]()
    for path, module in model.named_modules():
        tied = getattr(module, "all_tied_weights_keys", None)
        if isinstance(tied, dict):
            found |= {bare(f"{path}.{name}" if path else str(name)) for name in tied}
    return found


def _name(weight: Weight, ties: set[str]) -> str:
    """Of names from all of which transformers ties others it keeps the last one, by the alphabet."""
    return next((name for name in weight.names if name not in ties), max(weight.names))


def _say_what_is_missing(optimizer: Engine, model: nn.Module) -> None:
    core, bare = optimizer.inside, naming_in(model)
    masters = [*(each.master for each in core.buckets), *(each.master for each in core.tables)]
    if any(each is not None for each in masters):
        _say_once_of_masters()
    others = [bare(name) for name, value in model.state_dict().items() if _is_extra(name, value)]
    if others:
        warn_caller(f"zerox: safetensors files have tensors only, and so not {some(others)} of the model: {INSTEAD}")


def _is_extra(name: str, value: Any) -> bool:
    return name.endswith(EXTRA_STATE) or not isinstance(value, Tensor)


@functools.cache
def _say_once_of_masters() -> None:
    warn_caller(
        "zerox: zerox.save_weights() writes parameters as the model has them, in 16 bits: their masters, which hold "
        f"more, are not in the files. {INSTEAD}"
    )


# ---- on the disk


def _write(target: WeightTarget, plan: Plan, weights: Mapping[str, Weight], ranks: Everyone, failure: str) -> None:
    """Collective. Raises CheckpointError."""
    try:
        with ranks.failing_together(failure):
            if ranks.rank == 0:
                target.claim()
                make_files(target.folder, plan.files)
        with ranks.failing_together(failure):
            parts = {name: weight.parts for name, weight in weights.items() if name in plan.own}
            turn = ranks.rank * len(plan.files) // ranks.size  # file systems let one process at a time write a file
            write_parts(target.folder, [*plan.files[turn:], *plan.files[:turn]], parts)
        with ranks.failing_together(failure):
            if ranks.rank == 0:
                target.check_ours()
                target.put(_complete(target.folder, plan))
    except CheckpointError:
        with contextlib.suppress(CheckpointError, OSError):  # the error that is raised is the first one
            target.give_up()
        raise
    finally:
        target.close()


def _complete(folder: Path, plan: Plan) -> dict[str, int]:
    """The bytes of all files by name, once these are on the disk, the index last."""
    sync_files(folder, plan.files)
    found = {file.name: file.nbytes for file in plan.files}
    if len(plan.files) > 1:
        text = index_text({file.name: list(file.entries) for file in plan.files}, plan.total_bytes, plan.num_parameters)
        (folder / INDEX).write_text(text)
        sync(folder / INDEX)
        found[INDEX] = len(text.encode())
    return found
