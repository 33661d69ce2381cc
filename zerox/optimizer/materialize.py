"""Gives a model on the meta device memory and first values, module by module: zerox/plan/materialize.py has the order.

See Note [First values of a model on meta] in on_meta.py.
"""

from __future__ import annotations

import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from zerox import _C as C
from zerox import _torch
from zerox.memory.bucket import Member
from zerox.memory.flat import FlatBuffer, Unfilled, dense_strides
from zerox.model_names import in_text
from zerox.optimizer.on_meta import Init, Initialised, find_initialised
from zerox.optimizer.pretrained import kept
from zerox.plan.buckets import MIB
from zerox.plan.materialize import Turn, largest, most_beside, turns
from zerox.plan.plan import Plan
from zerox.ranks.calls import warn_caller
from zerox.ranks.group import Ranks

# Each byte of memory without values. In floating point it is a NaN, which nothing draws: one that is left is found. Of
# integers and bools every value may be meant: only memory that still is all as it was counts.
UNWRITTEN, UNWRITTEN_INTEGERS = 0xFF, 0xA5
CHUNK = 1 << 20  # elements that are looked at together
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32}  # by bytes of an element; of more, several int64


class Materializer:
    """Of the ``members`` on meta of ``model``, and of its buffers there."""

    def __init__(self, model: nn.Module, init: Init | None, members: Sequence[Member], ranks: Ranks) -> None:
        self.model = model
        self.init = init
        self.ranks = ranks
        self.given = members
        self.modules: list[Initialised] = []
        self.members = {id(member.param): member for member in members if member.param.is_meta}
        # By kind and name, since the optimizer may call a parameter as the model calls a buffer.
        self.digests: dict[str, str] = {}  # lines that ranks compare
        self.unwritten: dict[str, Tensor] = {}  # in which a module left memory without values
        self.made: dict[int, tuple[Tensor, Tensor, int]] = {}  # buffers: on meta, in memory, and its version then

    @staticmethod
    def of(model: nn.Module | None, init: Init | None, members: Sequence[Member], ranks: Ranks) -> Materializer | None:
        """None if nothing is on meta."""
        if model is None or not any(each.is_meta for each in (*model.parameters(), *model.buffers())):
            return None
        return Materializer(model, init, members, ranks)

    def look(self) -> None:
        """ValueError, before anything has changed, for what can't be initialised."""
        self.modules = find_initialised(self.model, self.init, self.given)

    def check_room(self, plan: Plan, members: Sequence[Member], limit: float) -> None:
        """ValueError if more than ``limit`` bytes of buckets would be whole beside those of one module. A warning that
        names a module whose own buckets are more than that."""
        found, nbytes = planned_turns(self.modules, plan, members)
        beside = most_beside(found, nbytes)
        if beside > limit:
            raise ValueError(
                f"zerox: while the model on the meta device gets its values, {beside / MIB:.3f} MiB of buckets are "
                f"whole beside one module's, and resident_mb allows {limit / MIB:.3f}: raise it, or lower "
                "bucket_cap_mb"
            )
        at, most = largest(found, nbytes)
        if most > limit:
            warn_caller(
                f"zerox: {self.modules[at].quoted} has parameters in buckets of {most / MIB:.1f} MiB, which are whole "
                f"at a time while it gets its first values: more than the {limit / MIB:.1f} MiB that resident_mb allows"
            )

    def materialize(self, unfilled: Unfilled) -> None:
        """Parameters that are in none of the buffers get memory of their own. Collective."""
        buffers = unfilled.buffers
        numbers = {id(param): id(param) for each in buffers for param in each.params}
        found = turns_of(self.modules, numbers, [[id(param) for param in each.params] for each in buffers])
        with torch.no_grad(), kept(self.model), self._draws_of_first():
            for module, turn in zip(self.modules, found, strict=True):
                try:
                    self._take_turn(module, turn, unfilled)
                except BaseException:  # what has no values, or not all, must not be taken for values later
                    self._take_memory([buffers[index] for index in turn.open], module)
                    raise
        self._note_buffers()
        self._compare()

    # ---- inside

    def _take_turn(self, module: Initialised, turn: Turn, unfilled: Unfilled) -> None:
        buffers = unfilled.buffers
        for index in turn.opens:
            unfilled.begin(index)
            for slot, param in enumerate(buffers[index].params):
                self._give_memory(param, buffers[index].own_home(slot))
        if turn.goes_back:
            unfilled.let_go()
        self._initialise(module)
        for index in turn.closes:
            self._end(buffers[index])
            unfilled.end(index)

    def _initialise(self, each: Initialised) -> None:
        loose = [param for param in each.params if param.is_meta]
        for param in loose:
            strides = dense_strides(param)
            made = torch.empty_strided(param.shape, strides, dtype=param.dtype, device=self.ranks.device)
            self._give_memory(param, made)
        for name in each.buffers:
            self._make_buffer(each.module, name)
        each.run()
        for param in loose:
            self._note(self.members[id(param)].name, param, "parameter")

    def _end(self, buffer: FlatBuffer) -> None:
        """A module may have given a parameter other memory, by ``param.data = ...``."""
        for slot, param in enumerate(buffer.params):
            name = self.members[id(param)].name
            if not buffer.is_at_home(slot):
                if misfit := buffer.misfit(slot, name):
                    raise ValueError(f"zerox: init has changed what it was to give values: {misfit}")
                value = param.detach()
                buffer.put(slot, value)
                param.data = buffer.own_home(slot)
            self._note(name, param, "parameter")

    def _take_memory(self, buffers: Sequence[FlatBuffer], at: Initialised) -> None:
        """Parameters are on meta again, and so are the buffers of the module that had its turn."""
        for buffer in buffers:
            for param in buffer.params:
                if not C.has_accumulator(param):  # init has given it one, and the error is another
                    C.set_data(param, torch.empty_like(param, device="meta"))
        for on_meta, made, _ in self.made.values():
            for name, each in at.module.named_buffers(recurse=False):
                if each is made:
                    setattr(at.module, name, on_meta)

    def _give_memory(self, param: Tensor, home: Tensor) -> None:
        leave_unwritten(home)
        C.set_data(param, home)

    def _make_buffer(self, module: nn.Module, name: str) -> None:
        """Modules that share one share what is made for it."""
        buffer = module.get_buffer(name)
        if id(buffer) not in self.made:
            made = torch.empty_like(buffer, device=self.ranks.device)
            leave_unwritten(made)
            self.made[id(buffer)] = (buffer, made, _torch.version_of(made))
        setattr(module, name, self.made[id(buffer)][1])

    def _note(self, name: str, values: Tensor, kind: str) -> None:
        flat, what = in_memory(values.detach()), f"{kind} '{name}'"
        self.digests[what] = f"{what} with first values of digest {C.digest(flat):016x}"
        if has_unwritten(flat):
            self.unwritten[what] = values

    def _note_buffers(self) -> None:
        """Of those that modules have now: init may have put others in their place."""
        ids = {id(made): version for _, made, version in self.made.values()}
        for name, buffer in self.model.named_buffers():
            if buffer.is_meta:
                self.unwritten[f"buffer '{name}'"] = buffer
            elif id(buffer) in ids:
                self._note(name, buffer, "buffer")
                if _torch.version_of(buffer) != ids[id(buffer)] and not may_be_nan(buffer):
                    self.unwritten.pop(f"buffer '{name}'", None)

    def _compare(self) -> None:
        known = [(member.name, member.param) for member in self.members.values()]
        left = [
            what for what, each in self.unwritten.items() if each.is_meta or has_unwritten(in_memory(each.detach()))
        ]
        with self.ranks.refusals_told():
            if left:
                more = f", and {len(left) - 1} more," if len(left) > 1 else ""
                raise ValueError(
                    f"zerox: {left[0]}{more} was on the meta device, and has elements to which nothing gave a "
                    "value: init must give one to each of a module's own parameters and buffers, or make that module "
                    "in memory"
                )
        way_out = "draw with torch's generators only, which all ranks get from rank 0, and on machines of one kind"
        self.ranks.check_same(list(self.digests.values()), way_out=way_out, in_words=lambda line: in_text(line, known))

    @contextmanager
    def _draws_of_first(self) -> Iterator[None]:
        """Inside, torch draws as on rank 0. Afterwards ranks whose generators were as rank 0's go on as it does, others
        go back to theirs."""
        own = generators(self.ranks.device)
        told = self.ranks.all_gather_bytes(pickle.dumps([state.numpy().tobytes() for state in own]))
        first = [torch.frombuffer(bytearray(state), dtype=torch.uint8) for state in pickle.loads(told[0])]
        is_first = all(map(torch.equal, own, first))
        set_generators(self.ranks.device, first)
        try:
            yield
        finally:
            if not is_first:
                set_generators(self.ranks.device, own)


def turns_of(modules: Sequence[Initialised], numbers: dict[int, int], buckets: Sequence[Sequence[int]]) -> list[Turn]:
    """``numbers``: of parameters that are in buckets, by id, as ``buckets`` have them."""
    return turns([[numbers[id(param)] for param in each.params if id(param) in numbers] for each in modules], buckets)


def planned_turns(
    modules: Sequence[Initialised], plan: Plan, members: Sequence[Member]
) -> tuple[list[Turn], list[int]]:
    """And the bytes of the buckets that they open."""
    planned = [bucket for bucket in plan.buckets if members[bucket.params[0]].param.is_meta]
    numbers = {id(members[place].param): place for bucket in planned for place in bucket.params}
    found = turns_of(modules, numbers, [bucket.params for bucket in planned])
    return found, [bucket.nbytes for bucket in planned]


def in_memory(values: Tensor) -> Tensor:
    """1-D, as its elements lie: a view if there are no gaps between them."""
    if dense_strides(values) != values.stride():
        return values.reshape(-1)
    return values.as_strided((values.numel(),), (1,))


def may_be_nan(values: Tensor) -> bool:
    """By its dtype."""
    return values.is_floating_point() or values.is_complex()


def leave_unwritten(values: Tensor) -> None:
    in_memory(values).view(torch.uint8).fill_(UNWRITTEN if may_be_nan(values) else UNWRITTEN_INTEGERS)


def has_unwritten(flat: Tensor) -> bool:
    """Whether some elements are as memory is that nobody wrote; of integers and bools whether all are."""
    if not may_be_nan(flat):
        parts = flat.view(torch.uint8).split(CHUNK)
        return flat.numel() > 0 and all(bool((part == UNWRITTEN_INTEGERS).all()) for part in parts)
    bits = flat.view(BITS.get(flat.itemsize, torch.int64))
    none = 0xFF if flat.itemsize == 1 else -1
    return any(bool((part == none).any()) for part in bits.split(CHUNK))


def generators(device: torch.device) -> list[Tensor]:
    """The states of torch's, of the host and of the device."""
    states = [torch.get_rng_state()]
    return [*states, torch.cuda.get_rng_state(device)] if device.type == "cuda" else states


def set_generators(device: torch.device, states: Sequence[Tensor]) -> None:
    torch.set_rng_state(states[0])
    if device.type == "cuda":
        torch.cuda.set_rng_state(states[1], device)
