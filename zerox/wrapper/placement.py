"""Where a wrapped module lies, and what a forward's inputs are moved to: as in torch's DistributedDataParallel."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel.scatter_gather import gather, scatter_kwargs

from zerox import _torch


class Placement:
    device: torch.device  # of the first parameter
    device_type: str
    device_ids: list[int] | None  # one index: inputs are moved there
    output_device: int | None
    dim: int  # along which scatter() and gather() cut

    def _place(self, params: Sequence[Tensor], device_ids: Any, output_device: Any, dim: int) -> None:
        """Raises ValueError as torch does, for several device ids, several device types, and ids that don't fit."""
        if device_ids is not None and len(device_ids) > 1:
            raise ValueError(f"device_ids can only be None or contain a single element, got {device_ids}")
        devices = {param.device for param in params}
        types = {device.type for device in devices}
        if len(types) > 1:
            raise ValueError(
                "DistributedDataParallel's input module must be on the same type of devices, but input module "
                f"parameters locate in {sorted(types)}"
            )
        self.device = params[0].device
        self.device_type = self.device.type
        self.dim = dim
        self.device_ids, self.output_device = None, None
        if not device_ids or self.device_type == "cpu" or len(devices) > 1:
            if device_ids or output_device:
                raise ValueError(
                    "DistributedDataParallel device_ids and output_device arguments only work with "
                    "single-device/multiple-device GPU modules or CPU modules, but got device_ids "
                    f"{device_ids}, output_device {output_device}, and module parameters {devices}"
                )
            return
        self.device_ids = [_torch.device_index(device) for device in device_ids]
        self.output_device = _torch.device_index(device_ids[0] if output_device is None else output_device)

    @property
    def is_multi_device_module(self) -> bool:
        assert isinstance(self, nn.Module)
        return len({param.device for param in self.parameters()}) > 1

    def _move(self, inputs: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Sequence[Any], Mapping[str, Any]]:
        """A forward's arguments, on the module's device if there are ``device_ids``."""
        if not self.device_ids:
            return inputs, kwargs
        moved, moved_kwargs = self.to_kwargs(inputs, kwargs, self.device_ids[0])
        return moved[0], moved_kwargs[0]

    def to_kwargs(self, inputs: Any, kwargs: Any, device_id: int) -> Any:
        return _torch.move_to(inputs, kwargs, torch.device(self.device_type, device_id))

    def scatter(self, inputs: Any, kwargs: Any, device_ids: Any) -> Any:
        return scatter_kwargs(inputs, kwargs, device_ids, dim=self.dim)

    def gather(self, outputs: Any, output_device: Any) -> Any:
        return gather(outputs, output_device, dim=self.dim)
