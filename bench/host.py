"""Times what the host does where tensors are too small to matter: a step of many small parameters, and one operator.

    python -m bench.host [--ranks 1 2] [--rounds 1500] [--parts steps clips operators] [--device cuda] [--json FILE]

"step" is clip, step and zero_grad of 40 parameters of 16 elements, beside torch's AdamW without a mean over ranks, and
as DTensors, whose 16 elements are this rank's of an axis of all ranks, beside the same number of plain ones.
"clip" is of 1,000 gradients of 64 x 64: torch's, of plain ones without foreach and of placeholders, and the optimizer's
own. What the call waits for other ranks is taken off. With --device cuda, where torch's takes plain gradients in a few
launches, its default is timed too, and each call until the GPU has done it; the other parts are of the CPU.
"operator" is one that reads no parameter, and one that reads one: the guard of sharded parameters (stage 3) sees both.
Microseconds of a call on rank 0. The least tenth is what the host needs; medians show what else the machine did.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from bench.common import Row, for_world_sizes, new_parser, on_ranks, parse
from zerox import FusedShardedAdam

COLUMNS = {"ranks": "d", "what": "<30", "of": "<16", "tenth_us": ".2f", "median_us": ".2f"}
CLIPPED = 1000
OPERATORS = 20  # in a sample: one takes about as long as the clock


def sampled(call: Callable[[], object], rounds: int, before: Callable[[], object] = lambda: None) -> Row:
    """``before`` each sample, not timed."""
    samples_us = []
    for _ in range(rounds):
        before()
        start = time.perf_counter_ns()
        call()
        samples_us.append((time.perf_counter_ns() - start) / 1e3)
    return summary(samples_us)


def summary(samples_us: list[float]) -> Row:
    return {
        "tenth_us": statistics.quantiles(samples_us, n=10, method="inclusive")[0],
        "median_us": statistics.median(samples_us),
    }


def small_steps(rounds: int) -> Iterator[Row]:
    def measured(name: str, params: list[Tensor], optimizer: torch.optim.Optimizer, clip: Callable[[], object]) -> Row:
        def step() -> None:
            clip()
            optimizer.step()
            optimizer.zero_grad()

        def backward() -> None:
            torch.stack([(param * 2.0).sum() for param in params]).sum().backward()

        for _ in range(20):
            backward()
            step()
        return {"what": "clip, step, zero_grad", "of": name, **sampled(step, rounds, backward)}

    def params() -> list[Tensor]:
        return [nn.Parameter(torch.randn(16)) for _ in range(40)]

    ours = FusedShardedAdam(trained := params())
    yield measured("zerox", trained, ours, lambda: ours.clip_grad_norm_(1.0))
    mesh = init_device_mesh("cpu", (1, torch.distributed.get_world_size()), mesh_dim_names=("dp", "tp"))
    cut: list[Tensor] = [
        nn.Parameter(DTensor.from_local(each.detach(), mesh["tp"], [Shard(0)], run_check=False)) for each in params()
    ]
    for name, own in (("zerox, dp of 1", params()), ("zerox, DTensors", cut)):
        alone = FusedShardedAdam(own, process_group=mesh["dp"])
        yield measured(name, own, alone, partial(alone.clip_grad_norm_, 1.0))
    theirs = torch.optim.AdamW(others := params(), fused=True)
    yield measured("AdamW, fused", others, theirs, lambda: nn.utils.clip_grad_norm_(others, 1.0))


def clips(rounds: int, device: str) -> Iterator[Row]:
    rounds = max(2, rounds // 30)

    def params() -> list[Tensor]:
        return [nn.Parameter(torch.randn(64, 64, device=device)) for _ in range(CLIPPED)]

    def wait() -> None:
        if device == "cuda":
            torch.cuda.synchronize()

    def done(call: Callable[[], object]) -> None:
        call()
        wait()

    for p in (plain := params()):
        p.grad = torch.randn(64, 64, device=device)
    for name, foreach in {"plain gradients": False, **({"plain, foreach": None} if device == "cuda" else {})}.items():
        clip_plain = partial(nn.utils.clip_grad_norm_, plain, 1e9, foreach=foreach)
        yield {"what": "torch's clip", "of": name, **sampled(partial(done, clip_plain), rounds)}
    optimizer = FusedShardedAdam(ours := params())
    synchronizer = optimizer.inside.grads.manager.synchronizer

    def backward() -> None:
        torch.autograd.backward(ours, [p.detach() for p in ours])
        optimizer.synchronize()
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()

    for name, call in (
        ("torch's clip", partial(nn.utils.clip_grad_norm_, ours, 1e9)),
        ("optimizer's clip", partial(optimizer.clip_grad_norm_, 1e9)),
    ):
        samples_us = []
        for _ in range(rounds):
            optimizer.zero_grad()
            backward()
            wait()
            before, start = synchronizer.waited_ns, time.perf_counter_ns()
            done(call)
            samples_us.append((time.perf_counter_ns() - start - (synchronizer.waited_ns - before)) / 1e3)
        yield {"what": name, "of": "placeholders", **summary(samples_us)}


def operators(rounds: int) -> Iterator[Row]:
    vector = torch.randn(8)

    def many(of: Tensor) -> None:
        for _ in range(OPERATORS):
            of.mv(vector)

    for stage in (2, 3):
        weight = nn.Parameter(torch.randn(8, 8))
        optimizer = FusedShardedAdam([weight], stage=stage)
        for what, matrix in (("operator on no parameter", torch.randn(8, 8)), ("operator on a parameter", weight)):
            with torch.no_grad():
                times = sampled(partial(many, matrix), rounds)
            yield {"what": what, "of": f"stage {stage}", **{key: value / OPERATORS for key, value in times.items()}}
        del optimizer


PARTS: dict[str, Callable[[int, str], Iterator[Row]]] = {
    "steps": lambda rounds, _: small_steps(rounds),
    "clips": clips,
    "operators": lambda rounds, _: operators(rounds),
}


def time_on_ranks(rounds: int, parts: Sequence[str] = tuple(PARTS), device: str = "cpu") -> list[Row]:
    world_size = torch.distributed.get_world_size()
    return [{"ranks": world_size, **row} for name in parts for row in PARTS[name](rounds, device)]


CHOSEN = {"nargs": "+", "choices": list(PARTS), "default": list(PARTS)}
make_parser = partial(
    new_parser, "bench.host", __doc__, "ranks", "rounds", "device", ranks=[1, 2], rounds=1500, parts=CHOSEN
)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    asked = (args.rounds, args.parts, args.device)
    for_world_sizes(args, COLUMNS, lambda world_size: on_ranks(time_on_ranks, world_size, *asked))


if __name__ == "__main__":
    main()
