"""Trains embeddings with sparse gradients on pairs that occur together, beside DDP and torch.optim.SparseAdam.

    python examples/train_recommender.py [--ranks 2] [--data PAIRS] [--picture FILE]

Without --data the pairs are words that follow each other in the sources of Python's standard library, which every
Python ships. A file of pairs has two words a line, separated by white space: user and item, say. For each pair the
model learns to score what came along above a random other (BPR). Both systems see the same batches, and the table says
how far apart they end: 0 is bit for bit.
"""

from __future__ import annotations

import argparse
import itertools
import re
import statistics
import sys
import sysconfig
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import command
import torch
import torch.distributed as dist
from corpus import BadInput
from ranks import am_rank
from torch import Tensor, nn
from torch.nn.functional import logsigmoid
from torch.nn.parallel import DistributedDataParallel

import zerox

HELD_OUT = 20  # one pair of so many is never trained on
LOOKS = 10  # at held-out pairs, over the training
WARM_UP = 3  # steps that are not timed


def words_of_library(most: int) -> Iterator[tuple[str, str]]:
    """Words that follow each other, from files in the order of their names."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("**/*.py")):
        if "site-packages" in path.parts or "test" in path.parts:
            continue
        words = re.findall(r"[A-Za-z_]{2,}", path.read_text(errors="replace"))
        yield from itertools.pairwise(words)
        most -= len(words)
        if most <= 0:
            return


def pairs_of_file(path: Path) -> Iterator[tuple[str, str]]:
    for number, line in enumerate(path.read_text().splitlines(), 1):
        words = line.split()
        if len(words) != 2:
            raise ValueError(f"{path}, line {number}: two words are needed, got {len(words)}")
        yield words[0], words[1]


def numbered(words: list[str]) -> tuple[Tensor, int]:
    """Those that come often have small numbers, as in most vocabularies. And how many there are."""
    order = {word: number for number, (word, _) in enumerate(Counter(words).most_common())}
    return torch.tensor([order[word] for word in words]), len(order)


@dataclass
class Data:
    left: Tensor
    right: Tensor
    num_left: int
    num_right: int

    @staticmethod
    def of(pairs: Iterator[tuple[str, str]]) -> Data:
        found = list(pairs)
        if len(found) < 2 * HELD_OUT:
            raise ValueError(f"at least {2 * HELD_OUT} pairs are needed, got {len(found)}")
        (left, num_left), (right, num_right) = (numbered([pair[side] for pair in found]) for side in (0, 1))
        return Data(left, right, num_left, num_right)

    def batch(self, size: int, seed: int) -> tuple[Tensor, Tensor, Tensor]:
        generator = torch.Generator().manual_seed(seed)
        place = torch.randint(0, len(self.left), (size,), generator=generator)
        place[place % HELD_OUT == 0] = 1
        return self.left[place], self.right[place], torch.randint(0, self.num_right, (size,), generator=generator)

    def held_out(self) -> tuple[Tensor, Tensor, Tensor]:
        left, right = self.left[::HELD_OUT], self.right[::HELD_OUT]
        return left, right, torch.randint(0, self.num_right, right.shape, generator=torch.Generator().manual_seed(0))


class Model(nn.Module):
    def __init__(self, data: Data, width: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.left = nn.Embedding(data.num_left, width, sparse=True)
        self.right = nn.Embedding(data.num_right, width, sparse=True)
        for table in (self.left, self.right):
            nn.init.normal_(table.weight, std=0.1)

    def forward(self, left: Tensor, right: Tensor, other: Tensor) -> Tensor:
        return (self.left(left) * (self.right(right) - self.right(other))).sum(1)


@dataclass
class Run:
    name: str
    model: Model
    step_ms: list[float] = field(default_factory=list)
    right: list[tuple[int, float]] = field(default_factory=list)  # step, held-out pairs that are scored right
    nbytes: float | None = None


def train(name: str, data: Data, args: argparse.Namespace, rank: int) -> Run:
    model = Model(data, args.width)
    run = Run(name, model)
    forward: nn.Module = model
    if name == "zerox":
        tables = {"params": zerox.sparse_params(model), "sparse": True, "weight_decay": 0.0}
        optimizer: torch.optim.Optimizer = zerox.FusedShardedAdam([tables], lr=args.lr)
    else:
        forward = DistributedDataParallel(model) if dist.is_initialized() else model
        optimizer = torch.optim.SparseAdam(list(model.parameters()), lr=args.lr)
    looks = {round(look * args.steps / LOOKS) for look in range(1, LOOKS + 1)}
    for step in range(1, args.steps + 1):
        batch = data.batch(args.batch, 1000 * step + rank)
        if dist.is_initialized():
            dist.barrier()
        begin = time.perf_counter()
        loss = -logsigmoid(forward(*batch)).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        run.step_ms.append(1000 * (time.perf_counter() - begin))
        if step in looks:
            with torch.no_grad():
                run.right.append((step, float((model(*data.held_out()) > 0).float().mean())))
    if isinstance(optimizer, zerox.FusedShardedAdam):
        run.nbytes = optimizer.inside.calls.row_grads.messages.traffic[1] / args.steps
    return run


def floor_ms(data: Data, args: argparse.Namespace, rank: int) -> float:
    """Of forward and backward, which no optimizer can save."""
    model, found = Model(data, args.width), []
    for step in range(1, args.steps + 1):
        batch = data.batch(args.batch, 1000 * step + rank)
        begin = time.perf_counter()
        (-logsigmoid(model(*batch)).mean()).backward()
        found.append(1000 * (time.perf_counter() - begin))
        model.zero_grad()
    return statistics.median(found[WARM_UP:])


def report(runs: list[Run], data: Data, args: argparse.Namespace, size: int, floor: float) -> None:
    dense = 2 * 4 * args.width * (data.num_left + data.num_right) * (size - 1) / size
    print(f"{size} ranks, {len(data.left):,} pairs of {data.num_left:,} x {data.num_right:,} words, width {args.width}")
    print(f"{'':18}{'ms a step':>10}{'less floor':>12}{'held-out pairs right':>22}{'bytes a step, rank':>20}")
    for run in runs:
        sent = "" if run.nbytes is None else f"{run.nbytes:,.0f}"
        ms = statistics.median(run.step_ms[WARM_UP:])
        print(f"{run.name:18}{ms:10.2f}{ms - floor:12.2f}{run.right[-1][1]:22.3f}{sent:>20}")
    print(f"{'dense gradients':18}{'':44}{dense:20,.0f}")
    print(f"the floor is forward and backward alone: {floor:.2f} ms")
    ours, theirs = runs
    apart = max(
        float((p - q).detach().abs().max())
        for p, q in zip(ours.model.parameters(), theirs.model.parameters(), strict=True)
    )
    print(f"farthest parameter apart: {apart:g}")


def draw(runs: list[Run], path: Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(6, 4))
    for run, style in zip(runs, ("-", "--"), strict=True):
        ms = statistics.median(run.step_ms[WARM_UP:])
        axes.plot([ms * step / 1000 for step, _ in run.right], [right for _, right in run.right], style, label=run.name)
    axes.set_xlabel("seconds of training")
    axes.set_ylabel("held-out pairs scored right")
    axes.legend()
    figure.savefig(path, bbox_inches="tight")


def read(args: argparse.Namespace) -> Data:
    try:
        return Data.of(pairs_of_file(args.data) if args.data else words_of_library(args.tokens))
    except OSError as error:
        raise BadInput(f"cannot read {error.filename or args.data}: {error.strerror or error}") from error
    except ValueError as error:
        raise BadInput(str(error)) from error


def compare(args: argparse.Namespace, rank: int, size: int) -> None:
    data = read(args)
    runs = [train(name, data, args, rank) for name in ("zerox", "DDP + SparseAdam")]
    floor = floor_ms(data, args, rank)
    if rank == 0:
        report(runs, data, args, size, floor)
        if args.picture is not None:
            draw(runs, args.picture)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--data", type=Path, help="a file of pairs, two words a line")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="how much of the standard library is read")
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--batch", type=int, default=1024, help="pairs of each rank")
    parser.add_argument("--width", type=int, default=32)
    parser.add_argument("--lr", type=float, default=0.01)
    parser.add_argument("--picture", type=Path)
    options = parser.parse_args()
    if options.steps <= WARM_UP + LOOKS:
        raise BadInput(f"--steps must be more than {WARM_UP + LOOKS}")
    if options.data and options.ranks > 1 and not am_rank():
        read(options)  # what is wrong with it is said once, before there are ranks
    return options


if __name__ == "__main__":
    sys.exit(command.run(parse_options, compare))
