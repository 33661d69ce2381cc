"""A table: a parameter whose gradients are rows, with the state of the rows that this rank owns."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerox.memory.bucket import Member
from zerox.memory.forms import master_of
from zerox.memory.grad_dtype import NARROW
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.stored import Stored
from zerox.ranks.dtensors import is_dtensor
from zerox.rules.known import KNOWN
from zerox.rules.rule import MASTER, MASTERS, REMAINDER, STEP, Rule, StateSpec

SPARSE = "sparse"  # the option of a param group that says so
MOST_ROWS = 2**31 - 2**6  # rows travel with 32-bit numbers
TABLE_DTYPES = (torch.float32, *NARROW)


class RowTable:
    """It lies in no bucket. ``state``: what its ``rule`` keeps, float32 ``[own rows, D]``, by the keys of its
    torch.optim class; ``master``: the exact values of the same rows, if they have 16 bits and one is kept. Both are as
    ``specs`` say. ``step`` is int64. ``own``: if it ``is_sharded`` (ZeRO stage 3), the values that this rank keeps,
    ``[own rows, D]``, and ``home`` is where the whole table would lie; else None, and every rank has all of it."""

    def __init__(
        self, member: Member, owners: RowOwners, rank: int, rule: Rule, specs: Sequence[StateSpec], is_sharded: bool
    ) -> None:
        self.member = member
        self.owners = owners
        self.rule = rule
        self.own_rows = owners.rows_of(rank)
        shape = (self.own_rows.numel(), member.param.shape[1])
        device = member.param.device
        kept = [spec.key for spec in specs if spec not in MASTERS]
        self.state = {key: torch.zeros(shape, dtype=torch.float32, device=device) for key in kept}
        self.step = torch.zeros((), dtype=torch.int64, device=CPU)
        self.own = member.param.detach()[self.own_rows] if is_sharded else None
        self.home: int | None = None
        self.master: Stored | None = None
        for spec in (spec for spec in specs if spec in MASTERS):
            first = self.own_values.float() if spec == MASTER else torch.zeros(shape, dtype=torch.int16, device=device)
            self.master = Stored(spec, first)

    @property
    def is_at_home(self) -> bool:
        return self.home in (None, self.param.data_ptr()) and self.param.is_contiguous()

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
        """``[own rows, D]``, as it is stored."""
        return self.state | ({} if self.master is None else self.master.tensors())

    @property
    def in_full(self) -> dict[str, Tensor]:
        """The same in float32, a remainder as the master that it stands for."""
        if self.master is None or self.master.spec != REMAINDER:
            return self.kept
        return self.state | {MASTER.key: master_of(self.own_values, self.master.values)}

    def for_flow(self, divisor: float) -> dict[str, Any]:
        """The arguments of add() of either flow of rows. ``divisor``: of the ranks' sum of gradients."""
        return {
            "param": self.param,
            "of_block": self.owners.of_block,
            "states": list(self.state.values()),
            "master": None if self.master is None else self.master.values,
            "step": self.step,
            "divisor": divisor,
            "own": self.own,
        }


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


def check_tables(members: Iterable[Member], groups: Sequence[Mapping[str, Any]], shards_tables: bool) -> None:
    """ValueError naming the first parameter of a sparse group that is no table. ``shards_tables``: in stage 3, of
    several ranks."""
    for member in members:
        if is_sparse(groups[member.group]) and (why := _unfit(member.param, shards_tables)):
            raise ValueError(f"parameter {member.quoted} of a param group with sparse=True {why}")


def _unfit(param: Tensor, shards_tables: bool) -> str:
    if is_dtensor(param):
        return "is a DTensor: tables are plain tensors, whole on every rank"
    if param.device.type != "cpu" and shards_tables:
        return f"is on {param.device}: stage=3 divides tables on the CPU only so far. Use stage=2, or sparse=False"
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
            f"sparse=True in {where} does not go with a process_group of its own: rows are dealt among all of the "
            "optimizer's ranks. Give these tables an optimizer of their own"
        )
    if is_on_mesh and shards_tables:
        raise ValueError(
            f"sparse=True in {where} does not go with stage=3 on a 2-D mesh: parameters are sharded over one axis "
            "there, and rows over both. Use stage=2, or pass one axis"
        )


def check_group(group: Mapping[str, Any], where: str) -> None:
    """ValueError for options that do not go with rows."""
    for option, why in REFUSED.items() if is_sparse(group) else ():
        if group.get(option):
            raise ValueError(f"sparse=True in {where} does not go with {option}={group[option]}: {why}")
