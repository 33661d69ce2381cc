"""Which version of a framework is here, and whether it still has the names that an integration needs."""

from __future__ import annotations

from collections.abc import Iterable
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any

from packaging.version import Version


def check_version(package: str, oldest: str, twin: str | None = None) -> None:
    """ImportError, in one line, if ``package`` is missing or older. ``twin``: the same under another name."""
    wanted = f"zerox.integrations.{package} needs {package} {oldest} or newer"
    try:
        found = version(package)
    except PackageNotFoundError:
        way_out = f"pip install '{package}>={oldest}'"
        if twin is not None and find_spec(twin) is not None:
            way_out += f", or import zerox.integrations.{twin} for the {twin} that is installed"
        raise ImportError(f"{wanted}, and it is not installed: {way_out}") from None
    if Version(found) < Version(oldest):
        raise ImportError(f"{wanted}, and {found} is installed: pip install '{package}>={oldest}'")


def check_names(package: str, tried: str, owner: Any, names: Iterable[str]) -> None:
    """RuntimeError, in one line, if ``owner`` has lost one of ``names``, not all of which its package documents."""
    lost = [name for name in names if not hasattr(owner, name)]
    if lost:
        where = owner.__name__ if isinstance(owner, type) else type(owner).__name__
        raise RuntimeError(
            f"zerox: {where} of {package} {version(package)} has no {', '.join(lost)}, which "
            f"zerox.integrations.{package} needs: pip install '{package}=={tried}', with which it was tried"
        )
