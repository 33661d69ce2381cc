"""Gradients that are rows of a table: from p.grad to the ranks that own them, and updated rows back to all.

Note [Rows travel by themselves]
A module with sparse=True names the rows of its table that a batch touches; the others have no gradient, not one of
zero. So a table is in no bucket, and no hook watches it: p.grad keeps this rank's rows, over as many backwards as there
are, inside no_sync() and outside. At a sync point to read the mean (step(), a norm, a scaler), each adds up its rows
of the same number, and sends numbers and values to the rows' owners (zerox/memory/row_owners.py), which add them in
rank order and divide once: csrc/rows/row_flow.h. So the mean has the bits that one process gets if it adds up the
ranks' gradients in order. All of that is in float32, and of a 16-bit table too: each rank's rows are widened first.

What is exchanged stays valid while no rank's p.grad changes: a clip and the step() after it exchange once. Each rank
says where they synchronize whether its own has changed; if one has, all send what they have again.

The owner updates its rows lazily, by the rule of their param group: untouched rows and their states stay, and a row
whose gradients cancel counts as touched. Adam's is that of torch.optim.SparseAdam. Then updated rows go to all ranks,
in whose tables they are written. In stage 3 they go to nobody: the owners' rows are all that lasts, and lookups fetch
them (Note [Rows are fetched by lookups] in csrc/residency/table_rows.h).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox import ops
from zerox._C import RowChange
from zerox.grads.grad_scale import Divisor, GradScale
from zerox.grads.norm import shard_limbs
from zerox.memory.bucket import Member
from zerox.memory.row_owners import CPU, RowOwners
from zerox.memory.row_table import RowTable, check_group
from zerox.plan.plan import TablePlan
from zerox.ranks.calls import named
from zerox.ranks.group import Ranks
from zerox.ranks.model_axes import ModelAxes
from zerox.rows.device_messages import DeviceMessages
from zerox.rows.device_rows import DeviceRowFlow
from zerox.rows.device_table import ReducedRows
from zerox.rows.row_gradient import TableGrad
from zerox.rules.of_groups import Rules

Groups = Sequence[Mapping[str, Any]]
Reduced = C.ReducedRows | ReducedRows
# Numbers, of all ranks together, that they tell each other beside all else where they synchronize.
MOST_PIGGYBACKED = 8192


def flow_of(ranks: Ranks, reads: bool) -> tuple[C.PeerMessages | DeviceMessages, C.RowFlow | DeviceRowFlow]:
    """Where the parameters are."""
    if ranks.device.type != "cpu":
        on_device = DeviceMessages(ranks)
        return on_device, DeviceRowFlow(on_device)
    messages = C.PeerMessages(ranks.control, ranks.failure_detector)
    return messages, C.RowFlow(messages, ranks.neighbours.processes if reads else ())


class Rows:
    """The tables of an optimizer. ``shows_mean``: p.grad becomes the mean over the ranks, as in stage 1.
    ``shards_tables``: each rank keeps the rows that it owns, as in stage 3.

    ``reads``: every rank can read every other's memory (exchange="messages" says that none does); then ranks tell
    each other where their rows lie, and don't send them.
    """

    def __init__(self, ranks: Ranks, model: ModelAxes, shows_mean: bool, shards_tables: bool) -> None:
        self.ranks = ranks
        self.model = model
        self.shows_mean = shows_mean
        self.shards_tables = shards_tables
        self.each: list[TableGrad] = []
        processes = ranks.neighbours.processes
        self.reads = bool(processes) and all(processes)
        self.messages, self.flow = flow_of(ranks, self.reads)

    @property
    def tables(self) -> list[RowTable]:
        return [each.table for each in self.each]

    @property
    def divisors(self) -> list[Divisor]:
        return [each.divisor for each in self.each]

    def rooms(self) -> list[tuple[str, int]]:
        """Name and bytes of the tables that are read whole."""
        return [(f"table '{each.member.name}'", each.param.nbytes) for each in self.tables if each.is_read_whole]

    @property
    def is_reduced(self) -> bool:
        return any(self.flow.reduced)

    def take(
        self, planned: Sequence[tuple[Member, TablePlan]], groups: Groups, rules: Rules, divisors: Sequence[Divisor]
    ) -> None:
        """Makes tables of these, with rank 0's values. Collective."""
        for member, plan in planned:
            param = member.param
            if self.shards_tables and C.has_own_storage(param):  # it was frozen, in a bucket that is sharded
                param.data = param.detach().clone()
            self.ranks.broadcast_values(param, f"parameter '{member.name}'")
            self.model.broadcast_values(param, self.model.replicated_over(param))
            owners = RowOwners(plan.num_rows, self.ranks.size, member.number)
            rule = rules.of(groups[member.group])
            table = RowTable(member, plan, owners, self.ranks.rank, rule, self.shards_tables)
            divisor = divisors[member.group]
            self.flow.add(**table.for_flow(self.ranks.size if divisor is None else divisor))
            self.each.append(TableGrad(table, divisor))

    def tensors(self) -> Iterator[Tensor]:
        """What is kept of gradients: this rank's rows, and the mean of those that it owns."""
        for each, reduced in zip(self.each, self.flow.reduced, strict=True):
            yield from each.tensors()
            if reduced is not None:
                yield from (reduced.rows, reduced.places, reduced.values)

    def elsewhere(self) -> str:
        """Why the values of a table that is sharded are lost; empty if they are not."""
        for table in self.tables:
            if not table.is_at_home:
                return (
                    f"parameter {table.member.quoted}, in a param group with sparse=True, was given other memory (by "
                    ".data =, .to() or share_memory_()), and with stage=3 ranks keep its rows: write into it in place"
                )
        return ""

    # ---- the mean

    def refusal(self) -> str:
        """Packs this rank's rows, if they have changed. Why they can't be exchanged, naming the parameter; empty if
        they can."""
        return "" if self.flow.pack() else next(filter(None, (each.refusal() for each in self.each)))

    @property
    def piggyback(self) -> list[int]:
        """What other ranks must know before exchange(); nothing if it is too much for where they synchronize anyway."""
        header = self.flow.header()
        return header if len(header) * self.ranks.size <= MOST_PIGGYBACKED else []

    @named("the exchange of rows", per_batch=True)
    def exchange(self, piggybacks: Sequence[int], goes_on: bool) -> RowChange:
        """The owners reduce the mean, unless it is there. Returns whether gradients were unchanged, added to, or
        replaced. Collective.

        ``piggybacks``: those of all ranks, or nothing. ``goes_on``: update() follows.
        """
        change = self.flow.exchange(piggybacks, goes_on)
        if self.shows_mean and change != RowChange.UNCHANGED:
            for each, reduced in zip(self.each, self.flow.reduced, strict=True):
                if reduced is not None:
                    each.show(self._of_all_ranks(reduced))
            self.flow.note_seen()
        return change

    def _of_all_ranks(self, own: Reduced) -> list[tuple[Tensor, Tensor]]:
        """By rank, what has been reduced there of one table. Collective."""
        count, width = own.values.shape
        counts = [int(each) for each in self.messages.to_all(torch.tensor([count], dtype=torch.int64, device=CPU))]
        words = torch.cat([own.rows.int(), own.values.view(-1).view(torch.int32)])
        received = self.messages.swap([words] * self.ranks.size, [n * (1 + width) for n in counts])
        return [
            (of[:n].long(), of[n:].view(torch.float32).view(n, width)) for of, n in zip(received, counts, strict=True)
        ]

    def limbs(self, p: float) -> Iterator[tuple[Divisor, Tensor]]:
        """The exact sums for norms, of the rows that were reduced here and that this rank counts. One segment a row, so
        that no number of ranks shows."""
        for each, reduced in zip(self.each, self.flow.reduced, strict=True):
            counts = self.model.counts(self.model.replicated_over(each.table.param))
            if reduced is not None and reduced.rows.numel() > 0 and counts:
                count, width = reduced.values.shape
                device = reduced.values.device
                segments = torch.zeros(count, ops.SEGMENT_COLUMNS, dtype=torch.int64, device=device)
                segments[:, 0] = torch.arange(count, device=device) * width
                segments[:, 1] = segments[:, 0] + width
                yield each.divisor, shard_limbs(reduced.values.view(-1), segments, p)

    def full_grad(self, table: RowTable, scale: GradScale) -> Tensor | None:
        """One table's whole mean, as step() will use it; None if no rank has a gradient. Collective."""
        index = self.tables.index(table)
        reduced, divisor = self.flow.reduced[index], self.each[index].divisor
        if reduced is None:
            return None
        whole = torch.zeros(table.param.shape, device=table.param.device)
        for rows, values in self._of_all_ranks(reduced):
            whole[rows] = values
        if (factor := scale.values.get(divisor)) is not None:
            whole *= float(factor)
        limit = scale.requested.limit
        return whole if limit is None else whole.clamp_(-limit, limit)

    def multiply(self, factors: Mapping[Divisor, Tensor]) -> None:
        """The mean, at once, where p.grad shows it."""
        for each, reduced in zip(self.each, self.flow.reduced, strict=True):
            if reduced is None or each.divisor not in factors:
                continue
            factor = float(factors[each.divisor])
            reduced.values.mul_(factor)
            if each.table.param.grad is not None:
                each.table.param.grad.mul_(factor)
        self.flow.note_seen()

    # ---- step()

    @named("step()", per_batch=True)
    def update(self, groups: Groups, scale: GradScale) -> list[tuple[RowTable, Tensor]]:
        """Updates the rows that this rank owns, and writes those that others have updated. Returns the tables that have
        changed, each with the places of the own rows that have. Collective."""
        for table in self.tables:
            check_group(groups[table.member.group], f"param group {table.member.group}")
        if scale.finite is not None and not bool(scale.finite):
            self.flow.close()
            return []
        self.flow.update([each.rule(groups[each.table.member.group], scale) for each in self.each])
        reduced = zip(self.tables, self.flow.reduced, strict=True)
        return [(table, of_table.places) for table, of_table in reduced if of_table is not None]
