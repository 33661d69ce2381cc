"""What transformers calls the tensors of its files in its models, and where it puts several into one, as experts.

zerox does not import it. A program that has such a model has, and what it says of its own files is asked for.
"""

from __future__ import annotations

import importlib
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import nn

from zerox.checkpoint.weight_files import WeightFiles
from zerox.optimizer.adapters import kind_of

STACK, JOIN = "MergeModulelist", "Concatenate"  # of transformers.core_model_loading
Names = dict[str, "str | tuple[str, tuple[int | slice, ...]]"]


def names_of_pretrained(model: nn.Module, files: WeightFiles) -> Names | None:
    """By name in the files, the name in the model, and where in that weight the tensor lies if it is not all of it.

    None for a model that is not of transformers, or of a version that says nothing of it (before 5). What it computes
    with more than stacking and joining keeps its name.
    """
    if not isinstance(model, kind_of("transformers.modeling_utils", "PreTrainedModel")):
        return None
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
        return _names(loading, mapping, model, files)
    except (ImportError, AttributeError, TypeError):
        return None


def _names(loading: Any, mapping: Sequence[Any], model: nn.Module, files: WeightFiles) -> Names:
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    known = model.state_dict(keep_vars=True)
    found: Names = {}
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # by target and pattern
    for name in sorted(files.tensors, key=loading.dot_natural_key):
        if name in known:
            continue
        new, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if new not in known:
            continue
        if pattern is None:
            found[name] = new
        else:
            sources[new][pattern].append(name)
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for new, of_pattern in sources.items():
        _put_together(by_pattern[next(iter(of_pattern))], new, of_pattern, files, found)
    return found


def _put_together(converter: Any, new: str, of_pattern: dict[str, list[str]], files: WeightFiles, found: Names) -> None:
    """Into ``found``: where in the weight ``new`` each tensor lies."""
    steps = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    stacks = steps[:1] == [(STACK, 0)]
    joined = [dim for kind, dim in steps[stacks:] if kind == JOIN]
    if len(joined) != len(steps) - stacks or len(joined) > 1 or len(converter.target_patterns) > 1:
        return
    if not joined and len(of_pattern) > 1:
        return
    at = 0
    for pattern in converter.source_patterns:
        names = of_pattern.get(pattern, [])
        size = 0
        for place, name in enumerate(names):
            index: tuple[int | slice, ...] = (place,) if stacks else ()
            if joined:
                size = files.tensors[name].shape[joined[0] - stacks]
                index += (slice(None),) * (joined[0] - stacks) + (slice(at, at + size),)
            found[name] = new, index
        at += size
