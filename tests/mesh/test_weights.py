"""Files of weights into DTensors, pipeline stages and experts: each rank its part, by the whole model's names.

All cases are run by the same four processes.
"""

from __future__ import annotations

import contextlib
import tempfile
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.checkpoint.test_load_weights import counting, masters_follow
from tests.checkpoint.weight_folders import write_weights
from tests.kernels.shards import same_bits
from tests.mesh import expert_models
from tests.mesh.parallel_models import Net, batch, cut, local, loss_of, whole
from tests.mesh.test_stages import groups, layers, stage_of
from tests.meshes import mesh_once
from tests.ranks import Once
from zerox import CheckpointError, FusedShardedAdam, load_weights
from zerox._C import SyncPoint
from zerox.checkpoint.weight_parts import model_of, weights_of
from zerox.checkpoint.weight_reader import WeightReader
from zerox.ranks.dtensors import part_of

LAYOUTS: dict[str, dict[str, Any]] = {  # (data parallel, tensor parallel) ranks
    "2x2": {"sizes": (2, 2)},
    "1x4": {"sizes": (1, 4), "hidden": 7},
    "uneven, sharded": {"sizes": (2, 2), "hidden": 7, "stage": 3},
    "empty on some": {"sizes": (1, 4), "hidden": 3},
    "sharded": {"sizes": (2, 2), "stage": 3},
    "masters": {"sizes": (2, 2), "dtype": torch.bfloat16},
    "frozen": {"sizes": (2, 2), "freezes": True},
    "frozen, sharded": {"sizes": (2, 2), "freezes": True, "stage": 3},
    "frozen, sharded, together": {"sizes": (2, 2), "hidden": 7, "freezes": True, "stage": 3, "cap_mb": 1},
    "no sequence": {"sizes": (2, 2), "sequence": False, "stage": 1},
}


def cut_net(case: dict[str, Any], seed: int) -> Net:
    torch.manual_seed(seed)
    net = Net(hidden=case.get("hidden", 32), bias="hidden" not in case, scaled=False).to(
        case.get("dtype", torch.float32)
    )
    cut(net, mesh_once(case["sizes"], ("dp", "tp"))["tp"], case.get("sequence", "hidden" not in case))
    if case.get("freezes"):
        net.blocks[0].requires_grad_(False)
        net.norm.requires_grad_(False)
    return net


def optimizer_of(net: Net, case: dict[str, Any]) -> FusedShardedAdam:
    group = mesh_once(case["sizes"], ("dp", "tp"))["dp"]
    options = {"lr": 1e-2, "bucket_cap_mb": case.get("cap_mb", 0.001), "stage": case.get("stage", 2)}
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="zerox: .* replicated over axis")
        return FusedShardedAdam(net.named_parameters(), process_group=group, **options)


def built(case: dict[str, Any], seed: int) -> tuple[Net, FusedShardedAdam]:
    net = cut_net(case, seed)
    return net, optimizer_of(net, case)


def step(net: Net, optimizer: FusedShardedAdam, case: dict[str, Any], number: int) -> None:
    dp = mesh_once(case["sizes"], ("dp", "tp"))["dp"]
    loss_of(net, batch(number).chunk(dp.size())[dp.get_local_rank()]).backward()
    optimizer.step()
    optimizer.zero_grad()


def contents(net: nn.Module, optimizer: FusedShardedAdam | None = None) -> dict[str, Tensor]:
    with contextlib.nullcontext() if optimizer is None else optimizer.whole():
        return {name: whole(value).detach().clone() for name, value in net.state_dict().items()}


def source_of(case: dict[str, Any]) -> dict[str, Tensor]:
    torch.manual_seed(5)
    return contents(Net(hidden=case.get("hidden", 32), bias="hidden" not in case, scaled=False))


def told_parts(optimizer: FusedShardedAdam) -> list[Any]:
    """Each weight with its parts as rectangles."""
    optimizer.inside.sync(SyncPoint.SAVE)
    weights = weights_of(optimizer, model_of(optimizer))
    return [(w.names, w.shape, [(p.offsets, p.sizes, p.values.clone()) for p in w.parts]) for w in weights]


def run_layout(rank: int, case: dict[str, Any], path: Path) -> Any:
    if rank == 0:
        write_weights("several", source_of(case), path)
    dist.barrier()
    net, optimizer = built(case, 1)
    step(net, optimizer, case, 0)
    seen: list[WeightReader] = []
    with counting(seen):
        load_weights(optimizer, path)
    loaded, follow = contents(net, optimizer), masters_follow(optimizer)
    parts = told_parts(optimizer)
    again, its = built(case, 2)
    load_weights(its, path)
    step(again, its, case, 0)
    twin = cut_net(case, 3)
    source = source_of(case)
    with torch.no_grad():
        for name, param in twin.named_parameters():
            local(param).copy_(part_of(param, source[name]))
    fresh = optimizer_of(twin, case)
    step(twin, fresh, case, 0)
    goes_on = all(map(same_bits, contents(again, its).values(), contents(twin, fresh).values()))
    return loaded, follow, seen[0].nbytes, parts, goes_on


def run_stages(rank: int, path: Path) -> dict[str, Any]:
    mesh = mesh_once((2, 2), ("pp", "dp"))
    place = mesh["pp"].get_local_rank()
    options: dict[str, Any] = {"process_group": mesh["dp"], "norm_group": mesh["pp"]}
    with torch.no_grad():
        source = nn.ModuleDict({str(number): layer for number, layer in enumerate(layers())})
        for param in source.parameters():
            param.add_(1)
    if rank == 0:
        write_weights("one in a folder", source.state_dict(), path)
    dist.barrier()
    own = stage_of([place, place + 2])
    optimizer = FusedShardedAdam(groups(own), **options)
    keys = load_weights(optimizer, path)
    theirs = source.state_dict()
    same = {name: torch.equal(value, theirs[name]) for name, value in own.state_dict().items()}
    one = stage_of([place])
    with pytest.raises(CheckpointError) as error:
        load_weights(FusedShardedAdam(groups(one), **options), path)
    return {"keys": tuple(keys), "same": all(same.values()), "count": len(same), "said": str(error.value)}


def run_experts(rank: int, path: Path) -> dict[str, Any]:
    places = expert_models.Places(mesh_once((2, 2), ("edp", "ep")))
    source = expert_models.Mixture()
    with torch.no_grad():
        for param in source.parameters():
            param.add_(1)
    theirs = source.state_dict()
    if rank == 0:
        write_weights("several", theirs, path)
    dist.barrier()
    model, _ = expert_models.twins(places)
    optimizer = FusedShardedAdam(expert_models.groups(model, places.edp), lr=1e-2)
    keys = load_weights(optimizer, path)
    same = {name: torch.equal(value, theirs[name]) for name, value in model.state_dict().items()}
    return {"keys": tuple(keys), "same": all(same.values()), "count": len(same)}


def run(rank: int, _: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as own:
        names: list[Any] = [own]
        dist.broadcast_object_list(names)
        folder = Path(names[0])
        found: dict[str, Any] = {
            name: run_layout(rank, case, folder / str(place)) for place, (name, case) in enumerate(LAYOUTS.items())
        }
        found["stages"] = run_stages(rank, folder / "stages")
        found["experts"] = run_experts(rank, folder / "experts")
        dist.barrier()
        return found


results = Once(run, 4)


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_cut_has_its_part_of_the_files(name: str) -> None:
    case = LAYOUTS[name]
    dtype = case.get("dtype", torch.float32)
    expected = {each: value.to(dtype) for each, value in source_of(case).items()}
    for found in results():
        loaded, follow, _, _, goes_on = found[name]
        assert loaded.keys() == expected.keys()
        for each, value in expected.items():
            assert same_bits(loaded[each], value), each
        assert follow
        assert goes_on, "as a model that had them"


@pytest.mark.parametrize("name", LAYOUTS)
def test_each_element_is_one_ranks_and_is_read_once(name: str) -> None:
    of_ranks = [found[name] for found in results()]
    for place, (names, shape, _) in enumerate(of_ranks[0][3]):
        count = torch.zeros(shape, dtype=torch.int32)
        for _, _, _, parts, _ in of_ranks:
            assert parts[place][:2] == (names, shape)
            for offsets, sizes, values in parts[place][2]:
                where = tuple(slice(at, at + n) for at, n in zip(offsets, sizes, strict=True))
                assert count[where].shape == values.shape
                count[where] += 1
        assert bool((count == 1).all()), names
    nbytes = sum(value.nbytes for value in source_of(LAYOUTS[name]).values())
    assert sum(found[2] for found in of_ranks) == nbytes


def test_pipeline_stages_have_theirs_by_the_whole_models_names() -> None:
    for found in results():
        told = found["stages"]
        assert told["keys"] == ([], [])
        assert told["same"]
        assert told["count"] == 2 * 3
        assert 'Unexpected key(s) in state_dict: "2.linear' in told["said"]
        assert told["said"] == results()[0]["stages"]["said"]


def test_experts_have_theirs() -> None:
    for found in results():
        assert found["experts"]["keys"] == ([], [])
        assert found["experts"]["same"]
        assert found["experts"]["count"] > 4
