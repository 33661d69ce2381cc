"""Who averages the gradients of a wrapped module, and when they leave."""

from __future__ import annotations

import weakref
from collections.abc import Sequence

from zerox._C import BucketManager
from zerox.ranks.holders import num_changes
from zerox.ranks.wrapped import WrappedModule, check_same_ranks
from zerox.wrapper.arguments import check_updated_after_backward
from zerox.wrapper.begin import tell_begin
from zerox.wrapper.comm_hooks import DTYPES, check_sent_in
from zerox.wrapper.first_values import engines_of
from zerox.wrapper.left_over import LeftOver


class Averaging:
    """Optimizers of zerox average those of the parameters that they hold, and a LeftOver all others. Its forward
    decides for all of them when they leave. Making one sends nothing."""

    def __init__(self, wrapped: WrappedModule) -> None:
        self.wrapped = wrapped
        self.left_over = LeftOver(wrapped)
        self.seen = -1  # how often optimizers had changed at the last look
        self.of_engines: Sequence[weakref.ref[BucketManager]] = ()
        self.hook = ""  # the name of a communication hook
        self.has_begun = False
        for engine in engines_of(wrapped.params):
            check_same_ranks(wrapped, engine.inside.ranks.given)
            engine.inside.grads.let_decide(dict.fromkeys(wrapped.names, wrapped.decision))

    def before_forward(self, joins: bool = False) -> None:
        """Of a training forward. ``joins``: inside join(). The first looks again for what the constructor refuses."""
        if not self.has_begun and self.wrapped.num_ranks > 1:  # alone there is nothing to wait for
            check_updated_after_backward(self.wrapped.params)
        self.has_begun = True
        if self.seen != num_changes():
            self._look()
        self.left_over.before_forward(joins)

    def take_hook(self, name: str) -> None:
        """A communication hook, which says in what dtype gradients are sent."""
        check_sent_in(name, engines_of(self.wrapped.params))
        self.hook = name
        self.left_over.send_in(DTYPES[name])

    def after_forward(self, outputs: object, syncs: bool, finds_unused: bool) -> None:
        """``syncs``: it was outside no_sync(). ``finds_unused``: see Note [Unused parameters]."""
        decision = self.wrapped.decision
        decision.note_forward(syncs)
        managers = self.left_over.managers
        if finds_unused:
            managers = [*self._shown(), *managers]
        if managers:
            tell_begin(outputs, managers, decision)

    # Note [Unused parameters]
    # With find_unused_parameters p.grad is there on all ranks, where a backward ends, if it is on any: torch's clip,
    # and whatever else looks at `p.grad is not None`, sees the same parameters on all ranks. Ranks synchronize for it,
    # which costs a small message, as in torch's DistributedDataParallel. Without it they find out in the next call,
    # which raises if it has to know.
    def _shown(self) -> list[BucketManager]:
        managers = [manager for to_manager in self.of_engines if (manager := to_manager()) is not None]
        for each in managers:
            each.grads.show_all()
        return managers

    def _look(self) -> None:
        """At the optimizers that there are now."""
        self.seen = num_changes()
        engines = engines_of(self.wrapped.params)
        self.of_engines = [weakref.ref(engine.inside.manager) for engine in engines]
        if self.hook:
            check_sent_in(self.hook, engines)
