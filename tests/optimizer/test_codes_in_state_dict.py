"""state_dict() with state of 8 bits: torch's classes never take codes for moments, and zerox's load every bit."""

from __future__ import annotations

import copy
import io
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

from tests.bucket_manager.rig import same_bits
from tests.optimizer.test_state_dict import WAYS
from tests.pull.shares import with_shares
from tests.ranks import run_ranks
from zerox import CheckpointError, FusedShardedAdam, FusedShardedLion, FusedShardedSGD
from zerox.checkpoint.convert import convert_file
from zerox.sliced_tensor import SlicedTensor

ROWS, COLUMNS = 64, 80
KINDS: dict[str, tuple[Any, Any, dict[str, Any]]] = {
    "adam": (FusedShardedAdam, torch.optim.AdamW, {"amsgrad": True}),
    "sgd": (FusedShardedSGD, torch.optim.SGD, {"momentum": 0.9}),
}


class Net(nn.Module):
    """A parameter with codes, one that is too small for them, one in channels_last."""

    def __init__(self, seed: int = 0, channels_last: bool = True) -> None:
        super().__init__()
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            self.first = nn.Linear(COLUMNS, ROWS)
            self.conv = nn.Conv2d(64, 32, 3, bias=False)
        if channels_last:
            self.conv.to(memory_format=torch.channels_last)  # type: ignore[call-overload]


def train(model: nn.Module, optimizer: Any, steps: range) -> None:
    for step in steps:
        generator = torch.Generator().manual_seed(step)
        for param in model.parameters():
            param.grad = torch.empty_like(param).copy_(torch.randn(param.shape, generator=generator))
        optimizer.step()
        optimizer.zero_grad()


def trained(make: Any = FusedShardedAdam, **options: Any) -> tuple[Net, Any]:
    model = Net()
    optimizer = make(model.named_parameters(), state_dtype="8bit", **options)
    train(model, optimizer, range(2))
    return model, optimizer


def as_in_older_versions(optimizer: Any) -> dict[str, Any]:
    """The dict that older versions gave: views of ``optimizer.state``, codes as plain tensors."""
    found = copy.deepcopy(optimizer.state_dict())
    params = [param for group in optimizer.param_groups for param in group["params"]]
    for number, state in found["state"].items():
        for key in state.keys() - {"step"}:
            state[key] = optimizer.state[params[number]][key].clone()
    return found


def is_coded(value: Tensor) -> bool:
    return value.dtype is torch.uint8


@pytest.mark.parametrize("flags", [{"foreach": False}, {"foreach": True}, {"fused": True}], ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_torch_s_classes_refuse_codes_and_name_the_way_out(kind: str, flags: dict[str, bool]) -> None:
    make, torchs, options = KINDS[kind]
    model, optimizer = trained(make, **options)
    other = Net(1)
    theirs = torchs(other.parameters(), lr=0.1, **options, **flags)
    train(other, theirs, range(1))
    before = copy.deepcopy(theirs.state_dict())
    with pytest.raises(RuntimeError, match=r"codes of 8 bits, and no moments.*full_state_dict\(\) has moments"):
        theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for number, state in before["state"].items():
        for key, value in state.items():
            assert torch.equal(theirs.state_dict()["state"][number][key], value), "nothing was loaded"
    for param, state in zip(other.parameters(), optimizer.state_dict()["state"].values(), strict=True):
        theirs.state[param] = dict(state)  # without load_state_dict()
    with pytest.raises(RuntimeError, match=r"codes of 8 bits, and no moments|must be .* the same dtype"):
        train(other, theirs, range(1))
    other.load_state_dict(model.state_dict())
    theirs.load_state_dict(optimizer.full_state_dict())
    train(other, theirs, range(2, 3))


@pytest.mark.parametrize("kind", KINDS)
def test_also_through_the_getters_of_dcp(kind: str) -> None:
    make, torchs, options = KINDS[kind]
    model, optimizer = trained(make, **options)
    other = Net(1)
    theirs = torchs(other.parameters(), lr=0.1, **options)
    with pytest.raises(RuntimeError, match="codes of 8 bits, and no moments"):
        set_optimizer_state_dict(other, theirs, get_optimizer_state_dict(model, optimizer))


@with_shares
def a_share_that_looks_whole(rank: int, _: int) -> int:
    """A parameter in one rank's shard has all of its codes there."""
    params = [nn.Parameter(torch.ones(4096)) for _ in range(2)]
    optimizer = FusedShardedAdam(params, state_dtype="8bit")
    share = optimizer.state_dict()
    found = 0
    for state in share["state"].values():
        if isinstance(state["exp_avg"], SlicedTensor) and state["exp_avg"].own.numel() == 4096:
            found += 1
            theirs = torch.optim.AdamW([nn.Parameter(torch.ones(4096))])
            group = {**theirs.state_dict()["param_groups"][0], "params": [0]}
            with pytest.raises(RuntimeError, match="codes of 8 bits, and no moments"):
                theirs.load_state_dict({"state": {0: state}, "param_groups": [group]})
    return found


def test_a_share_of_several_ranks_that_looks_whole_is_refused_too() -> None:
    assert sum(run_ranks(a_share_that_looks_whole, 2)) == 2


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("flags", [{"foreach": False}, {"fused": True}], ids=str)
def test_bfloat16_moments_load_into_adamw_as_they_are(dtype: torch.dtype, flags: dict[str, bool]) -> None:
    model = Net().to(dtype)
    optimizer = FusedShardedAdam(model.parameters(), state_dtype=torch.bfloat16)
    train(model, optimizer, range(2))
    other = Net(1).to(dtype)
    theirs = torch.optim.AdamW(other.parameters(), **flags)  # type: ignore[arg-type]
    theirs.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key in ("exp_avg", "exp_avg_sq"):
            assert theirs.state[q][key].dtype is dtype
            assert torch.equal(theirs.state[q][key], optimizer.state[p][key].to(dtype))
    train(other, theirs, range(1))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("make", [FusedShardedAdam, FusedShardedSGD, FusedShardedLion])
def test_it_loads_in_zerox_bit_for_bit(make: Any, way: str) -> None:
    options = {"momentum": 0.9} if make is FusedShardedSGD else {}
    model, optimizer = trained(make, **options)
    saved = optimizer.state_dict()
    coded = [value for state in saved["state"].values() for value in state.values() if is_coded(value)]
    assert coded
    assert all(isinstance(value, SlicedTensor) for value in coded)
    other = Net(1)
    loaded = make(other.named_parameters(), state_dtype="8bit", **options)
    other.load_state_dict(model.state_dict())
    loaded.load_state_dict(WAYS[way](saved))
    for p, q in zip(model.parameters(), other.parameters(), strict=True):
        for key, value in optimizer.state[p].items():
            assert same_bits(loaded.state[q][key], value), key
    for each in ((model, optimizer), (other, loaded)):
        train(*each, range(2, 4))
    assert all(same_bits(p.detach(), q.detach()) for p, q in zip(model.parameters(), other.parameters(), strict=True))


def loads(rank: int, world_size: int, saved: Any, bits: list[Tensor]) -> None:
    """A whole state on any number of ranks."""
    model = Net(1)
    optimizer = FusedShardedAdam(model.named_parameters(), state_dtype="8bit", bucket_cap_mb=0.03)
    optimizer.load_state_dict(saved)
    full = optimizer.full_state_dict()
    for found, expected in zip(full.get("state", {}).values(), bits, strict=False):
        assert same_bits(found["exp_avg"], expected)


@pytest.mark.parametrize("world_size", [1, 2, 3])
@pytest.mark.parametrize("is_old", [False, True])
def test_files_of_one_process_old_ones_too_load_on_any_number_of_ranks(world_size: int, is_old: bool) -> None:
    _, optimizer = trained()
    saved = as_in_older_versions(optimizer) if is_old else optimizer.state_dict()
    coded = [value for state in saved["state"].values() for value in state.values() if is_coded(value)]
    assert coded
    assert all(isinstance(value, SlicedTensor) != is_old for value in coded)
    file = io.BytesIO()
    torch.save(saved, file)
    file.seek(0)
    expected = [state["exp_avg"] for state in optimizer.full_state_dict()["state"].values()]
    run_ranks(loads, world_size, torch.load(file, weights_only=True), expected)


@pytest.mark.parametrize("is_old", [False, True])
def test_codes_of_another_memory_format_are_refused(is_old: bool) -> None:
    """Their blocks are of other elements."""
    _, optimizer = trained()
    saved = as_in_older_versions(optimizer) if is_old else copy.deepcopy(optimizer.state_dict())
    other = Net(1, channels_last=False)
    target = FusedShardedAdam(other.named_parameters(), state_dtype="8bit")
    with pytest.raises(ValueError, match=r"'conv.weight' is of a parameter in another memory format.*full_state_dict"):
        target.load_state_dict(saved)
    target.load_state_dict(optimizer.full_state_dict())


def through_dcp(rank: int, world_size: int, path: str, expected: Any) -> None:
    model = Net(1)
    optimizer = FusedShardedAdam(model.named_parameters(), state_dtype="8bit", bucket_cap_mb=0.03)
    given = {"optimizer": get_optimizer_state_dict(model, optimizer)}
    dcp.load(given, checkpoint_id=path)
    set_optimizer_state_dict(model, optimizer, given["optimizer"])
    for found, own in zip(optimizer.full_state_dict().get("state", {}).values(), expected, strict=False):
        assert same_bits(found["exp_avg"], own)


@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("is_old", [False, True])
def test_files_that_dcp_wrote_in_one_process_load_on_any_number_of_ranks(
    tmp_path: Path, world_size: int, is_old: bool
) -> None:
    model, optimizer = trained()
    found = get_optimizer_state_dict(model, optimizer)
    if is_old:
        names = [name for name, _ in model.named_parameters()]
        old = {names[number]: state for number, state in as_in_older_versions(optimizer)["state"].items()}
        found = {**found, "state": old}
    dcp.save({"optimizer": found}, checkpoint_id=tmp_path, no_dist=True)
    expected = [state["exp_avg"] for state in optimizer.full_state_dict()["state"].values()]
    run_ranks(through_dcp, world_size, str(tmp_path), expected)


def test_a_table_s_codes_are_marked_too() -> None:
    table = nn.Embedding(40, 300, sparse=True)
    groups = [{"params": [table.weight], "sparse": True, "weight_decay": 0.0}]
    optimizer = FusedShardedAdam(groups, state_dtype="8bit")
    table(torch.tensor([1, 5, 5])).square().sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    theirs = torch.optim.SparseAdam([nn.Parameter(torch.ones(40, 300))])
    with pytest.raises(RuntimeError, match="codes of 8 bits, and no moments"):
        theirs.load_state_dict({**saved, "param_groups": theirs.state_dict()["param_groups"]})
    before = {key: value.clone() for key, value in optimizer.state[table.weight].items()}
    optimizer.load_state_dict({**saved, "state": {}})
    optimizer.load_state_dict(saved)
    for key, value in before.items():
        assert same_bits(optimizer.state[table.weight][key], value)


def test_a_file_of_codes_is_not_converted_and_says_why(tmp_path: Path) -> None:
    model, optimizer = trained()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "all.pt")
    with pytest.raises(CheckpointError, match=r"exp_avg of 'first.weight' is of 8 bits.*full_state_dict\(\)"):
        convert_file(tmp_path / "all.pt", tmp_path / "checkpoint", False, False, ("model", "optimizer"))


LEAST_SCALE = 2.0**-100  # below, what the smallest codes stand for is subnormal


def test_all_codes_at_all_scales_are_the_same_again_after_float32() -> None:
    """As one rank saves them of several, and any number loads."""
    mantissas = torch.tensor([1.0, 1.37, 2.0 - 2.0**-23])
    scales = (2.0 ** torch.arange(-126, 128).float()[:, None] * mantissas).flatten()
    codes = torch.arange(256, dtype=torch.uint8).repeat(len(scales))
    signs = torch.ones_like(scales)
    signs[::2] = -1

    def made() -> tuple[FusedShardedAdam, dict[str, Any]]:
        param = nn.Parameter(torch.zeros(codes.numel()))
        optimizer = FusedShardedAdam([param], lr=0.1, state_dtype="8bit")
        param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer, optimizer.inside.buckets[0].state

    optimizer, state = made()
    for key, of_blocks in (("exp_avg", scales * signs), ("exp_avg_sq", scales)):
        state[key].values[: codes.numel()] = codes
        state[key].scales[: len(scales)] = of_blocks
    other, found = made()
    other.load_state_dict(optimizer.full_state_dict())
    again = other.full_state_dict()["state"][0]
    for key, wide in optimizer.full_state_dict()["state"][0].items():
        assert torch.equal(wide, again[key])
    for key, given in state.items():
        assert torch.equal(found[key].scales, given.scales)
        same = (found[key].values == given.values)[: codes.numel()].view(-1, 256)
        assert same[scales >= LEAST_SCALE].all()
