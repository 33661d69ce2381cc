"""Where the arrays of a large shard lie: spaced, in storages that the estimate counts, and its state is found there."""

from __future__ import annotations

import ctypes
import re
from pathlib import Path

import pytest
import torch

import zerox
from zerox.memory.pages import LINE_BYTES, STEP_BYTES, zeros
from zerox.plan.kept import PERIOD_BYTES, SPACED_BYTES, storage_bytes

CPU = torch.device("cpu")
LARGE = SPACED_BYTES // 4 + 1000  # elements of fp32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.uint8], ids=str)
def test_large_arrays_that_are_walked_together_start_apart(dtype: torch.dtype) -> None:
    numel = SPACED_BYTES // dtype.itemsize
    arrays = {place: zeros(numel, dtype, CPU, place) for place in (1, 2, 3, 4)}
    for place, array in arrays.items():
        assert array.data_ptr() % PERIOD_BYTES == place * STEP_BYTES + LINE_BYTES
        assert array.numel() == numel
        assert array.is_contiguous()
        assert not array.any()
        assert array.untyped_storage().nbytes() == storage_bytes(numel, dtype.itemsize, True, place)
        assert storage_bytes(numel, dtype.itemsize, True, place) <= 1.02 * numel * dtype.itemsize


def test_small_arrays_and_those_that_stand_alone_take_what_they_need() -> None:
    assert zeros(LARGE, torch.float32, CPU).untyped_storage().nbytes() == 4 * LARGE
    assert zeros(1000, torch.float32, CPU, 2).untyped_storage().nbytes() == 4000


def large_pages_kib(address: int) -> int:
    """Of the mapping that holds the address."""
    for mapping in re.split(r"^(?=[0-9a-f]+-[0-9a-f]+ )", Path("/proc/self/smaps").read_text(), flags=re.MULTILINE)[1:]:
        start, stop = (int(each, 16) for each in mapping.split(maxsplit=1)[0].split("-"))
        if start <= address < stop:
            return int(re.findall(r"AnonHugePages:\s+(\d+)", mapping)[0])
    raise AssertionError(f"nothing is mapped at {address:#x}")


def test_large_arrays_get_large_pages_where_the_system_gives_them_on_request() -> None:
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    if not setting.exists() or "[madvise]" not in setting.read_text():
        pytest.skip("this system gives no large pages, or gives them unasked")
    ctypes.CDLL(None).malloc_trim(0)  # or what tests before have freed is used again, in the pages that it has
    held = zeros(16 << 20, torch.float32, CPU)
    assert large_pages_kib(held.data_ptr() + held.nbytes // 2) > held.nbytes // 1024 // 2


@pytest.mark.parametrize("options", [{}, {"amsgrad": True}, {"state_dtype": torch.bfloat16}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_large_shard_s_state_is_where_state_dict_says_and_as_large_as_estimated(
    dtype: torch.dtype, options: dict
) -> None:
    torch.manual_seed(0)
    model = torch.nn.Linear(1024, 9 * 1024, bias=False, dtype=dtype)  # 18 MiB of remainders or bfloat16
    optimizer = zerox.FusedShardedAdam(model.parameters(), **options)
    model.weight.grad = torch.randn_like(model.weight)
    optimizer.step()
    [state] = optimizer.state_dict()["state"].values()
    bucket = optimizer.inside.buckets[0]
    for key, stored in bucket.state.items():
        assert torch.equal(state[key].reshape(-1), stored.values[: model.weight.numel()])
    grad = model_gradient(optimizer)
    assert torch.allclose(state["exp_avg"].float().reshape(-1), 0.1 * grad.float(), rtol=0.02)
    optimizer.zero_grad()
    measured, estimated = optimizer.memory_bytes(), zerox.estimate(model.parameters(), 1, **options)
    assert (measured.moments, measured.master) == (estimated.moments, estimated.master)


def model_gradient(optimizer: zerox.FusedShardedAdam) -> torch.Tensor:
    shard = optimizer.inside.grads.shard(0)
    assert shard is not None
    return shard[: optimizer.param_groups[0]["params"][0].numel()]
