"""What a checkpoint has of one parameter's state, as its metadata say."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from zerox.checkpoint.names import key_of
from zerox.memory.stored import form_of
from zerox.plan.form import Form
from zerox.rules.rule import REMAINDER, STEP, StateSpec

Saved = Mapping[str, TensorStorageMetadata]
Read = Callable[[dict[str, Any]], None]  # fills tensors by their names in the checkpoint


@dataclass(frozen=True)
class SavedParam:
    """``name``: the parameter's in the checkpoint, whose tensors are ``saved``. ``group``: the param group that it was
    saved in, if it was in one. ``order``: of its dimensions in memory, slowest first, if that is not their own."""

    name: str
    saved: Saved
    group: Mapping[str, Any] | None
    order: Sequence[int] = ()

    def key(self, what: str) -> str:
        return key_of(self.name, what)

    def has(self, what: str) -> bool:
        return self.key(what) in self.saved

    @property
    def was_saved(self) -> bool:
        """Else it was frozen, or had no gradient yet."""
        return self.has(STEP.key)

    def shape(self, what: str) -> torch.Size:
        return self.saved[self.key(what)].size

    def dtype(self, what: str) -> torch.dtype:
        return self.saved[self.key(what)].properties.dtype

    def form(self, spec: StateSpec) -> Form | None:
        """How this state was stored; None if it was not saved."""
        return form_of(spec, self.dtype(spec.key)) if self.has(spec.key) else None

    def has_scales(self, spec: StateSpec) -> bool:
        form = self.form(spec)
        return form is not None and form.scaled

    def misfit(self, what: str, shape: Sequence[int], dtypes: Sequence[torch.dtype], of: torch.dtype) -> str:
        """A line if it was saved otherwise than it can be; else nothing. ``of``: the parameter's dtype."""
        key = self.key(what)
        if not self.has(what):
            return ""
        if tuple(self.shape(what)) != tuple(shape):
            return f"{key} was saved as {list(self.shape(what))}, and is {list(shape)}"
        if self.dtype(what) not in dtypes:
            return f"{key} was saved as {self.dtype(what)}, and can be {' or '.join(map(str, dtypes))}"
        if what == REMAINDER.key and of is not torch.bfloat16:
            return f"{key} is for a torch.bfloat16 parameter, and the parameter is {of}"
        return ""


def dtypes_of(forms: Sequence[Form]) -> tuple[torch.dtype, ...]:
    return tuple(getattr(torch, form.dtype) for form in forms)
