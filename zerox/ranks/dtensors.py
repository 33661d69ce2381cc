"""What zerox asks of a DTensor: its local tensor, how it lies on its mesh, and the same of its gradient.

See Note [Local tensors] in csrc/buckets/bucket.h. torch.distributed.tensor takes long to import, so it is only looked
at where something else has imported it: before that there are no DTensors.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

from zerox import _C as C
from zerox import _torch
from zerox.plan.cut import Cut

MOST_DIMS = 4  # of a mesh: SeenPlacements in csrc/buckets/bucket.h


def is_dtensor(tensor: Tensor | None) -> bool:
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and isinstance(tensor, module.DTensor)


def local_of(tensor: Any) -> Any:
    """The local tensor of a DTensor; anything else as it is."""
    return _torch.local_tensor_of(tensor) if is_dtensor(tensor) else tensor


def cut_of(tensor: Any) -> Cut | None:
    """Where the local tensor of a DTensor lies in the whole one; None if it is the whole one, or no DTensor."""
    if not is_dtensor(tensor) or _torch.local_tensor_of(tensor).shape == tensor.shape:
        return None
    return Cut(tuple(tensor.shape), _torch.offsets_of(tensor))


def cuts_of(tensor: Any) -> dict[int, int]:
    """By dimension of a DTensor, in how many parts it is cut there; nothing for any other tensor."""
    found: dict[int, int] = {}
    for dim, placement in enumerate(tensor.placements) if is_dtensor(tensor) else ():
        if placement.is_shard() and tensor.device_mesh.size(dim) > 1:
            found[placement.dim] = found.get(placement.dim, 1) * tensor.device_mesh.size(dim)
    return found


def part_of(tensor: Any, whole: Tensor) -> Tensor:
    """A view of what a DTensor's local tensor is of a ``whole`` one; of any other tensor all."""
    if (cut := cut_of(tensor)) is None:
        return whole
    sizes = _torch.local_tensor_of(tensor).shape
    return whole[tuple(slice(start, start + size) for start, size in zip(cut.offsets, sizes, strict=True))]


def whole_of(tensor: Any, local: Tensor) -> Tensor:
    """The whole of what lies as a DTensor does, from each rank's ``local`` part. Collective over its mesh."""
    if not cuts_of(tensor):
        return local
    module: Any = sys.modules["torch.distributed.tensor"]
    mesh, device = tensor.device_mesh, local.device
    sent = local.to(mesh.device_type) if mesh.device_type != device.type else local
    lying: Any = module.DTensor.from_local(
        sent, mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    found: Tensor = lying.full_tensor().to(device)
    return found


def name_of_dim(mesh: Any, dim: int) -> str:
    names = mesh.mesh_dim_names
    return f"'{names[dim]}'" if names else f"{dim} of its mesh"


def unfit_dtensor(param: Any) -> str:
    """Why a DTensor's local tensor can't be trained; empty if it can."""
    module: Any = sys.modules["torch.distributed.tensor"]
    mesh = param.device_mesh
    if type(param) is not module.DTensor:
        return f"must be a plain tensor or a DTensor, got a {type(param).__name__}"
    if mesh.get_coordinate() is None:
        return f"is a DTensor on {mesh}, which does not have this rank"
    if mesh.ndim > MOST_DIMS:
        return f"is a DTensor on a mesh of {mesh.ndim} dimensions; zerox knows {MOST_DIMS}"
    for dim, placement in enumerate(param.placements):
        if type(placement) not in (module.Shard, module.Replicate):
            return (
                f"is a DTensor that lies as {placement!r} over axis {name_of_dim(mesh, dim)}: only Shard and Replicate "
                "can be trained. Where FSDP shards it too, leave FSDP out: zerox shards over the data-parallel ranks"
            )
    local = _torch.local_tensor_of(param)
    if type(local) is not Tensor:
        return f"is a DTensor of {type(local).__name__}s; its local tensor must be a plain one"
    if local.dtype != param.dtype:
        return f"is a DTensor of {param.dtype} with a local tensor of {local.dtype}: convert the model before it is cut"
    return ""


def placements_text(param: Any) -> str:
    """For comparing ranks: how a parameter lies over axes of several ranks; empty if it is a plain tensor."""
    if not is_dtensor(param):
        return ""
    mesh = param.device_mesh
    places = [
        f"{placement!r} over axis {name_of_dim(mesh, dim)} of {mesh.shape[dim]}"
        for dim, placement in enumerate(param.placements)
    ]
    return f" of {tuple(param.shape)} {', '.join(places)}"


# ---- for csrc/grads/local_grad.cpp

Found = tuple[Tensor | None, int, int, str]


def find_local(param: Any, grad: Any) -> Found:
    """The gradient as a plain tensor that lies as the parameter does, and the dimensions, as bits, over which it is
    Partial and over which it is Replicate; or why it can't be had."""
    if not is_dtensor(grad):
        return None, 0, 0, f"is a DTensor, and its gradient is a {type(grad).__name__}"
    have, want = grad.placements, param.placements
    partial = replicated = 0
    is_cut = True
    for dim, (came, wanted) in enumerate(zip(have, want, strict=True)):
        if came == wanted:
            replicated |= wanted.is_replicate() << dim
        elif param.device_mesh.size(dim) == 1:
            continue
        elif wanted.is_replicate() and came.is_partial("sum"):
            partial |= 1 << dim
        elif came.is_replicate():
            is_cut = False
        else:
            refusal = (
                f"lies as {wanted!r} over axis {name_of_dim(param.device_mesh, dim)}, and its gradient came "
                f"as {came!r}: only the same, Partial(sum) for Replicate, or Replicate for Shard can be taken"
            )
            return None, 0, 0, refusal
    local = _torch.local_tensor_of(grad)
    if not is_cut:
        to = [came if came.is_partial() else wanted for came, wanted in zip(have, want, strict=True)]
        with torch.no_grad():
            local = _torch.local_tensor_of(grad.redistribute(placements=to))  # sends nothing
    return _await(local), partial, replicated, ""


def values_of(grad: Any) -> Tensor:
    return _await(_torch.local_tensor_of(grad))


def _await(local: Any) -> Tensor:
    """A local tensor that is no longer on its way."""
    return local if type(local) is Tensor else local.trigger_wait()


def wrap_local(param: Any, grad: Any, local: Tensor, partial: int) -> Tensor:
    """A gradient of ``param`` with these elements. ``grad``, if it lies alike, gets them: a new DTensor takes 2 us."""
    module: Any = sys.modules["torch.distributed.tensor"]
    spec = _torch.spec_of(param)
    if partial:
        placements = tuple(
            module.Partial() if partial >> dim & 1 else placement for dim, placement in enumerate(spec.placements)
        )
        spec = type(spec)(spec.mesh, placements, tensor_meta=spec.tensor_meta)
    if is_dtensor(grad) and _torch.spec_of(grad) == spec:
        _torch.set_local_tensor(grad, local)
        return grad  # type: ignore[no-any-return]
    return module.DTensor(local, spec, requires_grad=False)  # type: ignore[no-any-return]


C.set_dtensor_functions(find_local, values_of, wrap_local)
