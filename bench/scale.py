"""What parameters and ranks cost: plans, host work, messages, and a model of step time that is checked.

python -m bench.scale [--only plan host ...] [--ranks 2 4] [--latency-us 25] [--bandwidth-gb-s 12.5]
    [--json FILE] [--png FILE]

plan     of models from 124 M to 405 B parameters over 8 to 16,384 ranks, from shapes alone: time and peak memory
         of Python's, buckets, what a rank sends in a step, and the buffers that buckets take on their way
host     construction, hooks and step() of many small parameters, buckets and (nothing is sent) ranks
traffic  messages and bytes of a step, counted by the extension, against the closed form
step     the event model of bench/step_model.py, from measured compute and one bucket's costs, beside real steps
wire     direct and native exchange over gloo, by size of the slice
bound    the same by bench/network.py's formulas for a network with --latency-us, --bandwidth-gb-s and --post-us
cap      the model's step over the bucket size on that network, a rank being a device of 400 TFLOP/s
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing.spawn import ProcessRaisedException

from bench import host, network, planning, step_check, traffic_check, wire
from bench.facts import write_result
from bench.jobs import WrongResult
from bench.network import Network
from bench.scale_plots import save_picture
from bench.shapes import MODELS
from bench.systems import Training

Row = dict[str, Any]
PARTS = ("plan", "host", "traffic", "step", "wire", "bound", "cap")


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.scale", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=PARTS, default=list(PARTS), metavar="PART", help="default: all")
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], metavar="N", help="measured (default: 2 4)")
    parser.add_argument("--planned", type=int, nargs="+", default=[8, 64, 1_024, 16_384], metavar="N", help="ranks")
    parser.add_argument("--models", nargs="+", choices=list(MODELS), default=list(MODELS), metavar="MODEL")
    parser.add_argument("--backend", choices=["gloo", "nccl"], default="gloo", help="of plans (default: %(default)s)")
    parser.add_argument("--latency-us", type=float, default=25.0, help="of a message (default: %(default)s)")
    parser.add_argument("--bandwidth-gb-s", type=float, default=12.5, help="of a rank's link (default: %(default)s)")
    parser.add_argument("--post-us", type=float, default=10.0, help="of the host, to post a message (default: 10)")
    parser.add_argument(
        "--layers", type=int, default=Training.layers, help="of the measured GPT (default: %(default)s)"
    )
    parser.add_argument("--rounds", type=int, default=15, help="of each measurement (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    args = parser.parse_args(argv)
    least = {"ranks": 2, "planned": 2, "rounds": 2, "layers": 1, "latency_us": 0, "bandwidth_gb_s": 1e-3, "post_us": 0}
    for name, bound in least.items():
        value = getattr(args, name)
        if min(value if isinstance(value, list) else [value]) < bound:
            parser.error(f"--{name.replace('_', '-')} takes numbers from {bound:g} on")
    return args


def parts_of(args: argparse.Namespace) -> dict[str, Callable[[], list[Row]]]:
    net = Network(latency_s=args.latency_us / 1e6, bytes_per_s=args.bandwidth_gb_s * 1e9, post_s=args.post_us / 1e6)
    training = Training(layers=args.layers, batch=1)
    return {
        "plan": lambda: planning.run(args.models, args.planned, args.backend),
        "host": lambda: host.run([100, 1_000, 10_000], [1, 10, 100, 1_000], [2, 8, 64, 512, 1_024], args.rounds),
        "traffic": lambda: traffic_check.run(args.ranks, replace(training, layers=min(2, args.layers))),
        "step": lambda: step_check.run(args.ranks, training, args.rounds),
        "wire": lambda: wire.run([2, 4, 8], args.rounds),
        "bound": lambda: network.bounds(net, [64, 128, 256, 512, 1_024]),
        "cap": lambda: network.sweeps(net, ["gpt2-124m", "llama-8b"], [64, 256, 1_024], args.backend),
    }


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows: list[Row] = []
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        for name, part in parts_of(args).items():
            if name in args.only:
                rows += part()
                print()
    except (ProcessRaisedException, WrongResult) as error:
        print(error, file=sys.stderr)
        return 1
    finally:
        torch.set_num_threads(num_threads)
    if args.json:
        write_result(args.json, "bench.scale", argv, rows)
    if args.png:
        save_picture(rows, args.png)
    return 0


if __name__ == "__main__":
    sys.exit(main())
