"""What Muon's momentum in few bits costs: held-out losses of a small GPT over several seeds, and its errors.

    python -m bench.momentum [--steps 400] [--seeds 3] [--json bench/results/muon-momentum.json]

Each run is `examples/train_gpt.py --optimizer muon --state-dtype ... --seed ...`, alone on one thread, with the shape
and the learning rate of bench.muon. fp32, bf16 and 8bit are as zerox stores them, AdamW's moments too; 8bit has the
dynamic map. "8bit linear" is the run of 8bit, in which Muon's momentum alone has another map: multiples of 1/127 of the
largest magnitude of each 256 elements, rounded to the nearest in Python. No kernel has that map. Beside each momentum
goes one in float32 that gets the same gradients. The momentum's error is the norm of their difference over that of the
float32 one, and the direction's error is the same of what Newton-Schulz makes of both. Both errors are of the last
step, and means over the matrices.
"""

from __future__ import annotations

import json
import math
import os
import runpy
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor

from bench.common import ROOT, Row, new_parser, parse, write_result
from bench.moments import cells_of_losses, columns_of_losses
from bench.muon import SHAPE, Run
from bench.muon import command as command_of
from zerox.memory.forms import decode
from zerox.plan.form import BLOCK_NUMEL
from zerox.update.matrices import GradPiece, take_gradients
from zerox.update.momentum import Momentum, average
from zerox.update.newton_schulz import Iteration, orthogonalize

LR = 0.04  # the best of bench.muon
LINEAR = "8bit linear"
KINDS = ("fp32", "bf16", "8bit", LINEAR)
MOST = 127  # steps of the linear map on each side of 0
# A row is of one kind: its held-out losses in nats a byte, and both errors, by seed.


def linear(values: Tensor) -> Tensor:
    """1-D, rounded by the linear map: to what 8 bits an element and the largest magnitude of each block can hold."""
    padded = torch.zeros(-(-values.numel() // BLOCK_NUMEL) * BLOCK_NUMEL)
    padded[: values.numel()] = values
    blocks = padded.view(-1, BLOCK_NUMEL)
    scales = blocks.abs().amax(1, keepdim=True) / MOST
    codes = (blocks / scales).nan_to_num(nan=0.0).round()
    return (codes * scales).view(-1)[: values.numel()]


class Seen(NamedTuple):
    """Of one parameter's last step: its gradient, the momentum that was used, and the one in float32."""

    grad: Tensor
    used: Tensor
    exact: Tensor
    factor: float


class Beside:
    """Stands for average(), or with the linear map for another one. What it keeps is by the parameters' numbers.
    ``numbers``: of the next ones, all of which are taken at once."""

    def __init__(self, is_linear: bool) -> None:
        self.is_linear = is_linear
        self.numbers: list[int] = []
        self.exact: dict[int, Tensor] = {}
        self.kept: dict[int, Tensor] = {}
        self.seen: dict[int, Seen] = {}

    def __call__(self, momenta: Sequence[Momentum], grads: Sequence[Tensor], momentum: float) -> list[Tensor]:
        return [self._of(*each, momentum) for each in zip(self.numbers, momenta, grads, strict=True)]

    def _of(self, number: int, kept: Momentum, grad: Tensor, momentum: float) -> Tensor:
        exact = self.exact.setdefault(number, torch.zeros_like(grad)).lerp_(grad, 1 - momentum)
        if self.is_linear:
            used = self.kept.get(number, torch.zeros_like(grad)).lerp(grad, 1 - momentum)
            self.kept[number] = linear(used)
        else:
            [used] = average([kept], [grad], momentum)
            self.kept[number] = decode(kept.stored).clone()
        self.seen[number] = Seen(grad.clone(), used.clone(), exact.clone(), momentum)
        return used

    def errors(self, shapes: Mapping[int, Sequence[int]], by: Iteration) -> tuple[float, float]:
        """(of the momentum, of the direction), at the last step."""
        of_momentum = [_distance(self.kept[number], exact) for number, exact in self.exact.items()]
        of_direction = []
        for number, seen in self.seen.items():
            made = [
                orthogonalize([seen.grad.lerp(each, seen.factor).view(*shapes[number]).bfloat16()], by)[0].float()
                for each in (seen.used, seen.exact)
            ]
            of_direction.append(_distance(*made))
        return statistics.fmean(of_momentum), statistics.fmean(of_direction)


def _distance(of: Tensor, beside: Tensor) -> float:
    return float((of - beside).norm() / beside.norm())


def run_here(is_linear: bool, script: Sequence[str]) -> None:
    """Runs the example in this process, and prints both errors as the last line."""
    beside, shapes = Beside(is_linear), dict[int, Sequence[int]]()
    last: list[Iteration] = []

    def noted(pieces: Sequence[GradPiece], group: Mapping[str, Any], scale: Tensor | None) -> None:
        for own, numel in ((piece.due.own, piece.direction.numel()) for piece in pieces):
            assert numel == math.prod(own.shape), "a parameter must be taken at once"
            shapes[own.number] = own.shape
        beside.numbers = [piece.due.own.number for piece in pieces]
        last[:] = [Iteration(tuple(group["ns_coefficients"]), group["ns_steps"], group["eps"])]
        take_gradients(pieces, group, scale)

    sys.argv = list(script)
    sys.path.insert(0, str(ROOT / "examples"))
    with patch("zerox.update.matrices.average", beside), patch("zerox.update.matrices.take_gradients", noted):
        try:
            runpy.run_path(str(ROOT / script[0]), run_name="__main__")
        except SystemExit as ended:
            if ended.code:
                raise
    print(json.dumps(beside.errors(shapes, last[0])))


def command(kind: str, seed: int, steps: int) -> list[str]:
    state_dtype = "8bit" if kind == LINEAR else kind
    [python, *script] = command_of(Run("muon", LR, steps, seed))
    return [python, "-m", "bench.momentum", "--run", kind, *script, "--state-dtype", state_dtype]


def train(kind: str, seed: int, steps: int) -> tuple[float, float, float]:
    """(held-out loss, error of the momentum, error of the direction)."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    run = command(kind, seed, steps)
    return read(subprocess.run(run, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, check=True).stdout)


def read(output: str) -> tuple[float, float, float]:
    line = next((line for line in output.splitlines() if "held-out loss" in line), None)
    if line is None:
        raise ValueError(f"the example printed no result:\n{output[-2000:]}")
    of_momentum, of_direction = json.loads(output.splitlines()[-1])
    return float(line.partition("held-out loss ")[2].split()[0]), of_momentum, of_direction


def table(found: Sequence[Row]) -> str:
    """Markdown, a row for each kind; the first is what the others are held against."""
    lines = [
        f"| momentum | {columns_of_losses(found)} | error of the momentum | of the direction |",
        "|---|---:|---:|---:|---:|---:|",
    ]
    for row in found:
        errors = " | ".join(f"{statistics.fmean(row[key]):.2%}" for key in ("momentum_errors", "direction_errors"))
        lines.append(f"| {row['kind']} | {cells_of_losses(row, found[0])} | {errors} |")
    return "\n".join(lines)


def main(argv: list[str] | None = None) -> None:
    argv = sys.argv[1:] if argv is None else argv
    if argv[:1] == ["--run"]:  # as train() calls it
        run_here(argv[1] == LINEAR, argv[2:])
        return
    numbers = {"steps": {"type": int, "default": 400}, "seeds": {"type": int, "default": 3, "help": "0, 1, ..."}}
    args = parse(new_parser("bench.momentum", __doc__, **numbers), argv)
    found: list[Row] = []
    for kind in KINDS:
        runs = [train(kind, seed, args.steps) for seed in range(args.seeds)]
        losses, of_momentum, of_direction = (list(each) for each in zip(*runs, strict=True))
        found.append({"kind": kind, "losses": losses, "momentum_errors": of_momentum, "direction_errors": of_direction})
        print(found[-1], flush=True)
    print(f"\n{table(found)}")
    write_result(args, found, shape=" ".join(SHAPE), lr=LR)


if __name__ == "__main__":
    main()
