"""Param groups with rules of their own: each trains as in an optimizer of that rule, and keeps what is its own."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.optimizer.models import backward, batch, make_model, train
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, FusedShardedLion, FusedShardedSGD, estimate, load, save
from zerox.engine import Engine
from zerox.rules.known import KNOWN

CLASSES: dict[str, Callable[..., Engine]] = {
    "adam": FusedShardedAdam,
    "sgd": FusedShardedSGD,
    "lion": FusedShardedLion,
}
# By rule: options that none of them has as a default.
OPTIONS: dict[str, dict[str, Any]] = {
    "adam": {"betas": (0.8, 0.95), "weight_decay": 0.1},
    "sgd": {"momentum": 0.8, "dampening": 0.25, "weight_decay": 0.01},
    "lion": {"betas": (0.8, 0.95), "weight_decay": 0.3},
}


def test_every_rule_has_a_class() -> None:
    """Muon's, which takes matrices only, is in tests/muon."""
    assert set(CLASSES) == set(OPTIONS) == set(KNOWN) - {"muon"}


def groups_of(params: list[nn.Parameter], own: str) -> Iterator[dict[str, Any]]:
    """A third of the parameters for each rule. ``own``: the class's, which its group does not name."""
    for index, (rule, options) in enumerate(OPTIONS.items()):
        named = {} if rule == own else {"rule": rule}
        yield {"params": params[index::3], **named, **options}


def three_rules(rank: int, world_size: int, own: str, stage: int, state_dtype: Any) -> bool:
    """Whether one optimizer with groups of three rules gives the bits of three optimizers with one rule each."""

    def run(make: Callable[[list[nn.Parameter]], list[Engine]]) -> list[Tensor]:
        model = make_model()
        optimizers = make(list(model.parameters()))
        for step in range(4):
            # In stage 1 the backward of every rank must reach several optimizers in the same order.
            backward(model, batch(rank, step), branch=step == 1 and (rank == 0 or stage == 1))
            for optimizer in optimizers:
                optimizer.step()
                optimizer.zero_grad()
        return [p.detach() for p in model.parameters()]

    shared = {"lr": 1e-2, "stage": stage, "bucket_cap_mb": 0.03, "state_dtype": state_dtype}
    together = run(lambda params: [CLASSES[own](list(groups_of(params, own)), **shared)])
    apart = run(
        lambda params: [
            CLASSES[rule](params[index::3], **shared, **options)
            for index, (rule, options) in enumerate(OPTIONS.items())
        ]
    )
    return all(same_bits(p, q) for p, q in zip(together, apart, strict=True))


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world_size", "own"), [(1, "adam"), (2, "sgd"), (3, "lion")])
def test_groups_of_three_rules_have_the_bits_of_three_optimizers(world_size: int, own: str, stage: int) -> None:
    for state_dtype in (torch.float32, "8bit"):
        assert run_ranks(three_rules, world_size, own, stage, state_dtype) == [True] * world_size


# ---- what a group takes from where


def weight(numel: int = 3) -> nn.Parameter:
    return nn.Parameter(torch.ones(numel))


def test_a_group_takes_lr_and_maximize_from_the_constructor_and_its_rule_s_own_defaults() -> None:
    [own, sgd, lion] = FusedShardedAdam(
        [{"params": weight()}, {"params": weight(), "rule": "sgd"}, {"params": weight(), "rule": "lion", "lr": 0.5}],
        lr=0.25,
        weight_decay=0.75,
        betas=(0.5, 0.6),
        maximize=True,
    ).param_groups
    assert own["betas"] == (0.5, 0.6)
    assert "rule" not in own
    for group, rule in ((sgd, "sgd"), (lion, "lion")):
        options = {name: value for name, value in group.items() if name not in ("params", "rule")}
        given = {"lr": 0.5 if rule == "lion" else 0.25, "maximize": True}
        assert options == {**KNOWN[rule].defaults, **given}


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "an unknown rule": ({"rule": "shampoo"}, r"rule must be one of \['adam', 'lion', 'muon', 'sgd'\], got 'shampoo'"),
    "momentum for Adam": ({"momentum": 0.9}, r"param group 1 has momentum=0.9, and its rule 'adam' has no such option"),
    "eps for Lion": ({"rule": "lion", "eps": 1e-8}, r"param group 1 has eps=1e-08, and its rule 'lion' has no such"),
    "betas for SGD": ({"rule": "sgd", "betas": (0.9, 0.9)}, r"param group 1 has betas=.*rule 'sgd'.*momentum"),
    "a value that torch refuses": ({"rule": "sgd", "momentum": -1.0}, "Invalid momentum value: -1.0"),
    "Nesterov without momentum": ({"rule": "sgd", "nesterov": True}, "Nesterov momentum requires a momentum"),
}


@pytest.mark.parametrize("case", WRONG)
def test_options_that_a_rule_lacks_are_refused_naming_both(case: str) -> None:
    options, message = WRONG[case]
    with pytest.raises(ValueError, match=message):
        FusedShardedAdam([{"params": weight()}, {"params": weight(), **options}])
    optimizer = FusedShardedAdam([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": weight(), **options})
    assert len(optimizer.param_groups) == 1


def test_a_rule_without_maximize_does_not_follow_a_constructor_that_has_it() -> None:
    params = [nn.Parameter(torch.ones(2, 2)), weight()]
    with pytest.raises(ValueError, match="the rule 'muon', which has no maximize, and would not follow"):
        FusedShardedAdam([{"params": params[0], "rule": "muon"}, {"params": params[1]}], maximize=True)


def test_a_rule_that_is_changed_later_is_refused() -> None:
    param = weight()
    optimizer = FusedShardedAdam([{"params": param, "rule": "sgd"}])
    param.sum().backward()
    optimizer.step()
    optimizer.param_groups[0]["rule"] = "lion"
    with pytest.raises(RuntimeError, match=r"param group 0 was given the rule 'lion'.*is of the rule 'sgd'"):
        optimizer.step()


def other_rule_on_rank_1(rank: int, _: int) -> None:
    with pytest.raises(ValueError, match=r"ranks must agree: rank 0 has .*rule='sgd'; rank 1 has .*rule='lion'"):
        FusedShardedAdam([{"params": weight(), "rule": "lion" if rank else "sgd"}])


def test_ranks_with_other_rules_are_told() -> None:
    run_ranks(other_rule_on_rank_1, 2)


def added_later(rank: int, world_size: int) -> bool:
    """A group of another rule that comes later has the bits of one that was there from the start."""

    def run(later: bool) -> list[Tensor]:
        model = make_model()
        [first, second] = [list(model.inner.parameters()), list(model.outer.parameters())]
        group = {"params": second, "rule": "sgd", "momentum": 0.5}
        optimizer = FusedShardedAdam([{"params": first}] if later else [{"params": first}, group], lr=1e-2)
        if later:
            optimizer.add_param_group(group)
        for step in range(3):
            backward(model, batch(rank, step))
            optimizer.step()
            optimizer.zero_grad()
        return [p.detach() for p in (*first, *second)]

    return all(same_bits(p, q) for p, q in zip(run(True), run(False), strict=True))


def test_a_group_of_another_rule_may_come_later() -> None:
    assert run_ranks(added_later, 2) == [True, True]


# ---- memory


@pytest.mark.parametrize("state_dtype", [torch.float32, "8bit"])
def test_the_estimate_knows_each_group_s_rule(state_dtype: Any) -> None:
    params = [weight(5000), weight(70), weight(8192), weight(300), weight(6000), weight(64)]
    for own in CLASSES:
        groups = list(groups_of(params, own))
        expected = estimate([dict(group) for group in groups], 1, rule=own, state_dtype=state_dtype)
        found = CLASSES[own](groups, state_dtype=state_dtype).memory_bytes()
        assert (found.moments, found.parameters) == (expected.moments, expected.parameters)
    plain = estimate(params, 1, rule="sgd")
    assert plain.moments == 0
    assert estimate(params, 1, rule="sgd", momentum=0.9).moments > 0
    with pytest.raises(ValueError, match=r"rule must be one of .* got 'shampoo'"):
        estimate(params, 1, rule="shampoo")


# ---- state


def trained(make: Callable[[Any], torch.optim.Optimizer], steps: int = 2) -> tuple[nn.Linear, torch.optim.Optimizer]:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        model = nn.Linear(5, 4)
    optimizer = make(model.named_parameters())
    go_on(model, optimizer, steps)
    return model, optimizer


def go_on(model: nn.Linear, optimizer: torch.optim.Optimizer, steps: int = 2) -> None:
    for step in range(steps):
        model(torch.arange(10.0).view(2, 5) - step).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


MOMENTUM: dict[str, Any] = {"lr": 1e-2, "momentum": 0.9, "dampening": 0.5, "weight_decay": 0.1}


def sgd_pair(**options: Any) -> dict[str, Callable[[Any], torch.optim.Optimizer]]:
    return {
        "torch": lambda params: torch.optim.SGD(params, foreach=False, **MOMENTUM | options),
        "zerox": lambda params: FusedShardedSGD(params, **MOMENTUM | options),
    }


@pytest.mark.parametrize("path", ["state_dict", "full_state_dict", "file"])
@pytest.mark.parametrize(("source", "target"), [("torch", "zerox"), ("zerox", "torch"), ("zerox", "zerox")])
def test_sgd_goes_on_from_sgd_s_state_wherever_it_began(source: str, target: str, path: str, tmp_path: Path) -> None:
    makers = sgd_pair()
    model, optimizer = trained(makers[source])
    if path == "full_state_dict" and source == "zerox":
        assert isinstance(optimizer, Engine)
        given = optimizer.full_state_dict()
    else:
        given = copy.deepcopy(optimizer.state_dict())
    if path == "file":
        torch.save(given, tmp_path / "state.pt")
        given = torch.load(tmp_path / "state.pt", weights_only=True)
    other, resumed = trained(makers[target], steps=0)
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(given)
    assert resumed.param_groups[0]["momentum"] == 0.9
    for each, its in ((model, optimizer), (other, resumed)):
        go_on(each, its)
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


def test_momentum_that_was_off_starts_from_the_gradient_when_it_is_turned_on() -> None:
    """As in torch, where the first momentum is the gradient, undampened; off and on again it is the old one."""
    found = []
    for make in sgd_pair(momentum=0.0).values():
        model, optimizer = trained(make)
        for momentum in (0.9, 0.0, 0.8):
            optimizer.param_groups[0]["momentum"] = momentum
            go_on(model, optimizer)
        found.append([p.detach().clone() for p in model.parameters()])
    for p, q in zip(*found, strict=True):
        torch.testing.assert_close(p, q, rtol=1e-6, atol=1e-7)


OTHERS: dict[str, tuple[Callable[[Any], torch.optim.Optimizer], Callable[[Any], Engine], str]] = {
    "AdamW's for SGD": (torch.optim.AdamW, FusedShardedSGD, r"param group 0 has the rule 'sgd'.*with (amsgrad|betas)"),
    "SGD's for Adam": (torch.optim.SGD, FusedShardedAdam, r"param group 0 has the rule 'adam'.*with dampening"),
    "AdamW's for Lion": (torch.optim.AdamW, FusedShardedLion, r"param group 0 has the rule 'lion'.*with amsgrad"),
    "Lion's for Adam": (FusedShardedLion, FusedShardedAdam, r"param group 0 has the rule 'adam'.*with no eps"),
    "a Lion group's for Adam": (
        lambda params: FusedShardedAdam([{"params": params, "rule": "lion"}]),
        FusedShardedAdam,
        r"param group 0 has the rule 'adam', and was saved with the rule 'lion'",
    ),
    "AdamW's for an SGD group": (
        torch.optim.AdamW,
        lambda params: FusedShardedAdam([{"params": params, "rule": "sgd"}]),
        r"param group 0 has the rule 'sgd', and was saved by another optimizer",
    ),
}


@pytest.mark.parametrize("case", OTHERS)
def test_state_of_another_rule_is_refused_naming_the_group_and_changes_nothing(case: str, tmp_path: Path) -> None:
    make, make_ours, message = OTHERS[case]
    model, theirs = trained(make)
    target, optimizer = trained(make_ours)
    before = copy.deepcopy([[p.detach() for p in target.parameters()], optimizer.full_state_dict()["state"]])  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(copy.deepcopy(theirs.state_dict()))
    if isinstance(theirs, Engine):
        save(tmp_path / "x", model, theirs)
        with pytest.raises(CheckpointError, match=r"param group 0 has the rule|unexpected|missing"):
            load(tmp_path / "x", target, optimizer)  # type: ignore[arg-type]
    after = [[p.detach() for p in target.parameters()], optimizer.full_state_dict()["state"]]  # type: ignore[attr-defined]
    assert str(after) == str(before)


def groups_keep_their_rules(rank: int, _: int, folder: str) -> Mapping[str, Any]:
    model = make_model()
    optimizer = FusedShardedAdam(list(groups_of(list(model.parameters()), "adam")), lr=1e-2)
    backward(model, batch(rank, 0))
    optimizer.step()
    full = optimizer.full_state_dict()
    if rank == 0:
        kept = [
            set(full["state"][number]) - {"step"} for group in full["param_groups"] for number in group["params"][:1]
        ]
        assert kept == [{"exp_avg", "exp_avg_sq"}, {"momentum_buffer"}, {"exp_avg"}]
        assert [group.get("rule") for group in full["param_groups"]] == [None, "sgd", "lion"]
    save(Path(folder) / "x", model, optimizer)
    return full


def test_what_a_saved_group_lacks_is_taken_from_its_own_rule() -> None:
    params = list(make_model().parameters())
    optimizer = FusedShardedAdam(list(groups_of(params, "adam")), lr=1e-2, process_group="alone")
    options = [{**group, "params": None} for group in optimizer.param_groups]
    saved = optimizer.state_dict()
    for group in saved["param_groups"]:
        del group["maximize"]
    optimizer.load_state_dict(saved)
    assert [{**group, "params": None} for group in optimizer.param_groups] == options


def test_each_parameter_s_state_has_the_keys_of_its_rule_and_groups_keep_it(tmp_path: Path) -> None:
    run_ranks(groups_keep_their_rules, 2, str(tmp_path))


def test_what_a_plain_training_does_is_untouched() -> None:
    """A group that names the class's own rule is a group that names none."""
    model = make_model()
    optimizer = FusedShardedAdam([{"params": list(model.parameters()), "rule": "adam"}], lr=1e-2)
    for step in range(3):
        backward(model, batch(0, step), branch=step == 1)
        optimizer.step()
        optimizer.zero_grad()
    plain, _, _ = train(0)
    assert all(same_bits(p.detach(), q) for p, q in zip(model.parameters(), plain, strict=True))
