"""A store that waits without keeping its connection to itself."""

from __future__ import annotations

import time
from collections.abc import Sequence
from datetime import timedelta

from torch.distributed.distributed_c10d import Store, default_pg_timeout

FIRST_S, LONGEST_S = 0.001, 0.05


class PolledStore(Store):
    """``store``, of which other threads ask meanwhile: a connection answers one call at a time, and a wait is one.

    Another connection would take one more of the host's that has the store, and up to seconds: torch's store looks up
    the name of each host that connects, and serves nobody until a name server has answered or was given up.
    """

    def __init__(self, store: Store) -> None:
        super().__init__()
        self.store = store
        self.is_closed = False

    def close(self) -> None:
        """Ends waits with RuntimeError, and soon."""
        self.is_closed = True

    def wait(self, keys: Sequence[str], timeout: timedelta = default_pg_timeout) -> None:  # type: ignore[override]
        deadline, pause = time.monotonic() + timeout.total_seconds(), FIRST_S
        while not self.store.check(list(keys)):
            if self.is_closed:
                raise RuntimeError("nobody waits any longer")
            if time.monotonic() > deadline:
                raise RuntimeError(f"wait timeout after {timeout.total_seconds():g} s, keys: {', '.join(keys)}")
            time.sleep(pause)
            pause = min(2.0 * pause, LONGEST_S)

    def get(self, key: str) -> bytes:
        self.wait([key])
        return self.store.get(key)

    def set(self, key: str, value: str) -> None:  # type: ignore[override]
        self.store.set(key, value)

    def add(self, key: str, value: int) -> int:
        return self.store.add(key, value)

    def check(self, keys: Sequence[str]) -> bool:  # type: ignore[override]
        return self.store.check(list(keys))
