"""Python's forks: parameters arrive before the fork, and the child leaves its parent's process groups alone.

Note [Forks] in csrc/workers/process.h says why.
"""

from __future__ import annotations

import os
import threading
import weakref

import torch.distributed as dist

from zerox import _C as C
from zerox import _torch

_inherited: list[dist.ProcessGroup] = []
_ours: weakref.WeakSet[dist.ProcessGroup] = weakref.WeakSet()
_forking = threading.local()  # several threads may fork at once


def leave_to_parent(group: dist.ProcessGroup) -> None:
    """A forked child never destroys ``group``, not even as garbage that torch no longer lists."""
    _ours.add(group)


def check_made_here(group: dist.ProcessGroup) -> None:
    """RuntimeError if this process was forked after ``group`` was made."""
    if any(group is each for each in _inherited):
        raise RuntimeError(
            f"zerox: process {os.getpid()} was forked after its process group was made, and has neither that group's "
            'threads nor its connections: pass process_group="alone" for an optimizer of this process only, or start '
            "ranks with spawn"
        )


def _before() -> None:
    """Keeps all groups while the fork goes on.

    The child clears the states of threads it doesn't have before it calls ``_in_child``, and such a state may hold a
    group's last reference: DTensor's cache of operators does.
    """
    _forking.groups = _torch.groups_before_fork(), set(_ours)  # the first with their stores
    C.before_fork()


def _in_parent() -> None:
    del _forking.groups


def _in_child() -> None:
    """Keeps all groups, also at exit: torch's would wait for their threads, and stores would stop the parent's."""
    C.keep_forever(_forking.groups)
    known, ours = _forking.groups
    _inherited.extend({*known, *ours})


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before, after_in_parent=_in_parent, after_in_child=_in_child)
