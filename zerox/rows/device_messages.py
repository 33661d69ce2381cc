"""Messages of any lengths between all ranks, of tensors on an accelerator."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from zerox import _C as C
from zerox.ranks.group import Ranks


class DeviceMessages:
    """What C.PeerMessages does on the host: by the ranks' group, or through the host if the group is gloo's.

    ``sent``: messages and bytes, by the ranks' group.
    """

    def __init__(self, ranks: Ranks) -> None:
        self.ranks = ranks
        self.host = C.PeerMessages(ranks.control, ranks.failure_detector)
        self.sent = (0, 0)

    @property
    def traffic(self) -> tuple[int, int]:
        messages, num_bytes = self.host.traffic
        return messages + self.sent[0], num_bytes + self.sent[1]

    def to_all(self, message: Tensor) -> list[Tensor]:
        """Of a tensor on the host."""
        return self.host.to_all(message)

    def swap(self, sent: Sequence[Tensor], numels: Sequence[int]) -> list[Tensor]:
        """Sends each rank its message, and returns what ranks had for this one, by rank, of ``numels`` elements. This
        rank's own comes back as it is. Collective."""
        if self.ranks.data is None:
            return list(sent)
        own = self.ranks.rank
        to_others = [each[:0] if rank == own else each for rank, each in enumerate(sent)]
        from_others = [0 if rank == own else numel for rank, numel in enumerate(numels)]
        if self.ranks.backend == "gloo":
            found = [
                each.to(sent[own].device) for each in self.host.swap([each.cpu() for each in to_others], from_others)
            ]
        else:
            found = [sent[own].new_empty(numel) for numel in from_others]
            self.ranks.await_work(self.ranks.data.alltoall(found, to_others))
            self.sent = (
                self.sent[0] + sum(1 for each in to_others if each.numel()),
                self.sent[1] + sum(each.nbytes for each in to_others),
            )
        found[own] = sent[own]
        return found
