"""Parameters that no longer lie where the optimizer laid them: after .to(), .half(), param.data = ..."""

from __future__ import annotations

from collections.abc import Sequence

from zerox._C import Meeting
from zerox.memory.bucket import Bucket
from zerox.memory.flat import BufferSlot, in_shared_memory, order_in_memory
from zerox.model_names import quoted
from zerox.ranks.calls import warn_caller

# Calls that read no parameter: a model may have left for another device, as frameworks' do at a training's end.
NEED_NO_PARAMS = (Meeting.FULL_STATE,)


def taken_back(
    buckets: Sequence[Bucket], moved: Sequence[tuple[int, int]], meeting: Meeting
) -> tuple[list[BufferSlot], str]:
    """Those of ``moved`` (bucket, slot) that can come home, and why the call must not go on; empty if it may."""
    fitting: list[BufferSlot] = []
    refusal = ""
    for index, slot in moved:
        bucket = buckets[index]
        misfit = bucket.buffer.misfit(slot, bucket.members[slot].name)
        if not misfit:
            fitting.append((bucket.buffer, slot))
        refusal = refusal or misfit
    if refusal and meeting not in NEED_NO_PARAMS:
        return [], refusal
    _warn_of_order(buckets, fitting)
    return fitting, ""


def _warn_of_order(buckets: Sequence[Bucket], slots: Sequence[BufferSlot]) -> None:
    """State has the order that the parameters had: another one would have to be brought into every rank's shard."""
    undone = [
        (buffer, slot)
        for buffer, slot in slots
        if not in_shared_memory(param := buffer.params[slot])
        and order_in_memory(param.shape, param.stride()) != order_in_memory(param.shape, buffer.strides[slot])
    ]
    if not undone:
        return
    buffer, slot = undone[0]
    name = next(bucket.members[slot].name for bucket in buckets if bucket.buffer is buffer)
    more = f" and {len(undone) - 1} more" if len(undone) > 1 else ""
    warn_caller(
        f"zerox: parameter {quoted(name, buffer.params[slot])}{more} got another order in memory (memory_format=...) "
        "after the optimizer was built. The values stay, but it is laid out as it was then: call "
        "model.to(memory_format=...) before you build the optimizer",
    )
