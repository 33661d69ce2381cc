"""First values of PEFT's adapters on the meta device: LoRA's, by the function by which PEFT gives them.

get_peft_model() puts them where the module is that they adapt, so on meta what PEFT had drawn is lost. zerox does not
import PEFT, and has its names here alone.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from torch import nn

KNOWN = (True, False, "gaussian")  # of LoraConfig(init_lora_weights=): those that need no values of the module
RESET = "reset_lora_parameters"


def kind_of(module: str, name: str) -> type | tuple[()]:
    """A class of a package that may be loaded, for isinstance()."""
    found = getattr(sys.modules.get(module), name, ())
    return found if isinstance(found, type) else ()


class OnMeta(NamedTuple):
    """An adapter in one layer, by its name, and how its config says that it begins."""

    name: str
    begins: Any


class Adapters:
    """Those on meta in ``model``. ValueError for what can't be initialised."""

    def __init__(self, model: nn.Module) -> None:
        self.parts: set[int] = set()  # modules that hold adapters' parameters, by id
        self.layers: dict[int, list[OnMeta]] = {}
        self._find(model, "", {}, set())

    def has(self, module: nn.Module) -> bool:
        """Whether its parameters are an adapter's."""
        return id(module) in self.parts

    def initialise(self, module: nn.Module) -> None:
        """The adapters in a layer, once the modules in it have had their turn."""
        for each in self.layers.get(id(module), ()):
            if each.begins is False:  # as the layers of torch that an adapter is made of
                for name in ("lora_A", "lora_B"):
                    getattr(module, name)[each.name].reset_parameters()
            else:
                getattr(module, RESET)(each.name, each.begins)

    # ---- inside

    def _find(self, module: nn.Module, path: str, configs: Mapping[str, Any], seen: set[int]) -> None:
        if id(module) in seen:
            return
        seen.add(id(module))
        own = getattr(module, "peft_config", None)
        configs = own if isinstance(own, Mapping) else configs
        if isinstance(module, kind_of("peft.tuners.tuners_utils", "BaseTunerLayer")):
            self._take(module, path, configs)
        is_copied = isinstance(module, kind_of("peft.utils.other", "AuxiliaryTrainingWrapper"))
        if is_copied and any(param.is_meta for param in module.parameters()):
            raise ValueError(
                f"zerox: PEFT trains a copy of module '{path}', and on the meta device there are no values to copy: "
                "leave it out of modules_to_save= and trainable_token_indices= and train the module itself "
                "(requires_grad_(True)), or pass init="
            )
        for name, child in module.named_children():
            self._find(child, f"{path}.{name}" if path else name, configs, seen)

    def _take(self, layer: Any, path: str, configs: Mapping[str, Any]) -> None:
        names = [*layer.adapter_layer_names, *layer.other_param_names]
        holders = [each for name in names if isinstance(each := getattr(layer, name, None), nn.Module)]
        for holder in holders:
            self.parts |= {id(each) for each in holder.modules()}
        empty = list(dict.fromkeys(name for each in holders for name in _names_on_meta(each)))
        if empty:
            self.layers[id(layer)] = [OnMeta(name, _begins(layer, path, name, configs)) for name in empty]


def _names_on_meta(holder: nn.Module) -> Iterator[str]:
    """Of adapters: a ModuleDict has modules by name, a ParameterDict parameters."""
    for name, param in holder.named_parameters():
        if param.is_meta:
            yield name.split(".")[0]


def _begins(layer: Any, path: str, name: str, configs: Mapping[str, Any]) -> Any:
    begins = getattr(configs.get(name), "init_lora_weights", None)
    is_plain = name in getattr(layer, "lora_A", {}) or name in getattr(layer, "lora_embedding_A", {})
    is_known = hasattr(layer, RESET) and is_plain and name not in layer.lora_variant
    if not is_known or begins not in KNOWN or (begins is False and name not in layer.lora_A):
        how = "" if begins is None else f", which begins by init_lora_weights={begins!r}"
        raise ValueError(
            f"zerox: PEFT's adapter '{name}' of module '{path}' ({type(layer).__name__}) is on the meta device{how}, "
            "and only a plain LoRA can be given first values there (init_lora_weights=True or 'gaussian', no DoRA): "
            "take one, or pass init="
        )
    return begins
