"""What torch's own tests say of its DistributedDataParallel, on ours: constructor, buffers, evaluation, copies.

docs/ddp-tests.md has the list; the numbers of training are in test_of_torch.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.wrapper import torch_models as models
from tests.wrapper.beside import data
from tests.wrapper.together import OnRanks
from zerox import DistributedDataParallel, FusedShardedAdam, FusedShardedSGD

ignore: Callable[..., None] = DistributedDataParallel._set_params_and_buffers_to_ignore_for_model

on_ranks = OnRanks(__name__, 2)
answer = on_ranks.answers


def error_of(make: Callable[[], object]) -> str:
    """Class and first words of what it raises."""
    try:
        make()
    except Exception as error:
        return f"{type(error).__name__}: {str(error)[:60]}"
    return ""


@on_ranks
def constructor_errors(rank: int) -> list[tuple[str, str]]:
    """What torch's class raises, and what ours does."""
    mesh = init_device_mesh("cpu", (2,))
    wide = init_device_mesh("cpu", (2, 1))
    on_two = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2, device="meta"))
    made: list[Callable[[Any], object]] = [
        lambda cls: cls(nn.Module()),
        lambda cls: cls(nn.Linear(2, 2).requires_grad_(False)),
        lambda cls: cls(nn.LazyLinear(3)),
        lambda cls: cls(nn.Linear(2, 2), device_ids=[0, 1]),
        lambda cls: cls(nn.Linear(2, 2), device_ids=[0]),
        lambda cls: cls(nn.Linear(2, 2), output_device=1),
        lambda cls: cls(on_two),
        lambda cls: cls(nn.Sequential(nn.Linear(2, 2), nn.SyncBatchNorm(2))),
        lambda cls: cls(nn.Linear(2, 2), process_group=dist.group.WORLD, device_mesh=mesh),
        lambda cls: cls(nn.Linear(2, 2), device_mesh=wide),
    ]
    return [(error_of(lambda m=make: m(OfTorch)), error_of(lambda m=make: m(DistributedDataParallel))) for make in made]


def test_constructor_raises_as_torchs() -> None:
    for found in answer("constructor_errors"):
        assert [theirs for theirs, ours in found if not theirs or ours[:50] != theirs[:50]] == []


@on_ranks
def accepted(rank: int) -> list[Any]:
    mesh = init_device_mesh("cpu", (2,))
    ddp = DistributedDataParallel(nn.Linear(2, 2), device_ids=[], device_mesh=mesh)
    return [ddp.device_mesh == mesh, ddp.device_ids, ddp.is_multi_device_module, ddp.bucket_bytes_cap >> 20]


def test_no_device_ids_and_a_mesh_are_accepted() -> None:
    assert answer("accepted") == [[True, None, False, 25]] * 2


@on_ranks
def models_differ(rank: int) -> list[str]:
    other_shape = nn.Embedding(10, 5 + rank)
    more = nn.Sequential(*(nn.Linear(2, 2, bias=False) for _ in range(1 + rank)))
    return [error_of(lambda m=model: DistributedDataParallel(m)) for model in (other_shape, more)]


def test_other_shapes_and_other_numbers_of_parameters_raise_on_all_ranks() -> None:
    for found in answer("models_differ"):
        assert all(each.startswith("RuntimeError: zerox: ranks must agree: rank 0 has") for each in found), found


def everywhere(tensor: Tensor) -> list[Tensor]:
    given = [torch.empty_like(tensor) for _ in range(2)]
    dist.all_gather(given, tensor.detach())
    return given


@on_ranks
def handed_out(rank: int) -> list[bool]:
    """A buffer that rank 0 alone changes, by another tensor, is on all ranks after a training forward."""
    ddp = DistributedDataParallel(models.Buffered())
    same = [torch.equal(*everywhere(ddp.module.layer.weight)), torch.equal(*everywhere(ddp.module.own))]
    for _ in range(2):
        if rank == 0:
            ddp.module.own = ddp.module.own + 1
        ddp(data(rank)).sum().backward()
        same.append(torch.equal(*everywhere(ddp.module.own)))
    return same


def test_forward_hands_out_rank_0s_buffers() -> None:
    assert answer("handed_out") == [[True] * 4] * 2


@on_ranks
def not_handed_out(rank: int) -> list[bool]:
    ddp = DistributedDataParallel(models.Buffered(), forward_sync_buffers=False)
    same = [ddp.forward_sync_buffers, torch.equal(*everywhere(ddp.module.own))]
    if rank == 0:
        ddp.module.own += 1
    ddp(data(rank)).sum().backward()
    return [*same, torch.equal(*everywhere(ddp.module.own))]


def test_without_forward_sync_buffers_only_the_constructor_hands_them_out() -> None:
    assert answer("not_handed_out") == [[False, True, False]] * 2


@on_ranks
def ignored(rank: int) -> list[Any]:
    """A layer that differs over ranks, is ignored, and is then replaced: gradients of both kinds, and the old one's."""
    found = []
    for options in ({}, {"find_unused_parameters": True}, {"static_graph": True}, {"broadcast_buffers": False}):
        model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1 + 4 * rank, 3, bias=False))
        model[1].register_buffer("own", torch.zeros(5 + rank))
        old = model[1].weight
        ignore(model, ["1.weight", "1.own"])
        ddp = DistributedDataParallel(model, **options)
        model[1] = nn.Linear(1, 1, bias=False)
        nn.init.constant_(model[0].weight, 3.0)
        nn.init.constant_(model[1].weight, 2.0)
        for _ in range(2):
            ddp(torch.full((1, 1), rank + 1.0)).sum().backward()
        found.append([float(model[0].weight.grad), float(model[1].weight.grad), old.grad])
    return found


def test_what_is_ignored_is_each_ranks_own() -> None:
    assert answer("ignored") == [[[6.0, 6.0 * (rank + 1), None]] * 4 for rank in range(2)]


@on_ranks
def data_parallel_params(rank: int) -> list[Any]:
    model = models.TwoOutputs()
    ignore(model, ["a.weight"])
    ddp = DistributedDataParallel(model)
    return [len(list(cls._get_data_parallel_params(model))) for cls in (OfTorch, type(ddp))]


def test_data_parallel_params_leave_out_what_is_ignored() -> None:
    assert answer("data_parallel_params") == [[2, 2]] * 2


@on_ranks
def without_grad(rank: int) -> list[bool]:
    """Rank 0 alone evaluates, without gradients; then all train."""
    ddp = DistributedDataParallel(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))
    found = []
    if rank == 0:
        ddp.eval()
        with torch.no_grad():
            found += [torch.equal(ddp(data(0)), ddp.module(data(0))) for _ in range(3)]
    found.append(all(param.grad is None and param.requires_grad for param in ddp.parameters()))
    ddp.train()
    ddp(data(rank)).sum().backward()
    return [*found, torch.equal(*everywhere(ddp.module[0].weight.grad))]


def test_rank_0_evaluates_alone() -> None:
    assert answer("without_grad") == [[True] * 5, [True] * 2]


@on_ranks
def evaluates_with_grad(rank: int) -> list[bool]:
    """The same with gradients on, where an optimizer of zerox holds all parameters."""
    found = []
    for stage in (1, 2):
        ddp = DistributedDataParallel(nn.Linear(4, 4))
        optimizer = FusedShardedAdam(ddp.parameters(), stage=stage)
        if rank == 0:
            ddp.eval()
            found.append(torch.equal(ddp(data(0)), ddp.module(data(0))))
        ddp.train()
        ddp(data(rank)).sum().backward()
        optimizer.step()
        found.append(torch.equal(*everywhere(ddp.module.weight)))
    return found


def test_rank_0_evaluates_alone_with_gradients_on() -> None:
    assert answer("evaluates_with_grad") == [[True] * 4, [True] * 2]


@on_ranks
def sparse(rank: int) -> list[bool]:
    found = []
    for stage in (1, 2, 3):
        weights = []
        for cls in (OfTorch, DistributedDataParallel):
            torch.manual_seed(0)
            ddp = cls(nn.EmbeddingBag(10, 4, sparse=True))
            groups = [{"params": list(ddp.parameters()), "sparse": True}]
            sgd = torch.optim.SGD(ddp.parameters(), lr=0.5)
            optimizer = sgd if cls is OfTorch else FusedShardedSGD(groups, lr=0.5, stage=stage)
            for step in range(3):
                words = torch.randint(0, 10, (2, 2), generator=torch.Generator().manual_seed(2 * step + rank))
                ddp(words).softmax(1)[:, 0].sum().backward()
                optimizer.step()
                optimizer.zero_grad()
            with optimizer.whole() if cls is not OfTorch else nullcontext():  # type: ignore[attr-defined]
                weights.append(ddp.module.weight.detach().clone())
        found.append(torch.allclose(*weights, atol=1e-7))
    return found


def test_sparse_gradients_are_averaged_in_a_sparse_group() -> None:
    assert answer("sparse") == [[True] * 3] * 2


@on_ranks
def copied(rank: int) -> list[str]:
    group = dist.new_group([0, 1])
    return [error_of(lambda c=cls: copy.deepcopy(c(nn.Linear(2, 2), process_group=group)))[:12] for cls in BOTH]


BOTH: tuple[Any, Any] = (OfTorch, DistributedDataParallel)


def test_a_copy_needs_the_default_group() -> None:
    assert answer("copied") == [["RuntimeError"] * 2] * 2


@on_ranks
def again(rank: int) -> list[bool]:
    """The wrapper is gone, and the module in another one, over another group."""
    model = nn.Linear(4, 4)
    found = []
    for group in (None, dist.new_group([0, 1])):
        ddp = DistributedDataParallel(model, process_group=group)
        for step in range(2):
            ddp(data(rank, step)).sum().backward()
        found.append(torch.equal(*everywhere(model.weight.grad)))
        del ddp
    return found


def test_a_module_is_wrapped_again() -> None:
    assert answer("again") == [[True] * 2] * 2
