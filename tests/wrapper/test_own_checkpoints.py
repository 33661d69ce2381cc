"""zerox.save() and zerox.load() have what is each rank's own, under its rank."""

from __future__ import annotations

import io
import itertools
import json
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from tests.wrapper.own_cases import Recommender, trained
from tests.wrapper.twins import STAGES, Script, of_zerox, values_of
from zerox.checkpoint import CheckpointError, manifest
from zerox.checkpoint.reader import CheckpointReader

Twin = tuple[Recommender, Any]
SGD = partial(zerox.FusedShardedSGD, lr=0.1)
RMSPROP = partial(zerox.ShardedOptimizer, optimizer_class=torch.optim.RMSprop, lr=0.01, momentum=0.5)


def adamw(script: Script) -> Twin:
    model = Recommender(script)
    return model, script.optimizer(model.groups(weight_decay=0.3), lr=0.01)


def sparse_sgd(script: Script) -> Twin:
    model = Recommender(script, sparse=True)
    return model, SGD(model.groups(), stage=script.optimizer.keywords["stage"])


def momentum(script: Script) -> Twin:
    model = Recommender(script)
    return model, SGD(model.groups(), momentum=0.9, stage=script.optimizer.keywords["stage"])


def a_class(script: Script) -> Twin:
    model = Recommender(script)
    return model, RMSPROP(model.groups(), stage=script.optimizer.keywords["stage"])


def on_one_rank_only(script: Script) -> Twin:
    """In one group with shared ones, and with running means and a count beside them."""
    model = Recommender(script)
    if script.rank != 1:
        model.tables = nn.ModuleList()
    else:
        model.tables[0] = nn.Sequential(model.tables[0], nn.BatchNorm1d(16))
    return model, script.optimizer(model.parameters(), lr=0.01)


KINDS: dict[str, Callable[[Script], Twin]] = {
    each.__name__: each for each in (adamw, sparse_sgd, momentum, a_class, on_one_rank_only)
}


def everything(model: Recommender, optimizer: Any) -> list[Tensor]:
    own = [optimizer.state.get(param) or {} for param in model.tables.parameters()]
    state = [torch.as_tensor(state[key]) for state in own for key in sorted(state)]
    options = [torch.tensor([group["lr"], group["weight_decay"]]) for group in optimizer.param_groups]
    shared = [optimizer.full_state(param) for param in model.top.parameters()]
    whole = [torch.as_tensor(each[key]) for each in shared for key in sorted(each)]
    return [each.detach().clone() for each in (*values_of(model), *state, *options, *whole)]


def goes_on(rank: int, _: int, folder: str, kind: str, stage: int) -> None:
    def train(twin: Twin, first: int, steps: int = 2) -> None:
        trained(*twin, steps=steps, first=first)

    one = KINDS[kind](of_zerox(rank, stage))
    train(one, 0, 3)
    one[1].param_groups[0]["lr"] *= 0.5
    zerox.save(folder, *one, extra={"step": 3})
    then = everything(*one)
    train(one, 3)
    # Of ours as it was built, and of one that has another state in place of it.
    for steps in (0, 1):
        other = KINDS[kind](of_zerox(rank, stage))
        if steps:
            train(other, 9, steps)
        assert not all(map(same_bits, everything(*other), then))
        assert zerox.load(folder, *other) == {"step": 3}
        found = everything(*other)
        assert len(found) == len(then)
        assert all(map(same_bits, found, then))
        train(other, 3)
        assert all(map(same_bits, everything(*other), everything(*one)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_bit_for_bit(tmp_path: Path, kind: str, stage: int) -> None:
    run_ranks(goes_on, 2, str(tmp_path / "saved"), kind, stage)
    assert json.loads((tmp_path / "saved/zerox.json").read_text())["format"] == 3


def saves_alone(rank: int, _: int, kind: str, stage: int) -> None:
    """By torch.save. Who loads it there goes on bit for bit."""
    model, optimizer = KINDS[kind](of_zerox(rank, stage))
    trained(model, optimizer, steps=3)
    whole = [optimizer.full_state_dict(to=to) for to in range(2)][rank]
    with pytest.warns(UserWarning, match=rf"the whole state of rank {rank} has that rank's own parameters only"):
        shown = optimizer.state_dict()
    file = io.BytesIO()
    torch.save({"model": model.state_dict(), "optimizer": shown}, file)
    file.seek(0)
    saved = torch.load(file, weights_only=True)
    assert saved["optimizer"]["state"].keys() == whole["state"].keys()
    for number, state in whole["state"].items():
        assert saved["optimizer"]["state"][number].keys() == state.keys()
        for key, value in state.items():
            assert same_bits(torch.as_tensor(saved["optimizer"]["state"][number][key]), torch.as_tensor(value)), key
    other = KINDS[kind](of_zerox(rank, stage))
    other[0].load_state_dict(saved["model"])
    other[1].load_state_dict(saved["optimizer"])
    for twin in ((model, optimizer), other):
        trained(*twin, steps=2, first=3)
    assert all(map(same_bits, everything(*other), everything(model, optimizer)))


@pytest.mark.parametrize("stage", STAGES)
@pytest.mark.parametrize("kind", KINDS)
def test_one_rank_s_save_has_its_own_and_all_that_ranks_share(kind: str, stage: int) -> None:
    run_ranks(saves_alone, 2, kind, stage)


def saved_at(rank: int, _: int, folder: str, kind: str = "adamw") -> None:
    one = KINDS[kind](of_zerox(rank, 2))
    trained(*one)
    zerox.save(folder, *one)


def refused(twin: Twin, folder: str, *patterns: str, strict: bool = True) -> None:
    """By zerox.load(), with nothing changed."""
    twin[1].param_groups[0]["lr"] = 0.125
    before = everything(*twin)
    with pytest.raises(CheckpointError) as error:
        zerox.load(folder, *twin, strict=strict)
    for pattern in patterns:
        assert re.search(pattern, str(error.value)), str(error.value)
    assert all(map(same_bits, everything(*twin), before))


def at_another_number(rank: int, world_size: int, folder: str) -> None:
    own = f"each rank's own .*, as tables.0.weight, of 2 ranks, and this is a run of {world_size}: load it on 2 ranks"
    for strict in (True, False) if world_size > 1 else (True,):
        refused(adamw(of_zerox(rank, 2)), folder, own, strict=strict)


@pytest.mark.parametrize("world_size", [1, 3])
def test_another_number_of_ranks_is_refused_on_all_of_them(tmp_path: Path, world_size: int) -> None:
    run_ranks(saved_at, 2, str(tmp_path / "saved"))
    run_ranks(at_another_number, world_size, str(tmp_path / "saved"))


def another_shape(table: nn.Embedding) -> nn.Module:
    return nn.Embedding(9, table.embedding_dim)


def another_dtype(table: nn.Embedding) -> nn.Module:
    return table.bfloat16()


def another_name(table: nn.Embedding) -> nn.Module:
    return nn.Sequential(table)


DIFFERENCES: dict[str, tuple[Callable[[nn.Embedding], nn.Module], list[str]]] = {
    "shape": (another_shape, [r"rank.1.model.tables.0.weight was saved as \[6, 16\], and is \[9, 16\]"]),
    "dtype": (another_dtype, [r"rank.1.model.tables.0.weight was saved as torch.float32, and is torch.bfloat16"]),
    "name": (
        another_name,
        [r"missing: model.tables.0.0.weight, rank 1's own", r"unexpected: model.tables.0.weight, rank 1's own"],
    ),
}


def differing(rank: int, _: int, folder: str, name: str) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    change, patterns = DIFFERENCES[name]
    if rank == 1:
        model.tables[0] = change(model.tables[0])
    twin = model, script.optimizer(model.groups(), lr=0.01)
    refused(twin, folder, "on rank 1: ", *patterns)
    if name == "name":  # what is not asked for stays
        before = [each.clone() for each in model.tables.parameters()]
        zerox.load(folder, *twin, strict=False)
        same = [same_bits(now, then) for now, then in zip(model.tables.parameters(), before, strict=True)]
        assert same == ([True, False] if rank == 1 else [False])


@pytest.mark.parametrize("name", DIFFERENCES)
def test_what_differs_on_one_rank_is_refused_on_all_of_them(tmp_path: Path, name: str) -> None:
    run_ranks(saved_at, 2, str(tmp_path / "saved"))
    run_ranks(differing, 2, str(tmp_path / "saved"), name)


class Counter(nn.Module):
    """``seen`` is no tensor, and in state_dict() as extra state."""

    def __init__(self, seen: int) -> None:
        super().__init__()
        self.seen = seen

    def get_extra_state(self) -> dict[str, int]:
        return {"seen": self.seen}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.seen = state["seen"]


def what_is_whose(rank: int, _: int, folder: str) -> set[str]:
    """In a model with frozen layers, buffers and extra state inside the wrapper and outside of it."""
    script = of_zerox(rank, 3)
    inside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counter(7))
    outside = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), Counter(rank), nn.Linear(2, 2).requires_grad_(False))
    outside[1].running_mean.fill_(rank)
    model = nn.ModuleDict({"inside": inside, "outside": outside})
    wrapped = script.wrap(inside)
    optimizer = script.optimizer([*inside.parameters(), *outside[0].parameters(), *outside[1].parameters()], lr=0.01)
    zerox.save(folder, model, optimizer)
    outside[1].running_mean.zero_()
    inside[2].seen = outside[2].seen = 9
    zerox.load(folder, model, optimizer)
    assert float(outside[1].running_mean[0]) == rank
    assert (inside[2].seen, outside[2].seen) == (7, rank)
    del wrapped
    return set(CheckpointReader(folder).read_metadata().state_dict_metadata)


def test_what_no_wrapper_has_is_a_rank_s_own_and_nothing_else(tmp_path: Path) -> None:
    keys, _ = run_ranks(what_is_whose, 2, str(tmp_path / "saved"))
    layers = ["0.weight", "0.bias", "1.weight", "1.bias"]
    means = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    own = {f"rank.{rank}.model.outside.{name}" for rank in (0, 1) for name in (*layers, *means, "3.weight", "3.bias")}
    shared = {f"model.inside.{name}" for name in (*layers, *means)}
    assert {key for key in keys if not key.startswith("optimizer.inside.")} == own | shared


def of_another_optimizer(rank: int, world_size: int, folder: str, differ: bool, alone: bool) -> None:
    """What another optimizer trains, or nobody, is shared where it is the same on all ranks, as before."""
    script = of_zerox(rank, 2)
    model = Recommender(script)
    if not differ:
        model.tables = nn.ModuleList([nn.Embedding(5, 16)])
        nn.init.ones_(model.tables[0].weight)
    optimizer = script.optimizer(model.top.parameters(), lr=0.01)
    another = zerox.FusedShardedAdam(model.tables.parameters(), process_group="alone") if alone else None
    trained(model, optimizer, 1)
    zerox.save(folder, model, optimizer)
    assert manifest.read(Path(folder))["format"] == (3 if differ else 2)
    then = values_of(model)
    for param in model.parameters():
        param.data.add_(1.0)
    zerox.load(folder, model, optimizer)
    assert all(map(same_bits, values_of(model), then))
    del another
    if differ:
        twin = adamw(script)
        refused(twin, folder, "missing: optimizer.tables.0.weight, rank 0's own")
        zerox.save(folder, *twin)
        refused((model, optimizer), folder, "unexpected: optimizer.tables.0.weight, rank 0's own")


@pytest.mark.parametrize(("differ", "alone"), [(True, False), (True, True), (False, False)])
def test_parameters_of_another_optimizer_are_a_rank_s_own_where_they_differ(
    tmp_path: Path, differ: bool, alone: bool
) -> None:
    run_ranks(of_another_optimizer, 2, str(tmp_path / "saved"), differ, alone)


def of_shared_alone(rank: int, _: int, folder: str) -> None:
    """A checkpoint of what ranks share is what it was, and has nothing for an optimizer with own parameters."""
    script = of_zerox(rank, 2)
    model = Recommender(script)
    zerox.save(folder, model.top, script.optimizer(model.top.parameters(), lr=0.01))
    host = torch.load(Path(folder, "host.pt"), weights_only=True)
    assert set(host) == {"groups", "memory_order", "model", "extra"}
    assert manifest.read(Path(folder))["format"] == 2
    twin = adamw(script)
    refused((twin[0], twin[1]), folder, "missing: model.tables.0.weight, rank 0's own")
    before = values_of(twin[0].tables)
    zerox.load(folder, *twin, strict=False)
    assert all(map(same_bits, values_of(twin[0].tables), before))


def test_without_them_nothing_changed_in_a_checkpoint(tmp_path: Path) -> None:
    run_ranks(of_shared_alone, 2, str(tmp_path / "saved"))


# What a rank keeps for itself does not depend on how many there are: each kind, and each stage, once.
@pytest.mark.parametrize(("kind", "stage"), zip(KINDS, itertools.cycle(STAGES)))
def test_on_3_ranks_too(tmp_path: Path, kind: str, stage: int) -> None:
    run_ranks(goes_on, 3, str(tmp_path / "saved"), kind, stage)
