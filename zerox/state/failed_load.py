"""A load_state_dict() that raised on this rank, and may have loaded on others.

A script that swallows the error would go on from a state that is new on some ranks and loaded on others. Such a load
can't tell all ranks, since scripts call it on some of them only. So what it raised waits for the next call that goes on
from the state, at a sync point. A load that succeeds on this rank ends that, also one that begins anew on purpose.
"""

from __future__ import annotations

from zerox._C import SyncPoint

# Replays of a graph begin with synchronize(). zerox.save() asks by itself: zerox.load() synchronizes alike, and may go
# on.
GO_ON = (SyncPoint.STEP, SyncPoint.FOLLOW, SyncPoint.SYNCHRONIZE, SyncPoint.FULL_STATE)


def text_for_ranks(error: Exception) -> str:
    """What all ranks are told of it."""
    return (
        f'its load_state_dict() raised {type(error).__name__} ("{error}"), and may have loaded on other ranks, which '
        "would go on from another state. Load one that fits on all ranks. Or, to go on without it on purpose, call "
        'optimizer.load_state_dict({**optimizer.state_dict(), "state": {}}) on all ranks, which begins anew, or '
        "optimizer.load_state_dict(optimizer.state_dict()), which keeps what each rank has"
    )


def refusal_after(failed: str, sync_point: SyncPoint) -> str:
    """Why a rank with this failed load can't take part; empty if it can."""
    return failed if failed and sync_point in GO_ON else ""
