"""torch's arguments, attributes and methods: taken, or refused by name."""

from __future__ import annotations

import copy
import inspect
import io
import pickle
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel as OfTorch

import zerox
from tests.ranks import run_ranks
from tests.wrapper.twins import of_zerox, values_of
from zerox import DistributedDataParallel, FusedShardedAdam
from zerox.wrapper.refusals import REFUSED, WITHOUT_EFFECT

# Of torch's reducer and logger, and of what is refused: nobody asks for these.
INSIDE = {"reducer", "logger", "use_side_stream_for_tensor_copies", "bucket_bytes_cap_default"}
OF_TORCH = inspect.signature(OfTorch.__init__).parameters  # older ones have fewer


def test_it_takes_all_arguments_that_torch_s_does_in_the_same_order() -> None:
    theirs, ours = (list(inspect.signature(cls.__init__).parameters) for cls in (OfTorch, DistributedDataParallel))
    assert set(theirs) <= set(ours)
    assert [name for name in ours if name in theirs] == theirs


def attributes(rank: int, world_size: int) -> dict[str, tuple[Any, Any]]:
    options = {"find_unused_parameters": True, "bucket_cap_mb": 3, "dim": 1, "gradient_as_bucket_view": True}
    if "bucket_cap_mb_list" in OF_TORCH:
        options["bucket_cap_mb_list"] = [1, 5, 2]
    made = []
    for cls in (OfTorch, DistributedDataParallel):
        net = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))
        net._ddp_params_and_buffers_to_ignore = ["1.bias"]
        made.append(cls(net, **options))
    theirs, ours = made
    names = [name for name in vars(theirs) if not name.startswith("_") and name not in INSIDE]
    names += ["is_multi_device_module", "broadcast_buffers", "join_device", "training"]
    found = {}
    for name in sorted(set(names) - {"module", "modules_buffers", "named_module_buffers", "process_group"}):
        found[name] = getattr(theirs, name), getattr(ours, name, "missing")
    found["buffers"] = sorted(theirs.named_module_buffers), sorted(ours.named_module_buffers)
    found["number of buffers"] = len(theirs.modules_buffers), len(ours.modules_buffers)
    found["group"] = theirs.process_group is dist.group.WORLD, ours.process_group is dist.group.WORLD
    found["join group"] = theirs.join_process_group is dist.group.WORLD, ours.join_process_group is dist.group.WORLD
    found["state"] = list(theirs.state_dict()), list(ours.state_dict())
    found["isinstance"] = True, isinstance(ours, OfTorch)
    found["device ids"] = theirs.device_ids, ours.device_ids
    return found


def test_its_attributes_are_torch_s() -> None:
    for found in run_ranks(attributes, 2):
        differ = {name: pair for name, pair in found.items() if pair[0] != pair[1]}
        assert not differ


def same_errors(rank: int, world_size: int) -> list[tuple[str, str]]:
    frozen = nn.Linear(2, 2).requires_grad_(False)
    asked: list[tuple[nn.Module, dict[str, Any]]] = [
        (frozen, {}),
        (nn.LazyLinear(2), {}),
        (nn.Linear(2, 2), {"device_ids": [0, 1]}),
        (nn.Linear(2, 2), {"device_ids": [0]}),
        (nn.Linear(2, 2), {"output_device": 1}),
        (nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2)), {}),
        (nn.Linear(2, 2), {"process_group": dist.group.WORLD, "device_mesh": "a mesh"}),
    ]
    found = []
    for module, options in asked:
        kinds = []
        for cls in (OfTorch, DistributedDataParallel):
            try:
                cls(module, **options)
                kinds.append("taken")
            except Exception as error:
                kinds.append(type(error).__name__)
        found.append((kinds[0], kinds[1]))
    return found


def test_it_raises_what_torch_s_raises() -> None:
    for found in run_ranks(same_errors, 2):
        assert all(theirs == ours != "taken" for theirs, ours in found), found


@pytest.mark.parametrize("name", ["mixed_precision", "delay_all_reduce_named_params", "param_to_hook_all_reduce"])
def test_what_would_change_numbers_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match=f"does not take {name}: "):
        DistributedDataParallel(nn.Linear(2, 2), **{name: object()})


def test_names_of_torch_s_inside_are_refused_or_have_nothing_to_do() -> None:
    model = DistributedDataParallel(nn.Linear(2, 2))
    for name in REFUSED:
        assert hasattr(OfTorch, name)
        with pytest.raises(NotImplementedError, match=name):
            getattr(model, name)()
    for name in WITHOUT_EFFECT:
        assert hasattr(OfTorch, name)
        assert getattr(model, name)() is None
    assert model.reducer._rebuild_buckets() is False
    with pytest.raises(AttributeError, match=r"no reducer of torch's, and so no reducer\.autograd_hook"):
        _ = model.reducer.autograd_hook
    with pytest.warns(FutureWarning, match="broadcast_buffers is ignored"):
        DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=True, forward_sync_buffers=False)
    with pytest.warns(FutureWarning, match="check_reduction"):
        DistributedDataParallel(nn.Linear(2, 2), check_reduction=True)
    with pytest.raises(TypeError, match=r"wraps a torch\.nn\.Module, got int"):
        DistributedDataParallel(3)


@pytest.mark.skipif("forward_sync_buffers" not in OF_TORCH, reason="this torch has no forward_sync_buffers")
def test_the_older_name_of_what_forwards_hand_out_warns_as_torch_s_does() -> None:
    with pytest.warns(FutureWarning, match="torch has renamed broadcast_buffers: pass forward_sync_buffers"):
        DistributedDataParallel(nn.Linear(2, 2), broadcast_buffers=False)


def static_graph_afterwards(rank: int, world_size: int) -> list[tuple[str, str]]:
    found = []
    for begins in (False, True):
        said = []
        for cls in (OfTorch, DistributedDataParallel):
            model = cls(nn.Linear(2, 2))
            if begins:
                model(torch.ones(1, 2)).sum().backward()
            try:
                model._set_static_graph()
                said.append("taken")
            except RuntimeError as error:
                said.append(str(error).partition(" before")[0])
        found.append((said[0], said[1]))
    return found


def test_a_graph_is_declared_static_before_training_begins_as_with_torch_s() -> None:
    for before, afterwards in run_ranks(static_graph_afterwards, 2):
        assert before == ("taken", "taken")
        assert "set_static_graph() should be called" in afterwards[0]
        assert "set_static_graph() should be called" in afterwards[1]


def copied_on_rank_0(rank: int, world_size: int) -> list[bool]:
    """Copies send nothing: rank 0 makes them alone."""
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net(), find_unused_parameters=True)
    script.train(model, script.optimizer(model.parameters()))
    found = []
    if rank == 0:
        stream = io.BytesIO()
        torch.save(model, stream)
        stream.seek(0)
        made = [copy.deepcopy(model), pickle.loads(pickle.dumps(model)), torch.load(stream, weights_only=False)]
        for each in made:
            found += [isinstance(each, DistributedDataParallel), each.find_unused_parameters]
            found += [all(map(torch.equal, values_of(each), values_of(model)))]
            found += [each.process_group is model.process_group]
    half = dist.new_group([0])
    if rank == 0:
        other = DistributedDataParallel(script.net(), process_group=half)
        with pytest.raises(RuntimeError, match="only with the default process group"):
            copy.deepcopy(other)
    return [*found, True]


def test_copies_send_nothing() -> None:
    assert all(map(all, run_ranks(copied_on_rank_0, 2)))


def names(rank: int, world_size: int, folder: str) -> list[Any]:
    script = of_zerox(rank, 2)
    model = DistributedDataParallel(script.net())
    found = [zerox.estimate(model.named_parameters(), 2) == zerox.estimate(model.module.named_parameters(), 2)]
    optimizer = FusedShardedAdam(model.named_parameters())
    found.append([member.name for member in optimizer.inside.members])
    script.train(model, optimizer)
    zerox.save(folder, nn.Sequential(model), optimizer)  # inside a larger model
    same = []
    for later in (script.net(), DistributedDataParallel(script.net())):
        other = FusedShardedAdam(later.named_parameters())
        zerox.load(folder, nn.Sequential(later), other)
        same += [torch.equal(a, b) for a, b in zip(model.parameters(), later.parameters(), strict=True)]
    found.append(all(same))
    outer = nn.ModuleDict({"backbone": model, "head": nn.Linear(1, 1)})
    named = [member.name for member in FusedShardedAdam(outer["backbone"].named_parameters("backbone")).inside.members]
    found.append(named)
    unnamed = FusedShardedAdam(model.parameters())
    found.append(unnamed.inside.members[0].quoted)
    return found


def test_names_have_no_prefix_in_files_and_errors(tmp_path: Any) -> None:
    bare = ["2.bias", "2.weight", "0.bias", "0.weight"]
    for same, inside, loaded, nested, quoted in run_ranks(names, 2, str(tmp_path / "saved")):
        assert "module." not in quoted
        assert "in the model" in quoted
        assert same
        assert sorted(inside) == sorted(bare)
        assert loaded
        assert sorted(nested) == sorted(f"backbone.{name}" for name in bare)
