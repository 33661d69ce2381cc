"""What the tests of this folder run on. Without a CUDA GPU nothing is collected; without a build with
CUDA kernels each is skipped.

ZEROX_TEST_DEVICE=cpu    runs those that need no CUDA as such on the CPU: to try their own logic without a GPU
ZEROX_TEST_DEVICE=fake   runs the kernels' on csrc/cuda compiled for the host (tests/accelerator)
ZEROX_TEST_SEED=NUMBER   repeats the random data of another run; a test that fails prints its number
"""

from __future__ import annotations

import functools
import os
import secrets
from pathlib import Path

import pytest
import torch

from tests.gpu.twins import DEVICE
from zerox._ext import cuda_refusal

# Thousands, that would all be skipped. Those of a file that is named are: they say why.
collect_ignore_glob = ["test_*.py"] if DEVICE.type == "cuda" and not torch.cuda.is_available() else []

# Before CUDA starts: otherwise streams share eight connections to the device, and wait in line behind each other there.
os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "32")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if item.path.is_relative_to(Path(__file__).parent):
            item.add_marker(pytest.mark.gpu)


@functools.cache
def what_is_missing() -> str | None:
    return cuda_refusal() if torch.cuda.is_available() else "no CUDA GPU that torch can use"


def pytest_runtest_setup(item: pytest.Item) -> None:
    elsewhere = DEVICE.type != "cuda" and "cuda" not in getattr(item, "fixturenames", ())
    if not elsewhere and (reason := what_is_missing()):
        pytest.skip(reason)


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def cuda() -> torch.device:
    """For tests of what only CUDA has: skipped also where ZEROX_TEST_DEVICE=cpu."""
    return torch.device("cuda")


@pytest.fixture
def seed() -> int:
    value = int(os.environ.get("ZEROX_TEST_SEED") or secrets.randbits(31))
    print(f"ZEROX_TEST_SEED={value}")
    return value
