"""Parameters that lie whole on one rank, on an accelerator: over gloo, through the host, and not otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch import Tensor

from tests.accelerator.fake import run_fake_ranks
from tests.accelerator.sharded import KINDS, WAYS, Training, ranks_of_threads
from tests.kernels.shards import same_bits
from tests.whole.rig import unequal_buckets, whole
from zerox.ranks.group import Ranks

pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")


@pytest.fixture(autouse=True, params=WAYS)
def any_way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    yield from ranks_of_threads(monkeypatch, request.param)


def trained(ranks: Ranks, stage: int, limit: str) -> tuple[list[Tensor], int]:
    training = Training(ranks, stage, limit)
    for step in range(3):
        training.step(step)
    return training.values(), unequal_buckets(training.optimizer)


@pytest.mark.parametrize(("stage", "limit"), [(1, "inf"), (2, "inf"), (3, "released at once"), (3, "two buckets")])
@pytest.mark.parametrize("world_size", [2, 3])
def test_a_training_has_the_bits_of_cut_parameters(world_size: int, stage: int, limit: str) -> None:
    cut = run_fake_ranks(trained, world_size, "via host", stage, limit)
    with whole():  # ranks are threads
        owned = run_fake_ranks(trained, world_size, "via host", stage, limit)
    for (ours, num_owned), (theirs, num_cut) in zip(owned, cut, strict=True):
        assert num_cut == 0 < num_owned
        assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


def refused(ranks: Ranks, stage: int) -> None:
    with pytest.raises(ValueError, match=r"must each lie whole on one rank.*: use gloo, without ZEROX_EXCHANGE=native"):
        Training(ranks, stage)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "via host"])
def test_other_backends_are_refused(kind: str, stage: int) -> None:
    with whole():
        run_fake_ranks(refused, 2, kind, stage)
