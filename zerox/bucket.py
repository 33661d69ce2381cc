"""A bucket as this rank sees it: its parameters in one flat buffer, and the optimizer state of its own shard."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from zerox._C import SEGMENT_COLUMNS
from zerox.buffers import FlatBuffer, dense_strides
from zerox.grad_dtype import grad_dtype_of
from zerox.large_pages import zeros
from zerox.model_names import quoted
from zerox.moments import MASTER_PLACE, Moments
from zerox.plan.buckets import BucketPlan
from zerox.plan.layout import Segment

REMAINDER = "remainder"
FP32 = "fp32"
MASTER = "master"  # its key in the state where it is float32; of remainders it is REMAINDER
MOST_NAMES = 8
MASTER_DTYPES = {REMAINDER: torch.int16, FP32: torch.float32}
MOMENT_DTYPES = {str(dtype): dtype for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.uint8)}


@dataclass(frozen=True)
class Member:
    """One parameter: its name, the index of its param group, and its number: the position among all that were given.

    The number is the same on all ranks, and for good: groups that are added later come behind.
    """

    name: str
    param: Tensor
    group: int
    number: int

    @property
    def quoted(self) -> str:
        """For errors: parameters without a name are looked for in the models that are alive."""
        return quoted(self.name, self.param)


def members_of(groups: Sequence[dict[str, Any]]) -> Iterator[Member]:
    """Every parameter of an optimizer's groups once, in registration order."""
    seen: set[int] = set()
    position = 0
    for index, group in enumerate(groups):
        names = group.get("param_names")
        for place, param in enumerate(group["params"]):
            name = str(names[place]) if names else f"param {position}"
            if id(param) not in seen:
                seen.add(id(param))
                yield Member(name, param, index, position)
            position += 1


def bytes_of(tensors: Sequence[Tensor | None]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors if t is not None)


class GradPart(NamedTuple):
    """Elements of a shard's gradient that lie together, from ``start`` of the shard, ``first_row`` of its segments."""

    grad: Tensor
    start: int
    first_row: int
    segments: Tensor  # those inside, counted from ``start``


class Bucket:
    """``members`` in the plan's order. ``master``: "remainder", "fp32" or None. State starts at zero, steps too."""

    def __init__(
        self, plan: BucketPlan, members: Sequence[Member], rank: int, master: str | None, amsgrad: bool
    ) -> None:
        self.plan = plan
        self.members = list(members)
        self.buffer = FlatBuffer([member.param for member in members], plan.layout)
        self.own_segments: list[Segment] = plan.layout.segments(rank)
        self.master_kind = master
        self.grad_dtype = grad_dtype_of(self.members[0].param)
        self.param_shard = self.buffer.shard(rank)

        device, shard_numel = self.buffer.flat.device, plan.layout.shard_numel
        rows = [
            [s.span.start, s.span.stop, members[s.slot].group, members[s.slot].number, s.param_start]
            for s in self.own_segments
        ]
        self.segments = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, SEGMENT_COLUMNS).to(device)
        self.steps = torch.zeros(len(rows), dtype=torch.int64, device=device)
        self.moments = Moments(MOMENT_DTYPES[plan.state_dtype], shard_numel, device, amsgrad)
        self.master: Tensor | None = None
        if master is not None:
            self.master = zeros(shard_numel, MASTER_DTYPES[master], device, MASTER_PLACE)

    def describe(self, index: int) -> str:
        """For errors: "bucket 3 (wte.weight, ...)", as csrc/bucket_manager has it."""
        names = ", ".join(member.name for member in self.members[:MOST_NAMES])
        more = len(self.members) - MOST_NAMES
        return f"bucket {index} ({names}{f' and {more} more' if more > 0 else ''})"

    def start_master(self) -> None:
        """The master takes the parameters' values: once they are the same on all ranks."""
        if self.master is not None and self.master_kind == FP32:
            self.master.copy_(self.param_shard)

    def state_shards(self) -> dict[str, Tensor]:
        """What is kept for each element of the own shard, by its key in the optimizer's state."""
        found = dict(self.moments.values)
        if self.master is not None:
            found[REMAINDER if self.master_kind == REMAINDER else MASTER] = self.master
        return found

    def state_of_own(self) -> Iterator[tuple[Tensor, dict[str, Tensor]]]:
        """Each parameter that has elements here, with views of its state.

        A view has the parameter's shape where this rank owns all of it, else it is the 1-D range of its elements in
        memory order that this rank owns. Keys as in torch.optim.AdamW, and "remainder" or "master" where one is kept.
        8-bit moments are uint8 codes, beside them "exp_avg_scale" and so on: float32, one for each block of 256
        elements in memory order. zerox/moments.py says what they stand for.
        """
        tensors = self.state_shards()
        for row, segment in enumerate(self.own_segments):
            param = self.members[segment.slot].param
            state = {"step": self.steps[row], **self.moments.scales_of(slice(segment.span.start, segment.span.stop))}
            for key, tensor in tensors.items():
                if segment.span.numel == param.numel():
                    start = tensor.storage_offset() + segment.span.start
                    state[key] = tensor.as_strided(param.shape, dense_strides(param), start)
                else:
                    state[key] = tensor[segment.span.start : segment.span.stop]
            yield param, state
