"""load_weights(): each kind of files into each way in which weights may lie, and then as if the model had had them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

import zerox
from tests.checkpoint.weight_folders import FORMATS, write_weights
from tests.checkpoint.weights import CASES, MESHES, Case, Everything, contents, exchanging, made, optimizer_of, step
from tests.kernels.shards import same_bits
from tests.ranks import Once
from zerox import FusedShardedAdam, load_weights
from zerox.checkpoint import weights as module
from zerox.checkpoint.weight_reader import WeightReader
from zerox.rules.rule import REMAINDER

KINDS = (*FORMATS, "zerox")


def source_of(case: Case, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    found = contents(Everything(5, dtype, case.has_tables))
    del found["head.weight"]
    return found


@contextmanager
def counting(seen: list[WeightReader]) -> Iterator[None]:
    class Seen(WeightReader):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            seen.append(self)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "WeightReader", Seen)
        yield


def state_of(optimizer: FusedShardedAdam) -> list[Tensor]:
    """All that this rank keeps beside parameters."""
    buckets, tables = optimizer.inside.buckets, optimizer.inside.tables
    kept = [t for b in buckets for stored in b.state.values() for t in stored.tensors().values()]
    kept += [t for table in tables for t in table.kept.values()]
    return [each.clone() for each in (*kept, *(b.steps for b in buckets))]


def moments_of(optimizer: FusedShardedAdam) -> list[Tensor]:
    masters = {id(b.master.values) for b in optimizer.inside.buckets if b.master is not None}
    masters |= {id(table.master.values) for table in optimizer.inside.tables if table.master is not None}
    kept = [t for b in optimizer.inside.buckets for s in b.state.values() for t in s.tensors().values()]
    kept += [t for table in optimizer.inside.tables for t in table.kept.values()]
    return [t.clone() for t in kept if id(t) not in masters] + [b.steps.clone() for b in optimizer.inside.buckets]


def masters_follow(optimizer: FusedShardedAdam) -> bool:
    """Whether masters stand for the parameters' values, and nothing else."""
    own = [(b.master, b.param_shard) for b in optimizer.inside.buckets]
    own += [(table.master, table.own_values) for table in optimizer.inside.tables]
    kept = [(master, values) for master, values in own if master is not None]
    return all(
        not master.values.any() if master.spec == REMAINDER else same_bits(master.values, values.float())
        for master, values in kept
    )


Bits = list[Tensor]


def load_all(rank: int, size: int, cases: dict[str, Case], folder: str) -> dict[tuple[str, str], Any]:
    """By case and format: what was loaded, whether moments stayed, bytes read, and a training from there on."""
    found: dict[tuple[str, str], Any] = {}
    for place, (name, case) in enumerate(cases.items()):
        kinds = KINDS if name in ("stage 2", "stage 3", "two levels, sharded") else KINDS[place % len(KINDS) :][:1]
        for kind in kinds:
            path = Path(folder, f"{size} {name} {kind}")
            if kind == "zerox":
                saver = made(case, 5)
                zerox.save(path, *saver)
            elif rank == 0:
                write_weights(kind, source_of(case), path)
            if size > 1:
                dist.barrier()
            given = next(iter(path.iterdir())) if kind in ("safetensors", "torch") else path
            model, optimizer = made(case, 1)
            step(model, optimizer, rank, 0)
            versions = [param._version for param in model.parameters()]
            before, seen = moments_of(optimizer), list[WeightReader]()
            with counting(seen):
                keys = load_weights(optimizer, given)
            assert tuple(keys) == ([], [])
            follow = masters_follow(optimizer)
            loaded, stays = contents(model), all(map(same_bits, moments_of(optimizer), before))
            written = all(p._version > v for p, v in zip(model.parameters(), versions, strict=True))
            step(model, optimizer, rank, 1)
            found[name, kind] = loaded, stays and follow, written, seen[0].nbytes, trained_from(case, given, rank)
    return found


def trained_from(case: Case, path: Path, rank: int) -> Bits:
    """With a new optimizer."""
    model, optimizer = made(case, 1)
    load_weights(optimizer, path)
    for number in range(2):
        step(model, optimizer, rank, number)
    return [*contents(model).values(), *state_of(optimizer)]


def twins(rank: int, size: int, cases: dict[str, Case]) -> dict[str, Bits]:
    found = {}
    for name, case in cases.items():
        model = Everything(1, case.dtype, case.has_tables)
        model.load_state_dict(source_of(case), strict=False)
        with exchanging(case.exchange):
            optimizer = optimizer_of(model, case)
        for number in range(2):
            step(model, optimizer, rank, number)
        found[name] = [*contents(model).values(), *state_of(optimizer)]
    return found


ALONE = {name: CASES[name] for name in ("stage 2", "remainders", "masters")}
WORLDS = {1: ALONE, 2: CASES, 3: CASES, 4: MESHES}
TWINS = {size: Once(twins, size, cases) for size, cases in WORLDS.items()}


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> dict[int, Once]:
    folder = str(tmp_path_factory.mktemp("weights"))
    return {size: Once(load_all, size, cases, folder) for size, cases in WORLDS.items()}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in WORLDS.items() for name in cases])
def test_weights_are_loaded_to_the_bit_and_each_byte_is_read_once(runs: dict[int, Once], size: int, name: str) -> None:
    case, of_ranks = WORLDS[size][name], runs[size]()
    kinds = [kind for of, kind in of_ranks[0] if of == name]
    assert kinds
    for kind in kinds:
        stored = source_of(case, case.dtype if kind == "zerox" else torch.float32)
        source = {n: value.to(case.dtype) if value.is_floating_point() else value for n, value in stored.items()}
        source["head.weight"] = source["embed.weight"]
        for found in of_ranks:
            loaded, stays, written, _, _ = found[name, kind]
            assert loaded.keys() == source.keys()
            for each in source:
                assert same_bits(loaded[each], source[each]), (kind, each)
            assert stays, "moments and steps stay, and masters follow"
            assert written, "autograd must see it"
        read = sum(found[name, kind][3] for found in of_ranks)
        assert read == sum(value.nbytes for value in stored.values())


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in WORLDS.items() for name in cases])
def test_training_goes_on_as_from_a_model_that_had_them(runs: dict[int, Once], size: int, name: str) -> None:
    for found, twin in zip(runs[size](), TWINS[size](), strict=True):
        for (of, kind), (*_, bits) in found.items():
            if of == name and (kind != "zerox" or WORLDS[size][name].dtype is torch.float32):
                assert len(bits) == len(twin[name])
                assert all(map(same_bits, bits, twin[name])), kind
