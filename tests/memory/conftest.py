"""The ranks of these tests end with each file: malloc keeps gigabytes of what they have freed."""

from collections.abc import Iterator

import pytest

from tests.ranks import pool


@pytest.fixture(scope="module", autouse=True)
def ranks_that_end() -> Iterator[None]:
    yield
    pool.close()
