"""A tensor's device memory in another process of the same machine, by device type."""

from __future__ import annotations

import json
from typing import Protocol

import torch
from torch import Tensor

from zerox import _torch


class DeviceMemory(Protocol):
    """How one type of device does it. Each raises RuntimeError if it can't be done here."""

    def share(self, tensor: Tensor) -> str:
        """What one other process needs to open the memory of ``tensor``, which is alone in its storage.

        The memory must stay until that process has dropped what it opened.
        """

    def open(self, token: str, device: torch.device) -> Tensor:
        """The bytes of that memory as a tensor of ``device``, which need not be the one that they are on."""

    def decline(self, token: str) -> None:
        """Instead of :meth:`open`: nobody will open it. Never raises."""


class CudaMemory:
    """As torch.multiprocessing sends tensors, in each mode of torch's allocator that can do so (not cudaMallocAsync).

    torch counts who has opened what: memory that its owner frees is used again when others have dropped it. It would
    open another GPU's memory as a tensor of that GPU, which takes a context there, and copies would run on that GPU's
    streams. CUDA maps it for a GPU of our own as well, if the two have peer access. So copies run on our own streams,
    and the other GPU need not be visible to this process.
    """

    def share(self, tensor: Tensor) -> str:
        shared = _torch.share_cuda(tensor)
        _, handle, nbytes, offset, counter, counter_offset, _, _ = shared
        return json.dumps([handle.hex(), nbytes, offset, counter.hex(), counter_offset])

    def open(self, token: str, device: torch.device) -> Tensor:
        handle, nbytes, offset, counter, counter_offset = json.loads(token)
        counted = (bytes.fromhex(counter), counter_offset)
        event = (b"", False)  # torch could let our stream wait for one of the owner's. Its host has waited instead
        storage = _torch.open_cuda(device.index, bytes.fromhex(handle), nbytes, offset, *counted, *event)
        return torch.empty(0, dtype=torch.uint8, device=device).set_(storage)  # type: ignore[call-overload]

    def decline(self, token: str) -> None:
        *_, counter, counter_offset = json.loads(token)
        _torch.decline_cuda(bytes.fromhex(counter), counter_offset)


# Other types read each other's memory through the host's.
BY_TYPE: dict[str, DeviceMemory] = {"cuda": CudaMemory()}
