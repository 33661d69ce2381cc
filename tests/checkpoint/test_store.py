"""save() and load(): all or nothing, at any number of ranks, and never the running optimizer in pieces."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.checkpoint.test_entries import STEPS, build, train
from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, latest, load, save
from zerox.checkpoint import manifest

EXTRA = {"step": 7, "sampler": torch.arange(5), "loss": [1.0, None, "x"]}


def values(model: nn.Module) -> list[Tensor]:
    return [p.detach().clone() for p in model.parameters()]


def save_midway(rank: int, _: int, kind: str, path: str) -> list[Tensor]:
    model, optimizer = build(kind, 0)
    train(model, optimizer, rank, range(STEPS))
    optimizer.param_groups[0]["lr"] = 0.003
    save(path, model, optimizer, extra=EXTRA)
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return values(model)


def load_and_go_on(rank: int, _: int, kind: str, path: str, options: dict[str, Any]) -> list[Tensor]:
    model, optimizer = build(kind, 1, **options)
    extra = load(path, model, optimizer)
    assert extra["sampler"].tolist() == EXTRA["sampler"].tolist()
    assert (extra["step"], extra["loss"]) == (EXTRA["step"], EXTRA["loss"])
    assert optimizer.param_groups[0]["lr"] == 0.003
    train(model, optimizer, rank, range(STEPS, 2 * STEPS))
    return values(model)


@pytest.mark.parametrize("kind", KINDS)
def test_a_training_goes_on_as_if_it_had_never_stopped(tmp_path: Path, kind: str) -> None:
    ended = run_ranks(save_midway, 2, kind, str(tmp_path / "x"))
    went_on = run_ranks(load_and_go_on, 2, kind, str(tmp_path / "x"), {"stage": 1})
    for ours, theirs in zip(went_on[0], ended[0], strict=True):
        assert same_bits(ours, theirs)
    assert [each.name for each in tmp_path.iterdir()] == ["x"], "nothing is left beside it"


@pytest.mark.parametrize(("saved_by", "loaded_by"), [(1, 3), (3, 1), (2, 4)])
def test_other_ranks_go_on_from_the_same_place(tmp_path: Path, saved_by: int, loaded_by: int) -> None:
    """Which is what they save at once."""
    first, second = str(tmp_path / "first"), str(tmp_path / "second")
    run_ranks(save_midway, saved_by, "bf16 remainder", first)
    run_ranks(load_and_save, loaded_by, "bf16 remainder", first, second)
    ours = run_ranks(load_and_go_on, 1, "bf16 remainder", first, {})
    theirs = run_ranks(load_and_go_on, 1, "bf16 remainder", second, {})
    for a, b in zip(ours[0], theirs[0], strict=True):
        assert same_bits(a, b)


def load_and_save(rank: int, _: int, kind: str, first: str, second: str) -> None:
    model, optimizer = build(kind, 1)
    save(second, model, optimizer, extra=load(first, model, optimizer))


def alone(kind: str = "fp32", seed: int = 0) -> tuple[nn.Module, FusedShardedAdam]:
    model, optimizer = build(kind, seed)
    train(model, optimizer, 0, range(STEPS))
    return model, optimizer


def everything(model: nn.Module, optimizer: FusedShardedAdam) -> list[Tensor]:
    kept = [stored for bucket in optimizer.inside.buckets for stored in bucket.state.values()]
    state = [
        *(bucket.steps for bucket in optimizer.inside.buckets),
        *(t for each in kept for t in each.tensors().values()),
    ]
    return [*values(model), *(each.clone() for each in state)]


@pytest.mark.parametrize("saved_as", [torch.channels_last, torch.contiguous_format])
@pytest.mark.parametrize("loaded_as", [torch.channels_last, torch.contiguous_format])
def test_memory_formats_are_each_s_own(
    tmp_path: Path, saved_as: torch.memory_format, loaded_as: torch.memory_format
) -> None:
    torch.manual_seed(0)
    models = [nn.Conv2d(4, 6, 3).to(memory_format=each) for each in (saved_as, loaded_as)]  # type: ignore[call-overload]
    ours, theirs = (FusedShardedAdam(model.named_parameters()) for model in models)
    models[0](torch.randn(1, 4, 5, 5)).sum().backward()
    ours.step()
    save(tmp_path / "x", models[0], ours)
    load(tmp_path / "x", models[1], theirs)
    assert torch.equal(models[0].weight, models[1].weight)
    first, second = (each.full_state_dict()["state"][0] for each in (ours, theirs))
    assert first["exp_avg"].any()
    for what, tensor in first.items():
        assert torch.equal(tensor, second[what]), what


def test_alone_it_says_nothing(tmp_path: Path, recwarn: pytest.WarningsRecorder) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    assert load(tmp_path / "x", model, optimizer) is None
    assert [str(each.message) for each in recwarn] == []


# ---- of another model


def test_what_was_saved_of_another_model_is_listed(tmp_path: Path) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    before = everything(model, optimizer)
    other = nn.ModuleDict({"inner": nn.Linear(72, 131), "extra": nn.Linear(2, 2)})
    theirs = FusedShardedAdam(other.named_parameters())
    with pytest.raises(CheckpointError) as error:
        load(tmp_path / "x", other, theirs)
    for line in (
        "missing: model.extra.weight",
        "unexpected: model.branch.bias",
        "and ",
    ):
        assert line in str(error.value)
    with pytest.raises(CheckpointError, match=r"model.inner.weight was saved as \[130, 72\], and is \[131, 72\]"):
        load(tmp_path / "x", other, theirs, strict=False)
    bf16, its = build("bf16 remainder", 0)
    with pytest.raises(CheckpointError, match=r"was saved as torch[.]float32, and is torch[.]bfloat16"):
        load(tmp_path / "x", bf16, its, strict=False)
    for ours, then in zip(everything(model, optimizer), before, strict=True):
        assert same_bits(ours, then)


def test_not_strict_takes_what_fits(tmp_path: Path) -> None:
    model, optimizer = alone()
    save(tmp_path / "x", model, optimizer)
    half = nn.ModuleDict({"inner": nn.Linear(72, 130), "extra": nn.Linear(2, 2)})
    kept = half["extra"].weight.detach().clone()
    its = FusedShardedAdam(half.named_parameters())
    load(tmp_path / "x", half, its, strict=False)
    assert torch.equal(half["inner"].weight, dict(model.named_parameters())["inner.weight"])
    assert torch.equal(its.state[half["inner"].weight]["exp_avg"], optimizer.state[model.inner.weight]["exp_avg"])  # type: ignore[index, union-attr]
    assert torch.equal(half["extra"].weight, kept)


def test_a_folder_that_is_no_checkpoint_is_told(tmp_path: Path) -> None:
    model, optimizer = alone()
    with pytest.raises(CheckpointError, match=r"is no checkpoint: it has no zerox[.]json"):
        load(tmp_path, model, optimizer)
    with pytest.raises(CheckpointError, match="nowhere is no checkpoint"):
        load(tmp_path / "nowhere", model, optimizer)
    manifest.write(tmp_path, {}, {})
    (tmp_path / manifest.NAME).write_text((tmp_path / manifest.NAME).read_text().replace('"format": 2', '"format": 9'))
    with pytest.raises(CheckpointError, match="is of format 9: this zerox reads formats up to 3"):
        load(tmp_path, model, optimizer)


# ---- the last one


def test_latest_is_the_last_one_that_is_complete(tmp_path: Path) -> None:
    assert latest(tmp_path / "nowhere") is None
    assert latest(tmp_path) is None
    model, optimizer = alone()
    for name in ("b", "c", "a"):  # saved last is not last by name
        save(tmp_path / name, model, optimizer)
    assert latest(tmp_path) == tmp_path / "a"
    (tmp_path / "a" / "host.pt").write_bytes(b"")
    assert latest(tmp_path) == tmp_path / "c"
    (tmp_path / "c" / manifest.NAME).unlink()
    assert latest(tmp_path) == tmp_path / "b"
    (tmp_path / "b").rename(tmp_path / ".b.replaced")  # as a save that is killed between two renames leaves it
    assert latest(tmp_path) == tmp_path / "b"
    load(tmp_path / "b", model, optimizer)
    save(tmp_path / "b", model, optimizer)
    (tmp_path / "b").rename(tmp_path / ".b.saving")
    assert latest(tmp_path) is None, "it never took its place"
