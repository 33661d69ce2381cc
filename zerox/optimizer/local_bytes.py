"""Bytes of parameters that are each rank's own, by formula: Note [Each rank's own]."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerox.memory.grad_dtype import grad_dtype_of
from zerox.optimizer.memory_bytes import MemoryBytes
from zerox.options import OptimizerOptions
from zerox.params.unwrapped_params import refuse_group
from zerox.ranks.subgroups import OF_GROUP
from zerox.rules.of_groups import Rules
from zerox.rules.rule import Rule

Named = Sequence[tuple[str, Tensor, dict[str, Any]]]  # with param groups
Local = str | Tensor | Iterable[str | Tensor]


def take_apart(local: Local, named: Named, rules: Rules, options: OptimizerOptions, has_axes: bool) -> set[int]:
    """The places in ``named`` of those that are ``local``: names, patterns of them, or tensors.

    ValueError as the constructor for what torch's class can't do for them, for what stands for none, and for all.
    """
    found: set[int] = set()
    for each in [local] if isinstance(local, (str, Tensor)) else local:
        places = [place for place, (name, tensor, _) in enumerate(named) if _is_meant(each, name, tensor)]
        if not places:
            what = f"a tensor of shape {tuple(each.shape)}" if isinstance(each, Tensor) else repr(each)
            raise ValueError(f"local: {what} stands for no parameter in params; are there names in params?")
        found.update(places)
    for name, _, group in (named[place] for place in sorted(found)):
        if group.get(OF_GROUP) is not None:
            raise ValueError(f"local: {name!r} is in a param group with a process_group, which says whose it is")
        refuse_group("local", group, rules.of(group), options, has_axes, partial(repr, name))
    if found and len(found) == len(named):
        raise ValueError(
            "local stands for all of params: an optimizer of which no DistributedDataParallel has a parameter averages "
            "all that it has, and none is a rank's own"
        )
    return found


def bytes_of_own(own: Named, rules: Rules) -> MemoryBytes:
    """Those of this rank, with dense gradients."""
    trained = [(tensor, group) for _, tensor, group in own if tensor.requires_grad]
    return MemoryBytes(
        parameters=sum(tensor.nbytes for _, tensor, _ in own),
        gradients=sum(tensor.numel() * grad_dtype_of(tensor, None).itemsize for tensor, _ in trained),
        master=0,
        moments=sum(_bytes_of_state(rules.of(group), group, tensor) for tensor, group in trained),
    )


def _is_meant(each: Any, name: str, tensor: Tensor) -> bool:
    return each is tensor if isinstance(each, Tensor) else fnmatchcase(name, each)


@torch.no_grad()
def _bytes_of_state(rule: Rule, group: Mapping[str, Any], param: Tensor) -> int:
    """Of torch's class under the group's options. What it keeps is seen of a small parameter: each of its dimensions is
    one of that one's, or does not depend on shapes."""
    small = torch.ones(tuple(range(2, 2 + param.dim())), dtype=param.dtype, device="cpu", requires_grad=True)
    small.grad = torch.zeros_like(small)
    optimizer = rule.torch_optimizer(group, [small])
    [live] = optimizer.param_groups
    live.update({option: group[option] for option in live if option in group and option != "params"})
    optimizer.step()
    kept = [value for value in optimizer.state[small].values() if isinstance(value, Tensor)]
    sizes = dict(zip(small.shape, param.shape, strict=True))
    return sum(each.itemsize * math.prod(sizes.get(size, size) for size in each.shape) for each in kept)
