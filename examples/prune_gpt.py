"""Train the small GPT dense and under masks, one after the other: a table of held-out losses, and a picture.

    python examples/prune_gpt.py
    python examples/prune_gpt.py --model small --steps 2000 --picture prune.png

zerox.Sparsity masks the matrices of all blocks: 50% and 80% of them by magnitude, more and more while training goes on;
2 of each 4 neighbours, and 80% by RigL, both from the first step. The last row is the 80% by magnitude again, by hand
with DDP and torch's AdamW. What zerox asks for is in `train`; docs/sparse-training.md explains it.
"""

import argparse
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import command
import torch
import torch.distributed as dist
from corpus import BadInput, Corpus, RandomWindows, even_windows, load_corpus
from gpt_model import GPT, SHAPES
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel

import zerox

CLIP = 1.0
LR = 3e-3
HELD_OUT_WINDOWS = 1024
LEAST_STEPS = 10  # of which the schedules have parts
MASKED = "blocks.*.weight"  # of two dimensions: embeddings, norms and logits stay dense
MOST = 0.8
BY_HAND = "80%, DDP by hand"

Masks = Callable[[zerox.FusedShardedAdam, int], zerox.Sparsity]


@dataclass(frozen=True)
class Outcome:
    """Parts from 0 to 1, nats a byte with their standard error over the windows, bytes of rank 0."""

    sparsity: float
    loss: float
    error: float
    state_bytes: int
    seconds: float


def gradually(steps: int):
    return zerox.cubic(start=steps // 10, end=steps * 3 // 4, every=max(1, steps // 40))


def by_magnitude(part: float) -> Masks:
    return lambda optimizer, steps: zerox.Sparsity(optimizer, {MASKED: part}, schedule=gradually(steps))


def two_of_four(optimizer: zerox.FusedShardedAdam, steps: int) -> zerox.Sparsity:
    return zerox.Sparsity(optimizer, {MASKED: 0.5}, pattern=(2, 4))


def by_rigl(optimizer: zerox.FusedShardedAdam, steps: int) -> zerox.Sparsity:
    schedule = zerox.rigl(every=max(1, steps // 40), until=steps * 3 // 4)
    return zerox.Sparsity(optimizer, {MASKED: MOST}, schedule=schedule)


RUNS: dict[str, Masks | None] = {
    "dense": None,
    "50% by magnitude": by_magnitude(0.5),
    "80% by magnitude": by_magnitude(MOST),
    "2:4": two_of_four,
    "80% by RigL": by_rigl,
}


class Training:
    """The model before its first step, which is the same for all, and what it reads."""

    def __init__(self, options: argparse.Namespace, corpus: Corpus, rank: int, num_ranks: int):
        shape = SHAPES[options.model]
        torch.manual_seed(0)
        self.model = GPT(shape)
        self.windows = RandomWindows(corpus.train, (options.windows, shape.context), 0, rank, num_ranks)
        self.held_out = even_windows(corpus.held_out, shape.context, HELD_OUT_WINDOWS)
        self.start = time.perf_counter()

    def backward(self, forward: nn.Module) -> None:
        batch = self.windows.draw()
        forward(batch[:, :-1], batch[:, 1:]).backward()

    @torch.no_grad()
    def outcome(self, sparsity: float, state_bytes: int) -> Outcome:
        seconds = time.perf_counter() - self.start
        losses = torch.cat([self.loss_of_each(windows) for windows in self.held_out.split(64)])
        error = float(losses.std()) / len(losses) ** 0.5
        return Outcome(sparsity, float(losses.double().mean()), error, state_bytes, seconds)

    def loss_of_each(self, windows: Tensor) -> Tensor:
        logits = self.model(windows[:, :-1])
        return functional.cross_entropy(logits.transpose(1, 2), windows[:, 1:], reduction="none").mean(1)


def train(masks: Masks | None, training: Training, steps: int) -> Outcome:
    optimizer = zerox.FusedShardedAdam(training.model.named_parameters(), lr=LR)
    sparsity = masks(optimizer, steps) if masks else None
    for _ in range(steps):
        training.backward(training.model)
        optimizer.clip_grad_norm_(CLIP)  # the norm of the elements that are kept
        optimizer.step()
        if sparsity:
            sparsity.step()
        optimizer.zero_grad()
    return training.outcome(reached(training.model, sparsity), optimizer.memory_bytes().moments)


def reached(model: GPT, sparsity: zerox.Sparsity | None) -> float:
    """Of all elements that can be masked."""
    if sparsity is None:
        return 0.0
    numel = {name: param.numel() for name, param in model.named_parameters()}
    parts = sparsity.sparsity()
    return sum(part * numel[name] for name, part in parts.items()) / sum(numel[name] for name in parts)


class ByHand:
    """torch's AdamW, with masks as a user would write them."""

    def __init__(self, model: GPT, steps: int):
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)
        self.params = list(model.parameters())
        self.schedule = gradually(steps)
        self.kept = {p: torch.ones_like(p) for p in model.blocks.parameters() if p.dim() > 1}

    @torch.no_grad()
    def step(self, count: int) -> None:
        for param, kept in self.kept.items():
            param.grad *= kept
        nn.utils.clip_grad_norm_(self.params, CLIP)
        self.optimizer.step()
        if self.schedule.changes(count):
            for param in self.kept:
                self.kept[param] = largest(param, MOST * self.schedule.part(count))
        for param, kept in self.kept.items():
            moments = self.optimizer.state[param]
            for tensor in (param, moments["exp_avg"], moments["exp_avg_sq"]):
                tensor *= kept
        self.optimizer.zero_grad()

    def sparsity(self) -> float:
        return 1 - float(sum(kept.sum() for kept in self.kept.values())) / sum(kept.numel() for kept in self.kept)

    def state_bytes(self) -> int:
        """Of both moments, and of masks that are as large as parameters."""
        return sum(2 * p.nbytes for p in self.params) + sum(kept.nbytes for kept in self.kept.values())


def largest(param: Tensor, part: float) -> Tensor:
    """1 where an element is not one of the smallest, of which there are ``part``."""
    to_mask = round(part * param.numel())
    if to_mask == 0:
        return torch.ones_like(param)
    return (param.abs() > param.abs().flatten().kthvalue(to_mask).values).to(param.dtype)


def train_by_hand(training: Training, steps: int) -> Outcome:
    twin = ByHand(training.model, steps)
    replicated = DistributedDataParallel(training.model) if dist.is_initialized() else training.model
    for count in range(1, steps + 1):
        training.backward(replicated)
        twin.step(count)
    return training.outcome(twin.sparsity(), twin.state_bytes())


def compare(options: argparse.Namespace, rank: int, num_ranks: int) -> None:
    corpus = load_corpus(None, SHAPES[options.model].context)
    found = {}
    if rank == 0:
        ranks = "1 rank" if num_ranks == 1 else f"{num_ranks} ranks"
        print(f"{ranks}, {options.steps} steps, model {options.model}: {SHAPES[options.model]}")
        print(f"{'':<20}{'sparsity':>9}{'held-out loss':>15}{'+-':>8}{'state bytes':>13}{'seconds':>9}", flush=True)
    for name, masks in RUNS.items():
        found[name] = train(masks, Training(options, corpus, rank, num_ranks), options.steps)
        report(name, found[name], rank)
    found[BY_HAND] = train_by_hand(Training(options, corpus, rank, num_ranks), options.steps)
    report(BY_HAND, found[BY_HAND], rank)
    if rank > 0:
        return
    apart = abs(found[BY_HAND].loss - found["80% by magnitude"].loss)
    print("sparsity: of the blocks' matrices. Loss: nats a byte, and its standard error over windows of text")
    print("state bytes: of rank 0, both moments and the masks: a bit an element, by hand a float")
    print(f"80% by magnitude and by hand: {apart:.1e} nats a byte apart")
    if options.picture:
        draw(options.picture, found)


def report(name: str, found: Outcome, rank: int) -> None:
    if rank == 0:
        row = f"{name:<20}{found.sparsity:>9.1%}{found.loss:>15.4f}{found.error:>8.4f}"
        print(f"{row}{found.state_bytes:>13,}{found.seconds:>9.1f}", flush=True)


def draw(path: Path, found: dict[str, Outcome]) -> None:
    """One PNG, 700 x 420: the held-out loss of each over the sparsity that it reached."""
    import matplotlib

    matplotlib.use("Agg")  # files only: the machine need not have a screen
    import matplotlib.pyplot as plt

    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, axes = plt.subplots(figsize=(7, 4.2), dpi=100, layout="constrained")
        line = [found[name] for name in ("dense", "50% by magnitude", "80% by magnitude")]
        sparsities, losses = [100 * each.sparsity for each in line], [each.loss for each in line]
        axes.plot(sparsities, losses, "o-", color="#2171b5", label="dense, and by magnitude")
        marks = {"2:4": ("s", "#d94801"), "80% by RigL": ("^", "#238b45"), BY_HAND: ("o", "#252525")}
        for name, (mark, color) in marks.items():
            size = 8 if "RigL" in name else 13  # around the point that it is close to, which has to be seen too
            place = 100 * found[name].sparsity, found[name].loss
            axes.plot(*place, mark, color=color, markersize=size, markerfacecolor="none", label=name)
        axes.set(xlabel="masked, % of the blocks' matrices", ylabel="held-out loss, nats a byte", xlim=(-3, 90))
        axes.grid(axis="y", alpha=0.3)
        axes.legend(frameon=False, loc="upper left")
        figure.savefig(path)
        plt.close(figure)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--model", choices=list(SHAPES), default="tiny")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--windows", type=int, default=8, help="of text in a step of a rank")
    parser.add_argument("--picture", type=Path, help="draws losses over sparsity into this PNG")
    options = parser.parse_args()
    if options.windows < 1:
        raise BadInput("windows must be at least 1")
    if options.steps < LEAST_STEPS:
        raise BadInput(f"--steps {options.steps}: masks come in over at least {LEAST_STEPS}")
    return options


if __name__ == "__main__":
    sys.exit(command.run(parse_options, compare))
