"""What ranks look at around their optimizer in its first step(): what nobody makes the same, and nobody averages.

torch's DistributedDataParallel hands out all of a module, and averages all its gradients. Without a wrapper an
optimizer does so for what it holds, so a warning says what there is beside that.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerox._C import Combine, SyncResult
from zerox.model_names import model_with
from zerox.optimizer.core import Core
from zerox.optimizer.first_look import check_subgroups, squares_of
from zerox.ranks.calls import warn_caller
from zerox.ranks.compared import digest, first_that_differs
from zerox.ranks.holders import find_held
from zerox.ranks.wrapped import decisions, find_unwrapped, hands_out_buffers_of, has_wrapped, names_of_wrapped

SYNC = "require_backward_grad_sync"


@dataclass(frozen=True)
class Around:
    """``still``: of what is not trained and in no optimizer of zerox, a line each. ``apart``: names of trained
    parameters whose gradient nobody averages. ``has_sync``: the model has an attribute that only a wrapper heeds."""

    still: tuple[str, ...] = ()
    apart: tuple[str, ...] = ()
    has_sync: bool = False
    is_found: bool = False


def look_around(core: Core, result: SyncResult) -> None:
    """One warning at most, in the first step(), when ranks have compared their parameters. Collective there: ranks tell
    each other, in a message of one size, whether they have found the same model."""
    if result.followed or core.calls.record.has_looked:
        return
    if core.ranks.size == 1 or not result.has_same_params:  # else some ranks are not here
        core.calls.record.has_looked = True
        return
    check_subgroups(core)
    _check_wrapped(core)
    core.calls.record.has_looked = True  # what raised above raises again
    around = _around(core)
    names = digest("\n".join(line.rpartition(" ")[0] for line in around.still))
    own = [int(around.is_found), names, digest("\n".join(around.still))]
    message = torch.tensor([each for number in own for each in (number, -number)], dtype=torch.int64, device="cpu")
    core.grads.all_reduce(message, Combine.MAX)
    most, least = message[0::2].tolist(), (-message[1::2]).tolist()
    said = list(_of_wrappers(core))
    if least[0]:  # else some rank has found no model
        said += _describe(around)
    if least[0] and most[1] == least[1] and most[2] != least[2]:
        said.insert(0, _what_differs(core, around.still))
    if said:
        warn_caller(
            f"zerox: {'; '.join(said)}. zerox.DistributedDataParallel around the model does what torch's does for these"
        )


def _check_wrapped(core: Core) -> None:
    """ValueError on all ranks for parameters that the optimizer took before a wrapper left them out: see Note [Each
    rank's own]. Collective where some are wrapped."""
    of_subgroups = core.calls.own.of_subgroups
    shared = [member for member in core.members if id(member.param) not in of_subgroups]
    params = [member.param for member in shared]
    if not has_wrapped(params):
        return
    own = core.calls.own.params
    late = [own[number] for number in own.keys() - find_unwrapped(own.values()).keys()]
    outside = find_unwrapped(params)
    with core.ranks.refusals_told():
        if late:
            raise ValueError(
                f"zerox: parameter of shape {tuple(late[0].shape)} was wrapped in a DistributedDataParallel after the "
                "optimizer was built, which took it for this rank's own: wrap all first, and build the optimizer then. "
                "State is as it was before"
            )
        if outside:
            members = sorted(shared, key=lambda member: member.number)
            name = next(member.quoted for member in members if id(member.param) in outside)
            raise ValueError(
                f"zerox: parameter {name} is not wrapped as others of this optimizer are, which averages "
                "it over the ranks, since it was built before the DistributedDataParallel: wrap the model first, and "
                "build the optimizer then. State is as it was before"
            )
    core.ranks.check_same([])


def _of_wrappers(core: Core) -> Iterator[str]:
    """torch's wrapper leaves alone what is in none; an optimizer without wrapped parameters averages all it holds."""
    wrapped = decisions()
    if wrapped and all(id(member.param) not in wrapped for member in core.members):
        yield (
            f"parameter {core.members[0].quoted} is in no DistributedDataParallel, and is averaged over the ranks "
            "all the same, which begin with rank 0's: give parameters that are each rank's own an optimizer with "
            "process_group='alone'"
        )


def _describe(around: Around) -> Iterator[str]:
    if around.apart:
        yield (
            f"nobody averages the gradient of {_list_names(around.apart)} over the ranks, "
            "which no optimizer of zerox holds"
        )
    if around.has_sync:
        yield f"the model has an attribute {SYNC}, which only a wrapper heeds: call optimizer.no_sync()"


def _what_differs(core: Core, lines: Collection[str]) -> str:
    """Collective, on all ranks."""
    everyone = [each.split("\n") for each in core.ranks.all_gather_text("\n".join(lines))]
    found = first_that_differs(everyone)
    assert found is not None, "their digests differ"
    name = everyone[0][found[1]].rpartition(" ")[0]
    return (
        f"{name} is in no optimizer of zerox and not the same on all ranks (optimizer.broadcast_buffers(model) gives "
        "all ranks rank 0's buffers)"
    )


def _around(core: Core) -> Around:
    model = model_with([member.param for member in core.members])
    if model is None or any(isinstance(each, DistributedDataParallel) for each in model.modules()):
        return Around(is_found=model is not None)
    known = find_held() | names_of_wrapped().keys()
    params = {name: param for name, param in model.named_parameters() if id(param) not in known}
    still = [_line("parameter", name, each) for name, each in params.items() if not each.requires_grad]
    if not hands_out_buffers_of(model):
        still += [_line("buffer", name, each) for name, each in model.named_buffers()]
    apart = tuple(name for name, each in params.items() if each.requires_grad and each.grad is not None)
    return Around(tuple(filter(None, still)), apart, any(SYNC in vars(each) for each in model.modules()), is_found=True)


def _line(kind: str, name: str, tensor: Tensor) -> str:
    """Its values stand last. Empty for what has none that can be looked at."""
    if tensor.is_meta or tensor.layout is not torch.strided:
        return ""
    return f"{kind} '{name}' {squares_of(tensor).replace(' ', '')}"


def _list_names(names: Collection[str]) -> str:
    first = next(iter(names))
    return f"parameter '{first}'" + (f" and {len(names) - 1} more" if len(names) > 1 else "")
