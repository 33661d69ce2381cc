"""Tables in stage 3: what is written outside step(), what a fork finds, and what a deleted optimizer leaves."""

from __future__ import annotations

import os

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import run_ranks
from tests.residency.rig import residents, run_by_way
from tests.rows.tables import WIDE, Model, backward, build, numbered
from zerox import sparse_params


def write(rank: int, size: int) -> None:
    table, optimizer = numbered()
    table(torch.tensor([5]))
    with torch.no_grad():
        table.weight.mul_(2)
        assert torch.equal(table(torch.tensor([5, 700]))[:, 0], torch.tensor([10.0, 1400.0]))
    residents(optimizer).release_all()
    assert torch.equal(table(torch.tensor([5, 700]))[:, 0], torch.tensor([10.0, 1400.0]))
    table.load_state_dict({"weight": torch.full(WIDE, 3.0)})
    assert torch.equal(table(torch.tensor([0, 999])), torch.full((2, WIDE[1]), 3.0))
    with optimizer.whole():
        table.weight.data.numpy()[:] = 4.0
    assert torch.equal(table(torch.tensor([1, 998])), torch.full((2, WIDE[1]), 4.0))
    with pytest.raises(ValueError, match="words"), optimizer.whole(), torch.no_grad():
        table.weight[rank] += 1.0
    residents(optimizer).release_all()
    assert torch.equal(table(torch.tensor([0, 1, 998])), torch.full((3, WIDE[1]), 4.0))
    table(torch.tensor([rank])).sum().backward()
    optimizer.step()
    torch.testing.assert_close(table(torch.tensor([0, 1])), torch.full((2, WIDE[1]), 3.5))


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_what_is_written_counts(way: str) -> None:
    run_ranks(run_by_way, 2, way, write)


def moved(rank: int, size: int) -> None:
    table, optimizer = numbered()
    table.weight.data = torch.zeros(WIDE)
    with pytest.raises(RuntimeError, match=r"'words'.* was given other memory"):
        optimizer.step()


def test_a_table_that_was_given_other_memory_is_named() -> None:
    run_ranks(moved, 2)


def with_max_norm(rank: int, size: int) -> None:
    table, _ = numbered()
    table.max_norm = 1.0
    with pytest.raises(RuntimeError, match=r"max_norm= of an embedding writes table 'words'"):
        table(torch.tensor([5]))


def test_max_norm_is_refused() -> None:
    run_ranks(with_max_norm, 2)


def forked(rank: int, size: int) -> int:
    table, _ = numbered()
    table(torch.tensor([5]))
    child = os.fork()
    if child == 0:
        try:
            table(torch.tensor([5]))
            os._exit(1)
        except RuntimeError as error:
            os._exit(0 if "table 'words' were released when this process was forked" in str(error) else 2)
    _, status = os.waitpid(child, 0)
    return os.waitstatus_to_exitcode(status)


def test_a_forked_child_is_told() -> None:
    assert run_ranks(forked, 2) == [0, 0]


def deleted(rank: int, size: int) -> None:
    table, optimizer = numbered()
    table(torch.tensor([5, 999])).sum().backward()
    optimizer.step()
    del optimizer
    assert torch.equal(table.weight[6:999, 0], torch.arange(6, 999).float())
    assert float(table(torch.tensor([5])).mean()) == 4.5


def test_a_table_outlives_its_optimizer() -> None:
    run_ranks(deleted, 2)


def params_of(model: nn.Module) -> list[Tensor]:
    return [param.detach().clone() for param in sparse_params(model)]


def state_dict_of_model(rank: int, size: int) -> None:
    model = Model()
    optimizer = build(model, stage=3)
    backward(model, rank, 0)
    optimizer.step()
    saved = {name: value.clone() for name, value in model.state_dict().items()}
    expected = params_of(model)
    optimizer.zero_grad()
    backward(model, rank, 2)
    optimizer.step()
    model.load_state_dict(saved)
    assert all(torch.equal(one, other) for one, other in zip(params_of(model), expected, strict=True))


def test_a_model_s_state_dict_comes_back() -> None:
    run_ranks(state_dict_of_model, 2)
