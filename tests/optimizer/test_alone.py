"""One rank alone: who asked for it trains so, and who was built too early hears of it before ranks drift apart."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import zerox
from tests.bucket_manager.rig import Chain, input_of, message_of, same_bits
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

BEFORE = "before init_process_group()"
OF_ONE = "while the default group had one rank"


def collective_calls(model: nn.Module, optimizer: FusedShardedAdam, folder: str) -> dict[str, Callable[[], object]]:
    return {
        "step": optimizer.step,
        "clip_grad_norm_": lambda: optimizer.clip_grad_norm_(1.0),
        "unscale": lambda: optimizer.unscale_grads_(None),
        "synchronize": optimizer.synchronize,
        "add_param_group": lambda: optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]}),
        "broadcast_buffers": lambda: optimizer.broadcast_buffers(model),
        "full_state_dict": optimizer.full_state_dict,
        "save": lambda: zerox.save(f"{folder}/saved", model, optimizer),
        "load": lambda: zerox.load(f"{folder}/saved", model, optimizer),
    }


def built_too_early(rank: int, world_size: int, folder: str, when: str) -> tuple[dict[str, str], bool, bool]:
    """What each collective call says, whether anything changed, and whether one that is built now trains."""
    dist.destroy_process_group()
    if when == OF_ONE:
        dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    model = Chain(2)
    optimizer = FusedShardedAdam(model.parameters())
    model(input_of(rank, 0)).square().mean().backward()
    optimizer.step()  # alone it trains
    if when == OF_ONE:
        dist.destroy_process_group()
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    before = [p.detach().clone() for p in model.parameters()]
    model(input_of(rank, 1)).square().mean().backward()
    said = {name: message_of(call) for name, call in collective_calls(model, optimizer, folder).items()}
    unchanged = all(same_bits(p, q) for p, q in zip(model.parameters(), before, strict=True))
    unchanged &= len(optimizer.param_groups) == 1
    del optimizer
    late = FusedShardedAdam(model.parameters())
    model(input_of(rank, 1)).square().mean().backward()
    late.step()
    mine = torch.cat([p.detach().view(-1) for p in model.parameters()])
    others = [torch.empty_like(mine) for _ in range(world_size)]
    dist.all_gather(others, mine)
    return said, unchanged, all(same_bits(mine, other) for other in others)


@pytest.mark.parametrize("when", [BEFORE, OF_ONE])
def test_an_optimizer_built_before_its_ranks_refuses_every_collective_call_once_they_are_there(
    when: str, tmp_path: Path
) -> None:
    for said, unchanged, trains in run_ranks(built_too_early, 2, str(tmp_path), when):
        for name, text in said.items():
            assert f"was built {when}, and the default group has 2 ranks now" in text, name
            assert "Call init_process_group() first" in text, name
            assert 'process_group="alone"' in text, name
        assert unchanged
        assert trains


def trained(rank: int, **options: object) -> list[Tensor]:
    model = Chain(2)
    optimizer = FusedShardedAdam(model.parameters(), **options)  # type: ignore[arg-type]
    for seed in range(2):
        model(input_of(rank, seed)).square().mean().backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach() for p in model.parameters()]


def asked_to_be_alone(rank: int, world_size: int, folder: str) -> tuple[list[bool], list[Tensor]]:
    """Whether each way to ask gives the bits of a process without torch.distributed; and what they are."""
    mesh = init_device_mesh("cpu", (world_size, 1), mesh_dim_names=("all", "own"))["own"]
    groups = [dist.new_group([each]) for each in range(world_size)]
    found = [trained(rank, process_group=group) for group in ("alone", mesh, groups[rank])]
    if rank == 0:
        found.append(trained(rank, process_group="alone", stage=1))  # and nobody is waited for
    dist.barrier()
    dist.destroy_process_group()
    early_model = Chain(2)
    early = FusedShardedAdam(early_model.parameters(), process_group="alone")
    expected = trained(rank)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world_size)
    for seed in range(2):
        early_model(input_of(rank, seed)).square().mean().backward()
        early.clip_grad_norm_(1.0)
        early.step()
        early.zero_grad()
    found.append([p.detach() for p in early_model.parameters()])
    return [all(map(same_bits, each, expected)) for each in found], expected


def test_who_asks_to_be_alone_trains_alone_whenever_it_was_built(tmp_path: Path) -> None:
    (first, of_0), (second, of_1) = run_ranks(asked_to_be_alone, 2, str(tmp_path))
    assert all([*first, *second])
    assert not same_bits(of_0[0], of_1[0]), "models that differ by rank"


def test_estimate_takes_a_process_group_as_the_constructor_does() -> None:
    params = [nn.Parameter(torch.ones(10_000))]
    assert zerox.estimate(params, 4, process_group="alone") == zerox.estimate(params, 1)
    assert zerox.estimate(params, 4, process_group=None) == zerox.estimate(params, 4)
    with pytest.raises(ValueError, match=r"process_group must be .* got 'alnoe'"):
        zerox.estimate(params, 4, process_group="alnoe")
