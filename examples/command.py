"""The command line of the small examples: what is found out before ranks are started, and who says what is wrong."""

import argparse
import sys
from collections.abc import Callable
from pathlib import Path

import torch
from corpus import BadInput
from ranks import BAD_INPUT, am_rank, process_group, start


def run(parse_options: Callable[[], argparse.Namespace], train: Callable[[argparse.Namespace, int, int], None]) -> int:
    """The exit status of ``train(options, rank, num_ranks)`` on ``options.ranks`` processes with one thread each."""
    try:
        options = parse_options()
        if options.ranks < 1:
            raise BadInput("--ranks must be at least 1")
        check_picture(options.picture)
        if options.ranks > 1 and not am_rank():
            return start(options.ranks)
        torch.set_num_threads(1)
        with process_group(torch.device("cpu")) as (rank, num_ranks):
            train(options, rank, num_ranks)
    except BadInput as error:
        print(f"{Path(sys.argv[0]).name}: error: {error}", file=sys.stderr, flush=True)
        return BAD_INPUT
    return 0


def check_picture(path: Path | None) -> None:
    """BadInput if no picture can be drawn there."""
    if path is None:
        return
    find_matplotlib("--picture")
    if not path.parent.is_dir():
        raise BadInput(f"--picture {path}: there is no folder {path.parent}")


def find_matplotlib(option: str) -> None:
    try:
        import matplotlib  # noqa: F401
    except ImportError as error:
        raise BadInput(f"{option} draws with matplotlib, which is not installed (pip install matplotlib)") from error
