"""Accelerate's LocalSGD, which averages parameters now and then, in place of gradients."""

from __future__ import annotations

import functools
from typing import Any

WHY = (
    "zerox: LocalSGD averages parameters now and then in place of gradients, and this accelerator's optimizers average "
    "gradients in each step: leave LocalSGD out, or use an accelerator that is not adopted, and an optimizer of torch"
)


def refuse_local_sgd(adopted: type) -> None:
    """Has LocalSGD raise ValueError where it begins with an accelerator of the class ``adopted``. It would ask the
    model for ``no_sync``, which only DistributedDataParallel has."""
    from accelerate.local_sgd import LocalSGD

    enter = LocalSGD.__enter__
    if hasattr(enter, "__wrapped__"):
        return

    @functools.wraps(enter)
    def checked(self: Any) -> Any:
        if self.enabled and isinstance(self.accelerator, adopted):
            raise ValueError(WHY)
        return enter(self)

    LocalSGD.__enter__ = checked
