"""Groups of zerox's own, over the ranks of a user's group."""

from __future__ import annotations

import weakref
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import Store

from zerox import _torch
from zerox.ranks.forks import leave_to_parent
from zerox.ranks.polled_store import PolledStore
from zerox.ranks.roll_call import RollCall

CPU = torch.device("cpu")
_num_made: weakref.WeakKeyDictionary[dist.ProcessGroup, int] = weakref.WeakKeyDictionary()


def same_ranks(
    group: dist.ProcessGroup, backend: str, roll_call: RollCall, timeout: timedelta | None
) -> dist.ProcessGroup:
    """Collective. ``timeout``: None for the backend's default. RuntimeError if a rank of ``roll_call`` doesn't come."""
    ranks = dist.get_process_group_ranks(group)
    try:
        if backend == "gloo":
            number = _num_made[group] = _num_made.get(group, 0) + 1  # also if this fails: its keys stay in the store
            return _gloo(group, number, roll_call, timeout)
        made = dist.new_group(
            ranks,
            timeout=timeout,
            backend=backend,
            pg_options=_high_priority(timeout),
            use_local_synchronization=True,
            group_desc="zerox",
        )
    except RuntimeError as error:
        raise RuntimeError(f"zerox: ranks {ranks} could not connect for a group of zerox's own: {error}") from error
    assert isinstance(made, dist.ProcessGroup)
    return made


def _gloo(group: dist.ProcessGroup, number: int, roll_call: RollCall, timeout: timedelta | None) -> dist.ProcessGroup:
    """A gloo group over the ranks of ``group`` that torch does not list: it ends with its last user.

    A group of dist.new_group() keeps its threads and sockets until all groups are destroyed; destroying it earlier
    would change the names of the groups that follow, at other moments on other ranks.
    """
    rank, size = group.rank(), group.size()
    store = dist.distributed_c10d.PrefixStore(f"zerox/{number}", store_of(group))
    limited = {} if timeout is None else {"timeout": timeout}
    polled = PolledStore(store)
    backend = roll_call.unless_one_fails(
        lambda: dist.ProcessGroupGloo(polled, rank, size, **limited), give_up=polled.close
    )
    made = dist.ProcessGroup(store, rank, size)
    _torch.set_backend(made, CPU, dist.ProcessGroup.BackendType.GLOO, backend)
    leave_to_parent(made)
    return made


def _high_priority(timeout: timedelta | None) -> Any:
    """NCCL's streams go ahead of the computation's, since the next bucket waits for the one in flight."""
    options = dist.ProcessGroupNCCL.Options(is_high_priority_stream=True)
    if timeout is not None:
        _torch.set_timeout(options, timeout)
    return options


def own_store(group: dist.ProcessGroup, name: str) -> Store:
    """Another one for each gloo group that was made over these ranks."""
    return dist.distributed_c10d.PrefixStore(f"zerox/{name}/{_num_made[group]}", store_of(group))


def store_of(group: dist.ProcessGroup) -> Store:
    return _torch.listed_groups()[group][1]
