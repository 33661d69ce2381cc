"""Train a small byte-level GPT with zerox, alone or under torchrun with any number of ranks.

    python examples/train_gpt.py
    python examples/train_gpt.py --ranks 2
    python examples/train_gpt.py --ranks 2 --compare --out out
    torchrun --local-addr 127.0.0.1 --nproc-per-node 2 --max-restarts 3 examples/train_gpt.py --save-dir out --resume

All that zerox asks of a training script is in `with_zerox` and `train_step`. `--optimizer` takes adamw, sgd, lion,
muon, or a class of torch.optim. `--meta` builds the model on the meta device: with `--stage 3` no rank ever has all of
it. `--uneven` gives ranks unequal numbers of batches, of unequal sizes. `--compare` trains a second model with
DistributedDataParallel and torch's optimizer, from the same start on the same text, and puts both in one picture.
`--save-dir` leaves checkpoints, from which `--resume` goes on: with any number of ranks, and by itself where torchrun
starts the ranks anew because one of them died.
"""

import argparse
import copy
import json
import math
import os
import platform
import shlex
import signal
import sys
import time
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field
from importlib.metadata import PackageNotFoundError, version

import torch
import torch.distributed as dist
from checkpoints import Checkpoints
from corpus import BadInput, Corpus, RandomWindows, load_corpus
from fits import check_fits
from gpt_model import GPT, sample_text
from log import Log
from measure import bytes_of_torch, bytes_of_zerox, distances_from_unfused, held_out_loss, mean_over_ranks
from optimizers import FUSED, estimate_options, params_of, sharded, torchs
from options import DTYPES, parse_options
from ranks import BAD_INPUT, am_rank, process_group, start
from report import Result, memory_table, write_comparison
from torch.nn.parallel import DistributedDataParallel
from torch.optim.lr_scheduler import LambdaLR
from tqdm import tqdm
from uneven import mean_losses, num_tokens, some_of, steps_of

from zerox import estimate

DISTANCE_STEP = 20  # where --compare measures how far the parameters of two systems are apart
SHOW_EVERY = 10  # steps between two looks at the loss: each look waits for the device


@dataclass
class Trainer:
    """A model and all that trains it. zerox and DDP differ in these fields, and in nothing else."""

    name: str
    module: GPT
    forward: torch.nn.Module  # the module itself, or DDP around it
    optimizer: torch.optim.Optimizer
    clip_grad_norm: Callable[[float], torch.Tensor]
    no_sync: Callable[[], AbstractContextManager]
    lr_factor: Callable[[int], float]
    losses: list[torch.Tensor] = field(default_factory=list)
    step_ms: list[float] = field(default_factory=list)
    past_losses: list[float] = field(default_factory=list)  # of the steps before this run, averaged over the ranks
    weighs_tokens: bool = False  # whether the mean is over tokens; `losses` are sums then
    tokens: list[int] = field(default_factory=list)

    def mean_losses(self, steps: int) -> list[float]:
        """Of all steps from the first one on, averaged over the ranks. Collective."""
        if self.weighs_tokens:
            return mean_losses(self.losses, self.tokens, steps)
        return [*self.past_losses, *(mean_over_ranks(torch.stack(self.losses)).tolist() if self.losses else [])]

    def __post_init__(self) -> None:
        self.scheduler = LambdaLR(self.optimizer, self.lr_factor)


def with_zerox(module: GPT, options: argparse.Namespace) -> Trainer:
    """No wrapper around the model: the optimizer shards its state, and averages gradients while backward runs."""
    optimizer = sharded(module, options)
    return Trainer(
        name="zerox",
        module=module,
        forward=module,
        optimizer=optimizer,
        clip_grad_norm=optimizer.clip_grad_norm_,
        no_sync=optimizer.no_sync,
        lr_factor=warm_up_then_cosine(options.steps),
        weighs_tokens=options.uneven,
    )


def with_ddp(module: GPT, options: argparse.Namespace, fused: bool) -> Trainer:
    """The same training with torch's own means; alone, without ranks, there is nothing for DDP to do."""
    name, optimizer = torchs(module, options, fused)
    forward = DistributedDataParallel(module, gradient_as_bucket_view=True) if dist.is_initialized() else module
    return Trainer(
        name=("DDP + " if dist.is_initialized() else "") + name,
        module=module,
        forward=forward,
        optimizer=optimizer,
        clip_grad_norm=lambda max_norm: torch.nn.utils.clip_grad_norm_(module.parameters(), max_norm),
        no_sync=forward.no_sync if dist.is_initialized() else nullcontext,
        lr_factor=warm_up_then_cosine(options.steps),
    )


def train_step(trainer: Trainer, micro_batches: list[torch.Tensor], max_norm: float) -> torch.Tensor:
    """One step on the mean over all micro-batches and ranks; returns the norm of the whole gradient.

    Where micro-batches are of unequal size, losses are summed, and the mean is over the tokens of all ranks.
    """
    optimizer = trainer.optimizer
    optimizer.zero_grad()
    loss_sum = 0.0
    for place, windows in enumerate(micro_batches, start=1):
        # Gradients add up on each rank; only the last backward sends them.
        with nullcontext() if place == len(micro_batches) else trainer.no_sync():
            mean = trainer.forward(windows[:, :-1], windows[:, 1:])
            loss = mean * num_tokens(windows) if trainer.weighs_tokens else mean / len(micro_batches)
            loss.backward()
        loss_sum += loss.detach()
    if trainer.weighs_tokens:
        trainer.tokens.append(sum(map(num_tokens, micro_batches)))
        optimizer.mean_over(trainer.tokens[-1])
    norm = trainer.clip_grad_norm(max_norm)
    optimizer.step()
    trainer.scheduler.step()
    trainer.losses.append(loss_sum)
    return norm


def warm_up_then_cosine(steps: int) -> Callable[[int], float]:
    """The learning rate as a share of its peak: up over the first tenth, then down to a tenth."""
    warm_up = max(1, steps // 10)

    def factor(step: int) -> float:
        if step < warm_up:
            return (step + 1) / warm_up
        done = (step - warm_up) / max(1, steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * done))

    return factor


def timed_step(trainer: Trainer, micro_batches: list[torch.Tensor], options: argparse.Namespace) -> torch.Tensor:
    if options.compare and dist.is_initialized():
        dist.barrier()  # no system pays for delays that another one left between ranks
    wait_for(options.device)
    start = time.perf_counter()
    norm = train_step(trainer, micro_batches, options.clip or math.inf)
    wait_for(options.device)
    trainer.step_ms.append((time.perf_counter() - start) * 1e3)
    return norm


def wait_for(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


class Progress:
    """The bar on rank 0. Looking at a loss is collective, so every rank calls `after`, at the same steps."""

    def __init__(self, options: argparse.Namespace, rank: int, world_size: int, done: int):
        self.quiet, self.steps = options.quiet, options.steps
        self.step_tokens = options.batch * options.shape.context * options.accumulate * world_size
        self.bar = tqdm(
            total=options.steps, initial=done, disable=options.quiet or rank > 0, unit="step", mininterval=0.5
        )

    def after(self, step: int, trainers: list[Trainer], norm: torch.Tensor) -> None:
        """`norm` is that of the first trainer, whose speed is shown too."""
        if self.quiet or (step % SHOW_EVERY and step != self.steps):
            return
        losses = torch.stack([trainer.losses[-1] for trainer in trainers])
        if trainers[0].weighs_tokens:  # this rank's: others may have run out of batches, and don't come here
            losses = losses / trainers[0].tokens[-1]
        else:
            losses = mean_over_ranks(losses)
        recent_ms = trainers[0].step_ms[-SHOW_EVERY:]
        tokens_per_s = self.step_tokens * len(recent_ms) * 1e3 / sum(recent_ms)
        numbers = {name: f"{loss:.3f}" for name, loss in zip(("loss", "torch's loss"), losses.tolist(), strict=False)}
        numbers |= {"tokens/s": f"{tokens_per_s:,.0f}", "grad norm": f"{float(norm):.2f}"}
        self.bar.set_postfix(numbers, refresh=False)
        self.bar.update(step - self.bar.n)


def train(trainers: list[Trainer], corpus: Corpus, options: argparse.Namespace, rank: int, world_size: int) -> dict:
    """Step all trainers side by side on the same windows; returns the distances between the first and the others."""
    draws = RandomWindows(corpus.train, (options.batch, options.shape.context), options.seed, rank, world_size)
    checkpoints = Checkpoints(options, corpus, rank, world_size)
    if (found := checkpoints.resume(trainers[0], draws)) and rank == 0:
        print(f"going on from {found}", flush=True)
    done = len(trainers[0].past_losses)
    progress = Progress(options, rank, world_size, done)
    log = Log(options, trainers[0].optimizer, rank, done)
    distances: dict = {}
    # A rank that comes to the end of join() goes along with the others' steps until all have come.
    joined = trainers[0].optimizer.join() if options.uneven else nullcontext()
    own_steps = steps_of(rank, world_size, options.steps) if options.uneven else options.steps
    with progress.bar, joined:
        for step in range(done + 1, own_steps + 1):
            micro_batches = [draws.draw().to(options.device) for _ in range(options.accumulate)]
            if options.uneven:
                micro_batches = [some_of(windows, step, rank) for windows in micro_batches]
            # In changing order, so that none always finds the caches as another one left them.
            in_turn = trainers if step % 2 else trainers[::-1]
            norms = {trainer.name: timed_step(trainer, micro_batches, options) for trainer in in_turn}
            if step == min(DISTANCE_STEP, options.steps) and len(trainers) == 3:
                distances = distances_from_unfused(*(trainer.module for trainer in trainers)) | {"step": step}
                trainers.pop()  # the textbook one is not needed any more
            progress.after(step, trainers[:2], norms[trainers[0].name])
            log.after(step, trainers[0], shows_loss=step % SHOW_EVERY == 0)
            if checkpoints.is_due(step):
                checkpoints.save(trainers[0], draws, trainers[0].mean_losses(step))
    log.close()
    return distances


def build_trainers(options: argparse.Namespace) -> list[Trainer]:
    """zerox first; to compare, torch's fastest and, in fp32, its textbook way: all from the same parameters."""
    torch.manual_seed(options.seed)
    if options.meta:  # without memory: each rank gets its part from the optimizer
        with torch.device("meta"):
            module = GPT(options.shape).to(DTYPES[options.dtype])
    else:
        module = GPT(options.shape).to(options.device, DTYPES[options.dtype])
    has_ways = options.dtype == "fp32" and options.optimizer in ("adamw", "sgd")
    num_others = 0 if not options.compare else 2 if has_ways else 1
    others = [copy.deepcopy(module) for _ in range(num_others)]
    try:
        trainers = [with_zerox(module, options)]
    except ValueError as error:  # an option that zerox knows better than the command line, such as the stage
        raise BadInput(str(error)) from error
    return trainers + [with_ddp(other, options, fused=place == 0) for place, other in enumerate(others)]


def run(options: argparse.Namespace, corpus: Corpus, rank: int, world_size: int) -> None:
    say = print if rank == 0 else lambda *_, **__: None
    trainers = build_trainers(options)
    module, optimizer = trainers[0].module, trainers[0].optimizer
    num_parameters = sum(p.numel() for p in module.parameters())
    say(f"{num_parameters / 1e6:.2f} M parameters ({options.shape}), {options.dtype}, ", end="")
    say(f"{world_size} rank{'s' * (world_size > 1)} on {options.device.type}, ZeRO stage {options.stage}")
    say(corpus, flush=True)

    distances = train(trainers, corpus, options, rank, world_size)

    # zerox's own count of its storages, beside the formula that gives it before anything is allocated.
    backend = dist.get_backend() if dist.is_initialized() else "gloo"
    columns = {"zerox": bytes_of_zerox(optimizer.memory_bytes())}
    if options.optimizer in FUSED:
        estimated = estimate(params_of(module, options), world_size, backend=backend, **estimate_options(options))
        columns["formula"] = bytes_of_zerox(estimated)
    columns |= {trainer.name: bytes_of_torch(trainer.module, trainer.optimizer) for trainer in trainers[1:]}
    results = [
        Result(
            name=trainer.name,
            loss=trainer.mean_losses(options.steps),
            held_out_loss=held_out_loss(trainer.module, corpus.held_out, options.batch, rank, world_size),
            memory_bytes=columns[trainer.name],
            step_ms=trainer.step_ms,
        )
        for trainer in trainers
    ]
    say(f"\n{memory_table(columns)}\n")
    for result in results:
        speed = f"{result.steady_ms()[1]:.1f} ms a step" if result.step_ms else "no step was left to do"
        say(f"{result.name}: held-out loss {result.held_out_loss:.4f} nats per byte, {speed}")
    if distances:
        say(distance_line(distances))
    if rank == 0:
        if options.losses:
            options.losses.write_text(json.dumps(results[0].loss) + "\n")
        if options.compare:
            facts = facts_of_run(options) | {"ranks": world_size, "parameters": num_parameters, "text": str(corpus)}
            write_comparison(options.out, results, facts | {"distances": distances})
            say(f"wrote {options.out / 'compare.png'} and {options.out / 'compare.json'}")
        say("\n" + sample_text(module, prompt="def ", num_bytes=300, temperature=0.8, seed=options.seed))


def distance_line(distances: dict) -> str:
    return (
        f"at step {distances['step']}, largest difference of a parameter from torch's foreach=False: "
        f"zerox {distances['zerox_from_unfused']:.2e}, torch's fused=True {distances['torch_fused_from_unfused']:.2e} "
        f"(largest parameter {distances['largest_parameter']:.2g})"
    )


def facts_of_run(options: argparse.Namespace) -> dict:
    """All that one needs to get the same numbers again."""
    try:
        zerox_version = version("zerox")
    except PackageNotFoundError:
        zerox_version = "not installed"  # run from its sources
    names = (
        "optimizer",
        "dtype",
        "state_dtype",
        "stage",
        "steps",
        "batch",
        "accumulate",
        "clip",
        "lr",
        "weight_decay",
        "eps",
        "seed",
    )
    return {
        "command": shlex.join(["train_gpt.py", *sys.argv[1:]]),
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "zerox": zerox_version},
        "device": options.device.type,
        "shape": asdict(options.shape),
        "options": {name: getattr(options, name) for name in names},
    }


def main() -> int:
    def interrupt_once(*_) -> None:
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun passes on a second one, in the middle of cleaning up
        raise KeyboardInterrupt

    signal.signal(signal.SIGINT, interrupt_once)
    sys.stdout.reconfigure(errors="replace")  # for letters in the sample that the terminal lacks
    try:
        options = parse_options(None, description=__doc__)
        corpus = load_corpus(options.data, options.shape.context)
        check_fits(options)
        if options.ranks and not am_rank():
            return start(options.ranks)  # after all checks: a wrong option costs one line, not torchrun's 45
        with process_group(options.device) as (rank, world_size):
            run(options, corpus, rank, world_size)
    except BadInput as error:
        # All ranks find the same fault, and torchrun ends all at the first exit: let that be the rank that prints it.
        if int(os.environ.get("LOCAL_RANK", 0)) > 0:
            time.sleep(5)
        else:
            print(f"train_gpt.py: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    except KeyboardInterrupt:
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
