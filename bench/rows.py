"""Times the step of a table whose gradient is rows, beside torch.optim.SparseAdam's, in turn; one rank.

    python -m bench.rows [--device cuda] [--rounds 50] [--json FILE]

Gradients are as a lookup leaves them: ids that come several times, in no order. Milliseconds of the wall's clock, in
which the device finishes each step, with moments in float32, bfloat16 and 8 bits; "as fast" is SparseAdam's median over
that of float32.
"""

from __future__ import annotations

import statistics
import time
from functools import partial

import torch
from torch import Tensor, nn

from bench.common import Row, new_parser, parse, print_rows, write_result
from zerox import FusedShardedAdam

COLUMNS = {"rows": "d", "width": "d", "ids": "d", "sparse_adam_ms": ".3f", "zerox_ms": ".3f", "as_fast": ".2f"}
COLUMNS |= {"bf16_ms": ".3f", "8bit_ms": ".3f"}
STATE_DTYPES: dict[str, torch.dtype | str] = {"zerox_ms": torch.float32, "bf16_ms": torch.bfloat16, "8bit_ms": "8bit"}
CASES = ((1_000_000, 64, 16_384), (1_000_000, 64, 131_072), (100_000, 128, 65_536), (40_000, 32, 8_192))
LR = 1e-3


def table(num_rows: int, width: int, device: str) -> nn.Parameter:
    return nn.Parameter(torch.randn(num_rows, width, generator=torch.Generator().manual_seed(0)).to(device))


def step_ms(param: nn.Parameter, optimizer: torch.optim.Optimizer, ids: Tensor, values: Tensor) -> float:
    param.grad = torch.sparse_coo_tensor(ids[None], values, param.shape, check_invariants=False)
    if param.is_cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    optimizer.step()
    if param.is_cuda:
        torch.cuda.synchronize()
    return (time.perf_counter() - start) * 1e3


def timed(num_rows: int, width: int, num_ids: int, device: str, rounds: int) -> Row:
    theirs = table(num_rows, width, device)
    rivals: dict[str, tuple[nn.Parameter, torch.optim.Optimizer]] = {}
    for name, state_dtype in STATE_DTYPES.items():
        ours = table(num_rows, width, device)
        group = {"params": [ours], "sparse": True, "weight_decay": 0.0}
        rivals[name] = ours, FusedShardedAdam([group], lr=LR, state_dtype=state_dtype)
    rivals["sparse_adam_ms"] = theirs, torch.optim.SparseAdam([theirs], lr=LR)
    order = list(rivals)
    samples: dict[str, list[float]] = {name: [] for name in rivals}
    for turn in range(rounds + 3):
        ids = torch.randint(0, num_rows, (num_ids,), generator=torch.Generator().manual_seed(turn)).to(device)
        values = torch.ones(num_ids, width, device=device)
        for name in order:
            samples[name].append(step_ms(*rivals[name], ids, values))
        order.append(order.pop(0))  # nobody is always behind the same one
    assert torch.equal(rivals["zerox_ms"][0], theirs), "not the same bits"
    found = {name: statistics.median(each[3:]) for name, each in samples.items()}
    as_fast = found["sparse_adam_ms"] / found["zerox_ms"]
    return {"rows": num_rows, "width": width, "ids": num_ids, **found, "as_fast": as_fast}


make_parser = partial(new_parser, "bench.rows", __doc__, "device", "rounds", device="cpu", rounds=50)


def main(argv: list[str] | None = None) -> None:
    args = parse(make_parser(), argv)
    rows = [timed(*case, args.device, args.rounds) for case in CASES]
    print_rows(rows, COLUMNS, header=True)
    write_result(args, rows, device=torch.cuda.get_device_name() if args.device == "cuda" else "cpu")


if __name__ == "__main__":
    main()
