"""Options that benchmarks of whole steps share: what is trained, on how many ranks, by which systems."""

from __future__ import annotations

import argparse
from pathlib import Path

import torch

from bench.systems import ALONE, DTYPES, SYSTEMS, Training
from zerox._ext import cuda_refusal


def training_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {module}", description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", choices=list(DTYPES), default="fp32", help="default: %(default)s")
    parser.add_argument("--clip", action="store_true", help="clip the norm to 1")
    parser.add_argument("--layers", type=int, default=Training.layers, help="of width 512 (default: %(default)s)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all numbers there")
    parser.add_argument("--png", type=Path, metavar="FILE", help="draw them there")
    return parser


def add_device(parser: argparse.ArgumentParser) -> None:
    """--device, of what this machine can do."""
    refusal = (cuda_refusal() or None) if torch.cuda.is_available() else "torch finds no CUDA GPU"

    def usable(name: str) -> str:
        if name == "cuda" and refusal:
            raise argparse.ArgumentTypeError(refusal)
        return name

    default = "cpu" if refusal else "cuda"
    parser.add_argument("--device", type=usable, choices=("cpu", "cuda"), default=default, help=f"default: {default}")


def step_parser(module: str, description: str | None) -> argparse.ArgumentParser:
    parser = training_parser(module, description)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2], metavar="N", help="world sizes (default: 2)")
    parser.add_argument("--systems", nargs="+", metavar="WORD", help=f"those with a word in: {'; '.join(SYSTEMS)}")
    return parser


def parse_step(parser: argparse.ArgumentParser, argv: list[str] | None) -> argparse.Namespace:
    """Ends the process, as argparse does, with a line for numbers under 1 and words that are in no system's name."""
    args = parser.parse_args(argv)
    for name, value in vars(args).items():
        numbers = value if isinstance(value, list) else [value]
        if any(isinstance(each, int) and not isinstance(each, bool) and each < 1 for each in numbers):
            parser.error(f"--{name} takes numbers from 1 on")
    if "systems" in args and not all(names_for(args.systems, world_size) for world_size in args.ranks):
        parser.error(f"no system has one of these words in its name: {' '.join(args.systems)}")
    return args


def names_for(wanted: list[str] | None, world_size: int) -> list[str]:
    """Systems whose name has one of the wanted words in it; alone those that need no group."""
    names = [kind.name for kind in ALONE] if world_size == 1 else list(SYSTEMS)
    return [name for name in names if not wanted or any(word.lower() in name.lower() for word in wanted)]
