"""Parameters that no longer lie where the optimizer laid them: after .to(), .half(), param.data = ..."""

from __future__ import annotations

from collections.abc import Sequence

from zerox._C import Meeting
from zerox.memory.bucket import Bucket
from zerox.memory.flat import BufferSlot

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
    return fitting, ""
