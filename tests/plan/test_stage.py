"""A ZeRO stage is data: three distributions."""

import pytest

from zerox.plan.stage import REPLICATED, SHARDED, stage_of


@pytest.mark.parametrize(
    ("number", "params", "grads", "state"),
    [(1, REPLICATED, REPLICATED, SHARDED), (2, REPLICATED, SHARDED, SHARDED)],
)
def test_a_stage_says_what_is_sharded(number: int, params: object, grads: object, state: object) -> None:
    stage = stage_of(number)
    assert (stage.number, stage.params, stage.grads, stage.state) == (number, params, grads, state)


@pytest.mark.parametrize("number", [0, 4, -1, None, "2"])
def test_an_unknown_stage_is_refused_listing_those_there_are(number: object) -> None:
    with pytest.raises(ValueError, match=r"\[1, 2, 3\]"):
        stage_of(number)


def test_a_stage_cant_be_changed() -> None:
    with pytest.raises(AttributeError):
        stage_of(1).grads = SHARDED
