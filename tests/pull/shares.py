"""Optimizers whose state_dict() is each rank's share only, as where nothing can be pulled."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any
from unittest.mock import patch


def with_shares(function: Callable[..., Any]) -> Callable[..., Any]:
    """Of optimizers that ``function`` builds."""

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        with patch.dict(os.environ, {"ZEROX_STATE_PULL": "0"}):
            return function(*args, **kwargs)

    return wrapped
