"""A rank's own state, taken from a state_dict() without a cast, all of it or nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from zerox.bucket import Bucket, Member
from zerox.moments import EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ, fits


@dataclass(frozen=True)
class Uncast:
    """The state of one parameter. torch would cast its tensors to the parameter's dtype, and 16 bits are too few for
    moments; what is neither a tensor nor iterable it hands on as it is."""

    state: Mapping[str, Any]


@contextmanager
def state_uncast(optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Inside, ``load_state_dict()`` wraps state as :class:`Uncast`, after the user's own hooks."""

    def wrap(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        return {**given, "state": {key: Uncast(state) for key, state in given["state"].items()}}

    handle = optimizer.register_load_state_dict_pre_hook(wrap)
    try:
        yield
    finally:
        handle.remove()


def check_state(buckets: Sequence[Bucket], frozen: Sequence[Member], given: Mapping[Any, Uncast]) -> None:
    """ValueError naming the first parameter whose state this rank can't hold."""
    names = {id(member.param): member.name for bucket in buckets for member in bucket.members}
    own = {id(param): state for bucket in buckets for param, state in bucket.state_of_own()}
    frozen_names = {id(member.param): member.name for member in frozen}
    for param, uncast in given.items():
        if not isinstance(param, Tensor):
            continue  # not a parameter's: torch takes such state too
        if id(param) in frozen_names:
            raise ValueError(
                f"state of parameter '{frozen_names[id(param)]}' was given, but it was frozen when the optimizer was "
                "built: build the optimizer with the parameters trainable that were when the state was saved"
            )
        here = own.get(id(param), {})
        for key in (EXP_AVG, EXP_AVG_SQ, MAX_EXP_AVG_SQ):
            if key in here and key in uncast.state and not fits(_dtype(uncast.state[key]), here[key].dtype):
                raise ValueError(
                    f"state of parameter '{names[id(param)]}' was saved with another state_dtype: its {key} is "
                    f"{_dtype(uncast.state[key])}, and this optimizer keeps {here[key].dtype}"
                )
        sizes = [(key, _numel(uncast.state[key]), here[key].numel()) for key in here if key in uncast.state]
        wrong = [f": {theirs} elements of {key} instead of {ours}" for key, theirs, ours in sizes if theirs != ours]
        if not here or wrong:
            raise ValueError(
                f"state of parameter '{names[id(param)]}' is another rank's share or was saved at another world size"
                + "".join(wrong[:1])
            )


def fill_state(buckets: Sequence[Bucket], given: Mapping[Any, Uncast]) -> None:
    """Copies values in place. What isn't given is as for a parameter that was never updated, as in torch."""
    for bucket in buckets:
        for segment, (param, own) in zip(bucket.own_segments, bucket.state_of_own(), strict=True):
            state = given[param].state if param in given else {}
            for key, tensor in own.items():
                if key in state:
                    tensor.copy_(torch.as_tensor(state[key]).reshape(tensor.shape))
                elif key == "master":
                    span = slice(segment.span.start, segment.span.stop)
                    assert bucket.master is not None
                    bucket.master[span].copy_(bucket.param_shard[span])
                else:
                    tensor.zero_()


def groups_with_defaults(groups: list[dict[str, Any]], defaults: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Options that an older state_dict didn't know take the optimizer's defaults."""
    for group in groups:
        for key, value in defaults.items():
            group.setdefault(key, value)
    return groups


def _numel(value: Any) -> int:
    return torch.as_tensor(value).numel()


def _dtype(value: Any) -> torch.dtype:
    return torch.as_tensor(value).dtype
