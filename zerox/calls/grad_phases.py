"""What happens to gradients where ranks meet, whatever the call is: see Note [Phases of a meeting]."""

from __future__ import annotations

from zerox._C import Meeting, RowChange
from zerox.calls.grad_calls import NEED_ROWS, READ_THE_MEAN, GradCalls
from zerox.calls.phases import Phases, Visit


class GradPhases:
    def __init__(self, calls: GradCalls, phases: Phases) -> None:
        self.calls = calls
        phases.before_meeting("gradients", self._before_meeting)
        phases.after_meeting("partial sums", self._sum_partial)
        phases.after_meeting("rows", self._exchange_rows)
        phases.after_meeting("scale", self._forget_scale)
        phases.after_meeting("operators", calls.writer.do_as_noted)
        phases.after_meeting("answers", calls.answers.note_call)

    def _before_meeting(self, visit: Visit) -> None:
        if not visit.refusal:
            calls = self.calls
            why = calls.refusal_to_multiply(visit.unfrozen) or calls.row_grads.elsewhere()
            visit.refusal = why or calls.pack_rows(visit.meeting)

    def _sum_partial(self, visit: Visit) -> None:
        """Of DTensors. Collective."""
        partial = self.calls.grads.partial
        if partial.buckets and visit.outcome.meeting in READ_THE_MEAN:
            partial.refresh()

    def _exchange_rows(self, visit: Visit) -> None:
        """Of tables: their mean is with its owners afterwards. Collective."""
        calls, meeting = self.calls, visit.outcome.meeting
        if not calls.row_grads.each or meeting not in NEED_ROWS:  # what a meeting is takes 0.5 us a question
            return
        goes_on = meeting == Meeting.STEP  # not `is`: each that C++ returns is new
        change = calls.row_grads.exchange(calls.grads.manager.settlement.remarks, goes_on)
        if change != RowChange.UNCHANGED:
            calls.scale.note_rows(change == RowChange.ADDED and calls.scale.holds_rows, calls.row_grads.has_landed)

    def _forget_scale(self, visit: Visit) -> None:
        self.calls.scale.forget_if_discarded()
