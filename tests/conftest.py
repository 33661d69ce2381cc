"""For all tests: one OpenMP thread a process, and Hypothesis without deadlines, which measure the machine.

Several pytest workers share the cores, and OpenMP's threads spin while they wait for each other: with two a process on
two cores, tests of benchmarks took three times as long. Tests of threads ask for theirs.

Hypothesis: "ci", the default, draws the same examples in every run; "search" draws new ones, and many; "sanitized" is
for tests/test_sanitizers.py.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=800)
settings.register_profile("sanitized", settings.get_profile("ci"), max_examples=12)
settings.load_profile("ci")

# Each of these compiles for a minute or more.
LONGEST = ("tests/cpp/test_ctest.py", "tests/test_accelerator.py", "tests/test_sanitizers.py")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a process with one of them at the end would work alone."""
    files = [f"{name}::" for name in LONGEST]
    items.sort(key=lambda item: next((i for i, file in enumerate(files) if item.nodeid.startswith(file)), len(files)))
