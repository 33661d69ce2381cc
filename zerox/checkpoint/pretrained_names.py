"""What transformers calls the tensors of its files in its models, and where it puts several into one, as experts.

zerox does not import it. A program that has such a model has, and what it says of its own files is asked for.
"""

from __future__ import annotations

import importlib
import re
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from zerox.checkpoint.names import naming_in
from zerox.checkpoint.weight_files import Stored, WeightFiles
from zerox.optimizer.adapters import kind_of

STACK, JOIN = "MergeModulelist", "Concatenate"  # of transformers.core_model_loading
IGNORED = "_keys_to_ignore_on_load_unexpected"  # of a model: patterns of what its files have beside its weights
Names = dict[str, "str | tuple[str, tuple[int | slice, ...]] | None"]


def names_of_pretrained(model: nn.Module, files: WeightFiles) -> Names | None:
    """By name in the files, the name in the model, and where in that weight the tensor lies if it is not all of it; or
    None for what is no weight. What transformers computes with more than stacking and joining is no name of the model.

    None for a model that is not of transformers, or of a version that says nothing of it (before 5).
    """
    pretrained = kind_of("transformers.modeling_utils", "PreTrainedModel")
    bare = naming_in(model)
    paths = ((f"{path}." if path else "", each) for path, each in model.named_modules())
    found: Any = next((each for path, each in paths if isinstance(each, pretrained) and not bare(path)), None)
    if found is None:
        return None
    try:
        loading: Any = importlib.import_module("transformers.core_model_loading")
        mapping = importlib.import_module("transformers.conversion_mapping").get_model_conversion_mapping(found)
    except (ImportError, AttributeError):
        return None
    return _names(loading, mapping, found, files)


def _names(loading: Any, mapping: Sequence[Any], model: Any, files: WeightFiles) -> Names:
    renamings = [each for each in mapping if isinstance(each, loading.WeightRenaming)]
    converters = [each for each in mapping if isinstance(each, loading.WeightConverter)]
    known = model.state_dict(keep_vars=True)
    ignored = [re.compile(pattern) for pattern in getattr(model, IGNORED, None) or ()]
    found: Names = {}
    sources: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))  # by target and pattern
    for name in sorted(files.tensors, key=loading.dot_natural_key):
        new, pattern = loading.rename_source_key(name, renamings, converters, model.base_model_prefix, known)
        if new not in known:
            if name not in known and any(each.search(name) for each in ignored):
                found[name] = None
        elif pattern is not None:
            sources[new][pattern].append(name)
        elif new != name:
            found[name] = new
    by_pattern = {pattern: each for each in converters for pattern in each.source_patterns}
    for new, of_pattern in sources.items():
        converter = by_pattern[next(iter(of_pattern))]
        is_whole = _put_together(converter, new, of_pattern, files, found)
        if not is_whole and new in files.tensors and not _fits(converter, known[new], files.tensors[new]):
            found[new] = None
    return found


def _fits(converter: Any, weight: Tensor, stored: Stored) -> bool:
    """Whether a tensor that has the weight's name already is computed only where its shape asks for it."""
    return stored.shape == tuple(weight.shape) and all(getattr(op, "check_dims", False) for op in converter.operations)


def _put_together(converter: Any, new: str, of_pattern: dict[str, list[str]], files: WeightFiles, found: Names) -> bool:
    """Into ``found``: where in the weight ``new`` each tensor lies. Returns whether that is all there is to do."""
    steps = [(type(each).__name__, getattr(each, "dim", 0)) for each in converter.operations]
    stacks = steps[:1] == [(STACK, 0)]
    joined = [dim - stacks for kind, dim in steps[stacks:] if kind == JOIN]
    if len(joined) != len(steps) - stacks or len(joined) > 1 or min(joined, default=0) < 0:
        return False
    if len(converter.target_patterns) > 1 or (not joined and len(of_pattern) > 1):
        return False
    end = 0
    for pattern in converter.source_patterns:
        start = end
        for place, name in enumerate(of_pattern.get(pattern, [])):
            index: tuple[int | slice, ...] = (place,) if stacks else ()
            if joined:
                start = start if stacks else end  # what is stacked lies beside each other, else one behind the other
                end = start + files.tensors[name].shape[joined[0]]
                index += (slice(None),) * joined[0] + (slice(start, end),)
            found[name] = new, index
    return True
