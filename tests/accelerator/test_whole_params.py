"""Parameters that lie whole on one rank, on an accelerator: over gloo through the host, and by an all-to-all."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from typing import Any
from unittest.mock import patch

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests.accelerator.fake import run_fake_ranks
from tests.accelerator.sharded import HERE, WAYS, Training, ranks_of_threads
from tests.kernels.shards import same_bits
from tests.muon.rig import OPTIONS, Model, Twin, build, matrices
from tests.whole.rig import unequal_buckets, whole
from zerox import FusedShardedMuon
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
@pytest.mark.parametrize(("world_size", "kind"), [(2, "via host"), (3, "via host"), (2, "direct"), (3, "direct")])
def test_a_training_has_the_bits_of_cut_parameters(world_size: int, kind: str, stage: int, limit: str) -> None:
    cut = run_fake_ranks(trained, world_size, kind, stage, limit)
    with whole():  # ranks are threads
        owned = run_fake_ranks(trained, world_size, kind, stage, limit)
    for (ours, num_owned), (theirs, num_cut) in zip(owned, cut, strict=True):
        assert num_cut == 0 < num_owned
        assert all(same_bits(one, other) for one, other in zip(ours, theirs, strict=True))


def refused(ranks: Ranks, stage: int) -> None:
    with pytest.raises(ValueError, match=r'must each lie whole on one rank.*: pass exchange="direct", without'):
        Training(ranks, stage)


@pytest.mark.parametrize("stage", [1, 2])
def test_native_collectives_are_refused(stage: int) -> None:
    with whole():
        run_fake_ranks(refused, 2, "native", stage)


# ---- Muon


def by_muon(
    ranks: Ranks, stage: int, dtype: torch.dtype = torch.float32, state_dtype: Any = torch.float32
) -> dict[str, Tensor]:
    """All ranks have the same gradients, whose mean is exact."""
    HERE.ranks = ranks
    model = Model(dtype).to(ranks.device)
    optimizer = build(model, True, OPTIONS, stage=stage, state_dtype=state_dtype)
    for number in range(3):
        model.backward(0, number)
        optimizer.step()
        optimizer.zero_grad()
    optimizer.synchronize()
    with optimizer.whole():
        return {name: param.detach().cpu() for name, param in model.named_parameters()}


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("kind", ["via host", "direct"])
def test_muon_has_the_bits_of_torch_on_a_cpu(kind: str, stage: int) -> None:
    """Equal matrices go in one batch, once it was seen that they have the bits that each has alone."""
    model = Model()
    twin = Twin(model, OPTIONS)
    for number in range(3):
        twin.step(model.backward(0, number), model, 1, None)
    with patch.object(torch, "baddbmm", wraps=torch.baddbmm) as batched:
        found = run_fake_ranks(by_muon, 2, kind, stage)
    assert batched.called
    for of_rank in found:
        for name, twins in twin.params.items():
            for ours, theirs in zip(matrices(name, of_rank[name]), twins, strict=True):
                assert same_bits(ours.contiguous(), theirs.detach().contiguous()), name


@pytest.mark.parametrize("state_dtype", [torch.bfloat16, "8bit"], ids=str)
@pytest.mark.parametrize(("kind", "stage"), [("via host", 1), ("direct", 2), ("direct", 3)])
def test_muon_has_a_cpu_s_bits_with_masters_and_a_momentum_in_fewer_bits(
    kind: str, stage: int, state_dtype: Any
) -> None:
    expected = by_muon(Ranks.alone(torch.device("cpu")), stage, torch.bfloat16, state_dtype)
    for of_rank in run_fake_ranks(by_muon, 2, kind, stage, torch.bfloat16, state_dtype):
        assert all(same_bits(of_rank[name], each) for name, each in expected.items())


class Counted(TorchDispatchMode):
    """Operators that an accelerator gets, by their names: not those that only make or show memory."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        is_view = any(each.alias_info is not None and not each.alias_info.is_write for each in func._schema.returns)
        if not is_view and not func.name().startswith("aten::empty"):
            self.names[func.name()] += 1
        return func(*args, **(kwargs or {}))


def operators(ranks: Ranks, count: int, dtype: torch.dtype) -> Counter[str]:
    """Of the second step with so many equal matrices."""
    HERE.ranks = ranks
    params = [nn.Parameter(torch.ones(12, 20, dtype=dtype, device=ranks.device)) for _ in range(count)]
    optimizer = FusedShardedMuon(params, lr=0.1)
    counted = Counted()
    for number in range(2):
        torch.stack([param.sum() for param in params]).sum().backward()
        with counted if number else nullcontext():
            optimizer.step()
        optimizer.zero_grad()
    return counted.names


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_more_matrices_take_no_more_operators(dtype: torch.dtype) -> None:
    """An operator is a launch, and for small matrices that is what a step takes."""
    few, many = (run_fake_ranks(operators, 1, "direct", count, dtype)[0] for count in (4, 12))
    assert few.total() > 0
    assert few == many
