"""Every param group's options as the kernels read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.rules.rule import Rule

LR = "lr"  # the one option that may be a tensor on an accelerator, and stays there


class OptionsTable:
    """A row of the rule's numbers for each param group (csrc/math).

    ``keeps_place``: the table stays at one address, for CUDA graphs.
    """

    def __init__(self, rule: Rule, device: torch.device, keeps_place: bool = False) -> None:
        self.rule = rule
        self.device = device
        self.keeps_place = keeps_place
        self.rows: list[list[float]] = []
        self.table = torch.empty(0, len(rule.columns), dtype=torch.float64, device=device)

    def refresh(self, groups: Sequence[dict[str, Any]], capturing: bool = False) -> Tensor:
        """float64 ``[groups, columns]`` on the device, from the groups' current options; never waits for the device.

        While a CUDA graph is captured (``capturing``) numbers become part of the graph; a tensor lr on the device is
        read anew by every replay.
        """
        rows = [self._row(group) for group in groups]
        if rows != self.rows:
            self._write(rows, capturing)
        for index, group in enumerate(groups):
            if _is_on_accelerator(group[LR]):
                column = [each.option for each in self.rule.columns].index(LR)
                self.table[index, column].copy_(group[LR].reshape(()), non_blocking=True)
        return self.table

    def _row(self, group: dict[str, Any]) -> list[float]:
        values = [(column.option, column.of(group)) for column in self.rule.columns]
        return [0.0 if name == LR and _is_on_accelerator(value) else float(value) for name, value in values]

    def _write(self, rows: list[list[float]], capturing: bool) -> None:
        if capturing:  # a replay would read the host's memory again, whatever lies there then
            if len(rows) != len(self.rows):
                raise RuntimeError("param groups were added: call step() or synchronize() once before capturing it")
            for index, row in enumerate(rows):
                for column, number in enumerate(row):
                    if number != self.rows[index][column]:
                        self.table[index, column].fill_(number)
        else:
            host = torch.tensor(rows, dtype=torch.float64, device="cpu", pin_memory=self.device.type == "cuda")
            if self.keeps_place and len(rows) == len(self.rows):
                self.table.copy_(host, non_blocking=True)
            else:
                self.table = host.to(self.device, non_blocking=True)
        self.rows = rows


def _is_on_accelerator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
