"""load_weights() called as strangers do: at odd moments, for wrapped models, and with what is not asked for."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import zerox
from tests.checkpoint.test_damaged_weights import Net, built, everything, source, step
from tests.checkpoint.weight_folders import write_safetensors, write_weights
from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, load_weights

SIZE = 2


def expected() -> dict[str, Tensor]:
    return {**source(), "head.weight": source()["b.weight"]}


def has_loaded(model: nn.Module) -> bool:
    ours, theirs = model.state_dict(), expected()
    return all(same_bits(value.detach().clone(), theirs[name.removeprefix("module.")]) for name, value in ours.items())


# ---- moments: each returns whether all is as it should be


def inside_whole(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    with optimizer.whole():
        load_weights(optimizer, path)
        inside = has_loaded(model)
    return inside and has_loaded(model)


def written_inside_whole(rank: int, path: str, stage: int) -> bool:
    """What is written before counts no more; what is written after it stays."""
    model, optimizer = built(stage)
    with optimizer.whole(), torch.no_grad():
        model.a.weight.fill_(3)
        load_weights(optimizer, path)
        is_loaded = has_loaded(model)
        model.a.bias.fill_(4)
    return is_loaded and bool((model.a.bias == 4).all()) and same_bits(model.a.weight.detach(), source()["a.weight"])


def inside_no_sync(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    before = everything(model, optimizer)
    with optimizer.no_sync(), pytest.raises(CheckpointError, match="no_sync"):
        load_weights(optimizer, path)
    same = all(map(same_bits, everything(model, optimizer), before))
    load_weights(optimizer, path)
    return same and has_loaded(model)


def hidden_gather(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.overlap_gather(model)
    step(model, optimizer, rank, 0)
    load_weights(optimizer, path)
    return has_loaded(model)


def between_backward_and_step(rank: int, path: str, stage: int) -> bool:
    """The gradient is that of the old weights, and the step goes on from the new ones."""
    model, optimizer = built(stage)
    x = torch.randn(8, 80, generator=torch.Generator().manual_seed(rank))
    model(x).backward()
    load_weights(optimizer, path)
    is_loaded = has_loaded(model)
    optimizer.step()
    with torch.no_grad():
        is_new = all(not same_bits(p.detach(), expected()[name]) for name, p in model.named_parameters())
    return is_loaded and is_new


def twice(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    load_weights(optimizer, path)
    load_weights(optimizer, path)
    return has_loaded(model)


def moved(rank: int, path: str, stage: int) -> bool:
    """By .data =, and by swapping two memories."""
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    model.a.bias.data = torch.zeros(90)
    model.a.weight.data = model.a.weight.detach().clone()
    load_weights(optimizer, path)
    is_loaded = has_loaded(model)
    step(model, optimizer, rank, 1)
    return is_loaded and not has_loaded(model)


def shared(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    model.a.weight.share_memory_()
    seen = model.a.weight.detach()
    load_weights(optimizer, path)
    return has_loaded(model) and model.a.weight.is_shared() and same_bits(seen, source()["a.weight"])


def wrapped(rank: int, path: str, stage: int) -> bool:
    model = Net(1)
    ddp = zerox.DistributedDataParallel(model)
    optimizer = FusedShardedAdam(ddp.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.02)
    load_weights(optimizer, path)
    return has_loaded(ddp) and has_loaded(model)


def compiled(rank: int, path: str, stage: int) -> bool:
    model = Net(1)
    found = torch.compile(model, backend="eager")
    optimizer = FusedShardedAdam(found.parameters(), lr=1e-2, stage=stage)  # type: ignore[attr-defined]
    load_weights(optimizer, path)
    return has_loaded(model)


def half(rank: int, path: str, stage: int) -> bool:
    """model.half() after the optimizer was built is refused, and bfloat16 files go into what it was."""
    model, optimizer = built(stage)
    model.a.half()
    with pytest.raises(CheckpointError, match=r"was .*float32.* when the optimizer was built"):
        load_weights(optimizer, path)
    return True


def masked(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    sparsity = zerox.Sparsity(optimizer, {"a.weight": 0.5, "b.weight": 0.25})
    masks = {name: mask.clone() for name, mask in sparsity.masks().items()}
    load_weights(optimizer, path)
    ours = {name: value.detach().clone() for name, value in model.state_dict().items()}
    theirs = expected()
    for name in ("a.weight", "b.weight"):
        theirs[name] = theirs[name] * masks[name]
    theirs["head.weight"] = theirs["b.weight"]
    return all(bool((ours[name] == theirs[name]).all()) for name in theirs)


def unsharded(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    optimizer.unshard()
    if stage == 3:
        with pytest.raises(CheckpointError, match=r"unshard\(\) was called"):
            load_weights(optimizer, path)
        return True
    load_weights(optimizer, path)
    return has_loaded(model)


def frozen_later(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    model.a.requires_grad_(False)
    load_weights(optimizer, path)
    is_loaded = has_loaded(model)
    kept = source()["a.weight"]
    optimizer.zero_grad()
    step(model, optimizer, rank, 1)
    return is_loaded and same_bits(model.a.weight.detach(), kept)


def frozen_and_thawed(rank: int, path: str, stage: int) -> bool:
    model = Net(1)
    model.a.requires_grad_(False)
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.02)
    load_weights(optimizer, path)
    is_loaded = has_loaded(model)
    model.a.requires_grad_(True)
    load_weights(optimizer, path)
    is_loaded &= has_loaded(model)
    step(model, optimizer, rank, 0)
    return is_loaded and not has_loaded(model)


def apart(rank: int, path: str, stage: int) -> bool:
    """Two optimizers of one model: each loads its own."""
    model = Net(1)
    first = FusedShardedAdam(model.a.named_parameters(), lr=1e-2, stage=stage)
    rest = [*model.b.parameters(), *model.norm.parameters()]
    second = FusedShardedAdam(rest, lr=1e-2, stage=stage)
    assert tuple(load_weights(first, path)) == ([], [])
    is_half = same_bits(model.a.weight.detach().clone(), source()["a.weight"]) and not has_loaded(model)
    load_weights(second, path)
    return is_half and has_loaded(model)


def other_arguments(rank: int, path: str, stage: int) -> bool:
    model, optimizer = built(stage)
    before = everything(model, optimizer)
    for arguments in ({"strict": rank == 0}, {"rename": {"a.bias": None} if rank else None}):
        with pytest.raises(CheckpointError, match=r"different arguments|on rank 1: Error"):
            load_weights(optimizer, path, **arguments)
    with pytest.raises(CheckpointError, match="different paths"):
        load_weights(optimizer, f"{path}/model.safetensors.index.json" if rank else path)
    return all(map(same_bits, everything(model, optimizer), before))


def whole_nowhere(rank: int, path: str, stage: int) -> bool:
    """In stage 3 no bucket is fetched for it."""
    model, optimizer = built(stage)
    step(model, optimizer, rank, 0)
    if stage == 3:
        optimizer.inside.gather.residents.set_hostile(True)
        optimizer.inside.gather.residents.release_all()
    optimizer.inside.take_most_resident_bytes()
    load_weights(optimizer, path)
    most = optimizer.inside.take_most_resident_bytes()
    return (most == 0 or stage < 3) and has_loaded(model)


MOMENTS: dict[str, Callable[[int, str, int], bool]] = {
    each.__name__: each
    for each in (
        inside_whole,
        written_inside_whole,
        inside_no_sync,
        hidden_gather,
        between_backward_and_step,
        twice,
        moved,
        shared,
        wrapped,
        compiled,
        half,
        masked,
        unsharded,
        frozen_later,
        frozen_and_thawed,
        apart,
        other_arguments,
        whole_nowhere,
    )
}


def run_moment(rank: int, _: int, name: str, path: str, stage: int) -> bool:
    found = MOMENTS[name](rank, path, stage)
    dist.barrier()
    return found


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("name", MOMENTS)
def test_at_any_moment(tmp_path: Path, name: str, stage: int) -> None:
    path = write_weights("several", source(), tmp_path / "x")
    assert run_ranks(run_moment, SIZE, name, str(path), stage, timeout_s=20) == [True] * SIZE


# ---- alone


def test_what_is_not_asked_for_is_a_line(tmp_path: Path) -> None:
    model, optimizer = built(2)
    file = write_weights("safetensors", source(), tmp_path / "x")
    for arguments, text in (
        ((file, optimizer), r"takes \(optimizer, path\), and got \(path, optimizer\): swap the two"),
        ((model, file), "optimizer is of the class .*Net: pass the optimizer that trains this model"),
        ((torch.optim.AdamW(model.parameters()), file), "which is no optimizer of zerox: build a FusedShardedAdam"),
        ((optimizer, 3), "path is of the class builtins.int"),
        ((optimizer, None), "path is None"),
    ):
        with pytest.raises(TypeError, match=text):
            load_weights(*arguments)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"rename is of the class builtins[.]str: pass a function or a dict"):
        load_weights(optimizer, file, rename="a")  # type: ignore[arg-type]


def test_expanded_buffers_and_meta_are_refused(tmp_path: Path) -> None:
    write_safetensors({"weight": torch.ones(3, 3), "bias": torch.ones(3), "seen": torch.ones(4, 2)}, tmp_path / "x")
    model: Any = nn.Linear(3, 3)
    model.register_buffer("seen", torch.zeros(1, 2).expand(4, 2))
    optimizer = FusedShardedAdam(model.parameters())
    before = model.weight.detach().clone()
    with pytest.raises(CheckpointError, match=r"'seen' of the model is expanded: .*contiguous"):
        load_weights(optimizer, tmp_path / "x")
    model.seen = torch.zeros(4, 2, device="meta")
    with pytest.raises(CheckpointError, match="'seen' of the model is on the meta device"):
        load_weights(optimizer, tmp_path / "x")
    assert torch.equal(model.weight, before)
    model.seen = torch.zeros(2, 4).t()
    load_weights(optimizer, tmp_path / "x")
    assert bool((model.seen == 1).all())


class Counting(Net):
    """Its state_dict() has something that is no tensor."""

    def __init__(self, seed: int) -> None:
        super().__init__(seed)
        self.calls = seed

    def get_extra_state(self) -> dict[str, int]:
        return {"calls": self.calls}

    def set_extra_state(self, state: dict[str, int]) -> None:
        self.calls = state["calls"]


def load_extra_state(rank: int, _: int, path: str, kind: str) -> tuple[bool, Any, list[str]]:
    model = Net(1) if kind == "no such module" else Counting(1)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, bucket_cap_mb=0.02)
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        keys = load_weights(optimizer, path)
    loaded = all(same_bits(value.detach().clone(), expected()[name]) for name, value in model.named_parameters())
    assert getattr(model, "calls", 1) == 1
    return loaded, tuple(keys), [str(each.message) for each in said if "extra_state" in str(each.message)]


@pytest.mark.parametrize("kind", ["an object", "a tensor", "absent", "no such module"])
def test_extra_state_is_told_of_and_left_alone(tmp_path: Path, kind: str) -> None:
    tensors: dict[str, Any] = {**source(), "_extra_state": {"calls": 7}, "b._extra_state": 3}
    if kind == "a tensor":
        tensors = {**source(), "_extra_state": torch.ones(3, dtype=torch.uint8)}
    elif kind == "absent":
        tensors = {**source()}
    torch.save(tensors, tmp_path / "x.pt")
    names = {"a tensor": "_extra_state,", "absent": ""}.get(kind, "_extra_state, b._extra_state,")
    for rank, (loaded, keys, said) in enumerate(run_ranks(load_extra_state, SIZE, str(tmp_path / "x.pt"), kind)):
        assert loaded
        assert keys == ([], [])
        assert len(said) == (kind != "absent" and rank == 0)
        assert all(f"has not loaded {names} which is no weight: give it to set_extra_state()" in each for each in said)


def test_a_state_dict_of_a_wrapper_is_renamed(tmp_path: Path) -> None:
    torch.save({f"module.{name}": value for name, value in source().items()}, tmp_path / "x.pt")
    model, optimizer = built(2)
    load_weights(optimizer, tmp_path / "x.pt", rename=lambda name: name.removeprefix("module."))
    assert has_loaded(model)


def test_training_goes_on_after_a_part_was_loaded(tmp_path: Path) -> None:
    tensors = source()
    del tensors["a.bias"]
    torch.save(tensors, tmp_path / "x.pt")
    model, optimizer = built(2)
    assert load_weights(optimizer, tmp_path / "x.pt", strict=False) == (["a.bias"], [])
    step(model, optimizer, 0, 0)


@pytest.mark.parametrize("option", ["no checksums", "mmap"])
def test_options_of_torch_change_nothing(tmp_path: Path, option: str) -> None:
    from torch.utils.serialization import config

    with config.patch("save.compute_crc32", False):
        torch.save(source(), tmp_path / "x.pt")
    model, optimizer = built(2)
    with config.patch("load.mmap", option == "mmap"):
        load_weights(optimizer, tmp_path / "x.pt")
    assert has_loaded(model)


def test_files_are_read_once_by_the_systems_count(tmp_path: Path) -> None:
    model = nn.Linear(2000, 2000)
    optimizer = FusedShardedAdam(model.parameters())
    write_safetensors({"weight": torch.randn(2000, 2000), "bias": torch.randn(2000)}, tmp_path / "model.safetensors")
    load_weights(optimizer, tmp_path)  # what the first call imports is read too

    def count() -> int:
        lines = Path("/proc/self/io").read_text().splitlines()
        return int(next(line for line in lines if line.startswith("rchar")).partition(": ")[2])

    before = count()
    load_weights(optimizer, tmp_path)
    nbytes = (tmp_path / "model.safetensors").stat().st_size
    assert nbytes * 0.99 < count() - before <= 1.01 * nbytes
