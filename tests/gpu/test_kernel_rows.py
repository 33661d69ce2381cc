"""update_rows_ on a device: the bits of the CPU's kernels, and for Adam those of torch's operations, roots exact."""

from __future__ import annotations

import math
from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from tests.gpu.twins import DEVICE, Fences
from tests.kernels.shards import same_bits
from zerox import ops

NUM_ROWS = 999
STEP, SCALE = 3, 0.5
# By name: the rule, its states and its options.
RULES: dict[str, tuple[str, int, list[float]]] = {
    "adam": ("adam", 2, [0.1, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0, 0.0]),
    "adam, maximize": ("adam", 2, [0.1, 0.5, 0.99, 1e-6, 0.0, 1.0, 1.0, 0.0]),
    "sgd": ("sgd", 0, [0.1, 0.0, 0.0, 0.0, 0.0, 0.0]),
    "sgd, momentum": ("sgd", 1, [0.1, 0.9, 0.1, 0.01, 1.0, 1.0]),
    "lion": ("lion", 1, [0.01, 0.9, 0.99, 0.1, 0.0]),
}


KINDS: dict[str, tuple[torch.dtype, torch.dtype | None]] = {  # of values, and of their masters
    "fp32": (torch.float32, None),
    "bf16": (torch.bfloat16, None),
    "bf16 + remainder": (torch.bfloat16, torch.int16),
    "bf16 + fp32": (torch.bfloat16, torch.float32),
    "fp16 + fp32": (torch.float16, torch.float32),
}


def exact_values(values: Tensor, master: Tensor | None) -> Tensor:
    """In float32, as update_ has them."""
    if master is None or master.dtype is torch.int16:
        wide = values.float()
        return wide if master is None else (wide.view(torch.int32) + master).view(torch.float32)
    return torch.where(master.to(values.dtype) == values, master, values.float())


def stored(exact: Tensor, dtype: torch.dtype, master_dtype: torch.dtype | None) -> tuple[Tensor, Tensor | None]:
    if master_dtype is not torch.int16:
        return exact.to(dtype), exact
    bits = exact.view(torch.int32)
    upper = (bits + 2**15) >> 16
    return upper.short().view(dtype), (bits - (upper << 16)).short()


def sparse_adam(options: Sequence[float], limit: float, tensors: list[Tensor]) -> None:
    """torch's operations in torch's order (torch/optim/_functional.py), on rows that lie side by side."""
    values, grads, exp_avg, exp_avg_sq = tensors
    lr, beta1, beta2, eps, _, maximize, *_ = options
    grads = (grads * SCALE).clamp(-limit, limit) * (-1 if maximize else 1)
    exp_avg += (grads - exp_avg) * (1 - beta1)
    exp_avg_sq += (grads * grads - exp_avg_sq) * (1 - beta2)
    root = (
        exp_avg_sq.sqrt() if DEVICE.type == "cpu" else exp_avg_sq.double().sqrt().float()
    )  # torch's are inexact there
    step_size = lr * math.sqrt(1 - beta2**STEP) / (1 - beta1**STEP)
    values += (exp_avg / (root + eps)) * -step_size


def assert_rows_updated_as_on_the_cpu(
    device: torch.device, seed: int, name: str, kind: str, width: int, offset: int, limit: float
) -> None:
    """``offset``: of all arrays, from a multiple of their alignment."""
    rule, num_states, options = RULES[name]
    dtype, master_dtype = KINDS[kind]
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randperm(NUM_ROWS, generator=generator)[: NUM_ROWS // 2]
    places = torch.randperm(NUM_ROWS, generator=generator)[: NUM_ROWS // 2]
    exact, *states = (torch.randn(NUM_ROWS, width, generator=generator) for _ in range(1 + num_states))
    for state in states:
        state.abs_()
    values = exact.to(dtype)
    values[::7] *= 2  # written since, and no longer what its master rounds to
    master = None
    if master_dtype is not None:
        master = torch.zeros(NUM_ROWS, width, dtype=master_dtype)
        _, master[places] = stored(exact[rows], dtype, master_dtype)
    grads = torch.randn(rows.numel(), width, generator=generator)
    fences = Fences(device)
    theirs = [fences.put(each, offset) for each in (values, *states)]
    their_master = None if master is None else fences.put(master, offset)
    step, expected_step = torch.tensor(STEP - 1), torch.tensor(STEP - 1)
    ops.update_rows_(
        rule, theirs[0], their_master, fences.put(grads, offset), theirs[1:], step, rows.to(device), places.to(device),
        options, SCALE, limit,
    )  # fmt: skip
    if rule == "adam":
        expected_step += 1
        before = exact_values(values[rows], None if master is None else master[places])
        touched = [before, grads, *(state[places] for state in states)]
        sparse_adam(options, limit, touched)
        for state, after in zip(states, touched[2:], strict=True):
            state[places] = after
        values[rows], after_master = stored(touched[0], dtype, master_dtype)
        if master is not None:
            master[places] = after_master
    else:
        ops.update_rows_(rule, values, master, grads, states, expected_step, rows, places, options, SCALE, limit)
    assert torch.equal(step, expected_step)
    for index, (ours, expected) in enumerate(zip(theirs, (values, *states), strict=True)):
        assert same_bits(ours.cpu(), expected), index
    assert master is None or (their_master is not None and same_bits(their_master.cpu(), master))
    fences.check()


@pytest.mark.parametrize("limit", [math.inf, 0.25])
@pytest.mark.parametrize(("width", "offset"), [(1, 0), (33, 0), (64, 0), (64, 1), (300, 0)])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("name", RULES)
def test_rows_are_updated_as_on_the_cpu(
    device: torch.device, seed: int, name: str, kind: str, width: int, offset: int, limit: float
) -> None:
    assert_rows_updated_as_on_the_cpu(device, seed, name, kind, width, offset, limit)


def test_no_rows_change_nothing(device: torch.device) -> None:
    values, none = torch.ones(5, 4, device=device), torch.empty(0, dtype=torch.int64, device=device)
    ops.update_rows_(
        "sgd", values, None, torch.empty(0, 4, device=device), [], torch.tensor(0), none, none, [0.1] + [0.0] * 5
    )
    assert bool((values.cpu() == 1.0).all())
