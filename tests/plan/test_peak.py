"""The formula for the worst moment of a step beside a machine that goes through every order of events."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from hypothesis import given
from hypothesis import strategies as st

from zerox.plan.peak import Flow, peak_alone, peak_of_sharded, peak_of_whole, peak_on_streams

sizes = st.integers(0, 100)


@st.composite
def flows_of_any_size(draw: st.DrawFn) -> Flow:
    packed, zero_copy, flat, received, shard, whole = (draw(sizes) for _ in range(6))
    kept = draw(st.sampled_from([0, shard]))  # the part of the shard that stays
    return Flow(packed + zero_copy, flat, received, shard, zero_copy, whole, kept, last=draw(st.integers(0, packed)))


flow_lists = st.lists(flows_of_any_size(), min_size=1, max_size=5)
BUFFERS = 2  # buckets that may have them at a time

# What one worker and then the other do with a bucket, step by step: (packed so far, reduced so far).
State = tuple[int, int]
PACKING = ("flat", "free local", "received")
LANDING = ("shard", "free buffers")


def next_states(state: State, count: int) -> Iterator[State]:
    packing, reducing = state
    bucket = packing // len(PACKING)
    if bucket < count and bucket < reducing // len(LANDING) + BUFFERS:
        yield packing + 1, reducing
    if reducing // len(LANDING) < bucket:
        yield packing, reducing + 1


def bytes_in(state: State, flows: Sequence[Flow], frees_local: bool, stalled: bool, ahead: int | None = None) -> int:
    """``ahead``: buckets whose gradients are there before the one before them has been reduced; None: all."""
    total = 0
    for index, flow in enumerate(flows):
        packed = state[0] - index * len(PACKING)
        reduced = state[1] - index * len(LANDING)
        there = (stalled and (ahead is None or state[1] >= (index - ahead) * len(LANDING))) or reduced >= 0
        total += (flow.local - flow.zero_copy) * (there and not (frees_local and packed >= 2))
        total += flow.zero_copy * (there and not (frees_local and reduced >= 2))
        total += flow.flat * (packed >= 1 and reduced < 2)
        total += flow.received * (packed >= 3 and reduced < 2)
        total += flow.shard * (reduced >= 1)
    return total


def states_of(count: int) -> set[State]:
    reached: set[State] = set()
    open_ = [(0, 0)]
    while open_:
        state = open_.pop()
        if state not in reached:
            reached.add(state)
            open_ += next_states(state, count)
    return reached


def worst_moment(flows: Sequence[Flow], frees_local: bool, ahead: int | None = None) -> int:
    """Of all states that the two workers can reach when all gradients are there that may be."""
    return max(bytes_in(state, flows, frees_local, True, ahead) for state in states_of(len(flows)))


def worst_moment_of_a_late_backward(flows: Sequence[Flow], ahead: int | None = None) -> int:
    """Backward's thread has made the gradients of some buckets, and still has the last one, which is packed."""
    most = 0
    for count, flow in enumerate(flows, 1):
        packed = (count - 1) * len(PACKING) + PACKING.index("free local") + 1
        states = [state for state in states_of(count) if state[0] >= packed]
        most = max(most, *(bytes_in(state, flows[:count], True, True, ahead) + flow.last for state in states))
    return most


def worst_moment_one_by_one(flows: Sequence[Flow]) -> int:
    most = 0
    for index in range(len(flows)):
        reduced = index * len(LANDING)
        states = [(index * len(PACKING) + packing, reduced) for packing in range(4)]
        states += [((index + 1) * len(PACKING), reduced + reducing) for reducing in (1, 2)]
        # Once it has been reduced, the next one's gradients are not there yet.
        most = max(most, *(bytes_in(state, flows[: index + 1], frees_local=True, stalled=False) for state in states))
    return most


@given(flow_lists)
def test_sharded_gradients_take_what_the_worst_order_of_events_takes(flows: list[Flow]) -> None:
    assert peak_of_sharded(flows, None) == max(worst_moment(flows, True), worst_moment_of_a_late_backward(flows))
    assert peak_of_sharded(flows, 0) == worst_moment_one_by_one(flows)


@given(flow_lists, st.integers(1, 3))
def test_a_paced_backward_has_few_gradients_that_wait(flows: list[Flow], ahead: int) -> None:
    late = worst_moment_of_a_late_backward(flows, ahead)
    assert peak_of_sharded(flows, ahead) == max(worst_moment(flows, True, ahead), late)


@given(flow_lists)
def test_on_streams_memory_is_free_in_the_order_of_launches(flows: list[Flow]) -> None:
    """As Flights does it: gradients beyond two flights before a launch, and buffers beyond one, are freed then."""
    gradients: list[int] = []  # of flights that are packed
    buffers: list[int] = []
    most = reduced = 0

    def note(others: int) -> None:
        nonlocal most
        most = max(most, reduced + sum(gradients) + sum(buffers) + others)

    for flow in flows:
        note(flow.local)
        del gradients[:-2]
        del buffers[:-1]
        gradients.append(flow.local)
        buffers.append(flow.buffers + flow.reducing)
        reduced += flow.shard
        note(0)
    assert peak_on_streams(flows) == most


@given(flow_lists)
def test_whole_gradients_are_gathered_while_the_local_ones_are_there(flows: list[Flow]) -> None:
    gathering, most = sum(flow.local + flow.shard for flow in flows), 0
    for flow in flows:
        gathering += flow.whole
        most = max(most, gathering)
        gathering -= flow.shard - flow.kept
    assert peak_of_whole(flows, stalled=True) == max(most, worst_moment(flows, frees_local=False))
    assert peak_of_whole(flows, stalled=False) <= peak_of_whole(flows, stalled=True)


@given(flow_lists)
def test_one_rank_packs_gradients_into_their_mean_or_leaves_them_there(flows: list[Flow]) -> None:
    held = most = sum(flow.local for flow in flows)
    for flow in flows:
        held += flow.flat
        most = max(most, held)
        held -= flow.local - flow.zero_copy
    assert peak_alone(flows, sharded=True) == most


def test_no_parameters_take_nothing() -> None:
    assert peak_of_sharded([], None) == peak_of_whole([], True) == peak_on_streams([]) == 0
    assert peak_alone([], True) == peak_alone([], False) == 0
