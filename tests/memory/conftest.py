"""Ranks that hold nothing of other files' tests: their bytes are counted."""

from __future__ import annotations

import pytest

from tests.ranks import pool


@pytest.fixture(autouse=True, scope="module")
def new_ranks() -> None:
    pool.close()
