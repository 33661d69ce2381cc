"""Train the small GPT over a mesh of CPU ranks, and hold it beside the same training in one process.

    python examples/train_parallel.py --tp 2 --shard 2
    python examples/train_parallel.py --replicate 2 --shard 2
    python examples/train_parallel.py --pp 2 --shard 2
    python examples/train_parallel.py --replicate 2 --shard 2 --tp 2

`--shard` and `--replicate` say how many data-parallel ranks there are (ranks of one machine, and machines), `--tp` over
how many each block's MLP is cut, `--pp` into how many stages the blocks are divided. Each rank also trains the whole
model with torch's AdamW on all ranks' text, and the table says how far its own part is from that.
What zerox asks for is in `optimizer_of` and `train_step`; docs/meshes.md explains it.
"""

import argparse
import copy
import math
import os
import sys

import torch
import torch.distributed as dist
from corpus import BadInput, RandomWindows, load_corpus
from gpt_model import GPT, SHAPES
from ranks import BAD_INPUT, am_rank, process_group, start
from torch import nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn import functional

from zerox import FusedShardedAdam

AXES = ("pp", "replicate", "shard", "tp")
MICRO_BATCHES = 2  # of each step, which is what a pipeline needs
WINDOWS = 2  # of text in each
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
    return FusedShardedAdam(
        stage.named_parameters(),
        lr=LR,
        process_group=mesh["replicate", "shard"],
        norm_group=mesh["pp"],  # whose other ranks have other parameters
    )


def train_step(schedule: Schedule1F1B, optimizer: FusedShardedAdam, own: list[torch.Tensor], is_first: bool) -> float:
    inputs, targets = (torch.cat([part[:, piece] for part in own]) for piece in (slice(0, -1), slice(1, None)))
    with optimizer.no_sync():  # the schedule has a backward for each micro-batch
        schedule.step(*([inputs] if is_first else []), target=targets)
    norm = optimizer.clip_grad_norm_(CLIP)  # over all stages, each element once
    optimizer.step()
    optimizer.zero_grad()
    return float(norm)


def run(options: argparse.Namespace) -> None:
    shape = SHAPES["tiny"]
    mesh = init_device_mesh("cpu", tuple(getattr(options, axis) for axis in AXES), mesh_dim_names=AXES)
    pp, replicate, shard, _ = (mesh[axis].get_local_rank() for axis in AXES)
    torch.manual_seed(0)
    whole = GPT(shape)
    twin = copy.deepcopy(whole)
    stage, twin_stage = (Stage(model, pp, options.pp) for model in (whole, twin))
    if options.tp > 1:
        cut(stage, mesh["tp"])
    optimizer = optimizer_of(stage, mesh)
    piece = PipelineStage(stage, pp, options.pp, torch.device("cpu"), group=mesh.get_group("pp"))
    schedule = Schedule1F1B(piece, MICRO_BATCHES, loss_fn=loss_of)
    reference = torch.optim.AdamW(twin.parameters(), lr=LR)
    readers = options.replicate * options.shard  # ranks that read text of their own
    text = load_corpus(None, shape.context).train
    windows = [RandomWindows(text, (WINDOWS, shape.context), 0, rank, readers) for rank in range(readers)]
    farthest = 0.0
    loss = 0.0
    for _ in range(options.steps):
        batches = [[reader.draw() for _ in range(MICRO_BATCHES)] for reader in windows]
        norm = train_step(schedule, optimizer, batches[replicate * options.shard + shard], pp == 0)
        everything = torch.cat([part for batch in batches for part in batch])
        of_twin = twin(everything[:, :-1], everything[:, 1:])
        of_twin.backward()
        loss = float(of_twin.detach())
        expected = float(nn.utils.clip_grad_norm_(twin.parameters(), CLIP))
        farthest = max(farthest, abs(norm - expected) / expected)
        reference.step()
        reference.zero_grad()
    pairs = zip(stage.parameters(), twin_stage.parameters(), strict=True)
    apart = max(float((whole_of(p) - q).detach().abs().max()) for p, q in pairs)
    found = torch.tensor([apart, farthest, sum(local_numel(p) for p in stage.parameters()), state_bytes(optimizer)])
    dist.all_reduce(found, dist.ReduceOp.MAX)
    if dist.get_rank() == 0:
        report(options, loss, *found.tolist())


def whole_of(param: torch.Tensor) -> torch.Tensor:
    return param.full_tensor() if isinstance(param, DTensor) else param


def local_numel(param: torch.Tensor) -> int:
    return (param.to_local() if isinstance(param, DTensor) else param).numel()


def state_bytes(optimizer: FusedShardedAdam) -> int:
    return optimizer.memory_bytes().moments


def report(options: argparse.Namespace, loss: float, apart: float, norm: float, numel: float, state: float) -> None:
    sizes = ", ".join(f"{axis} {getattr(options, axis)}" for axis in AXES if getattr(options, axis) > 1)
    print(f"{math.prod(getattr(options, axis) for axis in AXES)} ranks ({sizes or 'one rank'}), {options.steps} steps")
    print(f"{'loss of the last step, nats a byte':<52}{loss:10.4f}")
    print(f"{'farthest parameter from one process with AdamW':<52}{apart:10.1e}")
    print(f"{'farthest gradient norm, relative':<52}{norm:10.1e}")
    print(f"{'parameters of a rank, at most':<52}{numel:10,.0f}")
    print(f"{'bytes of optimizer state of a rank, at most':<52}{state:10,.0f}", flush=True)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for axis in AXES:
        parser.add_argument(f"--{axis}", type=int, default=1, help="ranks along this axis")
    parser.add_argument("--steps", type=int, default=20)
    options = parser.parse_args()
    if min(options.steps, *(getattr(options, axis) for axis in AXES)) < 1:
        raise BadInput("sizes and steps must be at least 1")
    if options.pp > SHAPES["tiny"].layers:
        raise BadInput(f"--pp {options.pp}: the model has {SHAPES['tiny'].layers} blocks to divide")
    return options


def main() -> int:
    try:
        options = parse_options()
        if not am_rank():
            return start(math.prod(getattr(options, axis) for axis in AXES))
        torch.set_num_threads(1)
        with process_group(torch.device("cpu")):
            run(options)
    except BadInput as error:
        if int(os.environ.get("RANK", 0)) == 0:
            print(f"train_parallel.py: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    return 0


if __name__ == "__main__":
    sys.exit(main())
