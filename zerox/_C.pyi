"""The extension's types, for mypy and editors. What things do stands in csrc/bucket_manager/*.h."""

import enum
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.distributed import ProcessGroup

EXACT_WORDS: int
SEGMENT_COLUMNS: int

def isa() -> str: ...
def supported_isas() -> list[str]: ...
def select_isa(name: str) -> None: ...
def let_siblings_read() -> None: ...
def read_memory(pid: int, address: int, into: Tensor) -> bool: ...

class Place(enum.Enum):
    STEP = 1
    CLIP = 2
    SYNCHRONIZE = 3
    UNSCALE = 4

class Combine(enum.Enum):
    SUM = 0
    MAX = 1

class Settled(enum.Enum):
    READY = 0
    ADOPT = 1

class Pending:
    def wait(self) -> None: ...

class ExchangeKind:
    def __init__(self, *, direct: bool, messages: bool, staged: bool, neighbours: Sequence[int]) -> None: ...

class ManagerOptions:
    def __init__(self, *, whole_grads: bool, keeps_shards: bool, device: torch.device) -> None: ...

class BucketManager:
    num_buckets: int
    num_launched: int
    num_added: int
    holds_scaled: bool
    num_landed: int
    settled: bool
    launch_order: list[int]
    traffic: tuple[int, int]
    def __init__(
        self,
        group: ProcessGroup | None,
        control: ProcessGroup | None,
        exchange: ExchangeKind,
        options: ManagerOptions,
    ) -> None: ...
    def add_bucket(
        self,
        names: list[str],
        params: list[Tensor],
        flat: Tensor,
        placeholders: Sequence[Tensor] | None,
        offsets: list[int],
        wire_dtype: torch.dtype,
        shard_numel: int,
        trailer_numel: int,
        segments: Tensor,
        num_straight: int,
    ) -> int: ...
    def settle(self, place: Place, adoptions: int = 0, refusal: str = "") -> Settled: ...
    def land(self) -> None: ...
    def zero(self, set_to_none: bool) -> None: ...
    def set_sync(self, sync: bool) -> None: ...
    def take_local_shard(self, bucket: int) -> Tensor: ...
    def mark_zeroed(self, bucket: int, slot: int) -> None: ...
    def mark_scaled(self) -> None: ...
    def gather(self, bucket: int) -> Pending: ...
    def moved(self) -> list[tuple[int, int]]: ...
    def all_reduce(self, values: Tensor, combine: Combine) -> None: ...
    def shard(self, bucket: int) -> Tensor | None: ...
    def present(self, bucket: int) -> Tensor: ...
    def words(self, bucket: int) -> Tensor | None: ...
    def trouble(self) -> str: ...
    def hold_flights(self, hold: bool) -> None: ...
