"""State of 8 bits in a state_dict(): codes, which the classes of torch.optim would take for moments.

Under the keys that those classes know it is therefore a :class:`SlicedTensor` with all elements, as it is one with some
on several ranks. Their load_state_dict() casts it, and a slice of codes refuses to become numbers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from zerox.memory.stored import SCALE, form_of
from zerox.plan.span import Span
from zerox.rules.rule import MASTER, REMAINDER
from zerox.sliced_tensor import SlicedTensor
from zerox.state.pulled_tensor import PulledTensor


def mark(state: dict[str, Any]) -> dict[str, Any]:
    """One parameter's state, with its codes as slices: views, as they were."""
    codes = {key: value for key, value in state.items() if key + SCALE in state and _is_plain_codes(value)}
    return {**state, **{key: _slice_of_all(value) for key, value in codes.items()}}


def unmark(state: Any) -> Any:
    """The same before :func:`mark`: a slice of all elements is the tensor itself. Older files have it so.

    Masters of a ``state_dict()`` that nobody pickled have beside them what they are stored as.
    """
    if not isinstance(state, Mapping):
        return state
    if isinstance(master := state.get(MASTER.key), PulledTensor) and master.int16 is not None:
        state = {**state, REMAINDER.key: master.as_remainder()}
    return {key: value.whole() if _has_all(value) else value for key, value in state.items()}


def _is_plain_codes(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, SlicedTensor) and form_of(None, value.dtype).scaled


def _slice_of_all(value: Tensor) -> SlicedTensor:
    flat = value.as_strided((value.numel(),), (1,))
    return SlicedTensor(value.shape, value.stride(), Span(0, value.numel()), flat)


def _has_all(value: Any) -> bool:
    return isinstance(value, SlicedTensor) and value.dim() > 0 and value.has_all
