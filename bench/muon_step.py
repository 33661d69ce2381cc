"""A step of Muon beside one of Adam and the Newton-Schulz iterations of what a rank owns, measured alone.

    python -m bench.muon_step [--ranks 2 4] [--layers 8] [--rounds 5] [--json FILE]

Each round has a step of Adam (forward, backward, update), one of Muon with the same model and batch, embeddings and
norms by Adam, and the iterations by themselves on matrices of the same shapes as this rank's. The slowest rank counts.
"ratio" is Muon's step over the sum of the two others; "balance" the slowest rank's work over the mean.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

from bench.common import TRAINING, Row, for_world_sizes, new_parser, on_ranks, parse, training_of
from bench.systems import Training
from zerox import FusedShardedAdam, FusedShardedMuon, muon_groups
from zerox.optimizer.planning import loads_of
from zerox.plan.owners import slowest_over_mean
from zerox.rules.muon import MUON, matrices_of
from zerox.update.newton_schulz import Iteration, orthogonalize


def seconds_of_slowest(job: Callable[[], object]) -> float:
    dist.barrier()
    start = time.perf_counter()
    job()
    spent = torch.tensor(time.perf_counter() - start, dtype=torch.float64)
    dist.all_reduce(spent, dist.ReduceOp.MAX)
    return float(spent)


def one_step(training: Training, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
    tokens = training.tokens(0, dist.get_rank())
    model(tokens[:, :-1], tokens[:, 1:]).backward()
    optimizer.step()
    optimizer.zero_grad()


def iterations(optimizer: FusedShardedMuon) -> Callable[[], None]:
    """Those of this rank's matrices: by themselves, on numbers that are not theirs."""
    inside = optimizer.inside
    shapes = [
        (matrix.rows.numel, matrix.columns)
        for bucket in inside.buckets
        for own in (bucket.own_segments if bucket.rule is MUON else ())
        for member in [bucket.members[own.slot]]
        for matrix in matrices_of(member.local.shape, optimizer.param_groups[member.group])
    ]
    drawn = [torch.randn(shape) for shape in shapes]
    by = Iteration(MUON.defaults["ns_coefficients"], MUON.defaults["ns_steps"], MUON.defaults["eps"])

    def run() -> None:
        for each in drawn:
            orthogonalize([each.bfloat16()], by)

    return run


def measure(training: Training, rounds: int) -> list[Row]:
    """On each rank."""
    of_adam, of_muon = training.model(), training.model()
    adam = FusedShardedAdam(of_adam.named_parameters())
    muon = FusedShardedMuon(muon_groups(of_muon, lr=1e-3, adamw_lr=1e-3, verbose=False))
    jobs: list[Callable[[], None]] = [
        partial(one_step, training, of_adam, adam),
        partial(one_step, training, of_muon, muon),
        iterations(muon),
    ]
    for first in jobs[:2]:  # which look around
        first()
    samples = [[seconds_of_slowest(job) for job in jobs] for _ in range(rounds)]
    adams, muons, alone = (statistics.median(each) for each in zip(*samples, strict=True))
    loads = loads_of(muon.inside.buckets, muon.inside.grads.subgroups)[0]
    row = {"ranks": dist.get_world_size(), "mparams": sum(p.numel() for p in of_adam.parameters()) / 1e6}
    row |= {"adam_seconds": adams, "muon_seconds": muons, "alone_seconds": alone, "ratio": muons / (adams + alone)}
    return [{**row, "balance": slowest_over_mean(loads)}]


COLUMNS = {"ranks": "", "mparams": ".1f", "adam_seconds": ".3f", "muon_seconds": ".3f", "alone_seconds": ".3f"}
COLUMNS |= {"ratio": ".3f", "balance": ".3f"}

make_parser = partial(new_parser, "bench.muon_step", __doc__, *TRAINING, "ranks", "rounds", rounds=5)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    training = training_of(args)
    for_world_sizes(args, COLUMNS, lambda size: on_ranks(measure, size, training, args.rounds))


if __name__ == "__main__":
    main()
