"""The numbers that a shard keeps for each of its elements: one :class:`Stored` each, in whatever form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zerox.memory.pages import storage_bytes, zeros
from zerox.plan.form import BLOCK_NUMEL, Form, num_blocks
from zerox.rules.rule import MASTERS, Rule, StateSpec

SCALE = "_scale"  # behind a key: the scales of its blocks


@dataclass(frozen=True, eq=False)
class Stored:
    """``values`` ``[n]``; ``scales``: float32 ``[ceil(n / 256)]`` beside codes of 8 bits, else None."""

    spec: StateSpec
    values: Tensor
    scales: Tensor | None = None

    @staticmethod
    def zeros(rule: Rule, spec: StateSpec, form: Form, numel: int, device: torch.device) -> Stored:
        """All zero: the code 0 is zero, whatever the scale. ``form``: used if ``spec`` has none."""
        form = spec.form or form
        values = zeros(numel, getattr(torch, form.dtype), device, _place(rule, spec))
        return Stored(spec, values, torch.zeros(form.num_scales(numel), device=device) if form.scaled else None)

    @staticmethod
    def of_rows(spec: StateSpec, dtype: torch.dtype, num_rows: int, width: int, device: torch.device) -> Stored:
        """All zero, ``[num_rows, width]``: each row is a parameter of its own, so codes of 8 bits have scales
        ``[num_rows, ceil(width / 256)]``."""
        values = torch.zeros(num_rows, width, dtype=dtype, device=device)
        is_coded = dtype is torch.uint8
        return Stored(spec, values, torch.zeros(num_rows, num_blocks(width), device=device) if is_coded else None)

    @staticmethod
    def among(spec: StateSpec, parts: Mapping[str, Tensor]) -> Stored | None:
        """That of ``spec`` among ``parts``, by its keys, 1-D; None if it is not there."""
        return Stored(spec, parts[spec.key], parts.get(spec.key + SCALE)) if spec.key in parts else None

    def part(self, elements: slice) -> Stored:
        """A view of these elements, which start with a block."""
        if self.scales is None:
            return Stored(self.spec, self.values[elements])
        blocks = slice(elements.start // BLOCK_NUMEL, num_blocks(elements.stop))
        return Stored(self.spec, self.values[elements], self.scales[blocks])

    def rows(self, rows: slice) -> Stored:
        """A view of these rows."""
        return Stored(self.spec, self.values[rows], None if self.scales is None else self.scales[rows])

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their keys in a state_dict."""
        scales = {} if self.scales is None else {self.spec.key + SCALE: self.scales}
        return {self.spec.key: self.values, **scales}

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def zero_(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()


def stored_bytes(rule: Rule, spec: StateSpec, form: Form, numel: int, on_host: bool) -> int:
    """The bytes that :meth:`Stored.zeros` allocates."""
    form = spec.form or form
    values = storage_bytes(numel, form.itemsize, on_host, _place(rule, spec))
    return values + form.num_scales(numel) * torch.float32.itemsize


def _place(rule: Rule, spec: StateSpec) -> int:
    """The number among the arrays that the update walks together: see zerox/memory/pages.py."""
    return 1 if spec in MASTERS else 2 + rule.states.index(spec)
