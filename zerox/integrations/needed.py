"""Says in one line why a framework can't be used."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any


def why_not(package: str, tried: str, error: ImportError) -> ImportError:
    """What to raise where an import from ``package`` failed. ``tried``: the version that zerox was tried with."""
    try:
        found = version(package)
    except PackageNotFoundError:
        return ImportError(f"this part of zerox needs {package}, which is not installed: pip install {package}")
    reason = " ".join(str(error).split())
    return ImportError(f"{package} {found} does not fit zerox, which was tried with {package} {tried}: {reason}")


def check_names(package: str, tried: str, names: Sequence[tuple[Any, str]]) -> None:
    """ImportError for the first ``(object, attribute)`` that a version of ``package`` does not have."""
    for owner, name in names:
        if not hasattr(owner, name):
            raise why_not(package, tried, ImportError(f"{owner.__name__} has no {name} there"))
