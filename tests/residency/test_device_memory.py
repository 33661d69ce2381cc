"""How a GPU's memory gets from process to process, without a GPU: what torch is given, by a stand-in for its calls."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from zerox.residency.device_memory import BY_TYPE

HANDLE, COUNTER, EVENT = b"\x00a handle\xff", b"/torch_1_2", b"an event"
NBYTES, OFFSET, COUNTER_OFFSET = 64, 512, 7


class Calls:
    """Of torch's, with the arguments that torch 2.11 to 2.13 have: see torch/csrc/StorageSharing.cpp."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.made: list[tuple[Any, ...]] = []
        for name in ("_share_cuda_", "_new_shared_cuda", "_release_ipc_counter_cuda"):
            assert hasattr(torch.UntypedStorage, name), "torch has it no more"
            call = getattr(self, name.strip("_"))
            monkeypatch.setattr(torch.UntypedStorage, name, call if name == "_share_cuda_" else staticmethod(call))

    @property
    def share_cuda(self) -> Any:
        return lambda storage: (1, HANDLE, storage.nbytes(), OFFSET, COUNTER, COUNTER_OFFSET, EVENT, True)

    def new_shared_cuda(self, *arguments: Any) -> torch.UntypedStorage:
        self.made.append(arguments)
        return torch.UntypedStorage(arguments[2])

    def release_ipc_counter_cuda(self, *arguments: Any) -> None:
        self.made.append(arguments)


def test_what_is_opened_is_what_was_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a tensor of the reader's own device, whose streams wait for no event: the owner's host has waited."""
    calls = Calls(monkeypatch)
    memory = BY_TYPE["cuda"]
    token = memory.share(torch.zeros(NBYTES // 4))
    with monkeypatch.context() as on_host:
        empty = torch.empty
        on_host.setattr(torch, "empty", lambda *size, dtype, device: empty(*size, dtype=dtype))
        opened = memory.open(token, torch.device("cuda", 3))
    assert calls.made == [(3, HANDLE, NBYTES, OFFSET, COUNTER, COUNTER_OFFSET, b"", False)]
    assert opened.dtype == torch.uint8
    assert opened.shape == (NBYTES,)


def test_what_is_declined_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Calls(monkeypatch)
    memory = BY_TYPE["cuda"]
    memory.decline(memory.share(torch.zeros(NBYTES // 4)))
    assert calls.made == [(COUNTER, COUNTER_OFFSET)]
