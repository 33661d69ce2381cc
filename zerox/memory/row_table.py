"""A table: a parameter whose gradients are rows, with the state of the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from zerox import _C as C
from zerox.memory.bucket import Member
from zerox.memory.forms import decode, master_of
from zerox.memory.grad_dtype import NARROW
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.stored import Stored
from zerox.model_names import quote
from zerox.plan.plan import TablePlan
from zerox.ranks.dtensors import is_dtensor
from zerox.rules.known import KNOWN
from zerox.rules.rule import MASTER, REMAINDER, STEP, Rule

SPARSE = "sparse"  # the option of a param group that says so
MOST_ROWS = 2**31 - 2**6  # rows travel with 32-bit numbers
TABLE_DTYPES = (torch.float32, *NARROW)


class RowTable:
    """It lies in no bucket. ``state``: what its ``rule`` keeps, ``[own rows, D]``, by the keys of its torch.optim
    class; in 8 bits each row has scales of its own, ``[own rows, ceil(D / 256)]``. ``master``: the exact values of the
    same rows, if they have 16 bits and one is kept. ``step`` is int64. ``own``: if it ``is_sharded`` (ZeRO stage 3),
    the values that this rank keeps, ``[own rows, D]``, and ``home``, 1-D, is where the whole table would lie; else both
    are None, and every rank has all of it."""

    def __init__(
        self, member: Member, plan: TablePlan, owners: RowOwners, rank: int, rule: Rule, is_sharded: bool
    ) -> None:
        self.member = member
        self.owners = owners
        self.rule = rule
        self.own_rows = owners.rows_of(rank)
        shape = (self.own_rows.numel(), member.param.shape[1])
        device = member.param.device
        kept = {each.key: Stored.of_rows(rule.spec_of(each.key), each.form, *shape, device) for each in plan.kept}
        masters = [kept.pop(each.key) for each in plan.kept if each.is_master]
        self.state = kept
        self.step = torch.zeros((), dtype=torch.int64, device=CPU)
        self.own = member.param.detach()[self.own_rows] if is_sharded else None
        self.home: Tensor | None = None
        self.master = masters[0] if masters else None
        if self.master is not None and self.master.spec == MASTER:
            self.master.values.copy_(self.own_values)

    @property
    def is_at_home(self) -> bool:
        is_there = self.home is None or C.address_of(self.home) == C.address_of(self.param)
        return is_there and self.param.is_contiguous()

    @property
    def is_read_whole(self) -> bool:
        """Whether a lookup in a sharded one needs memory for all of it; else for the rows that it reads."""
        return self.param.device.type != "cpu"

    @property
    def param(self) -> Tensor:
        return self.member.param

    @property
    def width(self) -> int:
        return int(self.param.shape[1])

    @property
    def own_values(self) -> Tensor:
        """``[own rows, D]``."""
        return self.param.detach()[self.own_rows] if self.own is None else self.own

    @property
    def needed_keys(self) -> tuple[str, ...]:
        """Of what is kept, the count of its updates first. Without a master it can go on: from its values."""
        return (STEP.key, *self.state)

    @property
    def kept(self) -> dict[str, Tensor]:
        """As it is stored, a row for each own one."""
        found = [*self.state.values(), *([] if self.master is None else [self.master])]
        return {key: tensor for stored in found for key, tensor in stored.tensors().items()}

    def in_full(self) -> Iterator[tuple[str, Tensor]]:
        """By key, ``[own rows, D]`` in float32, a remainder as the master that it stands for. One at a time."""
        for key, stored in self.state.items():
            yield key, decode(stored).float()
        if self.master is not None:
            is_remainder = self.master.spec == REMAINDER
            yield MASTER.key, master_of(self.own_values, self.master.values) if is_remainder else self.master.values

    def for_flow(self, divisor: float) -> dict[str, Any]:
        """The arguments of add() of either flow of rows. ``divisor``: of the ranks' sum of gradients."""
        return {
            "param": self.param,
            "number": self.member.number,
            "of_block": self.owners.of_block,
            "states": [stored.values for stored in self.state.values()],
            "scales": [stored.scales for stored in self.state.values() if stored.scales is not None],
            "master": None if self.master is None else self.master.values,
            "step": self.step,
            "divisor": divisor,
            "own": self.own,
        }


def by_dense_rule(states: Iterable[Tensor]) -> bool:
    """Whether Adam updates rows with such states as dense parameters. For float32 it has a kernel of its own."""
    return any(state.dtype is not torch.float32 for state in states)


def is_sparse(group: Mapping[str, Any]) -> bool:
    return bool(group.get(SPARSE, False))


def sparse_params(model: nn.Module) -> list[nn.Parameter]:
    """The parameters of modules that were made with ``sparse=True``, as nn.Embedding and nn.EmbeddingBag: for a param
    group ``{"params": zerox.sparse_params(model), "sparse": True, "weight_decay": 0.0}``."""
    found: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if getattr(module, SPARSE, False) is True:
            found |= {id(param): param for param in module.parameters(recurse=False)}
    return list(found.values())


def check_tables(named: Iterable[tuple[str, Tensor, Mapping[str, Any]]]) -> None:
    """ValueError naming the first parameter that is no table, and is in a sparse group: of (name, parameter, group)."""
    for name, param, group in named:
        if is_sparse(group) and (why := _unfit(param)):
            raise ValueError(f"zerox: parameter {quote(name, param)} of a param group with sparse=True {why}")


def _unfit(param: Tensor) -> str:
    if is_dtensor(param):
        return "is a DTensor: tables are plain tensors, whole on every rank"
    if param.dtype not in TABLE_DTYPES:
        return f"is {param.dtype}: tables are one of {TABLE_DTYPES}"
    if param.dim() != 2 or not param.is_contiguous():
        return f"must be contiguous, with two dimensions, got shape {tuple(param.shape)}, strides {param.stride()}"
    if param.numel() == 0 or param.shape[0] > MOST_ROWS:
        return f"must have 1 to {MOST_ROWS} rows that are not empty, got shape {tuple(param.shape)}"
    return ""


# Options that would reach rows which no batch names, or need state that rows do not have; with the way out.
REFUSED = {
    "weight_decay": "rows that no batch names would not decay. Give the group weight_decay=0.0",
    **{
        spec.when: f"rows keep no {spec.key}. Leave {spec.when} out in this group"
        for rule in KNOWN.values()
        for spec in rule.states
        if spec.when
    },
}


def check_ranks(where: str, are_some: bool, is_on_mesh: bool, shards_tables: bool) -> None:
    """ValueError for tables of ranks that don't deal their rows among themselves. ``are_some``: they have a
    process_group of their own."""
    if are_some:
        raise ValueError(
            f"zerox: sparse=True in {where} does not go with a process_group of its own: rows are dealt among all of "
            "the optimizer's ranks. Give these tables an optimizer of their own"
        )
    if is_on_mesh and shards_tables:
        raise ValueError(
            f"zerox: sparse=True in {where} does not go with stage=3 on a 2-D mesh: parameters are sharded over one "
            "axis there, and rows over both. Use stage=2, or pass one axis"
        )


def check_group(group: Mapping[str, Any], where: str) -> None:
    """ValueError for options that do not go with rows."""
    for option, why in REFUSED.items() if is_sparse(group) else ():
        if group.get(option):
            raise ValueError(f"zerox: sparse=True in {where} does not go with {option}={group[option]}: {why}")
