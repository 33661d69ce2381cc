"""What a test needs to read the machine code of the CUDA kernels."""

from __future__ import annotations

import os

import pytest


def need(reason: str | None) -> None:
    """Without a tool a test is skipped with the reason, but fails where CI promised to have all of them."""
    if reason and os.environ.get("CI") == "true":
        pytest.fail(reason)
    if reason:
        pytest.skip(reason)
