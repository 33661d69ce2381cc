"""The data-parallel ranks, and zerox's own group, over which they communicate."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from ctypes import string_at
from dataclasses import dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from zerox import _C as C
from zerox import _torch
from zerox._C import FailureDetector
from zerox.plan import combinations
from zerox.plan.environment import EXCHANGE, STATE_PULL, is_state_pulled
from zerox.ranks.axes import Axis, shard_of
from zerox.ranks.calls import say_after
from zerox.ranks.compared import digest, first_that_differs, line_of
from zerox.ranks.ends import stay_at_end
from zerox.ranks.exchange import choose_exchange
from zerox.ranks.forks import leave_to_parent
from zerox.ranks.last_words import last_words
from zerox.ranks.neighbours import Neighbours, Questions, find_neighbours
from zerox.ranks.own_groups import own_store, same_ranks
from zerox.ranks.process_group import (
    GroupArgument,
    check_still_alone,
    choose_grid,
    choose_group,
    reference_to,
    referenced,
    time_of,
    timeout_of,
    why_alone,
)
from zerox.ranks.roll_call import RollCall, summary_of

CPU = torch.device("cpu")
REFUSED = "refused: "
NO_NEIGHBOURS = Neighbours()


@dataclass(frozen=True)
class Origin:
    """``why_alone``: set for one rank that was not asked to be alone."""

    why_alone: str = ""
    process: C.Process = field(default_factory=C.Process)


@dataclass(frozen=True)
class Ranks:
    """``data`` moves gradients and parameters, ``control`` small CPU tensors; both None for one rank alone.

    ``device``: of the parameters; ``backend``: "gloo" or "nccl", which moves tensors of that device. ``to_given``: the
    user's group over the same ranks; None for one rank alone. ``failure_detector``: names the rank that is missing from
    the groups. ``on_mesh``: the axes of a mesh (replicate, shard), the inner one first; empty for any other group.
    """

    rank: int
    size: int
    backend: str
    exchange: str
    data: dist.ProcessGroup | None
    control: dist.ProcessGroup | None
    device: torch.device = CPU
    neighbours: Neighbours = NO_NEIGHBOURS
    to_given: weakref.ref[dist.ProcessGroup] | None = None
    origin: Origin = field(default_factory=Origin)
    failure_detector: FailureDetector | None = None
    on_mesh: tuple[Axis, ...] = ()

    @staticmethod
    def alone(device: torch.device = CPU, why: str = "") -> Ranks:
        return Ranks(0, 1, "none", "direct", None, None, device, origin=Origin(why))

    def check_here(self) -> None:
        """RuntimeError in a forked child, and if a default group was made later: its ranks would each train alone."""
        self.origin.process.check()
        if self.origin.why_alone:
            check_still_alone(self.origin.why_alone)

    @property
    def given(self) -> dist.ProcessGroup | None:
        """The user's group; None for one rank alone. RuntimeError once it is destroyed."""
        return referenced(self.to_given)

    @property
    def group_if_any(self) -> dist.ProcessGroup | None:
        """The same; None once it is destroyed."""
        return None if self.to_given is None else self.to_given()

    @property
    def axes(self) -> tuple[Axis, ...]:
        """The inner one first."""
        return self.on_mesh or (Axis.of_all(self.data, self.size),)

    def shard_of(self, rank: int) -> int:
        """Which shard of a bucket ``rank`` owns."""
        return shard_of(self.axes, rank)

    @property
    def via_host(self) -> bool:
        """Whether the tensors are an accelerator's and the backend moves only the host's."""
        return self.device.type != "cpu" and self.backend == "gloo"

    def axes_for_manager(self) -> list[C.Axis]:
        return [self.axis_for_manager(axis) for axis in self.axes]

    def axis_for_manager(self, axis: Axis) -> C.Axis:
        direct, gloo = self.exchange != "native", self.backend == "gloo"
        return axis.for_manager(direct, gloo, self.via_host, self.neighbours.processes)

    def all_reduce(self, values: Tensor, op: dist.ReduceOp.RedOpType) -> None:
        """In place, on CPU tensors, or on the accelerator's if its backend works there."""
        group = self.control if values.device.type == "cpu" else self.data
        if group is not None:
            self.await_work(C.start_all_reduce(group, values, op))

    def broadcast(self, values: Tensor, what: str, root: int = 0) -> None:
        """From rank ``root``, in place, for tensors on the CPU or on ``device``. ``what`` names them in errors."""
        sent = values.cpu() if self.via_host else values
        group = self.control if sent.device.type == "cpu" else self.data
        if group is not None:
            try:
                with C.Doing(f"the broadcast of {what}"):
                    self.await_work(C.start_broadcast(group, sent, root))
            except RuntimeError as error:
                raise RuntimeError(f"zerox: {what} did not arrive from rank {root} at all ranks: {error}") from error
            values.copy_(sent)

    def broadcast_values(self, tensor: Tensor, what: str) -> None:
        """From rank 0 into a tensor of any dtype and strides: as bytes, since backends don't know all dtypes."""
        if tensor.numel() == 0:
            return
        values = tensor.detach().contiguous()
        self.broadcast(values.reshape(-1).view(torch.uint8), what)
        tensor.detach().copy_(values)

    def gather(self, values: Tensor, to: int | None = 0) -> list[Tensor]:
        """Every rank's values, by rank, on rank ``to`` (None: on all ranks); elsewhere nothing. Collective.

        ``values``: 1-D, of one length on all ranks, on any device.
        """
        if self.data is None or self.control is None:
            return [values]
        sent = values.cpu() if self.via_host else values
        sent = sent.contiguous().view(torch.uint8)  # as bytes, since backends don't know all dtypes
        group = self.control if sent.device.type == "cpu" else self.data
        received = [torch.empty_like(sent) for _ in range(self.size)] if to in (None, self.rank) else []
        try:
            if to is None:
                self.await_work(C.start_all_gather(group, received, sent))
            else:
                self.await_work(C.start_gather(group, received, sent, to))
        except RuntimeError as error:
            raise RuntimeError(f"zerox: not all ranks sent their part of what is gathered: {error}") from error
        return [each.view(values.dtype) for each in received]

    def all_to_all(self, sent: Tensor, splits: Sequence[int], received: Sequence[int]) -> Tensor:
        """``splits``: how many elements of ``sent``, 1-D on the CPU, go to each rank; ``received``: how many come from
        each, which are returned by rank. Collective."""
        if self.control is None:
            return sent
        found = sent.new_empty(sum(received))
        self.await_work(C.start_all_to_all(self.control, found, sent, list(received), list(splits)))
        return found

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every rank's bytes, of any lengths, by rank."""
        if self.control is None:
            return [data]
        lengths = torch.zeros(self.size, dtype=torch.int64, device=CPU)
        lengths[self.rank] = len(data)
        self.all_reduce(lengths, dist.ReduceOp.MAX)
        sent = torch.zeros(max(1, int(lengths.max())), dtype=torch.uint8, device=CPU)
        if data:
            sent[: len(data)].copy_(torch.frombuffer(bytearray(data), dtype=torch.uint8))
        received = [torch.empty_like(sent) for _ in range(self.size)]
        self.await_work(C.start_all_gather(self.control, received, sent))
        return [string_at(each.data_ptr(), length) for each, length in zip(received, lengths.tolist(), strict=True)]

    def all_gather_text(self, text: str) -> list[str]:
        """Every rank's text, by rank."""
        return [each.decode() for each in self.all_gather_bytes(text.encode())]

    def check_same(
        self, lines: Sequence[str], refusal: str = "", way_out: str = "", in_words: Callable[[str], str] = str
    ) -> None:
        """ValueError on every rank, naming the first line that differs, unless all ranks pass the same lines.

        ``refusal``: the error that this rank raises instead; the others raise ValueError with its text. Collective.
        ``way_out``: what the error advises. ``in_words``: how the error has a line of this rank's.
        Ranks compare a digest; the lines themselves travel only when it differs.
        """
        text = f"{REFUSED}{refusal}" if refusal else "\n".join(lines)
        try:
            with C.Doing("a comparison of what ranks have"):
                everyone = self._unless_same(text)
        except RuntimeError as error:
            raise RuntimeError(f"zerox: a rank did not answer while ranks compared parameters: {error}") from error
        for rank, theirs in enumerate(everyone):
            if theirs[0].startswith(REFUSED):
                raise ValueError(f"zerox: rank {rank} raised {theirs[0].removeprefix(REFUSED)}")
        if (found := first_that_differs(everyone)) is not None:
            rank, index = found
            of_ranks = self.all_gather_text(in_words(line_of(lines, index)))
            advice = f": {way_out}" if way_out else ""
            raise ValueError(
                f"zerox: ranks must agree: rank 0 has {of_ranks[0]}; rank {rank} has {of_ranks[rank]}{advice}"
            )

    def _unless_same(self, text: str) -> list[list[str]]:
        """Every rank's lines by rank, or none if all ranks pass the same."""
        number = digest(text)
        extremes = torch.tensor([number, -number], device=CPU)
        self.all_reduce(extremes, dist.ReduceOp.MAX)
        if extremes[0] == -extremes[1]:
            return []
        return [each.split("\n") for each in self.all_gather_text(text)]

    def barrier(self, where: str) -> None:
        """RuntimeError on all ranks unless every rank comes. Collective."""
        try:
            with C.Doing(f"the sync point where {where}"):
                self.all_reduce(torch.zeros(1, device="cpu"), dist.ReduceOp.MAX)
        except RuntimeError as error:
            raise RuntimeError(f"zerox: a rank did not come where {where}: {error}") from error

    def await_work(self, work: dist.Work) -> None:
        """RuntimeError that names a rank that is gone."""
        if self.failure_detector is None:
            work.wait()
        else:
            self.failure_detector.await_(work)

    @contextlib.contextmanager
    def failure_told(self) -> Iterator[None]:
        """Around work of all ranks together at which one may fail: the others raise its reason at once."""
        try:
            yield
        except BaseException as error:
            self.tell_failure(f"rank {self.rank} raised {summary_of(error)}")
            raise

    def tell_failure(self, reason: str) -> None:
        """The others raise it at once, where they wait for this rank. No rank goes on with the others afterwards."""
        if self.failure_detector is not None:
            self.failure_detector.leave(reason)

    @contextlib.contextmanager
    def refusals_told(self) -> Iterator[None]:
        """Around code that may raise on one rank while the others go on to check_same()."""
        try:
            yield
        except Exception as error:
            with contextlib.suppress(RuntimeError, ValueError):  # this rank raises its own, first error
                self.check_same([], summary_of(error))
            raise


def call_ranks(process_group: GroupArgument) -> RollCall:
    """The roll call of one construction. Raises ValueError as :func:`find_ranks` does for the group itself."""
    group = choose_group(process_group)
    if group is None:
        return RollCall(None, 0, 1, dist.default_pg_timeout)
    _, store = _torch.listed_groups().get(group, ("", None))
    timeout = time_of(group)
    return RollCall(store, group.rank(), group.size(), timeout)


def find_ranks(
    process_group: GroupArgument,
    device: torch.device = CPU,
    roll_call: RollCall | None = None,
    exchange: str | None = None,
    has_state: bool = True,
    has_owners: bool = False,
) -> Ranks:
    """Makes the group of our own over the ranks of ``process_group``.

    Collective over these ranks. ``device``: of the parameters; it chooses among a group's backends if there is one for
    each device type. ``exchange``, ``has_owners``: as choose_exchange() has them. ``has_state``: others may read it.
    Raises ValueError for a mesh or a group that choose_group() refuses, a backend that can't move tensors of
    ``device``, or as choose_exchange(), and if ``roll_call`` does; RuntimeError if a rank doesn't come.
    """
    group = choose_group(process_group)
    if group is None or group.size() == 1:
        return Ranks.alone(device, why_alone(process_group))
    leave_to_parent(group)
    rank, size = group.rank(), group.size()
    backend = _backend(group, device)
    exchange = choose_exchange(exchange, backend, rank, has_owners)
    say_after()  # raises, while ranks can still be told
    is_pulled = is_state_pulled() and has_state
    if group not in _torch.listed_groups():
        # A group that torch.distributed does not know (ranks as threads of one process, in tests) can't be doubled.
        made = Ranks(rank, size, backend, exchange, group, group, device, to_given=reference_to(group))
        return _with_neighbours(replace(made, failure_detector=_failure_detector(group, None, [])))
    if roll_call is None:
        roll_call = RollCall(None, rank, size, dist.default_pg_timeout)
    grid = choose_grid(process_group)
    on_mesh = "" if grid is None else f", on a mesh (replicate, shard) of {grid.shape}"
    roll_call.answer(
        f"exchange={exchange!r} (the option, {EXCHANGE} or the default) over {backend} for parameters on "
        f"{device.type}{on_mesh}, with {STATE_PULL}={int(is_pulled)}"
    )
    data = same_ranks(group, backend, roll_call, timeout_of(group, backend))
    # Collectives on one gloo group pair up by order, and those of native exchange come from other threads.
    control = (
        data
        if backend == "gloo" and exchange != "native"
        else same_ranks(group, "gloo", roll_call, timeout_of(group, "gloo"))
    )
    axes: tuple[Axis, ...] = ()
    if grid is not None:
        along = [(1, grid.inner), (0, grid.outer)]
        time = timeout_of(group, backend)  # the mesh's own groups have the default, whatever the ranks' timeout is
        axes = tuple(grid.axis(index, rank, same_ranks(of, backend, roll_call, time)) for index, of in along)
    made = Ranks(rank, size, backend, exchange, data, control, device, to_given=reference_to(group), on_mesh=axes)
    over_gloo = {control} if backend != "gloo" else {control, data, *(axis.group for axis in axes if axis.group)}
    failure_detector = _failure_detector(group, own_store(group, "failure_detector"), list(over_gloo))
    made = _with_neighbours(replace(made, failure_detector=failure_detector))
    if not is_pulled or made.neighbours.linger is not None:
        return made
    asked = same_ranks(group, "gloo", roll_call, timeout_of(group, "gloo"))
    return with_questions(made, asked, roll_call.process_of_parent())


def _failure_detector(
    group: dist.ProcessGroup, store: Store | None, to_close: list[dist.ProcessGroup]
) -> FailureDetector:
    failure_detector = FailureDetector(
        groups=to_close,
        store=store,
        rank=group.rank(),
        world=group.size(),
        timeout=time_of(group),
        say_after=say_after(),
    )
    last_words.listen(failure_detector, group.rank())
    return failure_detector


def _with_neighbours(ranks: Ranks) -> Ranks:
    """Collective. An accelerator's tensors are sent from pinned memory, which is its driver's: no rank reads it."""
    if ranks.backend != "gloo" or ranks.exchange != "direct" or ranks.via_host:
        return ranks
    try:
        with ranks.failure_told(), C.Doing("the optimizer's constructor"):
            neighbours = find_neighbours(ranks.all_gather_text, ranks.rank)
    except RuntimeError as error:
        raise RuntimeError(f"zerox: a rank did not answer while ranks looked for neighbours: {error}") from error
    if ranks.failure_detector is None:
        return replace(ranks, neighbours=Neighbours(neighbours))
    ranks.failure_detector.set_processes(neighbours)
    return replace(ranks, neighbours=Neighbours(neighbours, _linger(ranks, neighbours)))


def _linger(ranks: Ranks, neighbours: Sequence[int]) -> C.Linger | None:
    """Of ranks that all read each other's memory. Collective."""
    if ranks.failure_detector is None or not all(neighbours):
        return None
    linger = C.Linger(ranks.failure_detector, list(neighbours), ranks.rank)
    linger.read_in_memory([int(each) for each in ranks.all_gather_text(str(linger.address))])
    stay_at_end()
    return linger


def with_questions(ranks: Ranks, group: dist.ProcessGroup, processes: Sequence[int]) -> Ranks:
    """``group``: of these ranks, for what they ask each other. Ranks that are at their end answer there, those that
    gave up do not. ``processes``: by rank, those that are known."""
    assert ranks.failure_detector is not None
    ranks.failure_detector.add_group(group, for_questions=True)
    questions = Questions.over(group, ranks.device)
    linger = C.Linger(ranks.failure_detector, list(processes), ranks.rank)
    linger.tell_by_message(group, questions.server, questions.asked)
    stay_at_end()
    return replace(ranks, neighbours=replace(ranks.neighbours, linger=linger, questions=questions))


def has_nccl(process_group: GroupArgument) -> bool:
    """Whether its ranks exchange an accelerator's tensors over NCCL."""
    group = choose_group(process_group)
    with contextlib.suppress(RuntimeError):  # it has no backend for them
        return group is not None and _torch.backend_of(group, torch.device("cuda")).name() == "nccl"
    return False


def _backend(group: dist.ProcessGroup, device: torch.device) -> str:
    """The backend that moves tensors of ``device`` in this group: gloo moves an accelerator's through the host."""
    for type_ in dict.fromkeys([device.type, "cpu"]):
        with contextlib.suppress(RuntimeError):  # there is none for this device type
            name = _torch.backend_of(group, torch.device(type_)).name()
            if name in ("gloo", "nccl"):
                return str(name)
    name, _ = _torch.listed_groups().get(group, (group.name(), None))
    combinations.check({"backend": {name}, "device": {device.type}})
    raise ValueError(f"process_group: its backend is {name}, and tensors on {device} need nccl or gloo")
