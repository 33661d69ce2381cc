"""The models are built from configurations, with random values: nothing is downloaded."""

from __future__ import annotations

import importlib.util
import os

import pytest


@pytest.fixture(autouse=True)
def needs_transformers() -> None:
    """Without the package a test is skipped with the reason, but fails where CI promised to have it."""
    if importlib.util.find_spec("transformers") is None:
        reason = "the models come from transformers: pip install transformers"
        if os.environ.get("CI") == "true":
            pytest.fail(reason)
        pytest.skip(reason)
