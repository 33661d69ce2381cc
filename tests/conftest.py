"""For all tests: one OpenMP thread a process, scheduled in batches, and Hypothesis without deadlines, which measure the
machine.

Several pytest workers share the cores, and OpenMP's threads spin while they wait for each other: with two a process on
two cores, tests of benchmarks took three times as long. Tests of threads ask for theirs.

In batches: a thread that is woken lets the running one go on. gloo's thread that receives polls without a pause while
another thread of its process holds a connection's lock. The message that a rank sends wakes the receiver, and the
receiver took the core from the sender, which held such a lock. Polling was two fifths of the time of tests with ranks.

Hypothesis: "ci", the default, draws the same examples in every run; "search" draws new ones, and many; "sanitized" is
for tests/test_sanitizers.py.
"""

import contextlib
import gc
import os

os.environ.setdefault("OMP_NUM_THREADS", "1")  # before torch is imported
if hasattr(os, "SCHED_BATCH"):  # Linux; threads and processes that are started from here on inherit it
    with contextlib.suppress(OSError):  # a sandbox may refuse: tests then only take longer
        os.sched_setscheduler(0, os.SCHED_BATCH, os.sched_param(0))

from collections import Counter
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile(
    "ci", deadline=None, derandomize=True, print_blob=True, suppress_health_check=[HealthCheck.too_slow]
)
settings.register_profile("search", settings.get_profile("ci"), derandomize=False, max_examples=800)
settings.register_profile("sanitized", settings.get_profile("ci"), max_examples=12)
settings.load_profile("ci")

gc.disable()  # until all is imported: see pytest_collection_finish()

# Each takes a quarter of a minute or more; the first three are deep, compile, and use both cores of a small machine.
LONGEST = (
    "tests/cpp/test_ctest.py",
    "tests/test_accelerator.py",
    "tests/test_sanitizers.py",
    "tests/optimizer/test_pairs.py",
    "tests/optimizer/test_combinations.py",
    "tests/optimizer/test_planted_faults.py",
    "tests/cuda/test_kernel_resources.py",
    "tests/pull/test_ends.py",
    "tests/pull/test_by_message.py",
    "tests/mesh/test_checkpoints.py",
    "tests/mesh/test_tensor_parallel.py",
    "tests/residency/test_any_model.py",
    "tests/wrapper/test_of_torch.py",
    "tests/models/test_real_models.py",
    "tests/optimizer/test_missing_dynamo_names.py",
    "tests/properties/test_training.py",
    "tests/optimizer/test_bit_equality.py",
    "tests/test_packaging.py",
    "tests/test_example_restart.py",
    "tests/pull/test_more_kinds.py",
    "tests/wrapper/test_own_checkpoints.py",
    "tests/residency/test_written_alone.py",
    "tests/residency/test_without_faults.py",
    "tests/residency/test_writes.py",
    "tests/mesh/test_sharded_parameters.py",
    "tests/optimizer/test_overlap_gather.py",
    "tests/test_clients.py",
    "tests/optimizer/test_regrouped.py",
    "tests/optimizer/test_parity.py",
    "tests/memory/test_peak.py",
    "tests/bits/test_bits.py",
    "tests/optimizer/test_grad_answers.py",
    "tests/test_example_parallel.py",
    "tests/residency/test_limits.py",
    "tests/memory/test_peak_sharded.py",
    "tests/test_example_vision.py",
    "tests/test_bench.py",
    "tests/optimizer/test_forks.py",
    "tests/optimizer/test_state_dict.py",
    "tests/mesh/test_experts.py",
    "tests/sparsity/test_masks.py",
    "tests/test_example_cli.py",
    "tests/test_gpu_script.py",
    "tests/test_gpu_figures.py",
    "tests/test_install.py",
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """The longest files first: a process with one of them at the end would work alone."""
    files = [f"{name}::" for name in LONGEST]
    items.sort(key=lambda item: next((i for i, file in enumerate(files) if item.nodeid.startswith(file)), len(files)))


def pytest_collection_finish() -> None:
    """What was imported stays: the garbage collector need not look through it again and again."""
    import tests.frozen  # noqa: F401

    gc.enable()


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """After the whole suite: where its time went, by file."""
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            seconds[getattr(report, "nodeid", "").partition("::")[0]] += getattr(report, "duration", 0.0)
    if sum(seconds.values()) > 600.0:
        terminalreporter.section("files that took longest")
        for name, spent in seconds.most_common(40):
            terminalreporter.line(f"{spent:7.1f} s  {name}")
