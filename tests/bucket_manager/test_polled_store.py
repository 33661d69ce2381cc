"""Waits of a PolledStore leave the store's one connection to others, and end."""

from __future__ import annotations

import threading
import time
from datetime import timedelta

import pytest
import torch.distributed as dist

from zerox.ranks.polled_store import PolledStore


def test_others_ask_the_store_while_it_waits() -> None:
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=5))
    found: list[bytes] = []
    waits = threading.Thread(target=lambda: found.append(PolledStore(store).get("key")), daemon=True)
    waits.start()
    begun = time.monotonic()
    while time.monotonic() - begun < 0.2:
        assert not store.check(["key"])
    store.set("key", "value")
    waits.join(10)
    assert found == [b"value"]


def test_a_wait_ends_with_its_timeout() -> None:
    polled = PolledStore(dist.HashStore())
    with pytest.raises(RuntimeError, match=r"^wait timeout after 0.05 s, keys: a, b$"):
        polled.wait(["a", "b"], timedelta(seconds=0.05))


def test_a_wait_ends_when_nobody_waits_any_longer() -> None:
    polled = PolledStore(dist.HashStore())
    raised: list[str] = []

    def wait() -> None:
        with pytest.raises(RuntimeError) as error:
            polled.wait(["key"])
        raised.append(str(error.value))

    waits = threading.Thread(target=wait, daemon=True)
    waits.start()
    polled.close()
    waits.join(10)
    assert raised == ["nobody waits any longer"]
