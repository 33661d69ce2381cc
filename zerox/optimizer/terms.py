"""The terms that ranks must agree on, one a line: an error names the first that differs."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox.memory.bucket import Member
from zerox.memory.flat import order_text
from zerox.memory.grad_dtype import grad_dtype_of
from zerox.model_names import in_text
from zerox.options import OptimizerOptions, parameter_words
from zerox.plan.choices import A_SUBGROUP, DTENSORS, FIRST_VALUES, LIE_AS, MASKS, ON_META, SPARSITY, SUBGROUP
from zerox.ranks.calls import warn_caller
from zerox.ranks.dtensors import is_dtensor, placements_text
from zerox.ranks.group import Ranks
from zerox.ranks.model_axes import ModelAxes
from zerox.ranks.process_group import ALONE
from zerox.ranks.subgroups import Subgroups
from zerox.ranks.ties import ties
from zerox.rules.of_groups import RULE

_said: list[bool] = []  # that plain parameters count as replicated


def words_of_calls(overlaps: bool, joins: bool, masks: bool) -> dict[str, Collection[str]]:
    """For check_pairs(): what no argument of the constructor says."""
    return {
        "overlap_gather": {"called" if overlaps else "not called"},
        "join": {"inside" if joins else "outside"},
        MASKS: {SPARSITY if masks else "None"},
    }


def check_pairs(
    options: OptimizerOptions,
    subgroups: Subgroups,
    groups: Sequence[dict[str, Any]],
    members: tuple[Sequence[Member], Sequence[Member]],
    calls: Mapping[str, Collection[str]],
    rule: str,
) -> None:
    """Raises for two that zerox.plan.combinations refuses, of an optimizer that has its ranks.

    ``members``: those in buckets, and others. ``calls``: whether what is no argument was called. ``rule``: of groups
    that name none.
    """
    ranks = subgroups.ranks
    in_buckets, others = members
    trained = [*in_buckets, *(m for m in others if m.param.requires_grad)]
    given = f'"{ALONE}"' if ranks.size == 1 and not ranks.origin.why_alone else "a group"
    dtensor = next((m.quoted for m in (*in_buckets, *others) if is_dtensor(m.param)), None)
    facts: dict[str, Collection[str]] = {
        "parameters": parameter_words(m.param.dtype for m in trained),
        LIE_AS: {DTENSORS: dtensor} if dtensor else {"plain tensors"},
        "device": {ranks.device.type},
        "process_group": {"a 2-D mesh" if ranks.on_mesh else given},
        SUBGROUP: {A_SUBGROUP if subgroups.are_many else "None"},
        "backend": {ranks.backend},
        "exchange": options.exchange_words(ranks.exchange),
        **calls,
    }
    for group in groups:
        on_meta = any(param.is_meta for param in group["params"])
        options.check_pairs({RULE: rule, **group}, **facts, **{FIRST_VALUES: {ON_META if on_meta else "in memory"}})


def check_axes(model: ModelAxes, members: Sequence[Member]) -> None:
    """ValueError for a DTensor that lies on axes that the model lacks."""
    for member in members:
        if is_dtensor(member.param) and (why := model.missing(member.param)):
            raise ValueError(f"zerox: parameter {member.quoted} {why}")


def check_terms(
    options: OptimizerOptions, subgroups: Subgroups, groups: Sequence[dict[str, Any]], members: Sequence[Member]
) -> None:
    """ValueError on all ranks, naming the first that differs, unless ranks agree. Collective.

    Parameters of a smaller subgroup may have other names than those of the next one.
    """
    known = [(member.name, member.param) for member in members]
    subgroups.ranks.check_same(
        list(_terms(options, subgroups, groups, members)), in_words=lambda line: in_text(line, known)
    )
    names: dict[int, list[str]] = {}
    for member in members:
        names.setdefault(member.group, []).append(f"parameter '{member.name}' in group {member.group}")
    subgroups.check_same(names)


def _terms(
    options: OptimizerOptions, subgroups: Subgroups, groups: Sequence[dict[str, Any]], members: Sequence[Member]
) -> Iterator[str]:
    yield from _of_options(options, groups)
    for member in members:
        param = member.param
        grads = grad_dtype_of(param, options.accumulate_dtype)
        kind = f"{tuple(member.local.shape)} {param.dtype} on {param.device.type}{placements_text(param)}"
        kind += order_text(member.local)
        kind += f" with gradients of {grads}" if grads != param.dtype else ""
        name = (
            f"parameter '{member.name}'"
            if subgroups.of_group[member.group] is subgroups.all
            else "an expert's parameter"
        )
        yield f"{_trained_text(param)} {name} {kind} in group {member.group}"


def _trained_text(param: Tensor) -> str:
    return "trainable" if param.requires_grad else "frozen"


def _of_options(options: OptimizerOptions, groups: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name, value in options.named().items():
        yield f"{name}={value!r}"
    for index, group in enumerate(groups):
        # The rule comes first: it decides on the others.
        for key in sorted(group.keys() - {"params", "param_names"}, key=lambda key: (key != RULE, str(key))):
            yield f"param group {index} with {key}={_as_text(group[key])}"


def check_model(
    model: ModelAxes,
    ranks: Ranks,
    options: OptimizerOptions,
    groups: Sequence[dict[str, Any]],
    members: Sequence[Member],
) -> None:
    """The same along model axes: ValueError on all ranks that names the first that differs. Collective.

    One rank warns of parameters that two pipeline stages seem to share, before the others get rank 0's values.
    """
    if not model.axes:
        return
    of_all = [f"divisors of gradients {[options.divisor_of(group) for group in groups]}"]
    of_all.append(f"float64 parameters: {any(m.param.dtype is torch.float64 for m in members)}")
    lines = [f"shard {ranks.shard_of(ranks.rank)} of {ranks.size} of each bucket", *_of_options(options, groups)]
    for member in members:
        shape = placements_text(member.param) or f" of {tuple(member.param.shape)}"
        lines.append(f"{_trained_text(member.param)} parameter '{member.name}' {member.param.dtype}{shape}")
    model.check_same(lines, of_all)
    shared = ties(model, [(m.name, m.local) for m in members if m.param.requires_grad])
    if ranks.rank == 0 and model.is_first and all(axis.coordinate == 0 for axis in model.axes):
        for said in shared:
            warn_caller(said)
    plain = [m.name for m in members if not is_dtensor(m.param)]
    over = [axis.name for axis in model.axes if axis.is_of_params]
    if plain and over and torch.distributed.get_rank() == 0 and not _said:
        _said.append(True)
        more = f" and {len(plain) - 1} more plain parameters count" if len(plain) > 1 else " counts"
        warn_caller(
            f"zerox: '{plain[0]}'{more} as replicated over axis {', '.join(over)}, where others are DTensors: "
            "coordinate 0's values are taken, and their gradients must be the same on all ranks of it"
        )


def _as_text(value: Any) -> str:
    """Equal text for equal values: all digits of a tensor, and no device numbers or addresses."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()!r}, {value.dtype}, {value.device.type})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_as_text, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    return f"a {type(value).__name__}"  # a class of the user's, whose value may have no text
