"""ZEROX_FAULTS=0: no handler of signals. Operators fetch, and what no operator shows raises or ends the process."""

from __future__ import annotations

import gc
import os
import re
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.children import in_a_child
from tests.ranks import run_ranks
from tests.residency.models import ALL, CASES, DEEP, array, entropy
from tests.residency.rig import assert_same, build, made, residents, train
from tests.residency.test_faults import handler
from tests.residency.test_unannounced import NAME, READS, trained_and_released

TOLD = r"sharded \(stage=3\), and with ZEROX_FAULTS=0 .*whole\(\)"


@contextmanager
def without_faults() -> Iterator[None]:
    """Optimizers that are built inside have no handler."""
    torch._dynamo.reset()  # what is garbage, or compiled, of a test before may have the handler, and goes inside
    gc.collect()
    before = handler()
    with patch.dict(os.environ, {"ZEROX_FAULTS": "0"}):
        yield
    assert handler() == before


def as_ever(rank: int, world_size: int, name: str) -> None:
    case = ALL[name]

    def run(stage: int, hostile: bool) -> list[Tensor]:
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = case.model()
        return train(model, build(model, stage, hostile), rank, case.loss, case.wrap(model))

    with without_faults():
        expected = run(2, hostile=False)
        assert_same(run(3, hostile=True), expected)
        assert_same(run(3, hostile=False), expected)


# Of compiled models, whole ones: blocks and checkpoints, which take longer to compile, are in DEEP.
SHOWN = sorted({*CASES, "compiled", "compiled by aot_eager"} - {"raw reads in a forward"})


@pytest.mark.parametrize("name", SHOWN)
def test_operators_fetch_as_ever(name: str) -> None:
    run_ranks(as_ever, 2, name)


@pytest.mark.parametrize("name", DEEP)
@pytest.mark.deep
def test_operators_of_what_inductor_compiles_fetch_as_ever(name: str) -> None:
    run_ranks(as_ever, 2, name)


def read(rank: int, world_size: int, name: str) -> None:
    with without_faults():
        model, optimizer, param, expected = trained_and_released(rank)
        if name == "deepcopy":  # copies by an operator
            assert torch.equal(READS[name](param), expected)
        else:
            with pytest.raises(RuntimeError, match=TOLD):
                READS[name](param)
        with optimizer.whole():
            assert np.array_equal(READS[name](param), expected)
        train(model, optimizer, rank, entropy, steps=1)


@pytest.mark.parametrize("name", sorted(set(READS) - {"storage"}))
def test_a_call_that_python_shows_raises(name: str) -> None:
    run_ranks(read, 2, name)


def shown(rank: int, world_size: int, released: bool) -> None:
    with without_faults():
        model, optimizer = made(resident_mb=float("inf"))
        param = model.get_parameter(NAME)
        view, values = param.data, param.detach().clone()
        asked = [view.numpy, view.tolist, view.__dlpack__, param.data_ptr, param.untyped_storage().data_ptr]
        for ask in (*asked, lambda: repr(param)):
            if released:
                residents(optimizer).release_all()
            with pytest.raises(RuntimeError, match=TOLD):
                ask()
        with optimizer.whole():
            address = param.data_ptr()
            assert repr(values)[7:60] in repr(view)
            assert np.array_equal(view.numpy(), values)
        optimizer.unshard()
        del optimizer
        assert param.data_ptr() == view.numpy().ctypes.data == address
        assert np.array_equal(view.numpy(), values)


@pytest.mark.parametrize("released", [False, True])
def test_numpy_dlpack_repr_and_addresses_raise(released: bool) -> None:
    run_ranks(shown, 2, released)


def ends(body: Callable[[], Any]) -> int:
    pid = os.fork()
    if pid == 0:
        body()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def bad_access(rank: int, world_size: int) -> None:
    with without_faults():
        model, optimizer = made()
        param = model.get_parameter(NAME)
        with optimizer.whole():
            memory = array(param)
        param + 0  # fetches it

        def write() -> None:
            memory[...] = 1

        assert ends(memory.sum) == 0
        assert ends(write) == -signal.SIGSEGV  # resident ones may be read only
        residents(optimizer).release_all()
        assert ends(memory.sum) == -signal.SIGSEGV
        with optimizer.whole():
            assert ends(write) == 0
        train(model, optimizer, rank, entropy, steps=1)


def test_a_read_that_nothing_shows_ends_the_process() -> None:
    run_ranks(bad_access, 2)


def fork(rank: int, world_size: int) -> None:
    with without_faults():
        model, optimizer = made()
        param = model.get_parameter(NAME)
        residents(optimizer).release_all()

        def by_an_operator() -> str:
            try:
                param + 0
                return "read"
            except RuntimeError as error:
                return str(error)

        def by_its_address() -> str:
            try:
                return str(param.data_ptr())
            except RuntimeError as error:
                return str(error)

        assert "were released when this process was forked" in in_a_child(by_an_operator)
        assert re.search(TOLD, in_a_child(by_its_address))
        train(model, optimizer, rank, entropy, steps=1)


def test_a_forked_child_raises_too() -> None:
    run_ranks(fork, 2)


def evaluate(rank: int, world_size: int) -> None:
    """Nobody says what a compiled region reads in evaluation: all is fetched, and stays while it runs."""
    with without_faults():
        torch._dynamo.reset()
        torch.manual_seed(0)
        model = nn.Linear(4, 4)
        optimizer = build(model, hostile=True)
        called = torch.compile(lambda x: torch.tanh(x) * model.weight)
        with torch.no_grad():
            x = torch.ones(4, 4)
            expected = torch.tanh(x) * model.weight
            for _ in range(2):
                torch.testing.assert_close(called(x), expected)
        assert not any(residents(optimizer).resident)


def test_compiled_code_in_evaluation_has_all_parameters() -> None:
    run_ranks(evaluate, 2)


def beside_another(rank: int, world_size: int) -> None:
    """With and without in one process: each as it was built."""
    model, optimizer = made()
    with without_faults():
        other_model, other = made()
    view, other_view = model.get_parameter(NAME).data, other_model.get_parameter(NAME).data
    residents(optimizer).release_all()
    residents(other).release_all()
    assert np.isfinite(array(view)).all()
    with pytest.raises(RuntimeError, match=TOLD):
        array(other_view)


def test_optimizers_differ_as_they_were_built() -> None:
    run_ranks(beside_another, 2)


def refuse(rank: int, world_size: int) -> None:
    with (
        patch.dict(os.environ, {"ZEROX_FAULTS": "off"}),
        pytest.raises(ValueError, match="ZEROX_FAULTS must be '0' or '1', got 'off'"),
    ):
        build(nn.Linear(4, 4))


def test_another_value_is_refused() -> None:
    run_ranks(refuse, 2)
