"""What tables do not go with is refused by name, on all ranks."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from tests.rows.tables import ROWS, WIDTH, Model, backward, build
from zerox import FusedShardedAdam, ShardedOptimizer
from zerox.rules.adam import ADAM, KIND


def table() -> nn.Parameter:
    return nn.Parameter(torch.ones(ROWS, WIDTH))


def group(**options: Any) -> list[dict[str, Any]]:
    return [{"params": [table()], "sparse": True, "weight_decay": 0.0, **options}]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_decay": 0.01}, "weight_decay=0.01: rows that no batch names would not decay"),
        ({"amsgrad": True}, "amsgrad=True"),
        ({"params": [nn.Parameter(torch.ones(5))]}, "two dimensions"),
        ({"params": [nn.Parameter(torch.ones(5, 4).t())]}, "contiguous"),
        ({"params": [nn.Parameter(torch.ones(5, 4, dtype=torch.float64))]}, "is torch.float64: tables are one of"),
        ({"params": [nn.Parameter(torch.ones(5, 0))]}, "not empty"),
    ],
)
def test_groups_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedShardedAdam(group(**options))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"reduce_dtype": torch.bfloat16}, "reduce_dtype=torch.bfloat16 does not go with sparse=True"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=re.escape(message)):
        FusedShardedAdam(group(), **options)


def test_other_optimizers_refuse_tables() -> None:
    with pytest.raises(ValueError, match="ShardedOptimizer does not go with sparse=True"):
        ShardedOptimizer(group(), torch.optim.SGD, lr=0.1)


def test_options_that_change_later_are_refused() -> None:
    optimizer = FusedShardedAdam(group())
    optimizer.param_groups[0]["weight_decay"] = 0.1
    optimizer.param_groups[0]["params"][0].grad = rows([1])
    with pytest.raises(ValueError, match=r"weight_decay=0\.1"):
        optimizer.step()


def test_calls_that_know_no_tables_are_refused() -> None:
    optimizer = FusedShardedAdam(group())
    with pytest.raises(NotImplementedError, match=r"inside join\(\) does not go with sparse=True"):
        optimizer.join()
    param = optimizer.param_groups[0]["params"][0]
    for call in (lambda: optimizer.set_full_grad_(param, param), lambda: optimizer.set_full_state_(param, step=1)):
        with pytest.raises(ValueError, match="sparse=True"):
            call()
    with pytest.raises(ValueError, match="sparse=True"):
        optimizer.clip_grad_norm_(1.0, parameters=[param])


def rows(numbers: list[int]) -> Tensor:
    values = torch.ones(len(numbers), WIDTH)
    return torch.sparse_coo_tensor(torch.tensor([numbers]).long(), values, (ROWS, WIDTH), check_invariants=False)


def wrong_gradient(rank: int, size: int, kind: str) -> None:
    param = table()
    optimizer = FusedShardedAdam([{"params": [("words", param)], "sparse": True, "weight_decay": 0.0}])
    wrong = {"dense": torch.ones(ROWS, WIDTH), "beyond": rows([3, ROWS]), "negative": rows([-1])}[kind]
    said = "has a dense gradient" if kind == "dense" else "names row"
    for call in (lambda: optimizer.clip_grad_norm_(1.0), optimizer.step):
        param.grad = wrong if rank == size - 1 else rows([4])
        with pytest.raises(RuntimeError, match=f"parameter 'words', in a param group with sparse=True,.*{said}"):
            call()
        optimizer.zero_grad()
    assert torch.equal(param, table()), "nothing has changed"
    param.grad = rows([4])
    optimizer.step()
    assert not torch.equal(param[4], table()[4])


@pytest.mark.parametrize("kind", ["dense", "beyond", "negative"])
def test_a_gradient_that_is_no_rows_of_the_table_is_named_on_all_ranks(kind: str) -> None:
    run_ranks(wrong_gradient, 2, kind)


def tied(rank: int, size: int) -> None:
    model = Model()
    optimizer = build(model)
    (model(torch.zeros(2, 3, dtype=torch.int64)) + model.words.weight.sum()).backward()
    with pytest.raises(RuntimeError, match="tied weights"):
        optimizer.step()


def test_tied_weights_are_named() -> None:
    run_ranks(tied, 2)


def multiplied(rank: int, size: int) -> None:
    model = Model()
    optimizer = build(model)
    backward(model, rank, 0)
    for param in model.parameters():
        if param.grad is not None and not param.grad.is_sparse:
            param.grad.mul_(0.5)
    with pytest.raises(RuntimeError, match=r"p\.grad\.mul_\(\) does not go with sparse=True"):
        optimizer.step()


def test_a_product_with_placeholders_beside_tables_is_refused() -> None:
    run_ranks(multiplied, 2)


def asked(rank: int, size: int) -> None:
    model = Model()
    _optimizer = build(model)
    backward(model, rank, 0)
    dense = next(param for param in model.parameters() if param.grad is not None and not param.grad.is_sparse)
    with pytest.raises(RuntimeError, match=r"norm\(\) of p\.grad does not go with sparse=True.*clip_grad_norm_\(\)"):
        dense.grad.norm()  # type: ignore[union-attr]


def test_a_norm_of_a_placeholder_beside_tables_is_refused() -> None:
    run_ranks(asked, 2)


def disagreeing(rank: int, size: int) -> None:
    options = {"sparse": True} if rank == 0 else {}
    with pytest.raises(ValueError, match="param group 0 with sparse"):
        FusedShardedAdam([{"params": [table()], "weight_decay": 0.0, **options}])


def test_ranks_that_disagree_about_a_table_are_told() -> None:
    run_ranks(disagreeing, 2)


def through_dcp(rank: int, size: int) -> None:
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict

    model = Model()
    optimizer = build(model)
    with pytest.raises(NotImplementedError, match="does not know tables, as "):
        get_optimizer_state_dict(model, optimizer, options=StateDictOptions(full_state_dict=True))


def test_dcp_s_state_dicts_are_refused() -> None:
    run_ranks(through_dcp, 2)


def test_sparse_params_are_those_of_modules_with_sparse_gradients() -> None:
    model = Model()
    assert zerox.sparse_params(model) == [model.words.weight, model.bags.weight, model.means.weight]
    assert zerox.sparse_params(nn.Embedding(3, 3)) == []
    assert zerox.sparse_params(nn.Sequential(model.words, model.words)) == [model.words.weight]


# Another value of each option that is not refused above, and is felt in two steps.
OTHERS = {"lr": 0.5, "betas": (0.0, 0.5), "eps": 9.0, "maximize": True}


def after_two_steps(**options: Any) -> Tensor:
    (own,) = groups = group(**options)
    optimizer = FusedShardedAdam(groups)
    for step in range(2):
        own["params"][0].grad = torch.sparse_coo_tensor(
            [[step, 3]], torch.ones(2, WIDTH), (ROWS, WIDTH), check_invariants=False
        )
        optimizer.step()
    return own["params"][0].detach()


# How weight_decay works, which is refused, is the one that nothing depends on.
@pytest.mark.parametrize("option", sorted(ADAM.defaults.keys() - {"weight_decay", "amsgrad", KIND}))
def test_no_option_of_adam_is_ignored_without_a_word(option: str) -> None:
    assert not torch.equal(after_two_steps(**{option: OTHERS[option]}), after_two_steps())
