"""What to say of parameters that lie whole on one rank: once, and where it may be no one's wish."""

from __future__ import annotations

from collections.abc import Iterator

from zerox.optimizer.core import Core
from zerox.optimizer.planning import loads_of
from zerox.plan.owners import slowest_over_mean
from zerox.ranks.calls import warn_caller
from zerox.rules.muon import MuonRule, matrices_of

TALL = 8  # times as many rows as columns: few hidden layers are, and all embeddings and heads
UNEQUAL = 1.25  # the slowest rank's work beside the mean
_said: set[str] = set()


def say_of_owned(core: Core) -> None:
    """On rank 0."""
    if core.ranks.rank == 0:
        for kind, said in (*_of_tall(core), *_of_unequal(core)):
            if kind not in _said:
                _said.add(kind)
                warn_caller(said)


def _of_tall(core: Core) -> Iterator[tuple[str, str]]:
    groups = core.groups.param_groups
    for bucket in core.buckets:
        for member in bucket.members if isinstance(bucket.rule, MuonRule) else ():
            for matrix in matrices_of(member.local.shape, groups[member.group])[:1]:  # a stack may be empty
                if matrix.rows.numel > TALL * matrix.columns:
                    yield (
                        "tall",
                        f"zerox: {member.quoted} has {matrix.rows.numel} rows and {matrix.columns} columns, and Muon "
                        "is for the matrices of hidden layers. Embeddings and heads do better with AdamW, in a group "
                        "of their own: zerox.muon_groups() makes such groups",
                    )


def _of_unequal(core: Core) -> Iterator[tuple[str, str]]:
    for loads in loads_of(core.buckets, core.grads.subgroups):
        if (found := slowest_over_mean(loads)) > UNEQUAL:
            yield (
                "unequal",
                f"zerox: of {len(loads)} ranks one has {found:.2f} times the mean of the work on matrices that lie "
                "whole on a rank, and all wait for it in step(). They are too few for so many ranks, or one is too "
                "large",
            )
