"""Any training, drawn at random: each step against torch from the same state, and the same bits however it is cut."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.optimizer.models import memory_order
from tests.properties.ledger import mean_gradients
from tests.properties.one_step import assert_same_bits, check_norm, check_owners, check_parts
from tests.properties.programs import CAPS, Param, Program, programs, shaped
from tests.properties.run import Part, make_groups, make_params, run
from zerox import estimate

# Of each property: 200 in all in `make test`, 300 others in `make test-deep`, which draws for itself, and always alike.
EXAMPLES = settings().max_examples
MORE = EXAMPLES * 3 // 2


@settings(max_examples=EXAMPLES)
@given(programs())
def test_each_step_of_any_training_is_torch_s_with_the_mean_gradient(program: Program) -> None:
    check_each_step(program)


@pytest.mark.deep
@settings(max_examples=MORE)
@given(programs())
def test_each_step_of_many_trainings_is_torch_s_with_the_mean_gradient(program: Program) -> None:
    check_each_step(program)


def check_each_step(program: Program) -> None:
    seen = run(program)
    means = mean_gradients(program)
    start = program.values(0)
    for rank in seen:
        assert_same_bits(rank.start, start, "parameters start as rank 0's")
        formula = estimate(make_groups(program, make_params(program, 0)), program.world_size, **program.options)
        memory = rank.memory
        assert memory is not None
        for each in ("parameters", "master", "moments"):
            now, most = getattr(memory, each), getattr(formula, each)
            as_whole_as_may_be = each == "parameters" and program.options["stage"] == 3
            assert now <= most if as_whole_as_may_be else now == most, f"{each}: {memory}, by formula {formula}"
    before = start
    for number, grads in enumerate(means):
        where = f"step {number}"
        coefficient = check_norm(program, number, grads, seen)
        for rank in seen:
            at = rank.steps[number]
            assert_same_bits(at.values, seen[0].steps[number].values, f"{where}: on all ranks")
            check_parts(program, grads, coefficient, at.before, at.after, before)
        check_owners(program, number, seen)
        for index, (old, new) in enumerate(zip(before, seen[0].steps[number].values, strict=True)):
            if grads[index] is None:
                assert_same_bits([new], [old], f"{where}: parameter {index} has no gradient")
        before = seen[0].steps[number].values


CUTS = (programs(one_exchange=True), CAPS, st.booleans(), st.integers(1, 2))


@settings(max_examples=EXAMPLES)
@given(*CUTS)
def test_bucket_sizes_stages_and_overlap_don_t_show_in_any_training(
    program: Program, cap: float | None, hold: bool, other_stage: int
) -> None:
    check_that_cuts_don_t_show(program, cap, hold, other_stage)


@pytest.mark.deep
@settings(max_examples=MORE)
@given(*CUTS)
def test_bucket_sizes_stages_and_overlap_don_t_show_in_many_trainings(
    program: Program, cap: float | None, hold: bool, other_stage: int
) -> None:
    check_that_cuts_don_t_show(program, cap, hold, other_stage)


def check_that_cuts_don_t_show(program: Program, cap: float | None, hold: bool, other_stage: int) -> None:
    stage = (program.options["stage"] - 1 + other_stage) % 3 + 1
    other = program.with_options(hold, bucket_cap_mb=cap, stage=stage)
    ours, theirs = run(program), run(other)
    for number in range(len(program.steps)):
        one, two = ours[0].steps[number], theirs[0].steps[number]
        assert_same_bits(one.values, two.values, f"step {number}: parameters")
        assert (one.norm is None) == (two.norm is None)
        if one.norm is not None and two.norm is not None:
            assert_same_bits([one.norm], [two.norm], f"step {number}: norm")
        mine, yours = (whole_state([rank.steps[number].after for rank in seen]) for seen in (ours, theirs))
        assert mine.keys() == yours.keys()
        for key in mine:
            assert_same_bits([mine[key]], [yours[key]], f"step {number}: parameter {key[0]}, {key[1]}")


def whole_state(ranks: list[list[Part]]) -> dict[tuple[int, str], Tensor]:
    """The state of all ranks, a whole tensor for each parameter and kind."""
    parts = sorted((part for rank in ranks for part in rank), key=lambda part: part.key)
    pieces: dict[tuple[int, str], list[Tensor]] = {}
    for part in parts:
        for key, tensor in part.state.items():
            # amsgrad is a group's, the buffer for it a bucket's: a parameter beside one that has it has zeros.
            if key != "max_exp_avg_sq" or tensor.any():
                pieces.setdefault((part.param, key), []).append(tensor.reshape(-1) if key != "step" else tensor[None])
    return {
        key: tensors[0] if key[1] == "step" and len({int(t) for t in tensors}) == 1 else torch.cat(tensors)
        for key, tensors in pieces.items()
    }


def test_a_shaped_tensor_lies_as_its_values_do() -> None:
    """The helper that all of this stands on."""
    for shape in [(), (7,), (2, 3), (2, 3, 4), (2, 3, 4, 5)]:
        for transposed in (False, True):
            param = Param(shape, transposed=transposed)
            values = torch.arange(float(param.numel))
            tensor = shaped(values, param)
            assert tensor.shape == shape
            assert torch.equal(memory_order(tensor), values)
    assert shaped(torch.zeros(120), Param((2, 3, 4, 5), transposed=True)).is_contiguous(
        memory_format=torch.channels_last
    )
