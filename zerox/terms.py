"""The terms that ranks must agree on, one a line: an error names the first that differs."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import fields
from typing import Any

import torch
from torch import Tensor

from zerox.grad_dtype import grad_dtype_of
from zerox.memory.bucket import Member
from zerox.options import OptimizerOptions
from zerox.rules.of_groups import RULE


def terms(options: OptimizerOptions, groups: Sequence[dict[str, Any]], members: Sequence[Member]) -> Iterator[str]:
    for field in fields(options):
        yield f"{field.name}={getattr(options, field.name)!r}"
    for index, group in enumerate(groups):
        # The rule comes first: it decides on the others.
        for key in sorted(group.keys() - {"params", "param_names"}, key=lambda key: (key != RULE, str(key))):
            yield f"param group {index} with {key}={_as_text(group[key])}"
    for member in members:
        param = member.param
        trained = "trainable" if param.requires_grad else "frozen"
        grads = grad_dtype_of(param, options.accumulate_dtype)
        kind = f"{tuple(param.shape)} {param.dtype} on {param.device.type}"
        kind += f" with gradients of {grads}" if grads != param.dtype else ""
        yield f"{trained} parameter '{member.name}' {kind} in group {member.group}"


def _as_text(value: Any) -> str:
    """Equal text for equal values: all digits of a tensor, and no device numbers or addresses."""
    if isinstance(value, Tensor):
        return f"tensor({value.tolist()!r}, {value.dtype}, {value.device.type})"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_as_text, value))})"
    if value is None or isinstance(value, bool | int | float | complex | str | torch.dtype):
        return repr(value)
    return f"a {type(value).__name__}"  # a class of the user's, whose value may have no text
