"""The update of a GPT-2's matrices by Muon on one rank, beside its products alone, torch.optim.Muon, and Adam.

    python -m bench.muon_update [--model gpt2 gpt2-xl] [--device cuda] [--seconds 60] [--json FILE]

In turn within one process, with gradients that backward has left: zerox' step(); the products of Newton-Schulz alone,
equal matrices stacked beforehand, without momentum, norms, decay and parameters, and the same one by one;
torch.optim.Muon's step(); FusedShardedAdam's. A sample begins with an idle device and ends when that has done it all:
where the device waits for the host, that counts. "host_ms" is until the call returned. Before anything is timed, a
step of zerox has to leave what torch's leaves; "apart" is their largest difference, as a share of the update.

Ratios are medians over the rounds: "of_products" is a time over that of the products, "theirs_over_ours" over zerox'.
Rates count 5 (4 m² n + 2 m³) operations for a matrix whose shorter side is m. "products" are the calls for them in one
step, and "launches" the kernels: fewer, if matrices go in batches. "extra_mib" is the most that a step needed for
itself. A CPU without units for bfloat16 needs minutes for GPT-2, and has --model=tiny.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor, nn
from torch.profiler import ProfilerActivity, profile

from bench.common import Row, new_parser, parse, print_rows, write_result
from bench.jobs import WrongResult
from bench.timing import LEAST_SAMPLES, MOST_SAMPLES, WARM_UP
from zerox import FusedShardedAdam, FusedShardedMuon
from zerox.plan.owners import newton_schulz_cost

MODELS = {"tiny": (2, 32), "gpt2": (12, 768), "gpt2-xl": (48, 1600)}  # layers, width
A, B, C = 3.4445, -4.7750, 2.0315  # torch.optim.Muon's coefficients
STEPS = 5
OURS, PRODUCTS, ONE_BY_ONE, TORCH, ADAM = "zerox", "products", "products, one by one", "torch Muon", "zerox Adam"
MOST_APART = 1e-2
CALLS = ("aten::mm", "aten::addmm", "aten::bmm", "aten::baddbmm")
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel")
Shape = tuple[int, int]


def shapes_of(model: str) -> list[Shape]:
    """Those of a GPT's hidden layers: queries, keys and values in one, and what follows them."""
    layers, width = MODELS[model]
    return [(3 * width, width), (width, width), (4 * width, width), (width, 4 * width)] * layers


# ---- who is timed


@dataclass(frozen=True)
class Rival:
    """``prepare``: before each ``call``, not timed."""

    prepare: Callable[[], object]
    call: Callable[[], object]


def iterate(x: Tensor) -> Tensor:
    """The products of a matrix, or of a batch of equal ones."""
    is_tall = x.shape[-2] > x.shape[-1]
    product = torch.addmm if x.dim() == 2 else torch.baddbmm
    x = x.mT if is_tall else x
    for _ in range(STEPS):
        gram = x @ x.mT
        x = product(x, product(gram, gram, gram, beta=B, alpha=C), x, beta=A)
    return x.mT if is_tall else x


def iterate_all(tensors: Sequence[Tensor]) -> None:
    for each in tensors:
        iterate(each)


def stepping(params: Sequence[Tensor], gradients: Sequence[Tensor], optimizer: torch.optim.Optimizer) -> Rival:
    def prepare() -> None:
        optimizer.zero_grad()
        torch.autograd.backward(params, gradients)

    return Rival(prepare, optimizer.step)


def rivals_for(shapes: Sequence[Shape], device: torch.device) -> tuple[dict[str, Rival], float]:
    """Each has parameters of its own, which begin alike. And how far zerox is from torch. Raises WrongResult."""
    start = [torch.randn(shape, device=device) for shape in shapes]
    gradients = [torch.randn(shape, device=device) for shape in shapes]
    params = {name: [nn.Parameter(each.clone()) for each in start] for name in (OURS, TORCH, ADAM)}
    rivals = {
        OURS: stepping(params[OURS], gradients, FusedShardedMuon(params[OURS])),
        TORCH: stepping(params[TORCH], gradients, torch.optim.Muon(params[TORCH])),
        ADAM: stepping(params[ADAM], gradients, FusedShardedAdam(params[ADAM])),
    }
    for name in (OURS, TORCH):
        rivals[name].prepare()
        rivals[name].call()
    off = apart(start, params[OURS], params[TORCH])
    if not off <= MOST_APART:
        raise WrongResult(f"a step of zerox is {off:.3g} of the update away from torch.optim.Muon's")
    single = [(each / each.norm()).bfloat16() for each in gradients]
    stacked = [
        torch.stack([each for each in single if each.shape == torch.Size(shape)]) for shape in dict.fromkeys(shapes)
    ]
    rivals[PRODUCTS] = Rival(lambda: None, partial(iterate_all, stacked))
    rivals[ONE_BY_ONE] = Rival(lambda: None, partial(iterate_all, single))
    return {name: rivals[name] for name in (OURS, PRODUCTS, ONE_BY_ONE, TORCH, ADAM)}, off


@torch.no_grad()
def apart(start: Sequence[Tensor], ours: Sequence[Tensor], theirs: Sequence[Tensor]) -> float:
    """The largest of all matrices."""
    pairs = zip(start, ours, theirs, strict=True)
    return max(float((one - other).norm() / (other - before).norm()) for before, one, other in pairs)


# ---- what it takes


def wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def sample_ms(rival: Rival, device: torch.device) -> tuple[float, float]:
    """Of a call, and of it until the host went on."""
    rival.prepare()
    wait(device)
    start = time.perf_counter()
    rival.call()
    returned = time.perf_counter()
    wait(device)
    return (time.perf_counter() - start) * 1e3, (returned - start) * 1e3


def sampled(rivals: Mapping[str, Rival], device: torch.device, budget_s: float) -> dict[str, list[tuple[float, float]]]:
    """In turn, round by round."""
    for rival in rivals.values():
        for _ in range(WARM_UP):
            sample_ms(rival, device)
    samples: dict[str, list[tuple[float, float]]] = {name: [] for name in rivals}
    end, order = time.monotonic() + budget_s, list(rivals)
    for turn in range(MOST_SAMPLES):
        if turn >= LEAST_SAMPLES and time.monotonic() > end:
            break
        for name in order:
            samples[name].append(sample_ms(rivals[name], device))
        order.append(order.pop(0))  # nobody is always behind the same rival
    return samples


def extra_mib(rival: Rival, device: torch.device) -> float | None:
    if device.type != "cuda":
        return None
    rival.prepare()
    wait(device)
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    rival.call()
    wait(device)
    return (torch.cuda.max_memory_allocated(device) - before) / 2**20


def counted(rival: Rival, device: torch.device) -> Row:
    """Calls for products, and on a GPU kernels that were launched."""
    rival.prepare()
    wait(device)
    is_gpu = device.type == "cuda"
    with profile(activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_gpu else [])]) as seen:
        rival.call()
        wait(device)
    counts = {each.key: each.count for each in seen.key_averages()}
    launches = sum(count for name, count in counts.items() if name.startswith(LAUNCHES))
    return {"products": sum(counts.get(name, 0) for name in CALLS), "launches": launches if is_gpu else None}


def rows_of(model: str, samples: Mapping[str, Sequence[tuple[float, float]]], more: Mapping[str, Row]) -> list[Row]:
    shapes = shapes_of(model)
    operations = sum(newton_schulz_cost(*shape) for shape in shapes)
    facts = {"model": model, "matrices": len(shapes), "mparams": sum(m * n for m, n in shapes) / 1e6}
    rows: list[Row] = []
    for who, own in samples.items():
        took = [ms for ms, _ in own]
        over = {
            name: statistics.median(ms / other for ms, (other, _) in zip(took, samples[name], strict=True))
            for name in (OURS, PRODUCTS)
        }
        p25, p50, p75 = statistics.quantiles(took, n=4, method="inclusive")
        row: Row = {**facts, "who": who, "p50_ms": p50, "spread": (p75 - p25) / p50, "samples": len(took)}
        row |= {"host_ms": statistics.median(host for _, host in own)}
        row |= {"tflops": None if who == ADAM else operations / p50 / 1e9}
        row |= {"of_products": over[PRODUCTS], "theirs_over_ours": None if who == OURS else over[OURS]}
        rows.append({**row, **more[who]})
    return rows


def measure(model: str, device: torch.device, budget_s: float) -> list[Row]:
    torch.manual_seed(0)
    rivals, off = rivals_for(shapes_of(model), device)
    print(f"{model}: after a step zerox is {off:.3g} of the update away from torch.optim.Muon", flush=True)
    more = {who: {"extra_mib": extra_mib(rival, device), **counted(rival, device)} for who, rival in rivals.items()}
    more[OURS]["apart"] = off
    return rows_of(model, sampled(rivals, device, budget_s), more)


COLUMNS = {"model": "<8", "matrices": "", "mparams": ".1f", "who": "<21", "p50_ms": ".3f", "spread": ".1%"}
COLUMNS |= {"host_ms": ".3f", "tflops": ".2f", "of_products": ".3f", "theirs_over_ours": ".2f", "products": ""}
COLUMNS |= {"launches": "", "extra_mib": ".0f"}

MODEL = {"nargs": "+", "choices": list(MODELS), "default": ["gpt2", "gpt2-xl"]}
make_parser = partial(new_parser, "bench.muon_update", __doc__, "device", seconds=60.0, model=MODEL)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # else it says when it starts and stops
    device = torch.device(args.device)
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    print(f"{name}, torch {torch.__version__}")
    rows: list[Row] = []
    skipped: list[str] = []
    for model in args.model:
        try:
            found = measure(model, device, args.seconds / len(args.model))
            print_rows(found, COLUMNS, header=True)
            rows += found
        except torch.OutOfMemoryError:
            skipped.append(f"{model}: too little memory")
            print(f"skipped {skipped[-1]}", flush=True)
        if device.type == "cuda":
            torch.cuda.empty_cache()
        write_result(args, rows, device=name, skipped=skipped)


if __name__ == "__main__":
    main()
