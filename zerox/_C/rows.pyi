"""What csrc/rows binds; see its headers."""

import enum
from collections.abc import Sequence

from torch import Tensor

from zerox._C import PeerMessages

class ReducedRows:
    rows: Tensor
    places: Tensor
    values: Tensor

class RowRule:
    def __init__(self, name: str, options: Sequence[float], *, scale: float, limit: float) -> None: ...
    name: str
    options: list[float]
    scale: float
    limit: float

class RowChange(enum.Enum):
    UNCHANGED = 0
    ADDED = 1
    REPLACED = 2

class RowFlow:
    reduced: list[ReducedRows | None]
    def __init__(self, messages: PeerMessages, neighbours: Sequence[int]) -> None: ...
    def add(
        self,
        *,
        param: Tensor,
        number: int,
        of_block: Tensor,
        states: Sequence[Tensor],
        scales: Sequence[Tensor],
        master: Tensor | None,
        step: Tensor,
        divisor: float,
        own: Tensor | None,
    ) -> None: ...
    def pack(self) -> bool: ...
    def forget(self) -> None: ...
    def note_seen(self) -> None: ...
    def header(self) -> list[int]: ...
    def exchange(self, headers: Sequence[int], goes_on: bool) -> RowChange: ...
    def update(self, rules: Sequence[RowRule]) -> None: ...
    def close(self) -> None: ...
