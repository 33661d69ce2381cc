"""Whether DistributedDataParallel averages gradients too: a wrapper that only evaluates does not."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence

from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from zerox import _C as C

# Living wrappers, and their parameters' ids. If a parameter has more or fewer hooks than known wrappers, all objects
# are searched, which takes some 50 ms.
_known: weakref.WeakKeyDictionary[DistributedDataParallel, frozenset[int]] = weakref.WeakKeyDictionary()


def find_reduced(params: Sequence[Tensor], counts: Sequence[int]) -> int:
    """The first of ``params`` that a wrapper reduces in the backward that begins; -1 if none does.

    ``counts``: each one's hooks that are not zerox's. A parameter with a hook of no known wrapper counts as reduced.
    """
    if any(len(_wrappers_of(param)) != count for param, count in zip(params, counts, strict=True)):
        _look_for_wrappers()
    reducing = {wrapper for wrapper in _known if C.expects_gradients(wrapper.reducer)}
    for index, (param, count) in enumerate(zip(params, counts, strict=True)):
        wrappers = _wrappers_of(param)
        if len(wrappers) != count or not reducing.isdisjoint(wrappers):
            return index
    return -1


def _wrappers_of(param: Tensor) -> list[DistributedDataParallel]:
    return [wrapper for wrapper, ids in _known.items() if id(param) in ids]


def _look_for_wrappers() -> None:
    for each in gc.get_objects():
        if issubclass(type(each), DistributedDataParallel) and "reducer" in each.__dict__:
            _known[each] = frozenset(id(param) for param in each.parameters())
