"""How models of transformers give their modules first values: by their own functions.

zerox does not import it. A program that has such a model has, so its classes are looked for among the modules that are
loaded. Names that it keeps private stand here alone.

A module belongs to the nearest model of transformers around it, which initialises it as in ``initialize_weights()``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

from torch import Tensor, nn

from zerox.optimizer.adapters import Adapters, kind_of

OLDEST = "5.20"
FLAG = "_is_hf_initialized"  # of a module or a tensor that transformers' functions of init leave alone
HOOK = "_hf_hook"  # of a module for which Accelerate moves values to and fro
GUARD = "guard_torch_init_functions"  # of transformers.initialization
INIT = "_initialize_weights"  # of one module, by the model that it belongs to; sets its flag


class Libraries:
    """Which functions of other libraries initialise the modules of ``model``. ValueError where none can."""

    def __init__(self, model: nn.Module) -> None:
        self.owners: dict[int, nn.Module] = {}
        self.adapters = Adapters(model)
        pretrained = kind_of("transformers.modeling_utils", "PreTrainedModel")
        self._find(model, None, pretrained)

    def init_of(self, module: nn.Module) -> Callable[[], object] | None:
        """None for a module that belongs to no model of theirs, or has nothing on meta in it."""
        owner = self.owners.get(id(module))
        is_adapters = self.adapters.has(module)
        if not (owner or is_adapters) or not any(is_on_meta(module)):
            return None
        return partial(self._initialise, None if is_adapters else owner, module)

    def _initialise(self, owner: nn.Module | None, module: nn.Module) -> None:
        if owner is not None:
            initialise(owner, module)
        self.adapters.initialise(module)

    def _find(self, module: nn.Module, owner: nn.Module | None, pretrained: Any) -> None:
        if id(module) in self.owners:
            return
        if isinstance(module, pretrained):
            owner = module
            if any(is_on_meta(module)):
                guard_of(module)
        if owner is not None:
            self.owners[id(module)] = owner
        for child in module.children():
            self._find(child, owner, pretrained)


def is_on_meta(module: nn.Module) -> Iterator[bool]:
    """Of each parameter and buffer."""
    return (each.is_meta for each in (*module.parameters(), *module.buffers()))


def initialise(owner: nn.Module, module: nn.Module) -> None:
    """A flag says that it was done on meta, as in Accelerate's ``init_empty_weights()``, where nothing came of it."""
    vars(module).pop(FLAG, None)
    with guard_of(owner)():
        getattr(owner, INIT)(module)


def guard_of(owner: nn.Module) -> Callable[[], AbstractContextManager[None]]:
    """Makes the context in which torch's own functions of init leave alone what has a flag. RuntimeError, in one line,
    for a version without it, or without the function that initialises a module."""
    guard: Any = getattr(sys.modules.get("transformers.initialization"), GUARD, None)
    if guard is None or not hasattr(owner, INIT):
        lost = GUARD if guard is None else INIT
        raise RuntimeError(
            f"zerox: the transformers of {type(owner).__name__} has no {lost}(), by which its models are given first "
            f"values on the meta device: pip install 'transformers>={OLDEST}', or pass init="
        )
    return guard  # type: ignore[no-any-return]


@contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Inside, transformers' functions leave alone what is in memory now, also those of a module around it."""
    flagged: list[Tensor] = []
    for tensor in (*model.parameters(), *model.buffers()):
        if not tensor.is_meta and not hasattr(tensor, FLAG):
            setattr(tensor, FLAG, True)
            flagged.append(tensor)
    try:
        yield
    finally:
        for tensor in flagged:
            delattr(tensor, FLAG)


def check_values(path: str, module: nn.Module) -> None:
    """ValueError for a module on meta that has values elsewhere, or had some that are lost."""
    tensors = [*module.parameters(recurse=False), *module.buffers(recurse=False)]
    empty = [tensor for tensor in tensors if tensor.is_meta]
    way_out = (
        "make the model on meta from its config, as AutoModelForCausalLM.from_config(config) does, and call "
        "zerox.load_weights() once the optimizer is there"
    )
    if empty and hasattr(module, HOOK):
        raise ValueError(
            f"zerox: Accelerate keeps the values of module '{path}' ({type(module).__name__}) elsewhere and brings "
            f"them for each forward, as device_map= and load_checkpoint_and_dispatch() ask for: {way_out}"
        )
    if any(getattr(tensor, FLAG, False) for tensor in empty):
        raise ValueError(
            f"zerox: module '{path}' ({type(module).__name__}) was loaded onto the meta device, where "
            f"from_pretrained() loses the values: {way_out}"
        )
