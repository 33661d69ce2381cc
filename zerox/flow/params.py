"""Parameters made whole again: each rank's updated shard goes to all others."""

from __future__ import annotations

from collections.abc import Sequence

from zerox import _C as C


class ParamGather:
    """Gathers run from start() to wait(); the flat buffers' views see the new values in place.

    ``hidden``: the last step left its gathers to the next forward.
    """

    def __init__(self, manager: C.BucketManager) -> None:
        self.manager = manager
        self.hidden = False
        self.num_ordered = 0  # buckets at the time when the order of their use was learned

    def start(self, index: int, background: bool = False) -> None:
        """``background``: no caller waits right away. RuntimeError if a rank is known to be gone."""
        self.hidden = self.hidden or background  # also if step() does not come to its end
        self.manager.params.start(index, background)

    def end_step(self, hidden: bool) -> None:
        """wait(), unless parameters in flight are left to their readers: Note [Reads wait for what they read]."""
        if hidden:
            self.manager.params.guard_reads()
        else:
            self.wait()

    def wait_for(self, buckets: Sequence[int]) -> None:
        """Waits until these are whole. RuntimeError naming the parameters if a rank's shard doesn't arrive in time."""
        if self.hidden:
            self.manager.params.wait(buckets)

    def wait(self) -> None:
        """Waits until all are whole and no rank reads this one's. RuntimeError as in wait_for(), at every call."""
        self.manager.params.finish()
        was_hidden, self.hidden = self.hidden, False
        used = self.manager.params.order_of_use
        if was_hidden and used and self.num_ordered != self.manager.num_buckets:
            self.num_ordered = self.manager.num_buckets
            self.manager.params.propose_order(list(dict.fromkeys([*used, *range(self.num_ordered)])))
