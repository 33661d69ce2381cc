"""Names in a checkpoint: the model's, whatever order and names the optimizer was given."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

from zerox import _torch
from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine
from zerox.memory.flat import dense_strides
from zerox.plan.span import Span
from zerox.ranks.dtensors import cut_of, is_dtensor
from zerox.ranks.wrapped import PREFIX
from zerox.sliced_tensor import SlicedTensor

MODEL, OPTIMIZER = "model.", "optimizer."
COMPILED = "_orig_mod."  # torch.compile() puts it into names
EXTRA_STATE = "_extra_state"


def key_of(name: str, what: str) -> str:
    """Of a part of a parameter's state."""
    return f"{OPTIMIZER}{name}.{what}"


def naming_in(model: nn.Module) -> Callable[[str], str]:
    """What a checkpoint calls what the model does: without what torch.compile() and wrappers put into names."""
    wrappers = [f"{path}." * bool(path) for path, each in model.named_modules() if isinstance(each, OfTorch)]

    def bare(name: str) -> str:
        for path in reversed(wrappers):  # those inside others first
            if name.startswith(path + PREFIX):
                name = path + name.removeprefix(path + PREFIX)
        return name.replace(COMPILED, "")

    return bare


def parameter_names(model: nn.Module, optimizer: Engine) -> dict[int, str]:
    """By number: the name in the model, else the one that the optimizer was given, else "param 3" by position."""
    bare = naming_in(model)
    of_model = {id(param): bare(name) for name, param in model.named_parameters()}
    found = {m.number: of_model.get(id(m.param), m.name) for m in optimizer.inside.members}
    if len(set(found.values())) < len(found):
        twice = sorted(name for name in set(found.values()) if list(found.values()).count(name) > 1)
        raise CheckpointError(f"two parameters of the optimizer have one name, one of them not in the model: {twice}")
    return found


def keys_in_model(model: nn.Module, param: Tensor) -> list[str]:
    """A parameter's names in a checkpoint: several if modules share it."""
    bare, named = naming_in(model), model.named_parameters(remove_duplicate=False)
    return [MODEL + bare(name) for name, each in named if each is param]


def split_model(model: nn.Module, optimizer: Engine) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """Tensors of the model's state_dict() by their names in a checkpoint, and what else is in it by its own.

    Of a parameter that is sharded, this rank's segment; of a DTensor its local tensor, as a part of the whole one.
    """
    state, bare = model.state_dict(), naming_in(model)
    others = {name for name, value in state.items() if name.endswith(EXTRA_STATE) or not isinstance(value, Tensor)}
    tensors = {MODEL + bare(name): value for name, value in state.items() if name not in others}
    for name, param in model.named_parameters(remove_duplicate=False):
        key, part = MODEL + bare(name), optimizer.inside.gather.segment_of(param)
        if key in tensors and part is not None:
            tensors[key] = part
    tensors = {name: sliced_dtensor(value) if is_dtensor(value) else value for name, value in tensors.items()}
    return tensors, {bare(name): state[name] for name in others}


def sliced_dtensor(tensor: Any) -> Tensor:
    """A DTensor's local tensor, whose memory it shows. Others than cut or replicated ones stay as they are."""
    local = _torch.local_tensor_of(tensor)
    if (
        any(not (each.is_shard() or each.is_replicate()) for each in tensor.placements)
        or dense_strides(local) != local.stride()
    ):
        return tensor  # type: ignore[no-any-return]
    values = local.detach().as_strided((local.numel(),), (1,))
    return SlicedTensor(local.shape, local.stride(), Span(0, local.numel()), values, cut_of(tensor))


def fill_others(model: nn.Module, saved: dict[str, Any]) -> None:
    """Gives modules the extra state that they had."""
    bare = naming_in(model)
    own = {bare(name): name for name in model.state_dict()}
    model.load_state_dict({own[name]: value for name, value in saved.items() if name in own}, strict=False)
