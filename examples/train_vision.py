"""Trains a small convolution net on scikit-learn's handwritten digits, beside DDP and torch.optim.AdamW.

    python examples/train_vision.py
    python examples/train_vision.py --steps 1000 --width 64 --picture vision.png

With batch norm, channels_last and bf16 autocast. Both systems start from the same parameters, see the same images and
take turns at each step. What zerox asks for is in `with_zerox`, `Trainer.step` and `held_out`.
"""

import argparse
import copy
import importlib.util
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import command
import torch
import torch.distributed as dist
from corpus import BadInput
from measure import bytes_of_torch, bytes_of_zerox, mean_over_ranks
from report import Result, draw, memory_table
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import CosineAnnealingLR

import zerox

LR = 3e-3
HELD_OUT = 5  # one image of so many is never trained on
LEAST_STEPS = 10


class Digits:
    """1,797 images of 8 x 8, with values from 0 to 1. They lie in scikit-learn's own files."""

    def __init__(self) -> None:
        from sklearn.datasets import load_digits

        values, labels = load_digits(return_X_y=True)
        images = torch.tensor(values, dtype=torch.float32).view(-1, 1, 8, 8) / 16
        is_held_out = torch.arange(len(images)) % HELD_OUT == 0
        self.images, self.held_out_images = images[~is_held_out], images[is_held_out]
        self.labels, self.held_out_labels = (torch.tensor(labels)[which] for which in (~is_held_out, is_held_out))

    def batch(self, numel: int, step: int, rank: int, num_ranks: int) -> tuple[Tensor, Tensor]:
        """A rank's own part of the step's batch, all of it moved by up to one pixel."""
        generator = torch.Generator().manual_seed(step)
        chosen = torch.randint(len(self.images), (num_ranks, numel), generator=generator)[rank]
        down, right = torch.randint(3, (2,), generator=generator.manual_seed(step * num_ranks + rank)).tolist()
        padded = functional.pad(self.images[chosen], (1, 1, 1, 1))
        return padded[:, :, down : down + 8, right : right + 8], self.labels[chosen]


def find_digits() -> None:
    """To import them takes seconds, which only ranks should spend."""
    if importlib.util.find_spec("sklearn") is None:
        raise BadInput("the digits are scikit-learn's, which is not installed (pip install scikit-learn)")


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.wide = nn.Conv2d(width, width, 3, padding=1, bias=False)
        self.mix = nn.Conv2d(width, width, 1, bias=False)
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for _ in range(2))

    def forward(self, hidden: Tensor) -> Tensor:
        branch = functional.relu(self.norms[0](self.wide(hidden)))
        return functional.relu(hidden + self.norms[1](self.mix(branch)))


class ConvNet(nn.Module):
    def __init__(self, width: int, blocks: int) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 3, stride=2, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(width)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(blocks)))
        self.to_logits = nn.Sequential(nn.Linear(16 * width, 4 * width), nn.ReLU(), nn.Linear(4 * width, 10))

    def forward(self, images: Tensor) -> Tensor:
        hidden = self.blocks(functional.relu(self.norm(self.stem(images))))
        return self.to_logits(hidden.flatten(1))


@dataclass
class Trainer:
    """``share_buffers()``: gives all ranks rank 0's running means and variances."""

    name: str
    module: nn.Module
    forward: nn.Module  # the module itself, or DDP around it
    optimizer: torch.optim.Optimizer
    share_buffers: Callable[[], object]
    steps: int
    losses: list[Tensor] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scheduler = CosineAnnealingLR(self.optimizer, self.steps)

    def step(self, images: Tensor, labels: Tensor) -> None:
        if dist.is_initialized():
            dist.barrier()  # no system pays for delays that the other one left between ranks
        begin = time.perf_counter()
        self.optimizer.zero_grad()
        # The forward alone: inside it autocast keeps 16-bit copies of weights, which step() does not renew.
        with torch.autocast("cpu", dtype=torch.bfloat16):
            logits = self.forward(images.to(memory_format=torch.channels_last))
        loss = functional.cross_entropy(logits.float(), labels)
        loss.backward()
        self.optimizer.step()
        self.scheduler.step()
        self.step_ms.append(1000 * (time.perf_counter() - begin))
        self.losses.append(loss.detach())


def with_zerox(module: nn.Module, steps: int) -> Trainer:
    """channels_last before the optimizer is built, which then keeps parameters and state in that order too."""
    module = module.to(memory_format=torch.channels_last)
    optimizer = zerox.FusedShardedAdam(module.named_parameters(), lr=LR)
    return Trainer("zerox", module, module, optimizer, lambda: optimizer.broadcast_buffers(module), steps)


def with_ddp(module: nn.Module, steps: int) -> Trainer:
    """DDP gives buffers out before each forward. Alone, without ranks, there is nothing for it to do."""
    module = module.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(module.parameters(), lr=LR, fused=True)
    forward = DistributedDataParallel(module, gradient_as_bucket_view=True) if dist.is_initialized() else module
    name = "DDP + AdamW" if dist.is_initialized() else "AdamW"
    return Trainer(name, module, forward, optimizer, lambda: None, steps)


def apart(module: nn.Module) -> float:
    """How far ranks are from each other in any buffer. Collective."""
    farthest = 0.0
    for buffer in module.buffers():
        most, least = buffer.double(), -buffer.double()
        if dist.is_initialized():
            dist.all_reduce(most, dist.ReduceOp.MAX)
            dist.all_reduce(least, dist.ReduceOp.MAX)
        farthest = max(farthest, float((most + least).max()))
    return farthest


@torch.no_grad()
def held_out(trainer: Trainer, digits: Digits, rank: int, num_ranks: int) -> tuple[float, float]:
    """(accuracy, mean loss) over images that the ranks share out. Collective.

    Each rank's batch norm has seen other images: without share_buffers() each would judge by means of its own.
    """
    trainer.share_buffers()
    trainer.forward.eval()
    images, labels = (of[rank::num_ranks] for of in (digits.held_out_images, digits.held_out_labels))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        logits = trainer.forward(images.to(memory_format=torch.channels_last)).float()
    right = (logits.argmax(1) == labels).sum()
    loss = functional.cross_entropy(logits, labels, reduction="sum")
    sums = torch.stack([right.double(), loss.double(), torch.tensor(float(len(labels))).double()])
    right_mean, loss_mean, count_mean = mean_over_ranks(sums).tolist()
    return right_mean / count_mean, loss_mean / count_mean


def train(options: argparse.Namespace, digits: Digits, rank: int, num_ranks: int) -> list[Trainer]:
    torch.manual_seed(0)
    module = ConvNet(options.width, options.blocks)
    trainers = [make(copy.deepcopy(module), options.steps) for make in (with_zerox, with_ddp)]
    for step in range(1, options.steps + 1):
        images, labels = digits.batch(options.batch, step, rank, num_ranks)
        # In changing order, so that neither always finds the caches as the other one left them.
        for trainer in trainers if step % 2 else trainers[::-1]:
            trainer.step(images, labels)
    return trainers


def compare(options: argparse.Namespace, rank: int, num_ranks: int) -> None:
    digits = Digits()
    trainers = train(options, digits, rank, num_ranks)
    zeroxs = trainers[0]
    numel = sum(p.numel() for p in zeroxs.module.parameters())
    title = f"{num_ranks} rank{'s' * (num_ranks > 1)}, {options.steps} steps of {options.batch} digits a rank"
    title += f", {numel:,} parameters"
    before = apart(zeroxs.module)
    memory = [bytes_of_zerox(zeroxs.optimizer.memory_bytes())]
    memory += [bytes_of_torch(trainer.module, trainer.optimizer) for trainer in trainers[1:]]
    results, accuracies = [], []
    for trainer, nbytes in zip(trainers, memory, strict=True):
        accuracy, loss = held_out(trainer, digits, rank, num_ranks)
        accuracies.append(accuracy)
        results.append(
            Result(trainer.name, mean_over_ranks(torch.stack(trainer.losses)).tolist(), loss, nbytes, trainer.step_ms)
        )
    after = apart(zeroxs.module)
    if rank > 0:
        return
    print(title)
    print(f"{'':<14}{'ms a step':>10}{'accuracy':>10}{'loss':>9}{'state bytes':>13}")
    for result, accuracy in zip(results, accuracies, strict=True):
        row = f"{result.name:<14}{result.steady_ms()[1]:>10.2f}{accuracy:>10.2%}{result.held_out_loss:>9.4f}"
        print(f"{row}{result.memory_bytes['moments']:>13,}")
    print("accuracy and loss: of held-out digits. State bytes: of rank 0, both moments")
    print(f"running means and variances: up to {before:.2g} apart on the ranks, {after:.2g} after broadcast_buffers()")
    print("\n" + memory_table({result.name: result.memory_bytes for result in results}))
    if options.picture:
        draw(options.picture, results, f"convolutions, batch norm, bf16 autocast, {title}", unit="nats per digit")


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch", type=int, default=32, help="digits a rank and step")
    parser.add_argument("--width", type=int, default=32, help="channels of each convolution")
    parser.add_argument("--blocks", type=int, default=2)
    parser.add_argument("--picture", type=Path, help="draws losses, bytes and times into this PNG")
    options = parser.parse_args()
    if min(options.batch, options.width, options.blocks) < 1:
        raise BadInput("batch, width and blocks must be at least 1")
    if options.steps < LEAST_STEPS:
        raise BadInput(f"--steps {options.steps}: at least {LEAST_STEPS} are needed, the first ones warm up")
    find_digits()
    return options


if __name__ == "__main__":
    sys.exit(command.run(parse_options, compare))
