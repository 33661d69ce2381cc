"""A ZeRO stage is data: two distributions."""

import pytest

from zerox.plan.stage import REPLICATED, SHARDED, stage_of


@pytest.mark.parametrize(
    ("number", "params", "grads"),
    [(1, REPLICATED, REPLICATED), (2, REPLICATED, SHARDED), (3, SHARDED, SHARDED)],
)
def test_a_stage_says_what_is_sharded(number: int, params: object, grads: object) -> None:
    stage = stage_of(number)
    assert (stage.number, stage.params, stage.grads) == (number, params, grads)


@pytest.mark.parametrize("number", [0, 4, -1, None, "2"])
def test_an_unknown_stage_is_refused_listing_those_there_are(number: object) -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 3\]"):
        stage_of(number)


def test_a_stage_cant_be_changed() -> None:
    with pytest.raises(AttributeError):
        stage_of(1).grads = SHARDED
