"""Modules inside a zerox.DistributedDataParallel, as optimizers see them: they need not know its class."""

from __future__ import annotations

import weakref
from collections.abc import Collection, Iterable, Sequence

import torch.distributed as dist
from torch import Tensor, nn

from zerox._C import Decision
from zerox.ranks.holders import note_change
from zerox.ranks.process_group import GroupArgument, choose_group, ranks_of, reference_to, referenced

PREFIX = "module."  # what a wrapper puts before the names of its module's parameters


class WrappedModule:
    """``group``: whose ranks train it, ``num_ranks`` of them; None: this process alone. ``ignored``: names of its
    parameters and buffers that stay each rank's own; ``params``: all others, by name. ``decision``: whether the next
    backward is sent, which its forward says: one for all wrappers of a module. ``is_alive``: there still is the
    wrapper."""

    def __init__(self, module: nn.Module, ignored: Collection[str], group: dist.ProcessGroup | None) -> None:
        before = _known.get(module)
        self.to_module = weakref.ref(module)
        # As they are now: torch.func.functional_call() puts others in their place for a while.
        self.params: dict[str, Tensor] = {n: param for n, param in module.named_parameters() if n not in set(ignored)}
        self.ignored = frozenset(ignored)
        self.to_group = reference_to(group)
        self.num_ranks = len(ranks_of(group))  # the group may end before the wrapper
        self.decision: Decision = Decision() if before is None else before.decision
        self.is_alive = True
        _known[module] = self
        note_change()

    def end(self) -> None:
        """The wrapper is gone: its module may be trained on, and nothing says any more that a backward stays here."""
        self.is_alive = False
        self.decision.note_forward(True)

    @property
    def group(self) -> dist.ProcessGroup | None:
        return referenced(self.to_group)

    @property
    def name(self) -> str:
        return type(self.to_module()).__name__

    @property
    def names(self) -> dict[int, str]:
        """By id of the parameter."""
        return {id(param): name for name, param in self.params.items()}


# The last wrapper of each module: its names hold as long as the module lives.
_known: weakref.WeakKeyDictionary[nn.Module, WrappedModule] = weakref.WeakKeyDictionary()


def all_wrapped() -> list[WrappedModule]:
    return list(_known.values())


def decisions() -> dict[int, Decision]:
    """Those of all parameters that are wrapped, by id."""
    return {number: each.decision for each in all_wrapped() for number in each.names}


def names_of_wrapped() -> dict[int, str]:
    """Of the parameters of all wrapped modules, ignored ones too, by id."""
    modules = [module for each in all_wrapped() if (module := each.to_module()) is not None]
    return {id(param): name for module in modules for name, param in module.named_parameters()}


_with_buffers: weakref.WeakSet[nn.Module] = weakref.WeakSet()


def note_hand_out(model: nn.Module) -> None:
    """Somebody hands out the buffers of a model that has no wrapper."""
    _with_buffers.add(model)


def hands_out_buffers_of(model: nn.Module) -> bool:
    return not _with_buffers.isdisjoint(model.modules())


def bare_names(names: Sequence[str], params: Sequence[Tensor]) -> list[str]:
    """Without the prefix of a wrapper, where the parameter is of its module: as ``model.named_parameters()`` has them.

    The wrapper may be a module of a larger model.
    """
    if not any(PREFIX in str(name) for name in names):
        return list(names)
    known = [each.names for each in all_wrapped()]
    each = zip(names, params, strict=False)  # one of them may be too short
    return [_bare(name, [of[id(param)] for of in known if id(param) in of]) for name, param in each]


def _bare(name: str, inside: Iterable[str]) -> str:
    for each in inside:
        outer = name.removesuffix(PREFIX + each)
        if outer != name and (not outer or outer.endswith(".")):
            return outer + each
    return name


def group_of(params: Iterable[Tensor], asked: GroupArgument) -> GroupArgument:
    """The group of an optimizer with these parameters: that of the wrapper around their module, if there is one.

    ValueError if ``asked`` is of other ranks, or if there are several wrappers with groups of other ranks.
    """
    given = {id(param) for param in params}
    around = [each for each in all_wrapped() if each.is_alive and not given.isdisjoint(each.names)]
    if not around:
        return asked
    if asked is not None:
        for each in around:
            check_same_ranks(each, choose_group(asked))
        return asked
    first = around[0]
    for each in around[1:]:
        check_same_ranks(each, first.group)
    return None if _is_default(first.group) else first.group


def find_unwrapped_beside_wrapped(params: Iterable[Tensor], every: Iterable[Tensor]) -> dict[int, Tensor]:
    """By id, those of ``params`` that no wrapper has, if that of several ranks has some of ``every``; else none."""
    return find_unwrapped(params) if has_wrapped(every) else {}


def find_unwrapped(params: Iterable[Tensor]) -> dict[int, Tensor]:
    """By id, those that no wrapper of several ranks has."""
    wrapped = _find_wrapped_over_ranks()
    return {id(param): param for param in params if id(param) not in wrapped}


def has_wrapped(params: Iterable[Tensor]) -> bool:
    """Whether a wrapper of several ranks has one of them."""
    return not _find_wrapped_over_ranks().isdisjoint(map(id, params))


def tensors_in_wrappers() -> set[int]:
    """By id, parameters and buffers that wrappers of several ranks have: buffers as they are now."""
    found = _find_wrapped_over_ranks()
    for each in _over_ranks():
        if (module := each.to_module()) is not None:
            found |= {id(buffer) for name, buffer in module.named_buffers() if name not in each.ignored}
    return found


def modules_in_wrappers() -> set[int]:
    """By id, all modules inside wrappers of several ranks."""
    known = [module for each in _over_ranks() if (module := each.to_module()) is not None]
    return {id(each) for module in known for each in module.modules()}


def check_same_ranks(wrapped: WrappedModule, group: dist.ProcessGroup | None) -> None:
    """ValueError unless an optimizer with this group averages over the wrapper's ranks."""
    if ranks_of(group) != ranks_of(wrapped.group):
        module = wrapped.name
        raise ValueError(
            f"process_group: the optimizer's has ranks {list(ranks_of(group))}, and that of the "
            f"DistributedDataParallel around {module} has ranks {list(ranks_of(wrapped.group))}: leave process_group "
            "out of the optimizer's arguments, or pass both the same"
        )


def _find_wrapped_over_ranks() -> set[int]:
    return {number for each in _over_ranks() for number in each.names}


def _over_ranks() -> list[WrappedModule]:
    return [each for each in all_wrapped() if each.is_alive and each.num_ranks > 1]


def _is_default(group: dist.ProcessGroup | None) -> bool:
    return group is None or (dist.is_initialized() and group is dist.group.WORLD)
