"""Which rectangles of a model's weights each rank reads or writes: between them all elements, each once."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.weights import CASES, MESHES, Case, Everything, contents, made, optimizer_of, step
from tests.kernels.shards import same_bits
from tests.ranks import Once
from zerox import FusedShardedAdam
from zerox._C import SyncPoint
from zerox.checkpoint.names import naming_in
from zerox.checkpoint.weight_parts import Weight, held_by_others, model_of, weights_of

Told = tuple[tuple[str, ...], tuple[int, ...], torch.dtype, list[tuple[tuple[int, ...], tuple[int, ...], Tensor]]]


def parts_now(model: nn.Module, optimizer: FusedShardedAdam) -> list[Weight]:
    optimizer.inside.sync(SyncPoint.SAVE)
    optimizer.inside.gather.prepare_checkpoint()
    return weights_of(optimizer, model)


def told(weights: list[Weight]) -> list[Told]:
    return [
        (each.names, each.shape, each.dtype, [(p.offsets, p.sizes, p.values.clone()) for p in each.parts])
        for each in weights
    ]


def tell_all(rank: int, size: int, cases: dict[str, Case]) -> dict[str, tuple[list[Told], dict[str, Tensor]]]:
    """Of each case after a step."""
    found = {}
    for name, case in cases.items():
        model, optimizer = made(case, 0)
        step(model, optimizer, rank, 0)
        found[name] = told(parts_now(model, optimizer)), contents(model)
    return found


ALONE = {name: CASES[name] for name in ("stage 2", "remainders")}
WORLDS = {1: ALONE, 2: CASES, 3: CASES, 4: {**CASES, **MESHES}}
RUNS = {size: Once(tell_all, size, cases) for size, cases in WORLDS.items()}


@pytest.mark.parametrize(("size", "name"), [(size, name) for size, cases in WORLDS.items() for name in cases])
def test_ranks_have_each_element_of_each_weight_once(size: int, name: str) -> None:
    of_ranks = [found[name] for found in RUNS[size]()]
    whole = of_ranks[0][1]
    for place, (names, shape, dtype, _) in enumerate(of_ranks[0][0]):
        count, values = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=dtype)
        for weights, _ in of_ranks:
            assert weights[place][:3] == (names, shape, dtype), "ranks have one list"
            for offsets, sizes, part in weights[place][3]:
                assert part.numel() > 0
                where = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                assert part.shape == values[where].shape == tuple(sizes)
                count[where] += 1
                values[where] = part
        assert bool((count == 1).all()), names
        assert same_bits(values, whole[names[0]]), names
    assert [name for names, *_ in of_ranks[0][0] for name in names if name != "head.weight"] == [
        name for name in whole if name != "head.weight"
    ], "the order is that of state_dict()"
    assert of_ranks[0][0][[each[0][0] for each in of_ranks[0][0]].index("embed.weight")][0] == (
        "embed.weight",
        "head.weight",
    )


def test_most_ranks_have_a_part_of_what_is_large() -> None:
    for name in CASES:
        having = [
            any(parts for names, _, _, parts in found[name][0] if names[0] == "embed.weight" or "rows" in names[0])
            for found in RUNS[3]()
        ]
        assert having == [True] * 3, name


# ---- the model


def alone(seed: int = 0) -> tuple[Everything, FusedShardedAdam]:
    model = Everything(seed)
    return model, optimizer_of(model, Case())


def test_the_model_is_found_by_its_parameters() -> None:
    model, optimizer = alone()
    assert model_of(optimizer) is model
    outer = nn.ModuleDict({"inside": model, "beside": nn.Linear(2, 2)})
    assert model_of(optimizer) is outer, "a module inside another one is no model"
    assert weights_of(optimizer, outer)[0].names == ("inside.gain",)


def test_wrappers_of_one_model_are_that_model() -> None:
    model, optimizer = alone()
    compiled = [torch.compile(model), torch.compile(model)]
    assert model_of(optimizer) in compiled
    assert [naming_in(each)("_orig_mod.gain") for each in compiled] == ["gain"] * 2
    assert weights_of(optimizer, model_of(optimizer))[0].names == ("gain",)


def test_a_model_that_is_not_known_is_asked_for() -> None:
    model, optimizer = alone()
    others = [nn.Sequential(model), nn.ModuleDict({"b": model})]
    with pytest.raises(ValueError, match=r"2 models that live have \(ModuleDict, Sequential\) .*model=model"):
        model_of(optimizer)
    others.clear()
    gc.collect()
    assert model_of(optimizer) is model
    loose = [nn.Parameter(torch.zeros(3))]
    with pytest.raises(ValueError, match="no model that lives has all parameters"):
        model_of(FusedShardedAdam(loose))


def test_what_another_optimizer_has_is_its_own() -> None:
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3), "c": nn.BatchNorm1d(2)})
    first, second = (FusedShardedAdam(model[each].named_parameters()) for each in "ab")
    outside = ["c.weight", "c.bias", "c.running_mean", "c.running_var", "c.num_batches_tracked"]
    for optimizer, own, other in ((first, "a", "b"), (second, "b", "a")):
        assert [w.names[0] for w in weights_of(optimizer, model)] == [f"{own}.weight", f"{own}.bias", *outside]
        assert held_by_others(optimizer, model) == {f"{other}.weight", f"{other}.bias"}


def test_what_a_hook_puts_into_a_state_dict_is_refused() -> None:
    def add(module: nn.Module, state: dict[str, Any], prefix: str, _: object) -> None:
        state[prefix + "made"] = module.get_parameter("weight").detach() * 2

    model = nn.Linear(2, 2)
    optimizer = FusedShardedAdam(model.named_parameters())
    model.register_state_dict_post_hook(add)
    with pytest.raises(ValueError, match="has 'made', which is no parameter and no buffer"):
        weights_of(optimizer, model)
