"""The state that this rank itself has, whatever ``optimizer.state`` shows."""

from __future__ import annotations

from typing import Any

from torch import Tensor


def own_state(optimizer: Any) -> dict[Tensor, dict[str, Tensor]]:
    """Views, by parameter: of those that have elements on this rank."""
    return {param: state for bucket in optimizer.inside.buckets for param, state in bucket.state_of_own()}
