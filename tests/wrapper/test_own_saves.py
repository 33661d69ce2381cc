"""Saves of what is each rank's own that end early, in other readers' hands, or with what else there may be."""

from __future__ import annotations

import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn

import zerox
from tests.kernels.shards import same_bits
from tests.local_optimizers.classes import NarrowState, PythonNumbers
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from tests.wrapper.own_cases import Recommender, trained
from tests.wrapper.test_own_checkpoints import adamw, everything, saved_at
from tests.wrapper.twins import of_zerox
from zerox.__main__ import main
from zerox.checkpoint import CheckpointError, manifest
from zerox.checkpoint.reader import CheckpointReader
from zerox.checkpoint.unwrapped import RanksOwn
from zerox.checkpoint.writer import CheckpointWriter

TIMEOUT_S = 20.0
# What rank 1 is about to do.
MOMENTS: dict[str, tuple[type, str]] = {
    "to say what it has": (RanksOwn, "describe"),
    "to make its record": (RanksOwn, "to_save"),
    "to write": (CheckpointWriter, "write_data"),
    "to look for it": (RanksOwn, "to_read"),
    "to take it": (RanksOwn, "take_state"),
}


def test_old_readers_and_files_of_one_model_refuse_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_ranks(saved_at, 2, str(tmp_path / "saved"))
    for target in ("all.pt", "weights.safetensors"):
        assert main(["convert", str(tmp_path / "saved"), str(tmp_path / target)]) == 1
        assert "each rank's own, of 2 ranks, and one file has no place" in capsys.readouterr().err
        assert not (tmp_path / target).exists()
    monkeypatch.setattr(manifest, "READ", (1, 2))
    with pytest.raises(CheckpointError, match="is of format 3: this zerox reads formats up to 2"):
        manifest.read(tmp_path / "saved")


def interrupted(rank: int, _: int, folder: str) -> None:
    """One rank can't write: the one that was there stays, and is whole."""
    one = adamw(of_zerox(rank, 2))
    trained(*one)
    zerox.save(folder, *one)
    then = everything(*one)
    trained(*one, first=3)
    with pytest.MonkeyPatch.context() as patched:
        if rank == 1:
            one[1].state[next(one[0].tables.parameters())]["odd"] = object()
        with pytest.raises(CheckpointError, match=r"on rank 1: odd in the state of tables.0.weight, this rank's own"):
            zerox.save(folder, *one)
        if rank == 1:
            del one[1].state[next(one[0].tables.parameters())]["odd"]
            patched.setattr(CheckpointWriter, "write_data", None)
        with pytest.raises(CheckpointError, match="on rank 1: TypeError"):
            zerox.save(folder, *one)
    zerox.load(folder, *one)
    assert all(map(same_bits, everything(*one), then))
    assert zerox.latest(Path(folder).parent) == Path(folder)


def test_a_save_that_one_rank_cannot_make_leaves_the_old_one(tmp_path: Path) -> None:
    run_ranks(interrupted, 2, str(tmp_path / "saved"))


def odd_tensors(rank: int, _: int, folder: str, cls: type[torch.optim.Optimizer]) -> None:
    """Of all layouts, dtypes and sizes, under classes that keep numbers in their own ways."""
    script = of_zerox(rank, 2)

    def built() -> tuple[nn.ModuleDict, Any]:
        torch.manual_seed(rank)
        own = [
            torch.randn(6, 4 + rank).t(),
            torch.randn(2, 3, 4, 5).to(memory_format=torch.channels_last),
            torch.zeros(0, 3),
            torch.randn(3, dtype=torch.float64),
            torch.randn(7).bfloat16(),
            torch.tensor(1.5),
        ]
        model = nn.ModuleDict({"own": nn.ParameterList(map(nn.Parameter, own)), "top": script.wrap(script.net())})
        return model, zerox.ShardedOptimizer(model.parameters(), optimizer_class=cls, lr=0.01)

    def train(model: nn.ModuleDict, optimizer: Any) -> None:
        for step in range(2):
            optimizer.zero_grad()
            shared: torch.Tensor = script.loss(model["top"], step)
            (shared + torch.stack([each.float().square().sum() for each in model["own"]]).sum()).backward()
            optimizer.step()

    one, other = built(), built()
    train(*one)
    zerox.save(folder, *one)
    zerox.load(folder, *other)
    train(*one)
    train(*other)
    for param, twin in zip(one[0].parameters(), other[0].parameters(), strict=True):
        assert same_bits(param, twin)
        assert param.stride() == twin.stride()
    for param, twin in zip(one[0]["own"], other[0]["own"], strict=True):
        state, loaded = one[1].state[param], other[1].state[twin]
        assert {key: type(value) for key, value in state.items()} == {key: type(each) for key, each in loaded.items()}
        assert all(same_bits(torch.as_tensor(state[key]), torch.as_tensor(loaded[key])) for key in state)


@pytest.mark.parametrize("cls", [torch.optim.NAdam, NarrowState, PythonNumbers])
def test_state_of_any_class_and_tensors_of_any_kind(tmp_path: Path, cls: type[torch.optim.Optimizer]) -> None:
    run_ranks(odd_tensors, 2, str(tmp_path / "saved"), cls)


def die(*_: Any, **__: Any) -> None:
    fail_now(signal.SIGKILL)


def with_a_death(rank: int, _: int, folder: str, moment: str) -> str:
    twin = adamw(of_zerox(rank, 2))
    trained(*twin)
    zerox.save(folder, *twin)
    if rank == 1:
        setattr(*MOMENTS[moment], die)
    call: Any = zerox.load if moment in ("to look for it", "to take it") else zerox.save
    with pytest.raises(CheckpointError) as error:
        call(folder, *twin)
    return str(error.value)


@pytest.mark.parametrize("moment", MOMENTS)
def test_a_rank_that_dies_leaves_the_old_one(tmp_path: Path, moment: str) -> None:
    folder = tmp_path / "saved"
    ranks = start_ranks(with_a_death, 2, str(folder), moment, folder=tmp_path / "ranks", timeout_s=TIMEOUT_S)
    try:
        said = ranks.answer(0, within_s=2 * TIMEOUT_S)
    finally:
        ranks.close()
    assert said.startswith(f"zerox: {folder} could not be "), said
    assert "did not answer" in said
    run_ranks(loads, 2, str(folder))


def loads(rank: int, _: int, folder: str) -> None:
    """It is whole, and a save may follow."""
    twin = adamw(of_zerox(rank, 2))
    zerox.load(folder, *twin)
    assert all(float(twin[1].state[param]["step"]) == 3 for param in twin[0].parameters() if twin[1].state.get(param))
    zerox.save(folder, *twin)


def not_in_the_model(rank: int, _: int, folder: str) -> None:
    """Under the names that the optimizer was given, or by their places; over a group that the user passes, too."""
    for named in (True, False):
        script = of_zerox(rank, 2)
        model = Recommender(script)
        given = list(model.named_parameters()) if named else list(model.parameters())
        optimizer = script.optimizer(given, lr=0.01)
        trained(model, optimizer)
        zerox.save(folder, model.top, optimizer, process_group=dist.new_group())
        then = everything(model, optimizer)
        trained(model, optimizer)
        zerox.load(folder, model.top, optimizer)
        assert all(map(same_bits, everything(model, optimizer), then))
        if not named:
            zerox.save(folder, model, optimizer)
            with pytest.raises(CheckpointError, match=r"missing: model.param 0, rank 0's own"):
                zerox.load(folder, model.top, optimizer)


def test_those_that_the_model_does_not_have(tmp_path: Path) -> None:
    run_ranks(not_in_the_model, 2, str(tmp_path / "saved"))


def beside_others(rank: int, _: int, folder: str) -> None:
    """Rank 2 has a model and an optimizer for itself, which know nothing of a rank's own, and saves with the others."""
    group = dist.new_group([0, 1])
    script = of_zerox(rank, 2)
    if rank < 2:
        model: Any = nn.ModuleDict({"table": nn.Embedding(5, 16), "top": script.net()})
        wrapped = zerox.DistributedDataParallel(model["top"], process_group=group)
        optimizer = script.optimizer(model.parameters(), lr=0.01)
        wrapped(model["table"](torch.arange(5))).sum().backward()
    else:
        model = nn.ModuleDict({"another": nn.Linear(3, 3)})
        optimizer = script.optimizer(model.parameters(), lr=0.01, process_group="alone")
        model["another"](torch.ones(3)).sum().backward()
    optimizer.step()
    zerox.save(folder, model, optimizer, process_group=dist.group.WORLD)
    keys = set(CheckpointReader(folder).read_metadata().state_dict_metadata)
    assert {key for key in keys if "table" in key and "model" in key} == {
        f"rank.{each}.model.table.weight" for each in (0, 1)
    }


def test_ranks_of_another_optimizer_save_with_them(tmp_path: Path) -> None:
    run_ranks(beside_others, 3, str(tmp_path / "saved"))
