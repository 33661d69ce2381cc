"""Whether step() becomes part of a CUDA graph, and whether it may."""

from __future__ import annotations

import torch

from zerox import _C as C
from zerox.calls.grad_calls import Record
from zerox.ranks.group import Ranks


def is_capturing(ranks: Ranks, capturable: bool, manager: C.BucketManager, record: Record) -> bool:
    """Ranks' messages on the host are not part of a graph. RuntimeError if step() can't be captured."""
    if ranks.device.type != "cuda" or not torch.cuda.is_current_stream_capturing():
        return False
    if not capturable:
        raise RuntimeError("step() can be captured into a CUDA graph with capturable=True only")
    if ranks.via_host:
        raise RuntimeError("step() can't be captured over gloo, which works on the host: use nccl")
    if not manager.backward.synced or manager.params.missing:
        raise RuntimeError("backward can't be captured, and synchronize() must come between it and the capture")
    if ranks.size > 1 and not record.has_looked:
        raise RuntimeError(
            "step() can't be captured yet: ranks compare their parameters before the first one, and before the first "
            "one after load_state_dict(), and can't in a capture: call synchronize() before it"
        )
    return True
