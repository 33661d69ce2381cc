"""What parameters that are DTensors are refused for, by name, on ranks (dp 2, tp 2)."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

import zerox
from tests.mesh.parallel_models import Meshes, batch, loss_of, twins
from tests.ranks import Once, run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer

Refusal = Callable[[Meshes], Any]


def lying(meshes: Meshes, placement: Any = None, mesh: Any = None) -> nn.Parameter:
    return nn.Parameter(distribute_tensor(torch.ones(8, 6), mesh or meshes.tp, [placement or Shard(0)]))


def made(meshes: Meshes, param: Tensor, **options: Any) -> FusedShardedAdam:
    return FusedShardedAdam([("odd", param)], process_group=meshes.dp, **options)


def strided(meshes: Meshes) -> nn.Parameter:
    spec = [_StridedShard(0, split_factor=2)]
    return nn.Parameter(DTensor.from_local(torch.ones(4, 6), meshes.tp, spec, run_check=False))


def part_of_a_sum(meshes: Meshes) -> nn.Parameter:
    return nn.Parameter(DTensor.from_local(torch.ones(4, 6), meshes.tp, [Partial()], run_check=False))


def other_local(meshes: Meshes) -> None:
    param = lying(meshes)
    optimizer = made(meshes, param)
    (param * 2).sum().backward()
    param._local_tensor = param._local_tensor.clone()  # type: ignore[attr-defined]
    optimizer.step()


def gradient_of_a_sum(meshes: Meshes) -> None:
    param = lying(meshes)
    optimizer = made(meshes, param)
    local = torch.ones(8, 6)
    param.grad = DTensor.from_local(local, meshes.tp, [Partial()], run_check=False)
    optimizer.step()


def now_and_then_partial(meshes: Meshes) -> None:
    param = lying(meshes, Replicate())
    optimizer = made(meshes, param)
    for placement in (Partial(), Replicate()):
        optimizer.zero_grad()
        param.grad = DTensor.from_local(torch.ones(8, 6), meshes.tp, [placement], run_check=False)
        optimizer.step()


def ranks_disagree(meshes: Meshes) -> None:
    made(meshes, lying(meshes, Shard(meshes.tp.get_local_rank())))


def clipped_together(meshes: Meshes) -> None:
    one, other = made(meshes, lying(meshes)), made(meshes, nn.Parameter(torch.ones(3)))
    zerox.clip_grad_norm_([one, other], 1.0)


def added_axis(meshes: Meshes) -> None:
    made(meshes, nn.Parameter(torch.ones(3))).add_param_group({"params": [("late", lying(meshes))]})


def call(name: str, *args: Any) -> Refusal:
    return lambda meshes: getattr(made(meshes, lying(meshes)), name)(*args)


def set_gradient(meshes: Meshes) -> None:
    param = lying(meshes)
    made(meshes, param).set_full_grad_(param, torch.ones(8, 6))


def state_of_another_cut(meshes: Meshes) -> None:
    of_rows, of_columns = lying(meshes), lying(meshes, Shard(1))
    made(meshes, of_columns).load_state_dict(made(meshes, of_rows).state_dict())


REFUSALS: dict[str, tuple[Refusal, type[Exception], str]] = {
    "strided": (lambda m: made(m, strided(m)), ValueError, "'odd' is a DTensor that lies as _?StridedShard.* 'tp'"),
    "a sum": (lambda m: made(m, part_of_a_sum(m)), ValueError, "'odd' is a DTensor that lies as Partial.* axis 'tp'"),
    "over dp": (lambda m: made(m, lying(m, mesh=m.dp)), ValueError, "'odd' is a DTensor on axis 'dp' .*average"),
    "over all": (
        lambda m: FusedShardedAdam([("odd", lying(m))]),
        ValueError,
        r"'odd' is a DTensor on axis 'tp' of ranks .*average .*mesh\[\"dp\"\]",
    ),
    "accumulate": (
        lambda m: made(m, lying(m), accumulate_dtype=torch.float32),
        ValueError,
        "accumulate_dtype=torch.float32 does not go with .*DTensors, as 'odd'",
    ),
    "any class": (
        lambda m: ShardedOptimizer([("odd", lying(m))], torch.optim.SGD, process_group=m.dp),
        ValueError,
        "ShardedOptimizer does not go with .*DTensors, as 'odd'",
    ),
    "norm_group": (lambda m: made(m, lying(m), norm_group=3), ValueError, "norm_group must be a ProcessGroup or"),
    "norm_group over dp": (lambda m: made(m, lying(m), norm_group=m.both), ValueError, "norm_group has the axis 'dp'"),
    "ranks disagree": (ranks_disagree, ValueError, "agree along axis 'tp'.*'odd'.*Shard.dim=0.*'odd'.*Shard.dim=1"),
    "another local tensor": (other_local, RuntimeError, "'odd' has another local tensor than when"),
    "gradient": (gradient_of_a_sum, RuntimeError, "'odd' lies as Shard.* axis 'tp', and its gradient came as Partial"),
    "in turn": (now_and_then_partial, RuntimeError, "'odd' came as Partial.sum. and as Replicate over axis 0"),
    "two optimizers": (clipped_together, ValueError, "optimizer 0 is over the axis 'tp' .* optimizer 1 over no model"),
    "counted already": (
        lambda m: zerox.clip_grad_norm_([made(m, lying(m))], 1.0, group=m.tp.get_group()),
        ValueError,
        "group= has ranks of the axis 'tp' of ranks .*, which the optimizers' norms are over already",
    ),
    "added later": (added_axis, ValueError, "'late' is a DTensor on the axis 'tp'.*give it to"),
    "join": (call("join"), NotImplementedError, "inside join.. does not go with parameters .*DTensors, as 'odd':"),
    "set_full_grad_": (set_gradient, NotImplementedError, "'odd', do not go with set_full_grad_.. yet"),
    "another cut": (state_of_another_cut, ValueError, "state of parameter 'odd' .* of another cut.*zerox.load"),
    "without a part": (
        lambda m: zerox.save("/nowhere", nn.Linear(2, 2), made(m, lying(m)), process_group=m.dp),
        ValueError,
        "process_group: ranks .* have a part of the optimizer's state and are not in it",
    ),
}


def refusals(rank: int, world_size: int) -> dict[str, str]:
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    found = {}
    for name, (refusal, _, _) in REFUSALS.items():
        try:
            refusal(meshes)
            found[name] = "taken"
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return found


all_refusals = Once(refusals, 4, timeout_s=30)


@pytest.mark.parametrize("name", REFUSALS)
def test_it_is_refused_by_name_on_all_ranks(name: str) -> None:
    _, error, message = REFUSALS[name]
    for found in all_refusals():
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(found[name])
        assert found[name].startswith(error.__name__)


def said_once(rank: int, world_size: int) -> list[str]:
    zerox.optimizer.terms._said.clear()  # these processes have trained before
    meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
    said = []
    for _ in range(2):
        net, _ = twins(False, meshes)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            FusedShardedAdam(net.named_parameters(), process_group=meshes.dp)
        said += [str(each.message) for each in caught if "replicated" in str(each.message)]
    return said


def test_that_plain_parameters_count_as_replicated_is_said_once() -> None:
    first, *others = run_ranks(said_once, 4)
    assert len(first) == 1
    assert "'scale' and 5 more plain parameters count as replicated over axis 'tp'" in first[0]
    assert others == [[], [], []]


def checked(rank: int, world_size: int, planted: str) -> tuple[float, float]:
    """How far the first norm, and some parameter after a step, are from those of the whole model."""
    from zerox.grads.partial_grads import PartialGrads
    from zerox.ranks.model_axes import ModelAxes

    before = ModelAxes.counts, PartialGrads.refresh
    if planted == "replicas are counted twice":
        ModelAxes.counts = lambda *_: True  # type: ignore[method-assign]
    elif planted == "nothing is summed":
        PartialGrads.refresh = lambda *_: None  # type: ignore[method-assign]
    try:
        meshes = Meshes(init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp")))
        net, twin = twins(True, meshes, scaled=False)
        optimizer = FusedShardedAdam(net.named_parameters(), process_group=meshes.dp)
        loss_of(net, batch(0).chunk(2)[meshes.dp.get_local_rank()]).backward()
        loss_of(twin, batch(0)).backward()
        expected = torch.nn.utils.clip_grad_norm_(twin.parameters(), 1.0)
        norm = optimizer.clip_grad_norm_(1.0)
    finally:
        ModelAxes.counts, PartialGrads.refresh = before  # type: ignore[method-assign]
    return float(norm), float(expected)


@pytest.mark.parametrize("planted", ["nothing", "replicas are counted twice", "nothing is summed"])
def test_a_planted_defect_shows_in_the_norm(planted: str) -> None:
    off = max(abs(norm / expected - 1) for norm, expected in run_ranks(checked, 4, planted))
    assert (off < 1e-6) if planted == "nothing" else (off > 1e-3)
