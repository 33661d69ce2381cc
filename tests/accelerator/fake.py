"""The fake accelerator of fake_accelerator.cpp as a torch device: ``fake:0`` to ``fake:3``."""

from __future__ import annotations

import functools
import json
import types
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils import cpp_extension

from tests.ranks import TIMEOUT_S, run_threads
from zerox._C import FailureDetector
from zerox.ranks.axes import Axis
from zerox.ranks.calls import say_after
from zerox.ranks.group import Ranks, with_questions
from zerox.ranks.process_group import reference_to
from zerox.residency.device_memory import BY_TYPE

HERE = Path(__file__).parent
ROOT = HERE.parents[1]


@functools.cache
def machine() -> Any:
    """The extension, built on first use. Registers the device."""
    folder = ROOT / "build" / f"fake-accelerator-{torch.__version__}"
    folder.mkdir(parents=True, exist_ok=True)
    # What knows torch is one file, since torch's headers take most of the time to compile.
    made_of = {"with_torch": ["op_arguments.cpp", "cuda/ops.cpp", "../tests/accelerator/fake_accelerator.cpp"]}
    for path in sorted((ROOT / "csrc/cuda").glob("*.cu")):
        if path.stem != "runtime":
            made_of[f"{path.stem}_on_host"] = [f"cuda/{path.name}"]
    sources = []
    for name, included in made_of.items():
        source = folder / f"{name}.cpp"  # as C++, which load() goes by the name for
        text = "".join(f'#include "{each}"\n' for each in included)
        if not source.exists() or source.read_text() != text:
            source.write_text(text)
        sources.append(source)
    flags = ["-Og", "-std=c++20", "-ffp-contract=off", "-fno-math-errno", "-fno-ipa-icf", "-fvisibility=hidden"]
    flags += ["-Wall", "-Wextra", "-Wno-unused-parameter", "-DZX_OPS_KEY=PrivateUse2"]
    made = cpp_extension.load(
        "fake_accelerator",
        [str(source) for source in sources],
        extra_cflags=flags,
        extra_include_paths=[str(ROOT / "csrc"), str(ROOT / "tests/cpp")],
        build_directory=str(folder),
    )
    torch.utils.rename_privateuse1_backend("fake")
    module = types.ModuleType("torch.fake")
    for name, value in {"is_available": True, "device_count": 4, "current_device": 0, "_is_in_bad_fork": False}.items():
        setattr(module, name, lambda value=value: value)
    torch._register_device_module("fake", module)
    BY_TYPE["fake"] = FakeMemory()
    return made


class FakeMemory:
    """zerox.residency.device_memory.DeviceMemory between ranks that are threads."""

    def share(self, tensor: Tensor) -> str:
        return json.dumps(machine().share(tensor))

    def open(self, token: str, device: torch.device) -> Tensor:
        opened: Tensor = machine().open(*json.loads(token), device.index)
        return opened

    def decline(self, token: str) -> None:
        machine().decline()


@contextmanager
def on_stream(stream: int, device: int = 0) -> Iterator[None]:
    """Work inside is submitted to ``stream``; 0 is the default one."""
    before = machine().set_stream(device, stream)
    try:
        yield
    finally:
        machine().set_stream(device, before)


def expect_no_races() -> None:
    races = machine().take_races()
    assert not races, f"{len(races)} races, the first: {races[:3]}"


class Lines:
    """The groups along one axis of a mesh of ``ranks``, by row: of each rank, its own."""

    def __init__(self, lines: Sequence[Sequence[int]], coordinate: Callable[[int], int]) -> None:
        self.of = {rank: tuple(line) for line in lines for rank in line}
        self.coordinates = tuple(coordinate(rank) for rank in sorted(self.of))
        self.stores = {line: dist.HashStore() for line in set(self.of.values())}
        self.sync_points = {line: machine().SyncPoint(len(line)) for line in self.stores}

    def axis(self, rank: int, over_gloo: bool) -> Axis:
        line = self.of[rank]
        if over_gloo:
            group = gloo_group(self.stores[line], line.index(rank), len(line))
        else:
            group = dist.ProcessGroup(self.stores[line], line.index(rank), len(line))
            backend = machine().StreamBackend(line.index(rank), len(line), self.sync_points[line])
            group._register_backend(torch.device("fake"), dist.ProcessGroup.BackendType.CUSTOM, backend)
            group._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        return Axis(group, line, self.coordinates)


def mesh_of_four() -> tuple[Lines, Lines]:
    """Two by two ranks; the inner axis first."""
    return Lines([(0, 1), (2, 3)], lambda rank: rank % 2), Lines([(0, 2), (1, 3)], lambda rank: rank // 2)


def gloo_group(store: dist.Store, rank: int, world_size: int) -> dist.ProcessGroup:
    made = dist.ProcessGroup(store, rank, world_size)
    gloo = dist.ProcessGroupGloo(store, rank, world_size, timedelta(seconds=TIMEOUT_S))
    made._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)
    made._set_default_backend(dist.ProcessGroup.BackendType.GLOO)
    return made


def run_fake_ranks(
    function: Callable[..., Any],
    world_size: int,
    kind: str,
    *args: Any,
    mesh: Sequence[Lines] = (),
    are_asked: bool = False,
) -> list[Any]:
    """``function(ranks, *args)`` on threads, rank r on ``fake:r``.

    ``kind``: "native" or "direct" over a backend with a stream of its own, as NCCL's; "via host" over gloo, through the
    host; "alone" for a world size of 1. ``are_asked``: ranks ask each other for state.
    """
    sync_point, for_questions = machine().SyncPoint(world_size), dist.HashStore()

    def serve(group: dist.ProcessGroup | None) -> Any:
        rank = 0 if group is None else group.rank()
        device = torch.device("fake", rank)
        if group is None:
            return function(Ranks.alone(device), *args)
        timeout = timedelta(seconds=TIMEOUT_S)
        times: dict[str, Any] = {"timeout": timeout, "say_after": say_after()}
        failure_detector = FailureDetector(groups=[], store=None, rank=rank, world=world_size, **times)
        axes = tuple(lines.axis(rank, over_gloo=kind == "via host") for lines in mesh)
        known: dict[str, Any] = {"to_given": reference_to(group), "failure_detector": failure_detector, "on_mesh": axes}

        def run(ranks: Ranks) -> Any:
            asked = (
                with_questions(ranks, gloo_group(for_questions, rank, world_size), [0] * world_size)
                if are_asked
                else ranks
            )
            return function(asked, *args)

        if kind == "via host":
            return run(Ranks(rank, world_size, "gloo", "direct", group, group, device, **known))
        data = dist.ProcessGroup(dist.HashStore(), rank, world_size)
        backend = machine().StreamBackend(rank, world_size, sync_point)
        data._register_backend(torch.device("fake"), dist.ProcessGroup.BackendType.CUSTOM, backend)
        data._set_default_backend(dist.ProcessGroup.BackendType.CUSTOM)
        return run(Ranks(rank, world_size, "nccl", kind, data, group, device, **known))

    return run_threads(serve, world_size)
