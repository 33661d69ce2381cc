"""Nothing waits for the device, no op and no step: torch sees no wait, and the host is done while the device sleeps."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor

from tests.gpu.chain import MIB, Scales, batch_of, sleep
from tests.gpu.twins import Fences, twin_of
from tests.kernels.shards import Shard, options_table, segments_of
from zerox import FusedShardedAdam, ops

LONG = 500_000_000  # cycles: a quarter of a second, more or less, and far more than the host needs for a step


@contextmanager
def torch_refuses_to_wait() -> Iterator[None]:
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def assert_never_waits(work: Callable[[], object], device: torch.device) -> None:
    """``work`` returns while the device still sleeps, and torch sees no wait in it."""
    work()  # loads modules
    for _ in range(2):  # the first fills the allocators' caches, with as much as a host that runs ahead takes
        torch.cuda.synchronize(device)
        sleep(device, LONG)
        asleep = torch.cuda.Event()
        asleep.record()
        with torch_refuses_to_wait():
            work()
        still_asleep = not asleep.query()
    torch.cuda.synchronize(device)
    assert still_asleep, "the host waited for the device"


def words(device: torch.device) -> Tensor:
    return torch.zeros(ops.EXACT_LIMBS, dtype=torch.int64, device=device)


def calls(device: torch.device) -> dict[str, Callable[[], object]]:
    """Every op, on tensors that lie ready."""
    shard = twin_of(Shard(5000, torch.bfloat16, master_kind="remainder"), Fences(device))
    options, scale = options_table().to(device), torch.ones((), dtype=torch.float64, device=device)
    slices = [torch.randn(5010, device=device) for _ in range(3)]
    mean, sums, segments = torch.empty(5000, device=device), words(device), segments_of(4000, 1000).to(device)
    flags = [torch.zeros(2, dtype=torch.uint8, device=device) for _ in range(2)]
    flat = torch.empty(6000, dtype=torch.bfloat16, device=device)
    pieces, raised = torch.tensor([[0, 5, 3, 4000], [1, 0, 4100, 1000]]), torch.tensor([5999])
    return {
        "flatten_": lambda: ops.flatten_(flat, slices, pieces, raised),
        "read_flags_": lambda: ops.read_flags_(*flags, slices, 5000),
        "reduce_": lambda: ops.reduce_(mean, sums, slices, segments, flags[1], 3, True),
        "norm_": lambda: ops.norm_(sums, mean, segments, 2.0),
        "norm_ of order 3": lambda: ops.norm_(sums, mean, segments, 3.0),
        "norm_value": lambda: ops.norm_value(sums, 2.0),
        "update_": lambda: ops.update_("adam", [shard.for_op()], options, scale),
    }


@pytest.mark.parametrize("name", calls(torch.device("cpu")))
def test_no_op_waits(cuda: torch.device, name: str) -> None:
    assert_never_waits(calls(cuda)[name], cuda)


def test_a_wait_is_noticed(cuda: torch.device) -> None:
    values = torch.ones(10, device=cuda)
    with pytest.raises(RuntimeError, match="synchroniz"):
        assert_never_waits(lambda: values.sum().item(), cuda)

    def wait_unseen() -> None:
        while not torch.cuda.current_stream(cuda).query():
            pass

    with pytest.raises(AssertionError, match="the host waited"):
        assert_never_waits(wait_unseen, cuda)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("stage", [1, 2])
def test_no_step_waits(cuda: torch.device, stage: int, dtype: torch.dtype) -> None:
    """Backward, clipping and the step of one rank, with a learning rate that changes from step to step."""
    model = Scales(numel=5000).to(cuda, dtype)
    x = batch_of(0, 0, 5000, dtype).to(cuda)
    optimizer = FusedShardedAdam(model.parameters(), stage=stage, bucket_cap_mb=2 * 5000 * dtype.itemsize / MIB)

    def step() -> None:
        optimizer.param_groups[0]["lr"] *= 0.9
        y = model(x).float()
        (y * y).sum().backward()
        optimizer.clip_grad_norm_(0.1)
        optimizer.step()
        optimizer.zero_grad()

    assert_never_waits(step, cuda)


def test_no_step_waits_for_a_learning_rate_on_the_device(cuda: torch.device) -> None:
    model = Scales(numel=5000).to(cuda)
    rate = torch.tensor(1e-2, device=cuda)
    optimizer = FusedShardedAdam(model.parameters(), lr=rate)
    x = batch_of(0, 0, 5000).to(cuda)

    def step() -> None:
        rate.mul_(0.9)
        y = model(x)
        (y * y).sum().backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)

    assert_never_waits(step, cuda)
