"""step() once ranks have synchronized, which is the same for a rank that follows the others: see join.py."""

from __future__ import annotations

from zerox._C import SyncResult
from zerox.memory.flat import give_out
from zerox.optimizer.core import Core


class Steps:
    def __init__(self, core: Core) -> None:
        self.core = core

    def check(self, result: SyncResult, follows: bool) -> None:
        """Before anything is written. Collective inside join(), if options of ranks' param groups differ."""
        core = self.core
        if result.followed and result.arguments[0]:
            raise RuntimeError(
                "zerox: a rank that has run out of batches inside join() can't follow step() with options of its own"
            )
        if not result.has_same_options:
            core.joining.take_options(result, follows)
        if core.groups.divisors() != core.calls.scale.of_groups:
            raise RuntimeError(
                "the gradient_divisor of a param group was changed, and gradients are divided while backward runs: "
                "build another optimizer, or call scale_grads_()"
            )
        core.calls.scale.check()
        if core.update.failure:
            raise RuntimeError(f"zerox: {core.update.failure}")

    def update(self, capturing: bool) -> None:
        """Inside the gather's updating()."""
        core = self.core
        groups, gather = core.groups.param_groups, core.gather
        core.loading.pulls.begin_step()
        with core.loading.pulls.step(capturing):
            core.loading.start_states(capturing)
            core.loading.note_changes()
            if core.calls.row_grads.each:
                gather.publish_tables(core.calls.row_grads.update(groups, core.calls.scale))
            overlap = core.overlap is not None and not capturing
            for run in core.update.runs(groups, capturing) if core.buckets else ():
                for index in run:
                    gather.start(index, background=overlap)
        if not capturing:
            core.grads.manager.synchronizer.bump_versions()
        gather.end_step(hidden=overlap)
        core.loading.pulls.end_step()

    def end(self) -> None:
        give_out(self.core.gather.elsewhere)
        self.core.calls.end_step()
        self.core.joining.is_notified = False
