"""A rank's own state, taken from a state_dict() without a cast."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor


@contextmanager
def keep_state_away(optimizer: torch.optim.Optimizer) -> Iterator[dict[int, dict[str, Any]]]:
    """Inside, ``optimizer.load_state_dict()`` takes groups alone; yields the state by position of the parameter.

    torch would cast every tensor to the parameter's dtype, and 16 bits are too few for moments.
    """
    taken: dict[int, dict[str, Any]] = {}

    def take(_: Any, given: dict[str, Any]) -> dict[str, Any]:
        taken.update(given["state"])
        return {**given, "state": {}}

    handle = optimizer.register_load_state_dict_pre_hook(take)
    try:
        yield taken
    finally:
        handle.remove()


def fill_state(own: Sequence[Mapping[str, Tensor] | None], given: Mapping[int, Mapping[str, Any]]) -> None:
    """Copies values in place. ValueError, with nothing changed, for a parameter whose sizes don't fit."""
    for index, state in given.items():
        here = own[index]
        if here is None or any(
            torch.as_tensor(state[key]).numel() != here[key].numel() for key in here if key in state
        ):
            raise ValueError(f"state of parameter {index} is another rank's share or was saved at another world size")
    for index, state in given.items():
        here = own[index]
        assert here is not None
        for key, tensor in here.items():
            if key in state:
                tensor.copy_(torch.as_tensor(state[key]).reshape(tensor.shape))
