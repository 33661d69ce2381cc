"""Which parameters of a model are matrices of hidden layers, and what the others are: for Muon's param groups."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import NamedTuple

from torch import Tensor, nn

LEAST = 16  # rows, and columns, of a matrix
EMBEDDINGS = (nn.Embedding, nn.EmbeddingBag)
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
HEADS = ("lm_head", "head", "classifier", "score")
MATRIX = "matrices"
STACK = "stacks of matrices"


class Part(NamedTuple):
    """A parameter: all names that the model has for it, the first one first, and what it ``is``."""

    names: tuple[str, ...]
    param: Tensor
    kind: str

    @property
    def is_matrix(self) -> bool:
        return self.kind in (MATRIX, STACK)


def parts_of(model: nn.Module) -> list[Part]:
    """Each parameter once, in the model's order."""
    names: dict[int, list[str]] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(param), []).append(name)
    special = _special(model)
    shared = {address: kind for param, kind in special.values() if (address := _address(param))}
    found = []
    for param in model.parameters():
        kind = special[id(param)][1] if id(param) in special else shared.get(_address(param), "")
        found.append(Part(tuple(names[id(param)]), param, kind or _by_shape(param)))
    return found


def _address(param: Tensor) -> int:
    """0: it has no memory."""
    return 0 if param.is_meta else param.data_ptr()


def _by_shape(param: Tensor) -> str:
    if param.ndim not in (2, 3) or not param.is_floating_point():
        return "biases, norms and other shapes"
    if min(param.shape[-2:]) < LEAST:
        return f"matrices of under {LEAST} rows or columns"
    return MATRIX if param.ndim == 2 else STACK


def _special(model: nn.Module) -> dict[int, tuple[Tensor, str]]:
    """What is special by its place in the model and not by its shape."""
    found: dict[int, tuple[Tensor, str]] = {}
    for param in _heads(model):
        found[id(param)] = param, "heads"
    for module in model.modules():
        for param in module.parameters() if isinstance(module, CONVOLUTIONS) else ():
            found[id(param)] = param, "convolutions"
        is_embedding = isinstance(module, EMBEDDINGS) or "embed" in type(module).__name__.lower()
        for name, param in module.named_parameters(recurse=False):
            if is_embedding or "embed" in name.lower():
                found[id(param)] = param, "embeddings"
    return found


def _heads(model: nn.Module) -> Iterator[Tensor]:
    """As the docstring of muon_groups() says."""
    repeated = _in_repeated_layers(model)
    vocabulary = max(
        (module.weight.shape[0] for module in model.modules() if isinstance(module, EMBEDDINGS)), default=0
    )
    last = None
    for name, module in model.named_modules():
        if callable(given := getattr(module, "get_output_embeddings", None)) and (head := given()) is not None:
            yield from head.parameters(recurse=False)
        width = _width_of_linear(module)
        if width is None or id(module) in repeated:
            continue
        if name.rpartition(".")[2] in HEADS or width == vocabulary:
            yield from module.parameters(recurse=False)
        last = module
    if last is not None and not vocabulary:
        yield from last.parameters(recurse=False)


def _width_of_linear(module: nn.Module) -> int | None:
    """Of its output; None for other modules."""
    weight = getattr(module, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2 or isinstance(module, EMBEDDINGS):
        return None
    return int(weight.shape[0])


def _in_repeated_layers(model: nn.Module) -> set[int]:
    """Ids of modules inside children, that have children themselves, of a ModuleList or of a container of several
    such children of one class."""
    found: set[int] = set()
    for module in model.modules():
        children = [child for child in module.children() if any(True for _ in child.children())]
        kinds = Counter(map(type, children))
        is_container = isinstance(module, nn.Sequential | nn.ModuleDict) and max(kinds.values(), default=0) > 1
        if isinstance(module, nn.ModuleList) or is_container:
            found.update(id(inner) for child in children for inner in child.modules())
    return found
