"""Scripts that are written for CUDA run on a machine without: what names a CUDA device means the CPU.

Both sides of a comparison run so, the script as it is and the changed one.
"""

from __future__ import annotations

import functools
import os
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.utils._device import _device_constructors

FACTORIES = (
    "arange as_tensor empty eye full full_like linspace ones rand randint randn randperm tensor zeros zeros_like"
)
SILENT = "set_device synchronize empty_cache reset_peak_memory_stats reset_max_memory_allocated set_rng_state_all"
COUNTS = "max_memory_allocated memory_allocated max_memory_reserved memory_reserved current_device"


def stand_in() -> None:
    """Replaces these functions in torch, for the life of the process."""
    _device_constructors()  # torch notes them by identity, for "with torch.device(...)": transformers' meta device
    for name in SILENT.split():
        setattr(torch.cuda, name, lambda *_, **__: None)
    for name in COUNTS.split():
        setattr(torch.cuda, name, lambda *_, **__: 0)
    torch.cuda.device_count = lambda: int(os.environ.get("LOCAL_WORLD_SIZE", "1"))
    for name in FACTORIES.split():
        _wrap(torch, name)
    _wrap(torch, "load", "map_location")
    for owner in (torch.Tensor, nn.Module):
        _wrap(owner, "to")
        owner.cuda = lambda self, *_, **__: self
    torch.Tensor.pin_memory = lambda self, *_, **__: self
    torch.Tensor.record_stream = lambda self, *_: None
    _wrap(torch.amp.autocast_mode.autocast, "__init__", "device_type")
    _wrap(torch.amp.GradScaler, "__init__", "device")
    _init_with_gloo()


def without_devices(cls: type) -> None:
    """The wrapper ``cls`` forgets its ``device_ids``, which a model on the CPU may not have."""
    init = cls.__init__

    @functools.wraps(init)
    def wrapped(self: Any, module: nn.Module, device_ids: Any = None, output_device: Any = None, **kwargs: Any) -> None:
        init(self, module, **kwargs)

    cls.__init__ = wrapped


def _wrap(owner: Any, name: str, keyword: str = "device") -> None:
    function = getattr(owner, name)

    @functools.wraps(function)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if keyword in kwargs:
            kwargs[keyword] = _on_cpu(kwargs[keyword])
        return (
            function(*map(_on_cpu, args), **kwargs) if name in ("to", "__init__", "load") else function(*args, **kwargs)
        )

    setattr(owner, name, wrapped)


def _on_cpu(value: Any) -> Any:
    is_cuda = (isinstance(value, str) and value.split(":")[0] == "cuda") or (
        isinstance(value, torch.device) and value.type == "cuda"
    )
    return "cpu" if is_cuda or type(value) is int else value


def _init_with_gloo() -> None:
    init = dist.init_process_group

    @functools.wraps(init)
    def wrapped(backend: Any = None, *args: Any, **kwargs: Any) -> None:
        kwargs.pop("device_id", None)
        init("gloo", *args, **kwargs)

    dist.init_process_group = wrapped
    dist.distributed_c10d.init_process_group = wrapped
