"""Classes whose elements depend on each other inside a tensor: each tensor lies whole on one rank, in its own shape."""

from __future__ import annotations

import copy
import os
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.kernels.shards import same_bits
from tests.local_optimizers import classes
from tests.local_optimizers.classes import Options
from tests.local_optimizers.test_bits import Pair, Plain
from tests.local_optimizers.test_failures import says
from tests.local_optimizers.test_state import follow_on, pass_on, same_state, shared
from tests.ranks import run_ranks
from tests.whole.rig import unequal_buckets
from zerox import ShardedOptimizer

SHAPES = {
    "wide": (30, 150),
    "square": (40, 40),
    "tall": (90, 7),
    "none": (0, 5),
    "row": (1, 64),
    "conv": (6, 5, 3, 3),
    "cube": (4, 5, 6),
    "vector": (4500,),
    "short": (33,),
    "number": (),
}
FILLED = tuple(name for name, shape in SHAPES.items() if 0 not in shape)  # by whose size Adafactor divides
MATRICES = [name for name, shape in SHAPES.items() if len(shape) == 2]


class Own(Plain):
    """Gradients are given, as those of Plain: in turn two parameters have none, and each rank lacks that of another."""

    def __init__(self, names: list[str]) -> None:
        nn.Module.__init__(self)
        generator = torch.Generator().manual_seed(0)
        for name in names:
            values = torch.randn(SHAPES[name], generator=generator)
            if name == "tall":
                values = values.t().contiguous().t()
            if name == "conv":
                values = values.to(memory_format=torch.channels_last)
            self.register_parameter(name, nn.Parameter(values))


class Both(Pair):
    def backward(self, number: int, branch: bool) -> None:
        for index, (_, param) in enumerate(self.model.named_parameters()):
            if index % 5 == number % 5 or index % 3 == (number + self.rank) % 3 or not self.owns(param):
                continue
            generator = torch.Generator().manual_seed(1000 * self.rank + 10 * number + index)
            grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
            param.grad, self.grads[param] = grad, grad.clone()


class CountingLamb(classes.Lamb):
    """Counts its steps in the group too, and multiplies with a number that it keeps for each parameter."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0)

    @torch.no_grad()
    def step(self, closure: Any = None, fails: bool = False) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if any(param.grad is not None for param in group["params"]):
                group["k"] = group["k"] + 1
        loss = super().step(closure)
        if fails:
            raise ArithmeticError("this rank can't")
        return loss

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        super().update(param, state, group)
        state["factor"] = state.get("factor", 1.0) * 0.9
        param.mul_(1 - 1e-3 * state["factor"] / group["k"])


@dataclass(frozen=True)
class Case:
    cls: Any
    options: tuple[tuple[str, Any], ...] = ()
    whole: str = "all"
    names: tuple[str, ...] = tuple(SHAPES)
    groups: Callable[..., Any] = list

    def pair(self, rank: int, world_size: int, dtype: torch.dtype = torch.float32, **options: Any) -> Both:
        kind = self.cls, dict(self.options)
        options = {"groups": self.groups, **options}
        return Both(rank, world_size, kind, dtype, Own(list(self.names)), whole=self.whole, **options)


MUON = Case(torch.optim.Muon, (("lr", 0.02), ("weight_decay", 0.1)), "matrices", tuple(MATRICES))
LAMB, LARS = Case(classes.Lamb), Case(classes.Lars, (("lr", 10.0),))
CASES = {
    "Muon": MUON,
    "Muon, all": Case(MUON.cls, MUON.options, "all", MUON.names),
    "LAMB": LAMB,
    "LARS": LARS,
    "Adafactor": Case(torch.optim.Adafactor, (("lr", 0.1), ("weight_decay", 0.1)), names=FILLED),
    "rows and columns": Case(classes.Factored),
    "LAMB that counts": Case(CountingLamb),
    "decay of matrices": Case(classes.DecayOfMatrices, whole="matrices"),
    "AdamW": Case(torch.optim.AdamW, (("amsgrad", True),), "matrices"),
}


def follow(rank: int, world_size: int, names: list[str], dtype: torch.dtype, steps: int, options: Options) -> None:
    for name in names:
        pair = CASES[name].pair(rank, world_size, dtype, **options)
        assert unequal_buckets(pair.ours) > 0 or world_size == 1
        for number in range(steps):
            pair.step(number, branch=True, clip=0.5)
        assert pair.theirs.param_groups[0].get("k") == pair.ours.param_groups[0].get("k")


FROM_PAPERS = ["Muon", "LAMB", "LARS", "Adafactor"]


@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
@pytest.mark.parametrize("stage", [1, 2, 3])
def test_parameters_and_state_have_the_bits_of_the_class_unsharded(world_size: int, stage: int) -> None:
    """20 clipped steps in each stage at one number of ranks, and a few at the others. Parameters lack gradients on some
    ranks or on all."""
    run_ranks(follow, world_size, FROM_PAPERS, torch.float32, 20 if world_size + stage == 5 else 6, {"stage": stage})


@pytest.mark.parametrize(("world_size", "stage"), [(1, 1), (2, 3), (3, 2)])
def test_so_have_other_classes_and_those_of_16_bit_parameters_with_masters(world_size: int, stage: int) -> None:
    others = [name for name in CASES if name not in FROM_PAPERS]
    run_ranks(follow, world_size, others, torch.float32, 4, {"stage": stage})
    run_ranks(follow, world_size, list(CASES), torch.bfloat16, 4, {"stage": stage})


def test_nothing_is_whole_by_default_and_one_rank_alone_has_matrices_only_if_asked() -> None:
    """A class without use for it sees what it saw: 1-D tensors, small ones that happen to lie on one rank too."""
    for whole, dims in (("none", [1, 1, 1]), ("matrices", [1, 2, 3]), ("all", [0, 2, 3])):
        params = [nn.Parameter(torch.ones(shape)) for shape in ((), (30, 40), (5, 5, 5))]
        ours = ShardedOptimizer(params, torch.optim.SGD, whole=whole)
        local = ours.inside.update.local  # type: ignore[attr-defined]
        assert sorted(each.param.dim() for bucket in local for each in bucket.params) == dims


def test_the_costliest_matrix_is_what_decides_on_owners() -> None:
    """Of a matrix Newton-Schulz steps, whatever the dimensions behind its first; of "all" the elements."""
    ours = ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], torch.optim.SGD, whole="matrices")
    cost = ours.inside.rules.default.cost
    assert cost((3, 2, 5), {}) == cost((10, 3), {}) == 5 * (4 * 3 * 3 * 10 + 2 * 27)
    assert cost((7,), {}) is cost((), {}) is None
    assert cost((0, 4), {}) == 0
    ours = ShardedOptimizer([nn.Parameter(torch.ones(4, 4))], torch.optim.SGD, whole="all")
    assert [ours.inside.rules.default.cost(shape, {}) for shape in ((3, 2, 5), (7,), (), (0, 4))] == [30, 7, 1, 0]


# ---- groups


def in_groups(rank: int, world_size: int, stage: int) -> None:
    """A second group that is added later, with another rate; one parameter is frozen for a step."""
    for case in (LAMB, Case(CountingLamb), MUON):
        first = len(case.names) // 2
        pair = case.pair(rank, world_size, stage=stage, groups=lambda named, first=first: named[:first])
        late = list(pair.model.named_parameters())[first:]
        for number in range(5):
            if number == 1:
                pair.ours.add_param_group({"params": late, "lr": 0.003})
                pair.theirs.add_param_group({"params": [(key, pair.twins[param]) for key, param in late], "lr": 0.003})
            pair.model.wide.requires_grad_(number != 3)
            pair.step(number, branch=True)
        for ours, theirs in zip(pair.ours.param_groups, pair.theirs.param_groups, strict=True):
            assert ours.get("k") == theirs.get("k")


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_a_group_that_is_added_trains_as_with_the_class(stage: int) -> None:
    run_ranks(in_groups, 2, stage)


class MuonAndSGD(torch.optim.Optimizer):
    """Groups of matrices for Muon, and others, as its first users had it. It counts its steps in them."""

    def __init__(self, params: Any, lr: float = 0.02, use_muon: bool = False) -> None:
        super().__init__(params, {"lr": lr, "use_muon": use_muon, "k": 0})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            group["k"] += int(any(param.grad is not None for param in group["params"]))
            for param in group["params"]:
                if group["use_muon"] != (param.dim() > 1):
                    raise ValueError("Muon is for matrices, and for all of them")
                if param.grad is None:
                    continue
                key = "of_muon" if group["use_muon"] else "of_sgd"
                mean = self.state[param].setdefault(key, torch.zeros_like(param)).lerp_(param.grad, 0.5)
                param.sub_(mean / mean.norm() if group["use_muon"] else mean, alpha=group["lr"])


def by_kind(named: list[tuple[str, Tensor]], **of_matrices: Any) -> list[dict[str, Any]]:
    matrices, others = ([each for each in named if (each[1].dim() > 1) is are] for are in (True, False))
    return [{"params": matrices, **of_matrices}, {"params": others, "lr": 0.1}]


OF_KINDS = Case(MuonAndSGD, whole="matrices", groups=partial(by_kind, use_muon=True))


def kept_by_kind(rank: int, world_size: int) -> list[set[str]]:
    """What the whole state has of matrices and of others."""
    found = []
    for case in (OF_KINDS, Case(classes.KeyOfMatrices, groups=by_kind)):
        pair = case.pair(rank, world_size)
        for number in range(5):
            pair.step(number, branch=True)
        assert [group.get("k") for group in pair.ours.param_groups] in ([5, 5], [None, None])
        kept = pair.ours.full_state_dict().get("state", {})
        found += [set(kept[0]) - {"step"}, set(kept[max(kept)]) - {"step"}] if kept else []
    return found


def test_groups_of_matrices_and_of_others_are_tried_each_by_itself() -> None:
    assert run_ranks(kept_by_kind, 2)[0] == [{"of_muon"}, {"of_sgd"}, {"mean"}, set()]


# ---- state


def trained(case: Case, rank: int, world_size: int, steps: range, **options: Any) -> Both:
    pair = case.pair(rank, world_size, **options)
    for number in steps:
        pair.step(number, branch=True)
    return pair


SAVED = {"Muon": MUON, "LAMB": LAMB}
SAVED |= {name: CASES[name] for name in ("LAMB that counts", "Adafactor", "rows and columns", "AdamW")}
SAVED["of kinds"] = OF_KINDS


def save(rank: int, world_size: int, folder: str) -> list[Options]:
    found = []
    for name, case in SAVED.items():
        pair = trained(case, rank, world_size, range(3), stage=1)
        zerox.save(Path(folder) / name, pair.model, pair.ours)
        found.append(pair.ours.full_state_dict())
    return found


def load(rank: int, world_size: int, folder: str, whole: str | None) -> list[Options]:
    """Into an optimizer that has other state. What follows has the bits of the class that has loaded all of it."""
    found = []
    for name, case in SAVED.items():
        if whole is not None and case.cls is not torch.optim.AdamW:
            continue
        pair = trained(replace(case, whole=whole or case.whole), rank, world_size, range(7, 9), stage=3)
        zerox.load(Path(folder) / name, pair.model, pair.ours)
        full = pair.ours.full_state_dict()
        follow_on(pair, shared(full))
        found.append(full)
    return found


def test_a_checkpoint_of_three_ranks_loads_at_two_and_with_another_whole(tmp_path: Path) -> None:
    saved = run_ranks(save, 3, str(tmp_path))[0]
    for then, now in zip(saved, run_ranks(load, 2, str(tmp_path), None)[0], strict=True):
        assert same_state(then, now)
    for whole in ("none", "all"):
        [now] = run_ranks(load, 2, str(tmp_path), whole)[0]
        assert same_state(saved[list(SAVED).index("AdamW")], now)


def to_the_class(rank: int, world_size: int) -> None:
    """full_state_dict() to the class and back from there, and state_dict() at the same number of ranks."""
    for case in SAVED.values():
        pair = trained(case, rank, world_size, range(3))
        full, share = shared(pair.ours.full_state_dict()), pair.ours.state_dict()
        for number, twin in enumerate(pair.twins.values()):
            for key, value in full["state"].get(number, {}).items():
                if isinstance(value, Tensor) and value.dim() > 0 and key != "master":
                    assert value.shape == pair.theirs.state[twin][key].shape, key
        weights, of_class = copy.deepcopy(pair.model.state_dict()), copy.deepcopy(pair.theirs.state_dict())
        for given in (full, share, of_class):
            other = trained(case, rank, world_size, range(7, 8))
            other.model.load_state_dict(weights)
            other.ours.load_state_dict(given)
            if given is not of_class or all("step" in state for state in of_class["state"].values()):
                assert same_state(shared(other.ours.full_state_dict()), full)
            follow_on(other, full)


def test_whole_state_goes_to_the_class_and_back() -> None:
    run_ranks(to_the_class, 2)


def through_dcp(rank: int, world_size: int, name: str, folder: str, way: str) -> None:
    case = CASES[name]
    case = replace(case, names=tuple(each for each in case.names if each != "none"))  # of which DCP has no tensors
    pass_on(lambda: case.pair(rank, world_size), folder, way)


DCP = [("Muon", "slices"), ("LAMB", "in place"), ("Adafactor", "slices")]
DCP += [("rows and columns", "whole"), ("rows and columns", "in place")]


@pytest.mark.parametrize(("name", "way"), DCP)
def test_dcp_s_ways_all_work(name: str, way: str, tmp_path: Path) -> None:
    run_ranks(through_dcp, 2, name, str(tmp_path / "x"), way)


FACTORED = "Adafactor", "rows and columns"


def read_and_write(rank: int, world_size: int, folder: str) -> None:
    """Of one parameter, by all ranks, and of all by rank 0 alone. What is written there, the class is given too."""
    for name in FACTORED:
        pair = trained(CASES[name], rank, world_size, range(3))
        path = Path(folder) / f"{name}.pt"
        if rank == 0:
            torch.save(pair.ours.state_dict(), path)
        full = shared(pair.ours.full_state_dict())
        assert same_state(torch.load(path, weights_only=True), full)
        for param, twin in pair.twins.items():
            theirs, ours = pair.theirs.state.get(twin, {}), pair.ours.full_state(param)
            assert ours.keys() - {"step"} == theirs.keys() - {"step"}
            written = {}
            for key, value in theirs.items():
                if key == "norm":
                    assert ours[key] == value
                    continue
                assert same_bits(ours[key].reshape(-1), value.detach().reshape(-1)), key
                if key != "step":
                    assert ours[key].shape == value.shape
                    written[key] = value.detach().clone() * 2
                    value.copy_(written[key])
            pair.ours.set_full_state_(param, **written)
        wide = pair.theirs.state[pair.twins[pair.model.wide]].keys() - {"step", "norm"}
        with pytest.raises(ValueError, match="must be a whole tensor of its shape"):
            pair.ours.set_full_state_(pair.model.wide, **{key: torch.ones(3) for key in wide})
        for number in range(3, 5):
            pair.step(number, branch=True)


def test_state_of_rows_and_columns_is_read_and_written_as_any_other(tmp_path: Path) -> None:
    run_ranks(read_and_write, 2, str(tmp_path))


def keys_shown(rank: int, world_size: int) -> list[set[str]]:
    """Of each parameter, where no rank reads another one's."""
    with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):
        pair = trained(CASES["Adafactor"], rank, world_size, range(3))
        return [set(pair.ours.state[param]) for param in pair.model.parameters()]


def test_ranks_without_a_parameter_show_the_keys_that_its_owner_has() -> None:
    first, second = run_ranks(keys_shown, 2)
    assert first == second
    for keys, name in zip(first, FILLED, strict=True):
        assert keys - {"step"} == ({"row_var", "col_var"} if len(SHAPES[name]) > 1 else {"variance"})


def in_other_groups(rank: int, world_size: int) -> None:
    """Matrices first and vectors later, each in a group of its own, which share what is learned of the class."""
    for name in FACTORED:
        case = replace(CASES[name], groups=by_kind)
        trained(case, rank, world_size, range(3))
        pair = case.pair(rank, world_size, groups=lambda named: [each for each in named if each[1].dim() > 1])
        pair.step(0, branch=True)
        late = [(key, param) for key, param in pair.model.named_parameters() if param.dim() < 2]
        pair.ours.add_param_group({"params": late})
        pair.theirs.add_param_group({"params": [(key, pair.twins[param]) for key, param in late]})
        for number in range(1, 4):
            pair.step(number, branch=True)


def test_groups_of_matrices_and_vectors_may_keep_other_state() -> None:
    run_ranks(in_other_groups, 2)


def bytes_kept(rank: int, world_size: int, cls: Any) -> tuple[int, int]:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((300, 200), (200, 300), (5000,), (4, 9))]
    said = zerox.estimate(params, world_size, optimizer_class=cls, whole="all")
    ours = ShardedOptimizer(params, cls, whole="all")
    torch.stack([param.sum() for param in params]).sum().backward()
    ours.step()
    return said.moments, ours.memory_bytes().moments


def test_rows_and_columns_take_as_much_memory_as_there_are() -> None:
    """Shards are multiples of 256 elements, for each kind of state."""
    for world_size in (1, 2):
        most = 4 * (200 + 300 + 200 + 300 + 5000 + 4 + 9 + 3 * 256)
        counted = [moments for _, moments in run_ranks(bytes_kept, world_size, torch.optim.Adafactor)]
        assert max(counted) <= most
        said = run_ranks(bytes_kept, world_size, torch.optim.Adafactor)[0][0]
        assert said == max(counted) if world_size == 1 else said in counted


def test_the_estimate_of_a_rank_s_own_parameter_has_its_rows_and_columns() -> None:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((300, 200), (64, 64))]
    options: dict[str, Any] = {"optimizer_class": torch.optim.Adafactor, "whole": "all"}
    alone = zerox.estimate(params[1:], 2, **options).moments
    assert zerox.estimate(params, 2, local=params[:1], **options).moments - alone == 4 * (300 + 200 + 1)  # and a count


class KeyOfVectors(classes.Simple):
    """Keeps something for large matrices too, and is tried with small ones."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if param.dim() < 2 or param.numel() > 500:
            state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.5)
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]


class SometimesOfVectors(classes.Simple):
    """Keeps something for vectors too, under an option, or from the second step on."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if param.dim() > 1 or group["always"] or (group["late"] and state.get("count")):
            state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.5)
        state["count"] = 1
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]


def test_dimensions_decide_alike_in_all_steps_and_under_all_options() -> None:
    params = [nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(7))]
    with pytest.raises(ValueError, match="of other numbers of dimensions from step to step"):
        ShardedOptimizer(params, SometimesOfVectors, whole="all", always=False, late=True)
    ours = ShardedOptimizer(params, SometimesOfVectors, whole="all", always=False, late=False)
    more = [nn.Parameter(torch.ones(3, 2)), nn.Parameter(torch.ones(7))]
    with pytest.raises(ValueError, match="keeps 'mean' for 1-D parameters under some options only"):
        ours.add_param_group({"params": more, "always": True})
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()


def test_a_number_without_dimensions_is_a_vector_to_adafactor() -> None:
    params = of((30, 20), ())()
    ours = ShardedOptimizer(params, torch.optim.Adafactor, whole="all")
    for param in params:
        param.grad = torch.ones_like(param)
    ours.step()
    assert set(ours.state[params[1]]) == {"step", "variance"}


def test_state_that_it_did_not_keep_when_it_was_tried_is_named() -> None:
    params = [nn.Parameter(torch.ones(30, 20)), nn.Parameter(torch.ones(7))]
    ours = ShardedOptimizer(params, KeyOfVectors, whole="all")
    for param in params:
        param.grad = torch.ones_like(param)
    with pytest.raises(RuntimeError, match="kept none for such parameters when it was tried"):
        ours.step()


# ---- what goes wrong


def fail(rank: int, world_size: int, who: int, dtype: torch.dtype, stage: int) -> tuple[list[str], bool]:
    model = Own(list(SHAPES)).to(dtype)
    ours = ShardedOptimizer(model.named_parameters(), CountingLamb, whole="all", stage=stage, bucket_cap_mb=0.03)

    def give() -> None:
        for param in model.parameters():
            param.grad = torch.ones_like(param)

    give()
    ours.step()
    ours.zero_grad()
    before = [param.detach().clone() for param in model.parameters()]
    give()
    said = [says(lambda: ours.step(fails=rank == who)), says(ours.step)]
    return said, all(map(same_bits, before, (param.detach() for param in model.parameters())))


@pytest.mark.parametrize(
    ("who", "dtype", "stage"), [(0, torch.float32, 2), (2, torch.bfloat16, 1), (1, torch.float32, 3)], ids=str
)
def test_all_ranks_raise_and_all_parameters_are_as_before(who: int, dtype: torch.dtype, stage: int) -> None:
    for said, as_before in run_ranks(fail, 3, who, dtype, stage):
        assert f"rank {who} raised ArithmeticError: this rank can't" in said[0]
        assert "Load the last state" in said[1]
        assert as_before


def of(*shapes: tuple[int, ...]) -> Callable[[], list[nn.Parameter]]:
    return lambda: [nn.Parameter(torch.ones(shape)) for shape in shapes]


MATRIX, MIXED, DEEP = of((30, 20)), of((30, 20), (7,)), of((3, 4, 5), (6, 2))
PASS_MATRICES = "Pass whole='matrices': parameters of two or more dimensions then lie whole on one rank each"
PASS_ALL = "Pass whole='all': all parameters then lie whole on one rank each"
GIVE = "Give it only parameters of two or more dimensions, with whole='matrices', and the others to another optimizer"
TOGETHER = r"lets tensors depend on each other: after \d+ steps its .* differ between tensors that share"
# The class, its parameters, whole, and what the error says.
REFUSED: dict[str, tuple[Any, Any, str, str]] = {
    "Muon, cut": (torch.optim.Muon, MATRIX, "none", PASS_MATRICES),
    "Muon of vectors too": (torch.optim.Muon, MIXED, "none", GIVE),
    "the same, whole": (torch.optim.Muon, MIXED, "all", GIVE),
    "Muon of three dimensions": (
        torch.optim.Muon,
        DEEP,
        "matrices",
        r"2-D and 3-D as whole ones: Muon only",
    ),
    "LAMB of matrices, cut": (classes.Lamb, MATRIX, "none", PASS_MATRICES),
    "LAMB, cut": (classes.Lamb, MIXED, "none", PASS_ALL),
    "LAMB with vectors cut": (classes.Lamb, MIXED, "matrices", PASS_ALL),
    "LARS, cut": (classes.Lars, of((9,)), "none", PASS_ALL),
    "decay of matrices, cut": (classes.DecayOfMatrices, MIXED, "none", PASS_MATRICES),
    **{
        f"{cls.__name__}, whole={whole}": (cls, MIXED, whole, TOGETHER)
        for cls in (classes.Prodigy, classes.ClippingAdamW, classes.RandomRounding, classes.OneDrawAStep)
        for whole in ("none", "all")
    },
    "a sum in the group": (classes.SumInGroup, MATRIX, "matrices", TOGETHER),
    "LBFGS": (torch.optim.LBFGS, MIXED, "all", "searches along one direction"),
    "Adafactor, cut": (torch.optim.Adafactor, MIXED, "none", PASS_ALL),
    "Adafactor with vectors cut": (torch.optim.Adafactor, MIXED, "matrices", PASS_ALL),
    "sums over all but one dimension": (classes.RowSums, of((5, 4, 3)), "all", r"keeps 'rows' of shape \(252, 1\)"),
    "a key of matrices only": (
        classes.KeyOfMatrices,
        MIXED,
        "matrices",
        "for a tensor of 2 dimensions and not",
    ),
    "another word": (torch.optim.SGD, MIXED, "some", "whole must be one of"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_class_that_needs_more_is_told_what_helps(case: str) -> None:
    cls, params, whole, says = REFUSED[case]
    with pytest.raises(ValueError, match=rf"(?s){says}"):
        ShardedOptimizer(params(), cls, whole=whole)
    with pytest.raises(ValueError, match=rf"(?s){says}"):
        zerox.estimate(params(), 2, optimizer_class=cls, whole=whole)


def test_what_the_error_says_helps() -> None:
    for cls, params, _, said in REFUSED.values():
        if said in (PASS_MATRICES, PASS_ALL):
            ShardedOptimizer(params(), cls, whole="matrices" if said == PASS_MATRICES else "all")
    ShardedOptimizer(MATRIX(), torch.optim.Muon, whole="matrices")
    matrix, vector = MIXED()
    groups = [{"params": [matrix]}, {"params": [vector]}]
    ShardedOptimizer(groups, classes.KeyOfMatrices, whole="all")
    with pytest.raises(ValueError, match="whole='all' in a param group would have no effect"):
        ShardedOptimizer([{"params": [matrix], "whole": "all"}], torch.optim.SGD)


def other_whole(rank: int, world_size: int) -> str:
    return says(lambda: ShardedOptimizer(MATRIX(), torch.optim.SGD, whole=("all", "none")[rank]))


def test_ranks_with_another_whole_are_told() -> None:
    for said in run_ranks(other_whole, 2):
        assert "rank 0 has whole='all'; rank 1 has whole='none'" in said


# ---- bytes


def weighed(rank: int, world_size: int, whole: str, stage: int) -> tuple[Any, Any]:
    params = [nn.Parameter(torch.ones(shape)) for shape in ((90, 70), (30, 300), (5000,), (7,))]
    options: dict[str, Any] = {"whole": whole, "stage": stage, "bucket_cap_mb": 0.01}
    said = zerox.estimate(params, world_size, optimizer_class=torch.optim.AdamW, **options)
    ours = ShardedOptimizer(params, torch.optim.AdamW, **options)
    torch.stack([param.sum() for param in params]).sum().backward()
    ours.synchronize()
    return said, ours.memory_bytes()


@pytest.mark.parametrize("stage", [1, 2, 3])
def test_the_estimate_names_the_fullest_rank(stage: int) -> None:
    for whole in ("none", "matrices", "all"):
        by_rank = run_ranks(weighed, 3, whole, stage)
        said, counted = by_rank[0][0], [each for _, each in by_rank]
        moments = [each.moments for each in counted]
        if whole == "none":
            assert said.fullest_rank is None
            assert moments == [said.moments] * 3
        else:
            assert moments[said.fullest_rank] == said.moments == max(moments) > min(moments)
            assert counted[said.fullest_rank].gradients == said.gradients
