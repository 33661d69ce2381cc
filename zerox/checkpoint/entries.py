"""The optimizer's state in a checkpoint: "name.step" and so on, whole tensors of which ranks have segments.

It does not depend on the number of ranks, stage, buckets, padding or the order of parameters.
"""

from __future__ import annotations

from collections.abc import Mapping

from zerox.checkpoint.names import key_of
from zerox.engine import Engine
from zerox.memory.bucket import Bucket, Member
from zerox.memory.stored import SCALE
from zerox.rules.rule import MASK, MASTERS
from zerox.sliced_tensor import SlicedTensor
from zerox.state.sliced_state import STEP, whole_form


def entries(optimizer: Engine, names: Mapping[int, str]) -> dict[str, SlicedTensor]:
    """This rank's segments of the state, which are views of it where they can be, under the keys of whole_form()."""
    found = {}
    for bucket in optimizer.inside.buckets:
        for member, state in whole_form(bucket):
            for what, tensor in state.items():
                if tensor.own.numel() and _is_its_own(optimizer, bucket, member, what):
                    found[key_of(names[member.number], what)] = tensor
    return found


def _is_its_own(optimizer: Engine, bucket: Bucket, member: Member, what: str) -> bool:
    """False for state that it has only because another parameter of its bucket needs it."""
    if what in (STEP, MASK.key):
        return True
    numbers = {spec.key: spec for spec in bucket.rule.numbers}
    spec = numbers[what] if what in numbers else bucket.state[what.removesuffix(SCALE)].spec
    return spec in MASTERS or bucket.rule.is_wanted(spec, optimizer.param_groups[member.group])
