"""What happens to gradients at a sync point, whatever the call is: see Note [Phases of a sync point]."""

from __future__ import annotations

from zerox._C import RowChange, SyncPoint
from zerox.calls.grad_calls import NEED_ROWS, READ_THE_MEAN, GradCalls
from zerox.calls.phases import Phases, Visit


class GradPhases:
    def __init__(self, calls: GradCalls, phases: Phases) -> None:
        self.calls = calls
        phases.before_sync("gradients", self._before_sync)
        phases.after_sync("partial sums", self._sum_partial)
        phases.after_sync("rows", self._exchange_rows)
        phases.after_sync("scale", self._forget_scale)
        phases.after_sync("operators", calls.writer.do_as_noted)
        phases.after_sync("answers", calls.answers.note_call)

    def _before_sync(self, visit: Visit) -> None:
        if not visit.refusal:
            calls = self.calls
            why = calls.refusal_to_multiply(visit.unfrozen) or calls.row_grads.elsewhere()
            visit.refusal = why or calls.pack_rows(visit.sync_point)

    def _sum_partial(self, visit: Visit) -> None:
        """Of DTensors. Collective."""
        partial = self.calls.grads.partial
        if partial.buckets and visit.result.sync_point in READ_THE_MEAN:
            partial.refresh()

    def _exchange_rows(self, visit: Visit) -> None:
        """Of tables: their mean is with its owners afterwards. Collective."""
        calls, sync_point = self.calls, visit.result.sync_point
        if not calls.row_grads.each or sync_point not in NEED_ROWS:  # to ask what a sync point is takes 0.5 us
            return
        goes_on = sync_point == SyncPoint.STEP  # not `is`: each that C++ returns is new
        change = calls.row_grads.exchange(calls.grads.manager.synchronizer.piggybacks, goes_on)
        if change != RowChange.UNCHANGED:
            calls.scale.note_rows(change == RowChange.ADDED and calls.scale.holds_rows, calls.row_grads.is_reduced)

    def _forget_scale(self, visit: Visit) -> None:
        self.calls.scale.forget_if_discarded()
