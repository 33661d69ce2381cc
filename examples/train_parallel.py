"""Train the small GPT over a mesh of CPU ranks, and hold it beside the same training in one process.

    python examples/train_parallel.py --tp 2 --shard 2
    python examples/train_parallel.py --replicate 2 --shard 2
    python examples/train_parallel.py --pp 2 --shard 2
    python examples/train_parallel.py --replicate 2 --shard 2 --tp 2
    python examples/train_parallel.py --experts 2 --shard 2
    python examples/train_parallel.py --layouts --picture layouts.png

`--shard` and `--replicate` say how many data-parallel ranks there are (ranks of one machine, and machines), `--tp` over
how many each block's MLP is cut, `--pp` into how many stages the blocks are divided. With `--experts N` MLPs are
mixtures of experts, which N data-parallel ranks share out. Each rank also trains the whole model with torch's AdamW on
all ranks' text, and the table says how far its own part is from that. `--layouts` does so for several layouts.
What zerox asks for is in `optimizer_of` and `train_step`; docs/meshes.md explains it.
"""

import argparse
import copy
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from corpus import BadInput, RandomWindows, load_corpus
from experts import COUNT, gpt_of_experts, is_of_expert, share_out
from gpt_model import GPT, NUM_BYTES, SHAPES, Shape
from layouts import AXES, Outcome, compare, name_of, num_ranks
from ranks import BAD_INPUT, am_rank, process_group, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from zerox import FusedShardedAdam

MICRO_BATCHES = 2  # of each step, which is what a pipeline needs
CLIP = 1.0
LR = 1e-3


class Stage(nn.Module):
    """The blocks of one pipeline stage; the first has the embeddings, the last the logits."""

    def __init__(self, model: GPT, index: int, count: int):
        super().__init__()
        layers = len(model.blocks)
        self.blocks = model.blocks[index * layers // count : (index + 1) * layers // count]
        self.first = nn.ModuleList([model.token_embedding, model.position_embedding] if index == 0 else [])
        self.last = nn.ModuleList([model.final_norm, model.to_logits] if index == count - 1 else [])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if len(self.first):
            tokens, positions = self.first
            x = tokens(x) + positions(torch.arange(x.shape[1]))
        for block in self.blocks:
            x = block(x)
        for module in self.last:
            x = module(x)
        return x


def loss_of(logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


def cut(stage: Stage, tp: DeviceMesh) -> None:
    """Each MLP by its hidden units, and the logits by bytes. Attention stays whole: its heads share one matrix."""
    plan = {"blocks.*.mlp_in": ColwiseParallel(), "blocks.*.mlp_out": RowwiseParallel()}
    if len(stage.last):
        plan["last.1"] = ColwiseParallel(output_layouts=Replicate())
    parallelize_module(stage, tp, plan)


def optimizer_of(stage: Stage, mesh: DeviceMesh) -> FusedShardedAdam:
    named = list(stage.named_parameters())
    others = {"lr": LR, "norm_group": mesh["pp"]}  # whose other ranks have other parameters
    if mesh["experts"].size() == 1:
        return FusedShardedAdam(named, process_group=mesh["replicate", "shard"], **others)
    dense = {"params": [(name, param) for name, param in named if not is_of_expert(name)]}
    # Ranks along "experts" have different ones: only those along "shard" add up an expert's gradients.
    own = {"params": [(name, param) for name, param in named if is_of_expert(name)], "process_group": mesh["shard"]}
    return FusedShardedAdam([dense, own], process_group=mesh["shard", "experts"]._flatten(), **others)


def schedule_of(stage: Stage, mesh: DeviceMesh, shape: Shape, windows: int) -> Schedule1F1B:
    """With all shapes said: to find them, it would run its stages on tensors without values, which can't be routed."""
    pipeline = mesh["pp"]
    text = torch.empty(windows, shape.context, dtype=torch.long, device="meta")
    stream = torch.empty(*text.shape, shape.width, device="meta", requires_grad=True)
    logits = torch.empty(*text.shape, NUM_BYTES, device="meta", requires_grad=True)
    piece = PipelineStage(
        stage,
        pipeline.get_local_rank(),
        pipeline.size(),
        torch.device("cpu"),
        input_args=text if len(stage.first) else stream,
        output_args=logits if len(stage.last) else stream,
        group=pipeline.get_group(),
    )
    return Schedule1F1B(piece, MICRO_BATCHES, loss_fn=loss_of)


def train_step(
    schedule: Schedule1F1B, optimizer: FusedShardedAdam, own: list[torch.Tensor], is_first: bool
) -> tuple[float, float]:
    """The loss, on the last stage's ranks, and the norm."""
    inputs, targets = (torch.cat([part[:, piece] for part in own]) for piece in (slice(0, -1), slice(1, None)))
    losses: list[torch.Tensor] = []
    with optimizer.no_sync():  # the schedule has a backward for each micro-batch
        schedule.step(*([inputs] if is_first else []), target=targets, losses=losses)
    norm = optimizer.clip_grad_norm_(CLIP)  # over all stages, each element once
    optimizer.step()
    optimizer.zero_grad()
    return sum(float(loss.detach()) for loss in losses) / MICRO_BATCHES, float(norm)


class Twin:
    """The whole model in one process, with torch's AdamW."""

    def __init__(self, model: GPT):
        self.model = model
        self.optimizer = torch.optim.AdamW(model.parameters(), lr=LR)

    def step(self, windows: torch.Tensor) -> tuple[float, float]:
        """The loss and the norm."""
        loss = self.model(windows[:, :-1], windows[:, 1:])
        loss.backward()
        norm = nn.utils.clip_grad_norm_(self.model.parameters(), CLIP)
        self.optimizer.step()
        self.optimizer.zero_grad()
        return float(loss.detach()), float(norm)


def run(options: argparse.Namespace) -> Outcome:
    shape = SHAPES["tiny"]
    mesh = init_device_mesh("cpu", tuple(sizes_of(options).values()), mesh_dim_names=AXES)
    at = {axis: mesh[axis].get_local_rank() for axis in AXES}
    torch.manual_seed(0)
    whole = GPT(shape) if options.experts == 1 else gpt_of_experts(shape)
    twin = Twin(copy.deepcopy(whole))
    stage, twin_stage = (Stage(model, at["pp"], options.pp) for model in (whole, twin.model))
    if options.tp > 1:
        cut(stage, mesh["tp"])
    if options.experts > 1:
        share_out(stage, mesh.get_group("experts"))
    optimizer = optimizer_of(stage, mesh)
    schedule = schedule_of(stage, mesh, shape, options.windows)
    readers = options.replicate * options.shard * options.experts  # ranks that read text of their own
    own = (at["replicate"] * options.shard + at["shard"]) * options.experts + at["experts"]
    text = load_corpus(None, shape.context).train
    windows = [RandomWindows(text, (options.windows, shape.context), 0, rank, readers) for rank in range(readers)]
    losses, of_twin, off = [], [], 0.0
    for _ in range(options.steps):
        batches = [[reader.draw() for _ in range(MICRO_BATCHES)] for reader in windows]
        loss, norm = train_step(schedule, optimizer, batches[own], at["pp"] == 0)
        expected, expected_norm = twin.step(torch.cat([part for batch in batches for part in batch]))
        losses.append(loss / readers / options.tp)
        of_twin.append(expected)
        off = max(off, abs(norm - expected_norm) / expected_norm)
    mean = torch.tensor(losses, dtype=torch.float64)  # ranks of other stages have zeros
    dist.all_reduce(mean)
    theirs = dict(twin_stage.named_parameters())
    apart = max(float((whole_of(p) - theirs[name]).detach().abs().max()) for name, p in stage.named_parameters())
    numel = sum(local_numel(p) for p in stage.parameters())
    most = torch.tensor([apart, off, numel, optimizer.memory_bytes().moments], dtype=torch.float64)
    dist.all_reduce(most, dist.ReduceOp.MAX)
    return Outcome(mean.tolist(), of_twin, sum(p.numel() for p in twin.model.parameters()), *most.tolist())


def whole_of(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def local_numel(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).numel()


def report(options: argparse.Namespace, found: Outcome) -> None:
    sizes = sizes_of(options)
    print(f"{num_ranks(sizes)} ranks ({name_of(sizes)}), {options.steps} steps")
    print(f"{'loss of the last step, nats a byte':<52}{found.losses[-1]:10.4f}")
    print(f"{'the same in one process with AdamW':<52}{found.of_twin[-1]:10.4f}")
    print(f"{'farthest parameter from one process with AdamW':<52}{found.apart:10.1e}")
    print(f"{'farthest gradient norm, relative':<52}{found.norm:10.1e}")
    print(f"{'parameters of a rank, at most':<52}{found.numel:10,.0f}")
    print(f"{'bytes of optimizer state of a rank, at most':<52}{found.state_bytes:10,.0f}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks along this axis")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--windows", type=int, default=2, help="of text in a micro-batch of a rank")
    parser.add_argument("--layouts", action="store_true", help="several layouts one after the other, in one table")
    parser.add_argument("--picture", type=Path, help="with --layouts: draws their losses and bytes into this PNG")
    options = parser.parse_args()
    if min(options.steps, options.windows, *sizes_of(options).values()) < 1:
        raise BadInput("sizes, steps and windows must be at least 1")
    if options.picture and not options.layouts:
        raise BadInput("--picture draws the layouts of --layouts, which is not given")
    if options.layouts and (given := sizes_of(options)) and num_ranks(given) > 1:
        raise BadInput(f"--layouts has layouts of its own: leave out {name_of(given)}")
    if options.pp > SHAPES["tiny"].layers:
        raise BadInput(f"--pp {options.pp}: the model has {SHAPES['tiny'].layers} blocks to divide")
    hidden = 4 * SHAPES["tiny"].width
    if hidden % options.tp or NUM_BYTES % options.tp:
        raise BadInput(f"--tp {options.tp}: {hidden} hidden units and {NUM_BYTES} logits can't be cut evenly")
    if options.experts > 1:
        check_experts(options)
    return options


def sizes_of(options: argparse.Namespace) -> dict[str, int]:
    return {axis: getattr(options, axis) for axis in AXES}


def check_experts(options: argparse.Namespace) -> None:
    if COUNT % options.experts:
        raise BadInput(f"--experts {options.experts}: each block has {COUNT} experts to share out evenly")
    if other := next((axis for axis in ("replicate", "tp") if getattr(options, axis) > 1), None):
        raise BadInput(f"--experts does not go with --{other}: zerox refuses it, see docs/meshes.md")


def main() -> int:
    try:
        options = parse_options()
        if options.layouts:
            compare(options, run)
            return 0
        if not am_rank():
            return start(num_ranks(sizes_of(options)))
        torch.set_num_threads(1)
        with process_group(torch.device("cpu")):
            found = run(options)
            if dist.get_rank() == 0:
                report(options, found)
    except BadInput as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"train_parallel.py: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
