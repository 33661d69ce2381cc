"""The arguments of torch's DistributedDataParallel: what is refused, and what has no effect here."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel as OfTorch
from torch.nn.parameter import is_lazy

from zerox import _torch
from zerox.options import UPDATED_INSIDE
from zerox.plan.buckets import MIB
from zerox.wrapper.values import MOST_BYTES

REFUSED = {
    "mixed_precision": "use autocast, or a 16-bit model, whose optimizer keeps master weights",
    "delay_all_reduce_named_params": "gradients leave as backward makes them: leave it out",
    "param_to_hook_all_reduce": "gradients leave as backward makes them: leave it out",
}
MOST_LIKE_TORCH_MB = 25.0
RENAMES_BUFFERS = "forward_sync_buffers" in inspect.signature(OfTorch.__init__).parameters


class WithoutEffect:
    """Attributes of torch's wrapper that say how its reducer works."""

    gradient_as_bucket_view: bool
    batched_grad_copy: bool
    skip_all_reduce_unused_params: bool
    bucket_bytes_cap: int  # where torch.compile cuts the graph of a wrapped module; optimizers have their own buckets
    bucket_bytes_cap_list: list[int]
    broadcast_bucket_size = MOST_BYTES
    mixed_precision = None
    logger = None

    def _keep(self, gradient_as_bucket_view: bool, batched_grad_copy: bool, skip_unused: bool) -> None:
        self.gradient_as_bucket_view = gradient_as_bucket_view
        self.batched_grad_copy = batched_grad_copy
        self.skip_all_reduce_unused_params = skip_unused

    def _keep_caps(self, bucket_cap_mb: float | None, bucket_cap_mb_list: Sequence[float] | None) -> None:
        most_mb = max(bucket_cap_mb_list) if bucket_cap_mb_list else bucket_cap_mb
        self.bucket_bytes_cap = int((MOST_LIKE_TORCH_MB if most_mb is None else most_mb) * MIB)
        self.bucket_bytes_cap_list = [int(each * MIB) for each in bucket_cap_mb_list or ()]


def check_refused(**given: Any) -> None:
    """ValueError for an argument that would change numbers, and does not here."""
    for name, value in given.items():
        if value is not None:
            raise ValueError(f"zerox.DistributedDataParallel does not take {name}: {REFUSED[name]}")


def choose_group_of(process_group: Any, device_mesh: DeviceMesh | None) -> dist.ProcessGroup | None:
    """The group that a module is trained in; None for one process without torch.distributed. Raises as torch does."""
    if process_group and device_mesh is not None:
        raise RuntimeError("Cannot specify both process_group and device_mesh arguments.")
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise RuntimeError(f"Only 1D device mesh is supported, but got {device_mesh}.")
        return device_mesh.get_group(0)
    if process_group is not None:
        if not isinstance(process_group, dist.ProcessGroup):
            raise ValueError(f"process_group must be a ProcessGroup that this process is in, got {process_group!r}")
        return process_group
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None


def trained_params(module: nn.Module, ignored: set[str]) -> list[Tensor]:
    """All parameters but the ignored ones. RuntimeError, in torch's words, if none is trained, or one is lazy."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"zerox.DistributedDataParallel wraps a torch.nn.Module, got {type(module).__name__}")
    params: list[Tensor] = [param for name, param in module.named_parameters() if name not in ignored]
    if not any(param.requires_grad for param in params):
        raise RuntimeError(
            "DistributedDataParallel is not needed when a module doesn't have any parameter that requires a gradient."
        )
    if any(is_lazy(param) for param in params):
        raise RuntimeError(
            "Modules with uninitialized parameters can't be used with `DistributedDataParallel`. Run a dummy forward "
            "pass to correctly initialize the modules"
        )
    if params[0].device.type == "cpu" and any(isinstance(each, nn.SyncBatchNorm) for each in module.modules()):
        raise ValueError("SyncBatchNorm layers only work with GPU modules")
    return params


def check_updated_after_backward(params: Mapping[str, Tensor]) -> None:
    """RuntimeError for a parameter that an optimizer updates before its gradient is averaged."""
    for name, param in params.items():
        if _torch.is_updated_inside(param):
            raise RuntimeError(f"zerox.DistributedDataParallel: parameter '{name}' {UPDATED_INSIDE}")


def buffers_to_share(broadcast_buffers: bool | None, forward_sync_buffers: bool | None) -> tuple[bool, bool]:
    """Whether forwards hand out buffers, and whether the constructor does: the older argument speaks of both."""
    if forward_sync_buffers is not None:
        if broadcast_buffers is not None:
            _say_deprecated("broadcast_buffers is ignored where forward_sync_buffers is passed")
        return bool(forward_sync_buffers), True
    if broadcast_buffers is not None and RENAMES_BUFFERS:
        _say_deprecated(
            "torch has renamed broadcast_buffers: pass forward_sync_buffers. If False, that one leaves the "
            "constructor's hand-out of buffers on"
        )
    both = True if broadcast_buffers is None else bool(broadcast_buffers)
    return both, both


def check_reduction_is_off(check_reduction: bool) -> None:
    if check_reduction:
        _say_deprecated("torch has deprecated check_reduction, and it does nothing: leave it out")


def _say_deprecated(text: str) -> None:
    warnings.warn(f"zerox.DistributedDataParallel: {text}", FutureWarning, stacklevel=4)
