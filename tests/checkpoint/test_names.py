"""What parameters are called in a checkpoint, and what of them may have changed since."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from tests.kernels.shards import same_bits
from zerox import CheckpointError, FusedShardedAdam, load, save
from zerox.checkpoint.place import find
from zerox.checkpoint.reader import CheckpointReader


def model_of(seed: int, width: int = 3) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, width), nn.Linear(width, 2))


def step(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    model(torch.ones(2, 4)).square().sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def names_in(path: Path) -> set[str]:
    return {name for name in CheckpointReader(find(path)).read_metadata().state_dict_metadata if name.endswith(".step")}


def given(model: nn.Module, how: str) -> Any:
    named = list(model.named_parameters())
    return {
        "unnamed": model.parameters(),
        "named": named,
        "otherwise named": [(f"net.{name}", param) for name, param in named],
        "backwards": list(reversed(named)),
        "in groups": [{"params": [named[0], named[3]]}, {"params": [named[1], named[2]]}],
    }[how]


WAYS = ["unnamed", "named", "otherwise named", "backwards", "in groups"]


def test_groups_of_other_options_don_t_become_one(tmp_path: Path) -> None:
    model = model_of(0)
    groups = given(model, "in groups")
    groups[1]["lr"] = 0.5
    save(tmp_path / "x", model, FusedShardedAdam(groups))
    other = model_of(1)
    with pytest.raises(CheckpointError, match=r"param group 0 were saved in groups \[0, 1\]: their options differ"):
        load(tmp_path / "x", other, FusedShardedAdam(other.parameters()))


def test_a_tensor_that_is_the_lr_stays_the_one_that_others_hold(tmp_path: Path) -> None:
    """A captured graph reads it. A number stays a number."""
    for lr, other in ((torch.tensor(0.25), 0.5), (0.25, torch.tensor(0.5)), (torch.tensor(0.25), torch.tensor(0.5))):
        model = model_of(0)
        optimizers = [FusedShardedAdam(model.parameters(), lr=each) for each in (lr, other)]
        save(tmp_path / "x", model, optimizers[0])
        load(tmp_path / "x", model, optimizers[1])
        [group] = optimizers[1].param_groups
        assert float(group["lr"]) == 0.25
        assert group["lr"] is other if isinstance(other, torch.Tensor) else isinstance(group["lr"], float)


@pytest.mark.parametrize("saved", WAYS)
@pytest.mark.parametrize("loaded", ["unnamed", "backwards"])
def test_parameters_are_called_as_in_the_model(tmp_path: Path, saved: str, loaded: str) -> None:
    """So that neither the order nor the names that the optimizer was given matter."""
    model, other = model_of(0), model_of(1)
    optimizer, its = FusedShardedAdam(given(model, saved)), FusedShardedAdam(given(other, loaded))
    step(model, optimizer)
    save(tmp_path / "x", model, optimizer)
    assert names_in(tmp_path / "x") == {f"optimizer.{name}.step" for name, _ in model.named_parameters()}
    load(tmp_path / "x", other, its)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(p.detach(), q.detach())
        assert same_bits(optimizer.state[p]["exp_avg"], its.state[q]["exp_avg"])


def test_what_is_not_the_model_s_is_called_by_position(tmp_path: Path) -> None:
    model, bias = model_of(0), nn.Parameter(torch.ones(2))
    optimizer = FusedShardedAdam([bias, *model.parameters()])
    save(tmp_path / "x", model, optimizer)
    assert "optimizer.param 0.step" in names_in(tmp_path / "x")
    clash = FusedShardedAdam([("0.weight", nn.Parameter(torch.ones(2))), *model.named_parameters(prefix="m")])
    with pytest.raises(CheckpointError, match=r"one name, one of them not in the model: \['0.weight'\]"):
        save(tmp_path / "y", model, clash)


def test_a_compiled_model_has_the_names_of_its_own(tmp_path: Path) -> None:
    model, other = model_of(0), model_of(1)
    optimizer, its = FusedShardedAdam(model.parameters()), FusedShardedAdam(other.parameters())
    save(tmp_path / "x", torch.compile(model), optimizer)  # type: ignore[arg-type]
    load(tmp_path / "x", other, its)
    assert torch.equal(model[0].weight, other[0].weight)


class Counting(nn.Linear):
    """A module with state that is no tensor."""

    count = 0

    def get_extra_state(self) -> dict[str, int]:
        return {"count": self.count}

    def set_extra_state(self, state: Any) -> None:
        self.count = state["count"]


def test_extra_state_of_modules_comes_back(tmp_path: Path) -> None:
    model, other = Counting(2, 2), Counting(2, 2)
    model.count = 5
    save(tmp_path / "x", model, FusedShardedAdam(model.parameters()))
    load(tmp_path / "x", other, FusedShardedAdam(other.parameters()))
    assert other.count == 5


def test_amsgrad_is_what_it_was_saved_with(tmp_path: Path) -> None:
    model, other = model_of(0), model_of(1)
    optimizer, its = FusedShardedAdam(model.parameters(), amsgrad=True), FusedShardedAdam(other.parameters())
    step(model, optimizer)
    save(tmp_path / "x", model, optimizer)
    load(tmp_path / "x", other, its)
    assert its.param_groups[0]["amsgrad"] is True
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert same_bits(optimizer.state[p]["max_exp_avg_sq"], its.state[q]["max_exp_avg_sq"])
    plain = model_of(2)
    save(tmp_path / "plain", plain, FusedShardedAdam(plain.parameters()))
    load(tmp_path / "plain", other, its)
    assert its.param_groups[0]["amsgrad"] is False
    assert not bool(its.state[other[0].weight]["max_exp_avg_sq"].any())


def test_amsgrad_is_saved_only_of_groups_that_have_it(tmp_path: Path) -> None:
    """Parameters of a bucket have it together; what is saved depends on no bucket."""
    model = model_of(0)
    groups = given(model, "in groups")
    groups[1] |= {"amsgrad": True}
    its_own = {f"{name}.max_exp_avg_sq" for name, _ in groups[1]["params"]}
    optimizer = FusedShardedAdam(groups)
    step(model, optimizer)
    save(tmp_path / "x", model, optimizer)
    known = CheckpointReader(tmp_path / "x").read_metadata().state_dict_metadata
    found = {name.removeprefix("optimizer.") for name in known if name.endswith("max_exp_avg_sq")}
    assert found == its_own


def test_a_parameter_that_was_frozen_then_starts_anew(tmp_path: Path) -> None:
    model, other = model_of(0), model_of(1)
    model[0].weight.requires_grad_(False)
    save(tmp_path / "x", model, FusedShardedAdam(model.parameters()))
    its = FusedShardedAdam(other.parameters())
    step(other, its)
    load(tmp_path / "x", other, its)
    assert not bool(its.state[other[0].weight]["exp_avg"].any())
    assert int(its.state[other[0].weight]["step"]) == 0
