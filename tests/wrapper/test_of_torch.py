"""What torch's own tests say of its DistributedDataParallel, on ours. docs/ddp-tests.md has the list.

Each case of torch_cases.py and torch_cases_of_models.py is trained under torch's class and AdamW, and under ours with
AdamW (left over), and with FusedShardedAdam in stages 1, 2 and 3: gradients after each backward, where p.grad is whole,
and the parameters.
"""

from __future__ import annotations

import traceback

import pytest

from tests.ranks import Once
from tests.wrapper.beside import compared
from tests.wrapper.torch_cases_of_models import CASES


def all_compared(rank: int, world_size: int) -> dict[str, dict[str, str]]:
    found = {}
    for name, case in CASES.items():
        try:
            found[name] = compared(rank, case)
        except Exception:
            found[name] = {"raised": traceback.format_exc()}
    return found


ALL = Once(all_compared, 2)


@pytest.mark.parametrize("name", CASES)
def test_it_trains_as_torchs(name: str) -> None:
    for found in ALL():
        assert found[name] == {}
