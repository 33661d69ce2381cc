"""save_weights(): files that are, byte for byte, those that safetensors writes of the whole model."""

from __future__ import annotations

import os
import warnings
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from huggingface_hub import split_torch_state_dict_into_shards
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from tests.checkpoint.odd_models import Odd, loss_of, made, state_of
from tests.mesh.expert_models import batch as expert_batch
from tests.mesh.expert_models import groups, own_part, twins
from tests.mesh.expert_models import loss_of as expert_loss_of
from tests.mesh.parallel_models import Net, cut
from tests.mesh.parallel_models import batch as net_batch
from tests.mesh.parallel_models import loss_of as net_loss_of
from tests.mesh.test_expert_checkpoints import places_of
from tests.mesh.test_two_levels import mesh_of
from tests.meshes import mesh_once
from tests.ranks import run_ranks
from tests.residency.rig import by_way
from tests.rows import tables
from tests.wrapper.own_cases import Recommender
from tests.wrapper.own_cases import trained as train_own
from tests.wrapper.twins import of_zerox
from zerox import CheckpointError, FusedShardedAdam, Sparsity, load_weights, save_weights
from zerox.checkpoint import weight_saving, weight_writer

SIZES = ("5GB", "30KB")


def as_safetensors_writes(state: dict[str, Tensor], size: str, folder: Path) -> dict[str, bytes]:
    """What transformers' save_pretrained() would put into a folder, by file."""
    plan = split_torch_state_dict_into_shards(state, filename_pattern="model{suffix}.safetensors", max_shard_size=size)
    folder.mkdir()
    for file, names in plan.filename_to_tensors.items():
        save_file({name: state[name] for name in names}, folder / file, metadata={"format": "pt"})
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def in_folder(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


def saves(rank: int, _: int, way: str, folder: Path, shape: Any, options: dict[str, Any]) -> tuple[Any, list[int]]:
    """The whole state, and how many bytes this rank wrote of each size's files."""
    written: list[int] = []
    write = os.pwrite

    def counted(descriptor: int, data: Any, start: int) -> int:
        count = write(descriptor, data, start)
        written[-1] += count
        return count

    with by_way(way, rank), mock.patch.object(weight_writer.os, "pwrite", counted):
        model, optimizer = made(**options, **({"process_group": mesh_of(*shape)} if shape else {}))
        for size in SIZES:
            written.append(0)
            save_weights(optimizer, folder / size, size)
        state = state_of(model, optimizer)
        loss_of(model).backward()  # goes on
        optimizer.step()
    return (state if rank == 0 else None), written


CASES: list[tuple[int, str, Any, dict[str, Any]]] = [
    (1, "memory", None, {}),
    (1, "memory", None, {"stage": 3}),
    (2, "memory", None, {"stage": 1}),
    (2, "memory", None, {"stage": 2, "bucket_cap_mb": 1.0}),
    (2, "memory", None, {"stage": 3}),
    (2, "messages", None, {"stage": 3}),
    (3, "memory", None, {"stage": 2, "bucket_cap_mb": 0.02}),
    (3, "memory", None, {"stage": 3, "bucket_cap_mb": 0.02}),
    (4, "two machines", None, {"stage": 3}),
    (4, "messages", None, {"stage": 1}),
    (4, "memory", (2, 2), {"stage": 2}),
    (4, "memory", (2, 2), {"stage": 3}),
    (4, "messages", (2, 2), {"stage": 3, "bucket_cap_mb": 0.02}),
]


@pytest.mark.parametrize(("world_size", "way", "shape", "options"), CASES, ids=str)
def test_files_are_those_of_safetensors_and_each_byte_is_written_once(
    tmp_path: Path, world_size: int, way: str, shape: Any, options: dict[str, Any]
) -> None:
    (state, _), *_ = found = run_ranks(saves, world_size, way, tmp_path, shape, options)
    for index, size in enumerate(SIZES):
        ours = in_folder(tmp_path / size)
        many = ours.pop("model.safetensors.index.json", None)
        assert ours == as_safetensors_writes(state, size, tmp_path / f"theirs {size}")
        assert (many is not None) == (len(ours) > 1) == (size == "30KB")
        assert sum(written[index] for _, written in found) == sum(map(len, ours.values()))
        if world_size > 1:
            assert all(written[index] > 0 for _, written in found), "ranks share the work"
    assert len(state) == 17
    assert sorted(each.name for each in tmp_path.iterdir()) == ["30KB", "5GB", "theirs 30KB", "theirs 5GB"]


def file_of(folder: Path) -> dict[str, Tensor]:
    """The only one of a folder."""
    [file] = folder.iterdir()
    return load_file(file)


def same(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> bool:
    """Names, shapes, dtypes and bits."""
    return ours.keys() == theirs.keys() and all(
        each.dtype == theirs[name].dtype and each.shape == theirs[name].shape and torch.equal(each, theirs[name])
        for name, each in ours.items()
    )


# ---- kinds of parameters and of optimizers


def saves_hidden(rank: int, _: int, folder: Path) -> dict[str, Tensor]:
    """While the gather after step() is on its way."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(90, 70), nn.Linear(70, 90))
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2)
    optimizer.overlap_gather(model)
    for _ in range(2):
        model(torch.ones(2, 90) * rank).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    save_weights(optimizer, folder)
    return {name: each.clone() for name, each in model.state_dict().items()}


def test_parameters_on_their_way_are_waited_for(tmp_path: Path) -> None:
    for state in run_ranks(saves_hidden, 2, tmp_path / "x"):
        assert same(file_of(tmp_path / "x"), state)


def saves_masters(rank: int, _: int, folder: Path, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[str]]:
    weight_saving._say_once_of_masters.cache_clear()
    torch.manual_seed(0)
    model = Odd().bfloat16()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, **options)
    loss_of(model).backward()
    optimizer.step()
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        for _ in range(2):
            save_weights(optimizer, folder)
    return state_of(model, optimizer), [str(each.message) for each in said]


@pytest.mark.parametrize("masters", ["remainder", "fp32", None])
@pytest.mark.parametrize("stage", [2, 3])
def test_files_have_the_16_bit_values_and_a_warning_says_so_once(tmp_path: Path, masters: Any, stage: int) -> None:
    options = {"master_weights": masters, "stage": stage}
    (state, told), (_, others) = run_ranks(saves_masters, 2, tmp_path / "x", options)
    assert same(file_of(tmp_path / "x"), state)
    assert state["narrow"].dtype is torch.bfloat16
    assert others == [], "rank 0 says it for all"
    assert len(told) == (masters is not None)
    assert all("in 16 bits: their masters, which hold more, are not in the files" in each for each in told)


def saves_masked(rank: int, _: int, folder: Path, stage: int) -> dict[str, Tensor]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(96, 80), nn.Linear(80, 96))
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage)
    Sparsity(optimizer, {"0.weight": 0.5}, schedule=None)
    model(torch.ones(2, 96)).sum().backward()
    optimizer.step()
    save_weights(optimizer, folder)
    return state_of(model, optimizer)


@pytest.mark.parametrize("stage", [2, 3])
def test_what_a_mask_leaves_out_is_0(tmp_path: Path, stage: int) -> None:
    state, *_ = run_ranks(saves_masked, 2, tmp_path / "x", stage)
    found = file_of(tmp_path / "x")
    assert same(found, state)
    assert int((found["0.weight"] == 0).sum()) >= found["0.weight"].numel() // 2


def saves_tables(rank: int, world_size: int, way: str, folder: Path, stage: int) -> dict[str, Tensor]:
    with by_way(way, rank):
        model = tables.Model()
        optimizer = tables.build(model, stage=stage)
        for step in range(2):
            tables.backward(model, rank, step)
            optimizer.step()
            optimizer.zero_grad()
        save_weights(optimizer, folder)
        return state_of(model, optimizer)


@pytest.mark.parametrize(("world_size", "way", "stage"), [(2, "memory", 1), (3, "memory", 3), (2, "messages", 3)])
def test_tables_are_whole(tmp_path: Path, world_size: int, way: str, stage: int) -> None:
    state, *_ = run_ranks(saves_tables, world_size, way, tmp_path / "x", stage)
    assert same(file_of(tmp_path / "x"), state)
    assert state["words.weight"].shape == (tables.ROWS, tables.WIDTH)


def saves_cut(rank: int, _: int, folder: Path, sizes: tuple[int, int], hidden: int, stage: int) -> Any:
    """Tensor parallel over one axis, data parallel over the other: whole tensors, as DTensors gather them."""
    mesh = mesh_once(sizes, ("dp", "tp"))
    torch.manual_seed(0)
    net = cut(Net(hidden=hidden), mesh["tp"], False)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="zerox: .* replicated over axis")
        optimizer = FusedShardedAdam(net.named_parameters(), lr=1e-2, process_group=mesh["dp"], stage=stage)
    (net_loss_of(net, net_batch(0)) * (mesh["dp"].get_local_rank() + 1)).backward()
    optimizer.step()
    save_weights(optimizer, folder)
    with optimizer.whole():
        return {
            name: (each.full_tensor() if hasattr(each, "full_tensor") else each).detach().clone()
            for name, each in net.state_dict(keep_vars=True).items()
        }


@pytest.mark.parametrize(
    ("sizes", "hidden", "stage"), [((2, 2), 32, 2), ((2, 2), 32, 3), ((1, 2), 7, 2), ((1, 4), 3, 1)], ids=str
)
def test_dtensors_are_whole(tmp_path: Path, sizes: tuple[int, int], hidden: int, stage: int) -> None:
    """Also where ranks have parts of unequal sizes, or none."""
    state, *others = run_ranks(saves_cut, sizes[0] * sizes[1], tmp_path / "x", sizes, hidden, stage)
    assert all(same(state, each) for each in others), "the twin is"
    assert same(file_of(tmp_path / "x"), state)


def saves_experts(rank: int, _: int, folder: Path) -> dict[str, Tensor]:
    places = places_of()
    model, _ = twins(places)
    optimizer = FusedShardedAdam(groups(model, places.edp), lr=1e-2)
    expert_loss_of(model, *map(own_part, expert_batch(0))).backward()
    optimizer.step()
    save_weights(optimizer, folder)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


def test_experts_of_all_ranks_are_in_one_file(tmp_path: Path) -> None:
    found = run_ranks(saves_experts, 4, tmp_path / "x")
    whole = {name: each for state in found for name, each in state.items()}
    assert len(whole) > len(found[0])
    assert same(file_of(tmp_path / "x"), whole)


def saves_stages(rank: int, _: int, folder: Path, tied: bool) -> dict[str, Tensor]:
    """Of a pipeline: each its layers, by names of the whole model."""
    mesh = mesh_once((2, 2), ("pp", "dp"))
    torch.manual_seed(0)
    place = mesh["pp"].get_local_rank()
    layers = {str(number): nn.Linear(60, 80, bias=False) for number in range(3)}
    model = nn.ModuleDict({name: layers[name] for name in (("0", "1") if place == 0 else ("0" if tied else "2", "2"))})
    optimizer = FusedShardedAdam(
        model.named_parameters(), lr=1e-2, process_group=mesh["dp"], norm_group=mesh["pp"], stage=2
    )
    save_weights(optimizer, folder)
    return {name: each.detach().clone() for name, each in model.state_dict().items()}


@pytest.mark.parametrize("tied", [False, True])
def test_stages_of_a_pipeline_write_one_model(tmp_path: Path, tied: bool) -> None:
    found = run_ranks(saves_stages, 4, tmp_path / "x", tied)
    assert same(file_of(tmp_path / "x"), found[0] | found[2])


# ---- and back


def loads(rank: int, _: int, way: str, folder: Path, options: dict[str, Any]) -> tuple[dict[str, Tensor], list[Any]]:
    with by_way(way, rank):
        model, optimizer = made(seed=1, **options)
        before = state_of(model, optimizer)
        keys = load_weights(optimizer, folder)
        assert not same(before, state_of(model, optimizer))
        return state_of(model, optimizer), [*keys]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize(
    ("saved_by", "loaded_by", "way"),
    [((2, 3), (3, 2), "memory"), ((3, 2), (2, 3), "messages"), ((1, 2), (4, 3), "memory")],
)
def test_load_weights_takes_them_back_at_any_number_of_ranks(
    tmp_path: Path, size: str, saved_by: tuple[int, int], loaded_by: tuple[int, int], way: str
) -> None:
    """``saved_by``, ``loaded_by``: ranks and stage."""
    (state, _), *_ = run_ranks(saves, saved_by[0], "memory", tmp_path, None, {"stage": saved_by[1]})
    for found, keys in run_ranks(loads, loaded_by[0], way, tmp_path / size, {"stage": loaded_by[1]}):
        assert same(found, state)
        assert keys == [[], []]


# ---- what is refused or told


def refused(rank: int, _: int, make: str, folder: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        globals()[make](rank, folder)
    return str(error.value)


def own_tables(rank: int, folder: Path) -> None:
    script = of_zerox(rank, 2)
    model = Recommender(script)
    optimizer = script.optimizer(model.groups(), lr=0.01)
    train_own(model, optimizer)
    save_weights(optimizer, folder)


def experts_of_one_name(rank: int, folder: Path) -> None:
    model = nn.ModuleDict({"expert": nn.Linear(4, 4)})  # which has another meaning on ranks 0 and 1
    group = {"params": list(model.named_parameters()), "process_group": places_of().edp}
    save_weights(FusedShardedAdam([group]), folder)


def two_optimizers(rank: int, folder: Path) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    first, _second = (FusedShardedAdam(list(each.named_parameters(prefix=n))) for n, each in model.named_children())
    save_weights(first, folder)


def other_sizes(rank: int, folder: Path) -> None:
    model = nn.Linear(4, 4)
    save_weights(FusedShardedAdam(model.named_parameters()), folder, "5GB" if rank else "4GB")


def complex_buffer(rank: int, folder: Path) -> None:
    model = nn.Linear(4, 4)
    model.register_buffer("phases", torch.ones(2, dtype=torch.complex128))
    save_weights(FusedShardedAdam(model.named_parameters()), folder)


@pytest.mark.parametrize(
    ("make", "world_size", "says"),
    [
        ("own_tables", 2, "parameters that no DistributedDataParallel has are each rank's own"),
        ("experts_of_one_name", 4, "give each the name that it has in the whole model"),
        ("two_optimizers", 2, "1.bias, 1.weight of the model are another optimizer's"),
        ("other_sizes", 2, "ranks passed other values of max_shard_size, 4000000000 and 5000000000 bytes"),
        ("complex_buffer", 2, "'phases' is torch.complex128, which safetensors files do not have"),
    ],
)
def test_what_files_can_t_have_is_refused_on_all_ranks(tmp_path: Path, make: str, world_size: int, says: str) -> None:
    for said in run_ranks(refused, world_size, make, tmp_path / "x"):
        assert said.startswith(f"zerox: weights could not be saved to {tmp_path / 'x'}")
        assert says in said
        assert "\n" not in said
    assert list(tmp_path.iterdir()) == []


class Extra(nn.Linear):
    def get_extra_state(self) -> Any:
        return {"scale": 2.0}

    def set_extra_state(self, state: Any) -> None:
        pass


def test_extra_state_is_told_and_left_out(tmp_path: Path) -> None:
    model = nn.Sequential(Extra(4, 4))
    with pytest.warns(UserWarning, match=r"tensors only, and so not 0[.]_extra_state of the model"):
        save_weights(FusedShardedAdam(model.named_parameters()), tmp_path / "x")
    assert file_of(tmp_path / "x").keys() == {"0.weight", "0.bias"}


MODEL = nn.Linear(3, 2)


@pytest.mark.parametrize(
    ("given", "kind", "says"),
    [
        (lambda o, p: (MODEL, p), TypeError, "optimizer is of the class torch.nn.modules.linear.Linear: pass the opti"),
        (lambda o, p: (p, o), TypeError, r"got \(path, optimizer\): swap the two"),
        (lambda o, p: (None, p), TypeError, "optimizer is None, which is no optimizer of zerox"),
        (
            lambda o, p: (torch.optim.SGD(MODEL.parameters(), 0.1), p),
            TypeError,
            "which is no optimizer of zerox: build",
        ),
        (lambda o, p: (o, 3), TypeError, "path is of the class builtins.int"),
        (lambda o, p: (o, p, "5"), ValueError, "'5' is no size"),
        (lambda o, p: (o, p, 1.5), TypeError, "1.5 is no size"),
        (lambda o, p: (o, p, 0), ValueError, "a file of 0 bytes"),
    ],
)
def test_other_arguments_are_one_line(tmp_path: Path, given: Any, kind: Any, says: str) -> None:
    with pytest.raises(kind, match=says):
        save_weights(*given(FusedShardedAdam(MODEL.named_parameters()), tmp_path / "x"))
    assert list(tmp_path.iterdir()) == []


def test_names_are_those_of_the_model_without_wrappers(tmp_path: Path) -> None:
    model = nn.ModuleDict({"part": torch.compile(nn.Linear(4, 4), backend="eager")})
    save_weights(FusedShardedAdam(model.parameters()), tmp_path / "x")
    assert file_of(tmp_path / "x").keys() == {"part.weight", "part.bias"}
