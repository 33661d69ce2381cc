"""NCCL: the exchange's collectives on its streams, at one rank, and at two ranks of one GPU where NCCL can do that.

NCCL lets two ranks share a GPU from version 2.30 on. Where torch brings an older one, ZEROX_NCCL_LIBRARY=PATH names a
libnccl.so.2 that the ranks preload. All ranks are fresh processes with a time limit, since NCCL may hang.
"""

from __future__ import annotations

import ctypes
import functools
import os
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from tests.bucket_manager.rig import LAYER_CAP, Chain, GradsOfModel, gradients_of, input_of, same_bits
from tests.gpu import test_muon
from tests.gpu.chain import cpu_copies, train_scales
from tests.gpu.processes import ProcessesFailed, run_processes
from tests.gpu.twins import DEVICE
from tests.ranks import run_ranks
from tests.rows import test_sparse_adam
from zerox import engine
from zerox.ranks.exchange import EXCHANGES
from zerox.ranks.group import Ranks

BACKEND = "nccl" if DEVICE.type == "cuda" else "gloo"
TIMEOUT_S = 60.0
TWO_RANKS_TIMEOUT_S = 45.0
TWO_RANKS = (2, 30)
LIBRARY = os.environ.get("ZEROX_NCCL_LIBRARY", "")
OF_TWO_RANKS = {
    "NCCL_MULTI_RANK_GPU_ENABLE": "1",
    "NCCL_NVLS_ENABLE": "0",  # does not go with it
    "NCCL_MAX_CTAS": "2",  # the ranks' kernels wait for each other: all of them must fit
    "NCCL_DEBUG": "WARN",
}
STEPS = 3
STAGES = (1, 2, 3)


def nccl_version(library: str | None) -> tuple[int, ...]:
    """(major, minor) of the NCCL in the file ``library``; None: of the one that was preloaded, else torch's own."""
    if not LIBRARY:
        return tuple(torch.cuda.nccl.version()[:2])
    version = ctypes.c_int()
    ctypes.CDLL(library).ncclGetVersion(ctypes.byref(version))
    return version.value // 10000, version.value // 100 % 100


@functools.cache
def no_two_ranks() -> str | None:
    """Why two ranks can't share the GPU."""
    major, minor = nccl_version(LIBRARY)
    if (major, minor) >= TWO_RANKS:
        return None
    return f"NCCL {major}.{minor} allows one rank a GPU: name one of 2.30 or newer in ZEROX_NCCL_LIBRARY"


def preloaded() -> dict[str, str]:
    return {"LD_PRELOAD": ":".join(filter(None, [LIBRARY, os.environ.get("LD_PRELOAD")]))} if LIBRARY else {}


# ---- one rank


def ranks_of_one(exchange: str) -> Ranks:
    """A group of one that is not taken for a process alone: everything goes through its backend."""
    control = dist.new_group([0], backend="gloo")
    return Ranks(0, 1, BACKEND, exchange, dist.group.WORLD, control, DEVICE)


def exchange_with_itself(rank: int, world_size: int) -> list[Any]:
    """By exchange and wire dtype: what was reduced and what autograd has, parameters before and after a gather."""
    return [
        (exchange, dtype, *exchange_once(exchange, dtype)) for exchange in EXCHANGES for dtype in (None, torch.bfloat16)
    ]


def exchange_once(exchange: str, reduce_dtype: torch.dtype | None) -> tuple[list[Any], list[Tensor], list[Tensor]]:
    model = Chain(4).to(DEVICE)
    xs = [input_of(0, seed).to(DEVICE) for seed in (1, 2)]
    expected = gradients_of(model, *[model(x).square().sum() for x in xs])
    ours = GradsOfModel(ranks_of_one(exchange), list(model.parameters()), LAYER_CAP, reduce_dtype=reduce_dtype)
    for x in xs:
        model(x).square().sum().backward()
    ours.sync()
    pairs, reduced = [], ours.reduced()
    for index, bucket in enumerate(ours.buckets):
        for slot, param in enumerate(bucket.plan.params):
            grad = expected[param]
            assert grad is not None
            pairs.append((reduced[index, slot].cpu(), grad.reshape(-1).cpu()))
    before = cpu_copies(model.parameters())
    for index in range(len(ours.buckets)):
        ours.manager.params.start(index)
    ours.manager.params.finish()
    return pairs, before, cpu_copies(model.parameters())


def test_one_rank_exchanges_with_itself(device: torch.device) -> None:
    [results] = run_processes(exchange_with_itself, 1, backend=BACKEND, timeout_s=TIMEOUT_S)
    assert len(results) == 2 * len(EXCHANGES)
    for exchange, reduce_dtype, reduced, before, after in results:
        tolerance = {"rtol": 1e-5, "atol": 1e-5} if reduce_dtype is None else {"rtol": 2e-2, "atol": 1e-2}
        assert len(reduced) == 8
        for ours, expected in reduced:
            torch.testing.assert_close(ours.float(), expected, **tolerance, msg=lambda m, e=exchange: f"{e}: {m}")
        assert all(same_bits(a, b) for a, b in zip(before, after, strict=True)), exchange


def train_with_itself(rank: int, world_size: int, stage: int) -> list[Any]:
    """Training alone, for which zerox takes a group of one, and then with each exchange over its backend."""
    results = [train_scales(0, DEVICE.type, STEPS, stage=stage, accumulate=2)]
    find_ranks = engine.find_ranks
    try:
        for exchange in EXCHANGES:
            engine.find_ranks = lambda *_, exchange=exchange, **__: ranks_of_one(exchange)
            results.append(train_scales(0, DEVICE.type, STEPS, stage=stage, accumulate=2))
    finally:
        engine.find_ranks = find_ranks
    return results


@pytest.mark.parametrize("stage", [1, 2])
def test_one_rank_trains_as_alone(device: torch.device, stage: int) -> None:
    [(alone, *exchanged)] = run_processes(train_with_itself, 1, stage, backend=BACKEND, timeout_s=TIMEOUT_S)
    for exchange, ours in zip(EXCHANGES, exchanged, strict=True):
        assert all(same_bits(a, b) for a, b in zip([*ours[0], *ours[1]], [*alone[0], *alone[1]], strict=True)), exchange
        assert ours[2] == alone[2]


def train_matrices_with_itself(rank: int, world_size: int) -> list[Any]:
    """By stage: alone, and by the all-to-all that matrices with owners need."""
    results = []
    for stage in STAGES:
        how = (str(DEVICE), torch.float32, torch.float32, stage)
        results.append([test_muon.trained(0, 1, *how)])
        with patch.object(engine, "find_ranks", lambda *_, **__: ranks_of_one("direct")):
            results[-1].append(test_muon.trained(0, 1, *how))
    return results


def test_one_rank_trains_matrices_as_alone(device: torch.device) -> None:
    [stages] = run_processes(train_matrices_with_itself, 1, backend=BACKEND, timeout_s=TIMEOUT_S)
    assert all(alone == exchanged for alone, exchanged in stages)


# ---- two ranks on one GPU


hung: list[str] = []  # what timed out before: the others would as well, and time is short


def train_in_two(rank: int, world_size: int, exchange: str) -> Any:
    """The version of NCCL, and what came of training in each stage."""
    os.environ["ZEROX_EXCHANGE"] = exchange
    version = nccl_version(None) if BACKEND == "nccl" else TWO_RANKS
    return version, [train_scales(rank, DEVICE.type, STEPS, stage=stage, layers_in_bucket=2.0) for stage in STAGES]


def train_over_gloo(rank: int, world_size: int) -> list[Any]:
    return [train_scales(rank, "cpu", STEPS, stage=stage, layers_in_bucket=2.0) for stage in STAGES]


@pytest.mark.parametrize("exchange", EXCHANGES)
def test_two_ranks_of_one_gpu_train_as_over_gloo(device: torch.device, exchange: str) -> None:
    """Bit for bit, in fp32: the sum of two numbers has no order."""
    if BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    if hung:
        pytest.skip(f"two ranks did not finish before, with the exchange {hung[0]}")
    environment = {**OF_TWO_RANKS, **preloaded()} if BACKEND == "nccl" else {}
    try:
        results = run_processes(
            train_in_two, 2, exchange, backend=BACKEND, timeout_s=TWO_RANKS_TIMEOUT_S, env=environment
        )
    except ProcessesFailed as failure:
        if "did not finish" in str(failure):
            hung.append(exchange)
        raise
    for (version, stages), expected in zip(results, run_ranks(train_over_gloo, 2), strict=True):
        assert version >= TWO_RANKS, "the library that was named is not the one that was used"
        for ours, theirs in zip(stages, expected, strict=True):
            assert all(same_bits(a, b) for a, b in zip([*ours[0], *ours[1]], [*theirs[0], *theirs[1]], strict=True))
            assert ours[2] == theirs[2]


def train_tables(rank: int, world_size: int) -> None:
    for stage in (1, 2):
        test_sparse_adam.train(rank, world_size, stage, {}, torch.float32, str(DEVICE))


def test_two_ranks_of_one_gpu_train_tables(device: torch.device) -> None:
    if BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    environment = {**OF_TWO_RANKS, **preloaded()} if BACKEND == "nccl" else {}
    run_processes(train_tables, 2, backend=BACKEND, timeout_s=TWO_RANKS_TIMEOUT_S, env=environment)


def train_matrices(rank: int, world_size: int) -> list[Any]:
    """All ranks have the same gradients, so that their number shows nowhere."""
    how = (str(DEVICE), torch.float32, torch.float32)
    return [test_muon.trained(rank, world_size, *how, stage) for stage in STAGES]


def test_two_ranks_of_one_gpu_train_matrices(device: torch.device) -> None:
    """Which lie whole on one of them, and travel in shares of several lengths."""
    if BACKEND == "nccl" and (reason := no_two_ranks()):
        pytest.skip(reason)
    environment = {**OF_TWO_RANKS, **preloaded()} if BACKEND == "nccl" else {}
    found = run_processes(train_matrices, 2, backend=BACKEND, timeout_s=TWO_RANKS_TIMEOUT_S, env=environment)
    [alone] = run_ranks(train_matrices, 1)
    assert found[0] == alone


# ---- the processes themselves


def hang(rank: int, world_size: int) -> None:
    dist.barrier()  # or rank 0 may be gone before rank 1 has found it
    if rank == 1:
        while True:
            pass


def raise_something(rank: int, world_size: int) -> None:
    raise ArithmeticError(f"injected in rank {rank}")


def test_a_rank_that_hangs_is_killed_and_named(device: torch.device) -> None:
    with pytest.raises(ProcessesFailed, match="rank 1 did not finish within"):
        run_processes(hang, 2, backend="gloo", timeout_s=8.0)


def test_what_a_rank_raised_is_told(device: torch.device) -> None:
    with pytest.raises(ProcessesFailed, match="injected in rank 0"):
        run_processes(raise_something, 1, backend="gloo", timeout_s=TIMEOUT_S)
