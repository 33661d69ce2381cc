"""The numbers that a shard keeps for each of its elements: one :class:`Stored` each, in whatever form."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from zerox.memory.pages import zeros
from zerox.memory.state_layout import StateLayout
from zerox.plan.form import BLOCK_NUMEL, Form, form_given, num_blocks
from zerox.plan.kept import Kept
from zerox.rules.rule import StateSpec

SCALE = "_scale"  # behind a key: the scales of its blocks


def form_of(spec: StateSpec | None, dtype: torch.dtype) -> Form:
    """How state that comes from outside is stored, by its dtype. ``spec``: what its rule says of it, if known."""
    always = None if spec is None else spec.form
    return form_given(str(dtype).removeprefix("torch."), dtype.itemsize, always)


@dataclass(frozen=True, eq=False)
class Stored:
    """``values`` ``[n]`` in a ``form``; ``scales``: float32 ``[ceil(n / 256)]`` if that is a scaled one, else None.
    ``layout``: of a shard's, where they lie in it if there is not one for each element of the parameters."""

    spec: StateSpec
    form: Form
    values: Tensor
    scales: Tensor | None = None
    layout: StateLayout | None = None

    @staticmethod
    def zeros(
        spec: StateSpec, kept: Kept, numel: int, device: torch.device, layout: StateLayout | None = None
    ) -> Stored:
        """All zero: the code 0 is zero, whatever the scale."""
        form = kept.form
        values = zeros(numel, getattr(torch, form.dtype), device, kept.place)
        scales = torch.zeros(form.num_scales(numel), device=device) if form.scaled else None
        return Stored(spec, form, values, scales, layout)

    @staticmethod
    def of_rows(spec: StateSpec, form: Form, num_rows: int, width: int, device: torch.device) -> Stored:
        """All zero, ``[num_rows, width]``: each row is a parameter of its own, so a scaled form has scales
        ``[num_rows, ceil(width / 256)]``."""
        values = torch.zeros(num_rows, width, dtype=getattr(torch, form.dtype), device=device)
        scales = torch.zeros(num_rows, form.num_scales(width), device=device) if form.scaled else None
        return Stored(spec, form, values, scales)

    @staticmethod
    def given(spec: StateSpec, values: Tensor, scales: Tensor | None = None) -> Stored:
        """Of what comes from outside: the door at which its form is told from its dtype."""
        return Stored(spec, form_of(spec, values.dtype), values, scales)

    @staticmethod
    def among(spec: StateSpec, parts: Mapping[str, Tensor]) -> Stored | None:
        """That of ``spec`` among ``parts`` from outside, by its keys, 1-D; None if it is not there."""
        return Stored.given(spec, parts[spec.key], parts.get(spec.key + SCALE)) if spec.key in parts else None

    def part(self, elements: slice) -> Stored:
        """A view of these elements, which start with a block."""
        if self.scales is None:
            return Stored(self.spec, self.form, self.values[elements])
        blocks = slice(elements.start // BLOCK_NUMEL, num_blocks(elements.stop))
        return Stored(self.spec, self.form, self.values[elements], self.scales[blocks])

    def rows(self, rows: slice) -> Stored:
        """A view of these rows."""
        return Stored(self.spec, self.form, self.values[rows], None if self.scales is None else self.scales[rows])

    def to(self, device: torch.device) -> Stored:
        scales = None if self.scales is None else self.scales.to(device)
        return Stored(self.spec, self.form, self.values.to(device), scales)

    def tensors(self) -> dict[str, Tensor]:
        """Its tensors by their keys in a state_dict."""
        scales = {} if self.scales is None else {self.spec.key + SCALE: self.scales}
        return {self.spec.key: self.values, **scales}

    @property
    def wide(self) -> torch.dtype:
        """That of the numbers themselves."""
        return torch.float64 if self.values.dtype == torch.float64 else torch.float32

    @property
    def is_wide(self) -> bool:
        return self.values.dtype == self.wide

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def zero_(self) -> None:
        for tensor in self.tensors().values():
            tensor.zero_()
