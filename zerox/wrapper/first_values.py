"""Where a wrapper is built, all ranks take rank 0's parameters and buffers of its module, as they stand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import ExitStack

import torch
import torch.distributed as dist
from torch import Tensor

from zerox import _torch
from zerox.engine import Engine
from zerox.memory.flat import order_text
from zerox.optimizer.hand_out import hand_out, standing_by
from zerox.ranks.dtensors import local_of
from zerox.ranks.holders import holders_of
from zerox.wrapper.arguments import check_updated_after_backward
from zerox.wrapper.values import broadcast, check_same


def engines_of(params: Mapping[str, Tensor]) -> list[Engine]:
    """The living optimizers that hold some of these, trained or frozen: by their first one, as on all ranks."""
    places = {id(param): place for place, param in enumerate(params.values())}

    def first_place(engine: Engine) -> int:
        return min(places.get(id(member.param), len(places)) for member in engine.inside.members)

    return sorted(holders_of(places), key=first_place)


@torch.no_grad()
def hand_out_first(
    params: Mapping[str, Tensor], buffers: Mapping[str, Tensor], group: dist.ProcessGroup | None, what: str
) -> None:
    """Of a module, which errors call ``what``. Collective. RuntimeError on all ranks of ``group``, naming the first, if
    they have other tensors, or an optimizer updates one inside backward.

    Optimizers hand out the parameters that they hold, so that masters and shards follow.
    """
    for name, param in params.items():
        if param.is_meta:
            raise ValueError(
                f"zerox.DistributedDataParallel: parameter '{name}' is on the meta device, and has no values to hand "
                "out: give the model memory before (model.to_empty(device=...)), or pass init_sync=False"
            )
    device = next(iter(params.values())).device
    lines = [*_lines("parameter", params), *_lines("buffer", buffers)]
    engines = engines_of(params)
    with ExitStack() as stack:
        for engine in engines:
            stack.enter_context(standing_by(engine.inside))
        check_same(lines, group, device, f": {what} must be built alike on all ranks")
    check_updated_after_backward(params)
    held: set[int] = set()
    for engine in engines:
        held |= (own := {id(member.param) for member in engine.inside.members})
        asked = own & {id(param) for param in params.values()}
        engine.inside.calls.record.has_looked = False
        hand_out(engine.inside, lambda member, asked=asked: id(member.param) in asked)  # type: ignore[misc]
    apart = [param for param in params.values() if id(param) not in held]
    broadcast([*map(local_of, apart), *buffers.values()], group, f"parameters and buffers of {what}")
    for param in apart:
        torch.autograd.graph.increment_version(param)


def _lines(kind: str, tensors: Mapping[str, Tensor]) -> Sequence[str]:
    inside = _torch.is_updated_inside
    return [
        f"{kind} '{name}' of shape {tuple(each.shape)} in {each.dtype}, {'' if each.requires_grad else 'not '}trained"
        f"{order_text(each) if kind == 'parameter' else ''}{', updated in backward' if inside(each) else ''}"
        for name, each in tensors.items()
    ]


def size_of(group: dist.ProcessGroup | None) -> int:
    return 1 if group is None else group.size()
