"""State of parameters that are each rank's own, which stands in ``optimizer.state``: see Note [Each rank's own]."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor

from zerox.model_names import name_or_shape
from zerox.ranks.calls import warn_caller
from zerox.sliced_tensor import SlicedTensor
from zerox.state.state_dict import Uncast

Own = Mapping[int, Tensor]  # parameters, by id


def places_of(groups: Sequence[Mapping[str, Any]], own: Own) -> dict[int, int]:
    """Where torch counts a parameter that ranks share, by its number; empty if that is the same."""
    every = [param for group in groups for param in group["params"]]
    shared = [place for place, param in enumerate(every) if id(param) not in own]
    return dict(enumerate(shared)) if own else {}


def with_own(
    state: Mapping[int, Any], groups: Sequence[Mapping[str, Any]], own: Own, live: Mapping[Any, Any]
) -> dict[int, Any]:
    """``state``, by number, as torch counts, with copies on the CPU of what is ``live`` of this rank's own."""
    places, every = places_of(groups, own), enumerate(param for group in groups for param in group["params"])
    kept = {place: live[p] for place, p in every if id(p) in own and live.get(p)}
    copied = {place: {key: _copy(value) for key, value in of_one.items()} for place, of_one in kept.items()}
    return dict(sorted(({places.get(number, number): of_one for number, of_one in state.items()} | copied).items()))


def check_own(own: Own, given: Mapping[Any, Uncast]) -> None:
    """ValueError for state that does not fit this rank's own parameters: it may be another rank's."""
    for param, uncast in given.items():
        of_one = uncast.state if isinstance(param, Tensor) and id(param) in own else {}
        for key, value in of_one.items():
            has_elements = isinstance(value, Tensor) and value.numel() > 1
            if isinstance(value, SlicedTensor) or (has_elements and value.shape != param.shape):
                raise ValueError(
                    f"{key} of shape {tuple(value.shape)} was saved for a parameter that is this rank's own, of shape "
                    f"{tuple(param.shape)}: load what this rank saved, on as many ranks as then"
                )


def as_loaded(param: Tensor, state: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of one's own state, cast as torch does for a parameter."""
    found = copy.deepcopy(dict(state))
    for key, value in found.items():
        if isinstance(value, Tensor) and value.dim():
            found[key] = value.to(param.device, param.dtype if value.is_floating_point() else value.dtype)
    return found


def warn_of_dcp(own: Own) -> None:
    warn_caller(
        f"zerox: {name_or_shape(next(iter(own.values())))} is this rank's own parameter, which no "
        "DistributedDataParallel has, and torch.distributed.checkpoint keeps one tensor of a name: dcp.save() would "
        "lose those of other ranks. Use zerox.save(), which has those of all"
    )


def warn_of_others(to: int) -> None:
    warn_caller(
        f"zerox: the whole state of rank {to} has that rank's own parameters only (those that no "
        "DistributedDataParallel has). full_state_dict(to=RANK) has another's, and zerox.save() has those of all"
    )


def _copy(value: Any) -> Any:
    return value.detach().to("cpu", copy=True) if isinstance(value, Tensor) else value
