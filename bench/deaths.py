"""How soon all other ranks have their error when one is killed, at each place where a training can be.

    python -m bench.deaths [--ranks 3 4 8] [--kills 50] [--json FILE]

Ranks take turns in being killed (SIGKILL), by themselves, at their place. Ranks that have raised live on until the last
has its error, as under a debugger, in a notebook, or where a script catches the error: no rank is helped by another's
end.
"""

from __future__ import annotations

import argparse
import itertools
import os
import signal
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import zerox
import zerox.checkpoint.store
import zerox.engine
from bench.facts import write_result
from tests.mortal_ranks import MortalRanks, start_ranks
from zerox.flow.params import ParamGather
from zerox.ranks.group import EXCHANGES, Ranks

PLACES = ("constructor", "forward", "backward", "clip", "step", "gather", "save", "between steps")
STAGES = (1, 2)
STEPS = 4
DEADLY_STEP = 2
TIMEOUT_S = 60.0  # of the group: what a rank waits that nothing wakes
DEATH = "death"
Row = dict[str, Any]


class Training:
    """A small model with four buckets; rank ``victim`` is killed at ``place``, or nobody if it is None."""

    def __init__(self, rank: int, stage: int, place: str | None, folder: Path) -> None:
        self.place, self.folder = place, folder
        if place == "constructor":
            self.die_at_call(Ranks, "broadcast", 2)
        torch.manual_seed(rank)
        self.model = nn.Sequential(*(nn.Linear(64, 64) for _ in range(4)))
        self.optimizer = zerox.FusedShardedAdam(self.model.named_parameters(), stage=stage, bucket_cap_mb=0.0167)

    def die(self, *_: Any) -> None:
        (self.folder / DEATH).write_text(repr(time.monotonic()))
        os.kill(os.getpid(), signal.SIGKILL)

    def die_at_call(self, owner: Any, name: str, nth: int) -> None:
        """This rank dies when ``owner.name`` is called for the nth time from now."""
        inside: Callable[..., Any] = getattr(owner, name)
        calls = itertools.count(1)

        def wrapped(*args: Any, **kwargs: Any) -> Any:
            if next(calls) == nth:
                self.die()
            return inside(*args, **kwargs)

        setattr(owner, name, wrapped)

    def arm(self) -> None:
        """In this step the rank dies."""
        if self.place == "forward":
            self.model[2].register_forward_hook(self.die)
        elif self.place == "backward":
            self.model[1].register_forward_hook(self.die_in_its_backward)
        elif self.place == "clip":
            self.die_at_call(zerox.engine, "total_norm", 1)
        elif self.place == "step":
            self.die_at_call(zerox.engine, "update", 2)
        elif self.place == "gather":
            self.die_at_call(ParamGather, "end_step", 1)
        elif self.place == "save":
            self.die_at_call(zerox.checkpoint.store, "write_parts", 1)
        elif self.place == "between steps":
            self.die()

    def die_in_its_backward(self, _: nn.Module, __: Any, output: Tensor) -> None:
        output.register_hook(self.die)

    def run(self) -> None:
        for step in range(STEPS):
            if step == DEADLY_STEP:
                self.arm()
            self.model(torch.randn(4, 64)).square().mean().backward()
            self.optimizer.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            if step == DEADLY_STEP:
                zerox.save(self.folder / "checkpoint", self.model, self.optimizer)


def train(
    rank: int, world_size: int, stage: int, place: str, exchange: str, victim: int, folder: str
) -> tuple[float, str] | None:
    """Seconds from the death to this rank's error, and what it says. None if there was none."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    where = Path(folder)
    try:
        Training(rank, stage, place if rank == victim else None, where).run()
    except Exception as error:
        seconds = time.monotonic() - float((where / DEATH).read_text())
        (where / f"{rank} has raised").touch()
        while len(list(where.glob("* has raised"))) < world_size - 1:
            time.sleep(0.01)
        return seconds, str(error)
    return None


class NoError(Exception):
    """A rank went on, or hung, where another had died."""


def kill_one(
    world_size: int, stage: int, place: str, victim: int, exchange: str, folder: Path, limit_s: float
) -> list[tuple[float, str]]:
    """Of each survivor: seconds from the death to its error, and what that says. NoError if one has none in time."""
    folder.mkdir()
    args = (stage, place, exchange, victim, str(folder))
    run: MortalRanks = start_ranks(train, world_size, *args, folder=folder / "ranks", timeout_s=TIMEOUT_S)
    try:
        survivors = [rank for rank in range(world_size) if rank != victim]
        answers = [run.answer(rank, within_s=limit_s) for rank in survivors]
    finally:
        run.close()
    for rank, answer in zip(survivors, answers, strict=True):
        if not isinstance(answer, tuple):
            what = f"{world_size} ranks, stage {stage}, rank {victim} killed in {place}: rank {rank}"
            raise NoError(f"{what} had no error within {limit_s:g} s" if answer is None else f"{what}: {answer}")
    return answers


def rows_of(world_size: int, kills: int, exchange: str, limit_s: float, folder: Path) -> list[Row]:
    """A row a place and stage, of ``kills`` shared among them."""
    cases = list(itertools.product(PLACES, STAGES))
    seconds: dict[tuple[str, int], list[float]] = {case: [] for case in cases}
    for number in range(max(kills, len(cases))):
        place, stage = cases[number % len(cases)]
        # Moves on by one from round to round, so that no place always loses the same rank.
        victim = (number + number // len(cases)) % world_size
        answers = kill_one(world_size, stage, place, victim, exchange, folder / str(number), limit_s)
        seconds[place, stage].append(max(each for each, _ in answers))
    return [
        {
            "ranks": world_size,
            "exchange": exchange,
            "place": place,
            "stage": stage,
            "kills": len(found),
            "median_s": statistics.median(found),
            "worst_s": max(found),
        }
        for (place, stage), found in seconds.items()
    ]


HEADER = ("ranks", "place        ", "stage", "kills", "median s", "worst s")


def line(cells: tuple[object, ...]) -> str:
    return "  ".join(f"{cell!s:>{len(name)}}" for cell, name in zip(cells, HEADER, strict=True))


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m bench.deaths", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--ranks", type=int, nargs="+", default=[3, 4, 8], metavar="N", help="default: 3 4 8")
    parser.add_argument("--kills", type=int, default=50, help="for each number of ranks; 16 at least (default: 50)")
    parser.add_argument("--exchange", choices=EXCHANGES, default="direct", help="default: %(default)s")
    parser.add_argument("--limit", type=float, default=2 * TIMEOUT_S, help="seconds a kill may take, start included")
    parser.add_argument("--json", type=Path)
    parser.add_argument("--png", type=Path, help="ignored: there is nothing to draw")
    return parser.parse_args(argv)


def main(argv: list[str] | None = None) -> int:
    args = parse(argv)
    rows: list[Row] = []
    load = os.getloadavg()[0]
    print(line(HEADER))
    with tempfile.TemporaryDirectory() as folder:
        for world_size in args.ranks:
            (Path(folder) / str(world_size)).mkdir()
            try:
                found = rows_of(world_size, args.kills, args.exchange, args.limit, Path(folder) / str(world_size))
            except NoError as error:
                print(error, file=sys.stderr)
                return 1
            for row in found:
                numbers = f"{row['median_s']:.2f}", f"{row['worst_s']:.2f}"
                print(line((row["ranks"], row["place"], row["stage"], row["kills"], *numbers)), flush=True)
            rows += found
    worst = max(row["worst_s"] for row in rows)
    print(f"all ranks had their error after {worst:.2f} s at most; load of the machine before: {load:.1f}")
    if args.json:
        write_result(args.json, "bench.deaths", argv, rows, {"load_before": load})
    return 0


if __name__ == "__main__":
    from bench import deaths  # its functions are run in other processes: they need a name that is the same there

    sys.exit(deaths.main())
