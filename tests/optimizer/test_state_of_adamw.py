"""State that goes to torch's AdamW and comes from it: each of its paths, its flags, and the kind of weight decay."""

from __future__ import annotations

import copy
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.kernels.shards import same_bits
from tests.optimizer.test_state_dict import small
from zerox import FusedShardedAdam, load, save


@pytest.mark.parametrize("flags", [{}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("through_dcp", [False, True])
def test_adamw_goes_on_from_it_on_each_of_its_paths(flags: dict[str, bool], through_dcp: bool) -> None:
    model, optimizer = small(lr=0.1)
    other = nn.Linear(3, 2)
    other.load_state_dict(model.state_dict())
    torchs = torch.optim.AdamW(other.parameters(), **flags)  # type: ignore[arg-type]
    if through_dcp:
        set_optimizer_state_dict(other, torchs, copy.deepcopy(get_optimizer_state_dict(model, optimizer)))
    else:
        torchs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    torchs.param_groups[0].update(flags)  # as of any loaded group
    for each, its in ((model, optimizer), (other, torchs)):
        each(torch.tensor([[1.0, -2.0, 3.0]])).square().sum().backward()
        its.step()
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        assert torchs.state[q]["step"].dtype is torch.float32
        assert float(torchs.state[q]["step"]) == 3.0
        torch.testing.assert_close(p, q)


@pytest.mark.parametrize("decoupled", [True, False])
def test_the_kind_of_weight_decay_stays_as_built_with_a_warning(decoupled: bool, tmp_path: Path) -> None:
    """torch.optim.Adam's state doesn't make Adam of AdamW, nor the other way round; also through a checkpoint."""
    model, theirs = small(torch.optim.Adam if decoupled else torch.optim.AdamW)
    warned = pytest.warns(UserWarning, match=rf"decoupled_weight_decay={not decoupled}.*\[0\] keep.*={decoupled}")
    target, optimizer = small(decoupled_weight_decay=decoupled, lr=0.5)
    with warned:
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is decoupled
    assert optimizer.param_groups[0]["lr"] == 1e-3, "the other options are those saved"
    model, other_kind = small(decoupled_weight_decay=not decoupled)
    save(tmp_path / "saved", model, other_kind)
    with warned:
        load(tmp_path / "saved", target, optimizer)
    assert optimizer.param_groups[0]["decoupled_weight_decay"] is decoupled
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        optimizer.load_state_dict(
            copy.deepcopy(small(torch.optim.AdamW if decoupled else torch.optim.Adam)[1].state_dict())
        )


FLAGS = [{"foreach": True}, {"fused": True}, {"foreach": False, "fused": None, "differentiable": False}]


@pytest.mark.parametrize("flags", FLAGS, ids=str)
def test_flags_of_torch_s_adamw_are_taken_and_given_back(flags: dict[str, Any]) -> None:
    _, plain = small()
    _, built = small(**flags)
    _, theirs = small(torch.optim.AdamW, **flags)
    model = nn.Linear(3, 2)
    grouped = FusedShardedAdam([{"params": list(model.parameters()), **flags}])
    grouped.load_state_dict(copy.deepcopy(theirs.state_dict()))
    capturable = copy.deepcopy(theirs.state_dict())
    capturable["param_groups"][0]["capturable"] = True
    grouped.load_state_dict(capturable)
    FusedShardedAdam(grouped.param_groups)  # what the constructor decides is not taken from there
    for optimizer in (built, grouped):
        for name, value in flags.items():
            assert optimizer.param_groups[0].get(name) or not value
        back = small(torch.optim.AdamW)[1]
        back.load_state_dict(copy.deepcopy(optimizer.state_dict()))
        assert bool(back.param_groups[0]["fused"]) == bool(flags.get("fused"))
        for p in back.param_groups[0]["params"]:
            p.grad = torch.ones_like(p)
        back.step()
    for ours, others in zip(plain.param_groups[0]["params"], built.param_groups[0]["params"], strict=True):
        assert same_bits(ours.detach(), others.detach()), "they have no effect here"


def test_flags_that_can_t_be_are_refused() -> None:
    for kind in (FusedShardedAdam, torch.optim.AdamW):
        with pytest.raises(RuntimeError, match="`fused` and `foreach` cannot be `True` together"):
            small(kind, foreach=True, fused=True)
        with pytest.raises(RuntimeError, match="`fused` does not support `differentiable`"):
            small(kind, fused=True, differentiable=True)
    for attempt in (
        lambda: small(differentiable=True),
        lambda: FusedShardedAdam([{"params": [nn.Parameter(torch.ones(2))], "differentiable": True}]),
        lambda: small()[1].load_state_dict(small(torch.optim.AdamW, steps=0, differentiable=True)[1].state_dict()),
    ):
        with pytest.raises(ValueError, match=r"differentiable=True.*use an optimizer of torch.optim"):
            attempt()
