"""Parameters that no longer lie where the optimizer laid them: after .to(), .half(), param.data = ..."""

from __future__ import annotations

from collections.abc import Sequence

from zerox._C import SyncPoint
from zerox.calls.phases import Visit
from zerox.memory.bucket import Bucket
from zerox.memory.flat import BufferSlot, in_shared_memory, order_in_memory
from zerox.model_names import quote
from zerox.optimizer.core import Core
from zerox.ranks.calls import warn_caller

# Calls that read no parameter: a model may have left for another device, as frameworks' do at a training's end.
NEED_NO_PARAMS = (SyncPoint.FULL_STATE,)


class Moved:
    """Phases: "gather", "moved" and "moved values"."""

    def __init__(self, core: Core) -> None:
        self.core = core
        core.phases.before_sync("gather", self._wait)
        core.phases.before_sync("moved", self._look)
        core.phases.before_sync("moved values", self._read)
        core.phases.after_sync("moved", self._bring_home)

    def _wait(self, visit: Visit) -> None:
        gather = self.core.gather
        gather.wait()
        visit.refusal = visit.refusal or gather.failure(forget=visit.sync_point is SyncPoint.STEP)

    def _look(self, visit: Visit) -> None:
        core = self.core
        if moved := core.grads.find_moved():
            visit.elsewhere, misfit = take_back(core.buckets, moved, visit.sync_point)
            visit.refusal = visit.refusal or misfit
        visit.refusal = visit.refusal or core.grads.find_replaced()

    def _read(self, visit: Visit) -> None:
        if visit.elsewhere and not visit.refusal:
            visit.values = self.core.gather.find_elsewhere(visit.elsewhere)

    def _bring_home(self, visit: Visit) -> None:
        if not visit.follows or visit.result.sync_point == SyncPoint.STEP:
            self.core.gather.elsewhere = visit.elsewhere
            if visit.elsewhere:
                self.core.gather.take_in(visit.elsewhere, visit.values)


def take_back(
    buckets: Sequence[Bucket], moved: Sequence[tuple[int, int]], sync_point: SyncPoint
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
    if refusal and sync_point not in NEED_NO_PARAMS:
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
        f"zerox: parameter {quote(name, buffer.params[slot])}{more} got another order in memory (memory_format=...) "
        "after the optimizer was built. The values stay, but it is laid out as it was then: call "
        "model.to(memory_format=...) before you build the optimizer",
    )
