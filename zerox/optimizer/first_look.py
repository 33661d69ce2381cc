"""What ranks look at in their first step(): whether all have the same parameters.

Note [The first look]
Ranks begin with rank 0's values, and every step() changes them alike. A script that then writes to the parameters of
one rank alone (a load on rank 0, say) would train with other values on each, without a sign. So the first step(), and
the first one after load_state_dict(), compares the sum of the squares of each parameter. It is exact, so that no order
of summation shows; it takes one read of the parameters; and it is the same for 0.0 and -0.0, and for all NaNs. Its
digest is in the message that ranks send there anyway. A change that keeps the sum, such as another order of the
elements, is not seen. A step() that is captured into a CUDA graph sends no message, so with capturable=True the first
synchronize() looks too, which comes before each capture.

With sharded parameters (ZeRO stage 3) all ranks read the same shards: only parameters that lie elsewhere may differ.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Iterator, Sequence

import torch
from torch import Tensor

from zerox import ops
from zerox._C import SEGMENT_COLUMNS, SyncPoint
from zerox.calls.phases import Visit
from zerox.model_names import in_text
from zerox.optimizer.core import Core
from zerox.options import PARAM_DTYPES
from zerox.ranks.compared import digest, first_that_differs, line_of
from zerox.ranks.subgroups import Subgroup
from zerox.residency.residency import Residency

NUM_COUNTS = 3  # behind the digits of an exact sum: see csrc/math/exact_sum.h
WAY_OUT = (
    "write parameters on all ranks alike, or call optimizer.broadcast_parameters() after the write, or wrap the model "
    "in zerox.DistributedDataParallel after it: both give all ranks those of rank 0"
)


class FirstLook:
    """Phases: "first look"."""

    def __init__(self, core: Core) -> None:
        self.core = core
        core.phases.before_sync("first look", self._before_sync)
        core.phases.after_sync("first look", self._after_sync)

    def _before_sync(self, visit: Visit) -> None:
        core = self.core
        if core.calls.record.has_looked:
            return
        if visit.sync_point is SyncPoint.STEP or (
            visit.sync_point is SyncPoint.SYNCHRONIZE and core.options.capturable
        ):
            visit.params = digest_of_params(core)

    def _after_sync(self, visit: Visit) -> None:
        if not visit.result.has_same_params:
            check_same_params(self.core)


def digest_of_params(core: Core) -> float:
    """The same on all ranks if these have the same parameters; 0 for one rank alone. Of smaller subgroups' parameters
    it says nothing."""
    if core.ranks.size == 1:
        return 0.0
    if isinstance(core.gather, Residency):
        return float(digest("\n".join(_lines_of(core.gather, _elsewhere(core.gather)))))
    return float(digest("\n".join(_lines(core, core.grads.subgroups.all))))


def check_same_params(core: Core) -> None:
    """Where digests differ. Collective: RuntimeError on all ranks, naming the first parameter that does; no error if
    ranks have found other things to compare, and have the same."""
    if isinstance(core.gather, Residency):
        gather, ranks = core.gather, core.ranks
        said = ranks.all_gather_text(" ".join(f"{index}.{slot}" for index, slot in _elsewhere(gather)))
        places = sorted({(int(i), int(s)) for text in said for i, s in (place.split(".") for place in text.split())})
        lines = list(_lines_of(gather, places))
    else:
        lines = list(_lines(core, core.grads.subgroups.all))
    everyone = [text.split("\n") for text in core.ranks.all_gather_text("\n".join(lines))]
    known = [(member.name, member.param) for member in core.members]
    if (found := first_that_differs(everyone)) is not None:
        rank, index = found
        one, other = (in_text(line_of(everyone[each], index), known) for each in (0, rank))
        raise RuntimeError(
            f"zerox: ranks have different parameters before step(): rank 0 has {one}, rank {rank} {other}. "
            f"State is as it was before; {WAY_OUT}"
        )


def check_subgroups(core: Core) -> None:
    """The same of parameters that smaller subgroups have. Collective."""
    ranks = core.ranks
    for subgroup in core.grads.subgroups.made.values():
        with ranks.refusals_told():
            subgroup.ranks.check_same(list(_lines(core, subgroup)), way_out=WAY_OUT)
        ranks.check_same([])


def squares_of(tensor: Tensor) -> str:
    """What stands for the sum of the squares of all elements; of integers, for the sum of their bytes."""
    flat = (torch.view_as_real(tensor.detach()) if tensor.is_complex() else tensor.detach()).reshape(-1)
    if flat.dtype not in PARAM_DTYPES:
        return str(int(flat.view(torch.uint8).sum(dtype=torch.int64)))
    [limbs] = _limbs_of(flat, [(0, flat.numel())])
    return _text_of(limbs)


# ---- inside


def _lines(core: Core, subgroup: Subgroup) -> Iterator[str]:
    """One for each parameter that the subgroup has."""
    subgroups, moved = core.grads.subgroups, set(core.grads.find_moved())
    for index, bucket in enumerate(core.buckets):
        if subgroups.of_group[bucket.members[0].group] is not subgroup:
            continue
        layout = bucket.plan.layout
        limbs = _limbs_of(bucket.buffer.flat, list(zip(layout.offsets, layout.numels, strict=True)))
        for slot, member in enumerate(bucket.members):
            squares = squares_of(member.local) if (index, slot) in moved else _text_of(limbs[slot])
            yield _line(member.name, squares)
    for member in (*core.frozen, *(table.member for table in core.tables)):
        if subgroups.of_group[member.group] is subgroup:
            yield _line(member.name, squares_of(member.local))


def _lines_of(gather: Residency, places: Iterable[tuple[int, int]]) -> Iterator[str]:
    for index, slot in places:
        yield _line(gather.all[index].members[slot].name, squares_of(gather.all[index].buffer.params[slot]))


def _line(name: str, squares: str) -> str:
    return f"parameter '{name}' with values of digest {hashlib.sha256(squares.encode()).hexdigest()[:12]}"


def _limbs_of(flat: Tensor, places: Sequence[tuple[int, int]]) -> Tensor:
    """int64 ``[n, EXACT_LIMBS]``, on the host. ``places``: n times where elements start, and how many there are."""
    in_order = sorted(range(len(places)), key=lambda place: places[place])  # as kernels read them
    rows = [[places[place][0], sum(places[place]), 0, place, 0] for place in in_order]
    segments = torch.tensor(rows, dtype=torch.int64, device="cpu").reshape(-1, SEGMENT_COLUMNS)
    limbs = torch.zeros(len(rows), ops.EXACT_LIMBS, dtype=torch.int64, device=flat.device)
    ops.norm_(limbs, flat, segments.to(flat.device), 2.0)
    return limbs.cpu()[sorted(range(len(places)), key=lambda place: in_order[place])]


def _text_of(limbs: Tensor) -> str:
    """The number that they stand for, however it was carried, and the counts of what is not finite."""
    digits = limbs.tolist()
    number = sum(digit << (32 * place) for place, digit in enumerate(digits[:-NUM_COUNTS]) if digit)
    return f"{number:x} {digits[-NUM_COUNTS:]}"


def _elsewhere(gather: Residency) -> Sequence[tuple[int, int]]:
    """Of sharded parameters, those that lie elsewhere on this rank."""
    return [
        (index, slot)
        for index, (_, members, buffer) in enumerate(gather.all)
        for slot in range(len(members))
        if not buffer.is_at_home(slot)
    ]
