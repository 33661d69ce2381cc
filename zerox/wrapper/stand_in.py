"""What stands for torch's Reducer: frameworks and pipeline stages ask it to send the next backward."""

from __future__ import annotations

from typing import Any

from zerox._C import Decision


class Reducer:
    """The ``reducer`` of a :class:`zerox.DistributedDataParallel`, which has none of torch's."""

    def __init__(self, decision: Decision) -> None:
        self._decision = decision

    def prepare_for_backward(self, outputs: Any) -> None:
        """The next backward is sent, whatever forwards have decided."""
        self._decision.note_forward(True)

    def prepare_for_forward(self) -> None:
        """As torch's: there is nothing to do."""

    def _rebuild_buckets(self) -> bool:
        return False

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"zerox.DistributedDataParallel has no reducer of torch's, and so no reducer.{name}: optimizers of zerox "
            "average its gradients"
        )
