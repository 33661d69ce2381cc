"""Where elements lie: every one owned once, shards equal and aligned, blocks of 256 never cut."""

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from zerox.plan.layout import FLAG_ALIGN, SMALL_NUMEL, Layout
from zerox.plan.span import SHARD_ALIGN, Span, align_up

# Sizes around every threshold, and anything between; world sizes beyond the number of parameters too.
sizes = st.one_of(
    st.sampled_from([0, 1, 255, 256, 257, SMALL_NUMEL - 1, SMALL_NUMEL, SMALL_NUMEL + 1]),
    st.integers(0, 3 * SMALL_NUMEL),
    st.integers(0, 40),
)
layouts = st.builds(Layout, st.lists(sizes, min_size=1, max_size=40).map(tuple), st.integers(1, 17))


def is_small(numel: int) -> bool:
    return numel < SMALL_NUMEL


@given(layouts)
def test_shards_are_equal_multiples_of_256_that_tile_the_buffer(layout: Layout) -> None:
    assert layout.shard_numel > 0
    assert layout.shard_numel % SHARD_ALIGN == 0
    end = 0
    for rank in range(layout.world_size):
        span = layout.shard_span(rank)
        assert (span.start, span.numel) == (end, layout.shard_numel)
        end = span.stop
    assert end == layout.numel


@given(layouts)
@example(Layout((0,), 3))
@example(Layout((256, 0), 1))
@example(Layout((256, 0, 256, 0, 0), 2))
def test_every_element_is_owned_exactly_once(layout: Layout) -> None:
    pieces: dict[int, list[tuple[int, int]]] = {slot: [] for slot in range(len(layout.numels))}
    taken = []
    for rank in range(layout.world_size):
        for segment in layout.segments(rank):
            pieces[segment.slot].append((segment.param_start, segment.span.numel))
            assert segment.span.stop <= layout.shard_numel
            start = rank * layout.shard_numel + segment.span.start
            assert start == layout.offsets[segment.slot] + segment.param_start
            taken.append((start, start + segment.span.numel))
    for slot, numel in enumerate(layout.numels):
        end = 0
        for start, count in pieces[slot]:
            assert start == end
            assert count > 0 or numel == 0
            end += count
        assert end == numel
        assert len(pieces[slot]) == 1 or numel >= SMALL_NUMEL  # an empty parameter has one owner as well
    assert all(before <= after for (_, before), (after, _) in pairwise(taken))


@given(layouts)
def test_large_parameters_start_at_a_multiple_of_256(layout: Layout) -> None:
    for slot, numel in enumerate(layout.numels):
        assert is_small(numel) or layout.offsets[slot] % SHARD_ALIGN == 0


@given(layouts)
def test_a_small_parameter_follows_densely_unless_it_would_cross_a_shards_end(layout: Layout) -> None:
    end = 0
    for slot, numel in enumerate(layout.numels):
        if is_small(numel) and layout.offsets[slot] != end:
            assert end // layout.shard_numel != (end + numel - 1) // layout.shard_numel
            assert layout.offsets[slot] == align_up(end, layout.shard_numel)
        end = layout.offsets[slot] + numel


@given(layouts)
def test_blocks_of_256_counted_from_a_parameters_start_never_cross_a_shards_end(layout: Layout) -> None:
    for rank in range(layout.world_size):
        for segment in layout.segments(rank):
            assert segment.param_start % SHARD_ALIGN == 0
            is_last = segment.param_start + segment.span.numel == layout.numels[segment.slot]
            assert is_last or segment.span.numel % SHARD_ALIGN == 0


@given(layouts)
def test_padding_is_bounded_by_what_alignment_can_cost(layout: Layout) -> None:
    """Under 256 elements before each large parameter; at each shard's end one small parameter that didn't fit, and 256
    for the shards' own alignment (twice: once each for the length it started from and the one it grew to)."""
    largest_small = max((n for n in layout.numels if is_small(n)), default=0)
    num_large = sum(not is_small(n) for n in layout.numels)
    bound = SHARD_ALIGN * num_large + 2 * layout.world_size * (largest_small + SHARD_ALIGN)
    assert 0 <= layout.padding <= bound


def test_biases_and_norms_cost_no_alignment() -> None:
    """64 blocks of a weight and four small vectors: 256-aligned starts would cost 4 * 64 * up to 255 elements."""
    numels = (768 * 768, 768, 768, 100, 1) * 64
    layout = Layout(numels, 4)
    assert layout.padding <= 64 * SHARD_ALIGN + 4 * (768 + SHARD_ALIGN)


@given(layouts)
def test_max_segments_is_the_most_of_any_shard_by_brute_force(layout: Layout) -> None:
    most = max(len(layout.segments(rank)) for rank in range(layout.world_size))
    assert layout.max_segments == most
    assert layout.trailer_numel >= 2 * most
    assert layout.trailer_numel % FLAG_ALIGN == 0


@given(st.lists(st.integers(0, 500), min_size=1, max_size=20).map(tuple))
def test_alone_one_shard_holds_everything_without_gaps_between_small_parameters(numels: tuple[int, ...]) -> None:
    layout = Layout(numels, 1)
    assert layout.offsets == tuple(sum(numels[:slot]) for slot in range(len(numels)))
    assert len(layout.segments(0)) == len(numels)


@pytest.mark.parametrize("numels", [(0,), (0, 0, 0), (1,), (1, 0), (0, 1)])
@pytest.mark.parametrize("world_size", [1, 2, 5])
def test_empty_and_zero_dim_parameters_have_a_place(numels: tuple[int, ...], world_size: int) -> None:
    layout = Layout(numels, world_size)
    owners = [segment.slot for rank in range(world_size) for segment in layout.segments(rank)]
    assert sorted(owners) == list(range(len(numels)))
    assert layout.shard_numel == SHARD_ALIGN


@settings(max_examples=30)
@given(st.integers(1, 10**13), st.integers(1, 20_000))
def test_huge_parameters_are_divided_without_loss(numel: int, world_size: int) -> None:
    layout = Layout((numel,), world_size)
    assert layout.numel >= numel
    assert layout.shard_numel <= max(align_up(-(-numel // world_size), SHARD_ALIGN), align_up(SMALL_NUMEL, SHARD_ALIGN))


@pytest.mark.parametrize(
    ("numels", "world_size", "named"), [((), 2, r"\(\)"), ((3, -1), 2, "-1"), ((3,), 0, "0"), ((3,), -4, "-4")]
)
def test_an_impossible_layout_is_refused_with_the_value(numels: Sequence[int], world_size: int, named: str) -> None:
    with pytest.raises(ValueError, match=named):
        Layout(tuple(numels), world_size)


@pytest.mark.parametrize("rank", [-1, 2])
def test_a_rank_outside_the_world_is_refused(rank: int) -> None:
    with pytest.raises(ValueError, match=rf"\[0, 2\), got {rank}"):
        Layout((5,), 2).shard_span(rank)


def test_a_layout_cant_be_changed() -> None:
    with pytest.raises(AttributeError):
        Layout((5,), 2).shard_numel = 7


def test_draw_shows_each_shard_with_names_gaps_and_cuts() -> None:
    drawn = Layout((5000, 100, 0, 4000), 2).draw(["weight", "bias", "empty", "head"]).split("\n")
    assert drawn == [
        "2 shards of 4,608 elements, 116 of padding",
        "rank 0: 0..4608 weight[0:4608]",
        "rank 1: 0..392 weight[4608:5000], 392..492 bias, 492..492 empty, 492..4492 head",
    ]
    cut = Layout((10_000,), 3).draw().split("\n")
    assert cut[1:] == ["rank 0: 0..3584 #0[0:3584]", "rank 1: 0..3584 #0[3584:7168]", "rank 2: 0..2832 #0[7168:10000]"]
    assert Layout((1,), 2).draw().split("\n")[2] == "rank 1: padding only"


# ---- parameters with owners


@st.composite
def dealt(draw: st.DrawFn) -> Layout:
    numels = tuple(draw(st.lists(sizes, min_size=1, max_size=30)))
    world_size, align = draw(st.integers(1, 9)), draw(st.sampled_from([1, 16, 32]))
    owners = tuple(draw(st.integers(0, world_size - 1)) for _ in numels)
    return Layout(numels, world_size, align, owners)


@given(dealt())
@example(Layout((256, 0), 2, owners=(0, 0)))
@example(Layout((0,), 3, owners=(1,)))
def test_each_parameter_lies_whole_with_its_owner_in_order_and_apart(layout: Layout) -> None:
    assert layout.owners is not None
    for rank in range(layout.world_size):
        segments, shard = layout.segments(rank), layout.shard_span(rank)
        assert [each.slot for each in segments] == [slot for slot, by in enumerate(layout.owners) if by == rank]
        end = 0
        for each in segments:
            assert (each.param_start, each.span.numel) == (0, layout.numels[each.slot])
            assert layout.offsets[each.slot] == shard.start + each.span.start
            align = layout.start_align if is_small(layout.numels[each.slot]) else SHARD_ALIGN
            assert each.span.start == align_up(end, align)
            assert layout.shards_of(each.slot) == range(rank, rank + 1)
            end = each.span.stop
        assert end <= shard.numel
    assert layout.cut_slots == ()


@given(dealt())
def test_shards_of_owners_tile_the_buffer_and_are_as_long_as_it_takes(layout: Layout) -> None:
    assert layout.shard_starts[0] == 0
    assert layout.shard_starts[-1] == layout.numel
    for rank, (start, stop) in enumerate(pairwise(layout.shard_starts)):
        assert layout.shard_span(rank) == Span(start, stop)
        last = max((each.span.stop for each in layout.segments(rank)), default=0)
        assert (stop - start) % SHARD_ALIGN == 0
        assert max(last, SHARD_ALIGN) <= stop - start < last + 2 * SHARD_ALIGN
    assert layout.shard_numel == max(stop - start for start, stop in pairwise(layout.shard_starts))


@given(st.one_of(layouts, dealt()), st.data())
def test_what_lies_in_front_of_each_shard_ends_with_the_last_of_the_first_parameters(
    layout: Layout, data: st.DataObject
) -> None:
    count = data.draw(st.integers(0, len(layout.numels)))
    for rank, numel in enumerate(layout.numels_in_front(count)):
        first = [each for each in layout.segments(rank) if each.slot < count]
        others = [each for each in layout.segments(rank) if each.slot >= count]
        assert numel >= max((each.span.stop for each in first), default=0)
        assert numel <= min((each.span.start for each in others), default=layout.shard_span(rank).numel)


@given(dealt())
def test_max_segments_of_owners_is_the_most_of_any_shard(layout: Layout) -> None:
    assert layout.max_segments == max(len(layout.segments(rank)) for rank in range(layout.world_size))


@given(st.lists(sizes, min_size=1, max_size=20).map(tuple))
def test_on_one_rank_alone_parameters_lie_the_same_with_and_without_owners(numels: tuple[int, ...]) -> None:
    cut, owned = Layout(numels, 1), Layout(numels, 1, owners=(0,) * len(numels))
    assert cut.offsets == owned.offsets
    assert owned.numel <= cut.numel


@pytest.mark.parametrize("owners", [(0,), (0, 2), (-1, 0), (0, 1, 1)])
def test_owners_that_are_no_ranks_or_too_few_are_refused(owners: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"owners must be one of 2 ranks for each of 2 parameters, got \("):
        Layout((5, 5), 2, owners=owners)


def test_draw_shows_shards_of_several_lengths() -> None:
    drawn = Layout((5000, 100, 300), 3, owners=(1, 0, 1)).draw().split("\n")
    assert drawn == [
        "3 shards of 256 to 5,376 elements, 488 of padding",
        "rank 0: 0..100 #1",
        "rank 1: 0..5000 #0, 5000..5300 #2",
        "rank 2: padding only",
    ]
