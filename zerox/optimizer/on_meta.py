"""What of a model is on the meta device, in which order it is initialised, and why it can't be: all before any is made.

Note [First values of a model on meta]
They are those of this loop in one process, whose generators begin as rank 0's:

    model.to_empty(device=device)
    for module in children_first(model):
        init(module)  # or module.reset_parameters(), or what the library that made it has: pretrained.py

with any number of ranks, each of which draws all values, and keeps its own part of each bucket. A module whose own
parameters are in memory is left alone. Ranks compare digests of what they have drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

from zerox import _C as C
from zerox import _torch
from zerox.memory.bucket import Member
from zerox.model_names import quote
from zerox.optimizer.pretrained import Libraries, check_values
from zerox.ranks.group import has_nccl
from zerox.ranks.process_group import GroupArgument

Init = Callable[[nn.Module], object]


class Initialised(NamedTuple):
    """A module, where it is in the model, and its own parameters and buffers that are on meta. ``run`` gives them
    values."""

    path: str
    module: nn.Module
    params: list[nn.Parameter]
    buffers: list[str]
    run: Callable[[], object]

    @property
    def quoted(self) -> str:
        return f"module '{self.path}' ({type(self.module).__name__})" if self.path else type(self.module).__name__


def children_first(model: nn.Module, path: str = "") -> Iterator[tuple[str, nn.Module]]:
    """Each module once, with its path, in the order of :meth:`torch.nn.Module.apply`."""
    seen: set[int] = set()

    def walk(module: nn.Module, path: str) -> Iterator[tuple[str, nn.Module]]:
        if id(module) in seen:
            return
        seen.add(id(module))
        for name, child in module.named_children():
            yield from walk(child, f"{path}.{name}" if path else name)
        yield path, module

    yield from walk(model, path)


def device_of(params: Sequence[Tensor], process_group: GroupArgument) -> torch.device:
    """Where parameters are trained: where those are that are not on meta. Else on the current device of CUDA if ranks
    exchange gradients over NCCL, or on torch's default device."""
    real = next((param.device for param in params if not param.is_meta), None)
    if real is not None or not params:
        return real or torch.device("cpu")
    default = torch.get_default_device()
    if default.type != "cuda" and has_nccl(process_group):
        return torch.device("cuda", torch.cuda.current_device())
    return torch.device("cpu") if default.type == "meta" else torch.empty(0, device=default).device  # with its index


def check_asked(model: nn.Module | None, init: Init | None, members: Sequence[Member]) -> None:
    """ValueError or TypeError for arguments that are no model and no function, for a model without some of the
    parameters, and for an init without anything on meta."""
    if model is not None and not isinstance(model, nn.Module):
        raise TypeError(f"zerox: model must be a torch.nn.Module or None, got {type(model).__name__}")
    if init is not None and not callable(init):
        raise TypeError(f"zerox: init must be a function of a module or None, got {type(init).__name__}")
    if init is not None and not any(member.param.is_meta for member in members):
        raise ValueError("zerox: init is for parameters on the meta device, and none is there: leave it out")
    if model is not None:
        known = {id(param) for param in model.parameters()}
        if other := next((member for member in members if id(member.param) not in known), None):
            raise ValueError(f"zerox: parameter {other.quoted} is not in model: pass the model that has all parameters")


def find_initialised(model: nn.Module, init: Init | None, members: Sequence[Member]) -> list[Initialised]:
    """The modules to initialise, in their order. ValueError for what can't be, by name; nothing has changed then."""
    _check_params(model, members)
    found = []
    init_of = Libraries(model).init_of if init is None else partial(partial, init)
    for path, module in children_first(model):
        check_values(path, module)
        each = _look_at(path, module, init_of(module))
        if each is not None:
            found.append(each)
    return found


def _look_at(path: str, module: nn.Module, init: Callable[[], object] | None) -> Initialised | None:
    """None if there is nothing to do for it. ``init``: what initialises it, if that is not its own method."""
    own, buffers = list(module.parameters(recurse=False)), dict(module.named_buffers(recurse=False))
    params = [param for param in own if param.is_meta]
    empty = [name for name, buffer in buffers.items() if buffer.is_meta]
    each = Initialised(path, module, params, empty, lambda: None)
    if params and len(params) < len(own):
        other = next(param for param in own if not param.is_meta)
        raise ValueError(
            f"zerox: {each.quoted} has parameters on the meta device beside others that have values (one of shape "
            f"{tuple(other.shape)} on {other.device}): give all of a module's own parameters values, or none"
        )
    if own and empty and not params:
        raise ValueError(
            f"zerox: {each.quoted} has a buffer '{empty[0]}' on the meta device beside parameters that have values, "
            "which what initialises it would change: give the buffer values"
        )
    for name, value in vars(module).items():
        if isinstance(value, Tensor) and value.is_meta:
            raise ValueError(
                f"zerox: {each.quoted} has a tensor on the meta device as '{name}', which is no parameter and no "
                "buffer, and nobody could give it values: make it a buffer, or make this module in memory"
            )
    if (own or buffers) and not params and not empty:
        return None
    if init is not None:
        return each._replace(run=init)
    reset = _torch.reset_of(module)
    if reset is None:
        if not params and not empty:
            return None
        what = f"parameter of shape {tuple(params[0].shape)}" if params else f"buffer '{empty[0]}'"
        raise ValueError(
            f"zerox: {each.quoted} has a {what} on the meta device and no reset_parameters(): pass init=, a function "
            "that gives a module values, or make this module in memory"
        )
    if not params and not empty:  # one that initialises its parts
        below = [param.is_meta for param in module.parameters()]
        if not any(below) or not isinstance(module, nn.Transformer):
            return None
        if not all(below):
            raise ValueError(
                f"zerox: {each.quoted} initialises the modules in it, of which only some are on the meta device: pass "
                "init="
            )
    return each._replace(run=reset)


def _check_params(model: nn.Module, members: Sequence[Member]) -> None:
    of_model = {id(param): name for name, param in model.named_parameters()}
    given = {id(member.param) for member in members}
    by_storage: dict[int, str] = {}
    for member in members:
        if not member.param.is_meta:
            continue
        if why := _unfit(member.param):
            raise ValueError(f"zerox: parameter {quote(member.name, member.param)} is on the meta device and {why}")
        other = by_storage.setdefault(_torch.storage_of(member.param), member.name)
        if other != member.name:
            raise ValueError(
                f"zerox: parameters '{other}' and '{member.name}' on the meta device share memory, which they would no "
                "longer do: make them one parameter (for a model of transformers that was made inside Accelerate's "
                "init_empty_weights() call model.tie_weights() first)"
            )
    for number, name in of_model.items():
        param = model.get_parameter(name)
        if param.is_meta and number not in given:
            raise ValueError(
                f"zerox: parameter '{name}' of the model is on the meta device, and the optimizer was not given it: "
                "give it all of them, frozen ones too, as model.named_parameters()"
            )


def _unfit(param: Tensor) -> str:
    if param.grad is not None:
        return "has a gradient: build the optimizer before backward"
    if C.has_accumulator(param):
        return "has a node in autograd's graph already: build the optimizer before that is made"
    return ""
