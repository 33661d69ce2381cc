"""Every param group's options as the kernels read them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.rules.of_groups import RULE, Rules
from zerox.rules.rule import Rule

LR = "lr"  # the one option that may be a tensor on an accelerator, and stays there


class OptionsTable:
    """A row of the rule's numbers for each param group (csrc/math); of zeros for a group of another rule.

    ``default``: the name of the rule of groups that name none; None: this one. ``keeps_place``: the table stays at one
    address, for CUDA graphs.
    """

    def __init__(self, rule: Rule, device: torch.device, keeps_place: bool = False, default: str | None = None) -> None:
        self.rule = rule
        self.default = rule.name if default is None else default
        self.device = device
        self.keeps_place = keeps_place
        self.rows: list[list[float]] = []
        self.lr_column = next((i for i, column in enumerate(rule.columns) if column.option == LR), None)
        self.table = torch.empty(0, len(rule.columns), dtype=torch.float64, device=device)

    def refresh(self, groups: Sequence[dict[str, Any]], capturing: bool = False) -> Tensor:
        """float64 ``[groups, columns]`` on the device, from the groups' current options; never waits for the device.

        While a CUDA graph is captured (``capturing``) numbers become part of the graph; a tensor lr on the device is
        read anew by every replay.
        """
        rates: dict[int, Tensor] = {}
        rows = [self._row(index, group, rates) for index, group in enumerate(groups)]
        if rows != self.rows:
            self._write(rows, capturing)
        for index, rate in rates.items():
            self.table[index, self.lr_column].copy_(rate.reshape(()), non_blocking=True)
        return self.table

    def _is_of_rule(self, group: Mapping[str, Any]) -> bool:
        return bool(group.get(RULE, self.default) == self.rule.name)

    def _row(self, index: int, group: Mapping[str, Any], rates: dict[int, Tensor]) -> list[float]:
        """Adds to ``rates`` an lr on an accelerator, whose number the host does not ask for."""
        if not self._is_of_rule(group):
            return [0.0] * len(self.rule.columns)
        row = self.rule.row(group)
        if self.lr_column is not None and _is_on_accelerator(row[self.lr_column]):
            rates[index], row[self.lr_column] = row[self.lr_column], 0.0
        return list(map(float, row))

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


class OptionsTables:
    """A table for each rule that a param group has."""

    def __init__(self, rules: Rules, device: torch.device, keeps_place: bool = False) -> None:
        self.rules = rules
        self.device = device
        self.keeps_place = keeps_place
        self.tables: dict[str, OptionsTable] = {}
        self.names: list[str] = []  # the rule of each group

    def refresh(self, groups: Sequence[dict[str, Any]], capturing: bool = False) -> dict[str, Tensor]:
        """Each table by the name of its rule, as :meth:`OptionsTable.refresh` has it.

        Raises RuntimeError if a group was given another rule: its state is of the one that it had.
        """
        names = [self.rules.of(group).name for group in groups]
        if names != self.names:
            self._take(names)
        return {name: table.refresh(groups, capturing) for name, table in self.tables.items()}

    def _take(self, names: list[str]) -> None:
        for index, (had, has) in enumerate(zip(self.names, names, strict=False)):
            if had != has:
                raise RuntimeError(
                    f"param group {index} was given the rule {has!r}, and its state is of the rule {had!r}: build "
                    "another optimizer to change the rule"
                )
        self.names = names
        for name in names:
            if name not in self.tables:
                default = self.rules.default.name
                self.tables[name] = OptionsTable(self.rules.known[name], self.device, self.keeps_place, default)


def _is_on_accelerator(value: Any) -> bool:
    return isinstance(value, Tensor) and value.device.type != "cpu"
