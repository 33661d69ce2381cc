"""What scripts ask of a machine or of libraries that is not there any more, or not here."""

from __future__ import annotations

import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch


def put(name: str, **content: Any) -> None:
    """Makes a module of this name, if there is none, have this content."""
    module = sys.modules.setdefault(name, ModuleType(name))
    for key, value in content.items():
        setattr(module, key, value)


def claim_cuda(to: Callable[[str], bool]) -> None:
    """torch.cuda.is_available() says yes to modules of the names that ``to`` knows: scripts wrap only then."""
    torch.cuda.is_available = lambda: to(sys._getframe(1).f_globals["__name__"])
