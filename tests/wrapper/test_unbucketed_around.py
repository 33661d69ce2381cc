"""Left-over gradients that no bucket can have: rows of tables, complex ones, and what happens around them."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks
from torch.nn.parallel import DistributedDataParallel as OfTorch

from tests.ranks import run_ranks
from tests.wrapper.tables import ATOL, Tables, mean_of, tables_of, words
from tests.wrapper.together import OnRanks, error_of
from zerox import DistributedDataParallel, FusedShardedAdam, FusedShardedSGD

on_ranks = OnRanks(__name__, 2, 3)
answers = on_ranks.answers


@on_ranks
def halves(rank: int) -> list[bool]:
    """16-bit rows are added up in float32, and rounded once."""
    ddp = DistributedDataParallel(nn.EmbeddingBag(12, 4, sparse=True, mode="sum", dtype=torch.bfloat16))
    [own] = torch.autograd.grad((ddp.module(words(rank, 0)).float() * 1.01).sum(), [ddp.module.weight])
    same = ddp.module.weight.grad is None
    (ddp(words(rank, 0)).float() * 1.01).sum().backward()
    grad = ddp.module.weight.grad
    assert grad is not None
    rounded = own.float().coalesce().bfloat16().float().to_dense()
    return [same, grad.dtype is torch.bfloat16, torch.equal(grad.to_dense(), mean_of(rounded).bfloat16())]


def test_rows_of_16_bits_are_rounded_once() -> None:
    assert answers("halves") == [[True] * 3] * 5


@on_ranks
def compressed(rank: int) -> list[bool]:
    ddp = DistributedDataParallel(nn.EmbeddingBag(12, 4, sparse=True, mode="sum"))
    ddp.register_comm_hook(None, default_hooks.bf16_compress_hook)
    [own] = torch.autograd.grad((ddp.module(words(rank, 0)) * 1.01).sum(), [ddp.module.weight])
    (ddp(words(rank, 0)) * 1.01).sum().backward()
    expected = mean_of(own.coalesce().bfloat16().float().to_dense()).bfloat16().float()
    assert ddp.module.weight.grad is not None
    return [ddp.module.weight.grad.dtype is torch.float32, torch.equal(ddp.module.weight.grad.to_dense(), expected)]


def test_rows_are_sent_in_the_dtype_of_a_hook() -> None:
    assert answers("compressed") == [[True, True]] * 5


@on_ranks
def of_the_module(rank: int) -> list[bool]:
    """A backward that no forward of the wrapper told of, and one that no p.grad is of."""
    ddp = DistributedDataParallel(nn.EmbeddingBag(12, 4, sparse=True, mode="sum"))
    table = ddp.module.weight
    ddp(words(rank, 0)).sum().backward()
    first = table.grad
    torch.autograd.grad(ddp(words(rank, 0)).sum(), [table])
    found = [table.grad is first]
    table.grad = None
    [own] = torch.autograd.grad(ddp.module(words(rank, 1)).sum(), [table])
    ddp.module(words(rank, 1)).sum().backward()
    assert table.grad is not None
    return [*found, torch.allclose(table.grad.to_dense(), mean_of(own.to_dense()))]


def test_rows_of_a_forward_of_the_module_are_averaged_too() -> None:
    assert answers("of_the_module") == [[True] * 2] * 5


@on_ranks
def untouched(rank: int) -> list[bool]:
    """Where no p.grad has changed, it stays the tensor that it is."""
    ddp = DistributedDataParallel(Tables())
    ddp(words(rank, 0)).sum().backward()
    first = ddp.module.first.weight.grad
    ddp(words(rank, 0), "none").sum().backward()
    return [ddp.module.first.weight.grad is first, ddp.module.second.weight.grad is None]


def test_what_has_not_changed_is_not_sent_again() -> None:
    assert answers("untouched") == [[True] * 2] * 5


@on_ranks
def frozen(rank: int) -> list[bool]:
    """Frozen from the start, thawed, frozen and thawed again; a layer beside it thaws while it is frozen."""
    model = Tables()
    model.layer.requires_grad_(False)
    model.second.requires_grad_(False)
    ddp = DistributedDataParallel(model)
    found = []
    for step, (table, layer) in enumerate([(False, False), (True, False), (False, True), (True, True)]):
        model.second.requires_grad_(table)
        model.layer.requires_grad_(layer)
        ddp.zero_grad()
        own = torch.autograd.grad(model(words(rank, step), "both").sum(), [model.first.weight])[0]
        forward = model if step == 3 else ddp  # what is thawed has kept its hook
        forward(words(rank, step), "both").sum().backward()
        assert model.first.weight.grad is not None
        found.append((model.second.weight.grad is not None) == table)
        found.append(torch.allclose(model.first.weight.grad.to_dense(), mean_of(own.to_dense()), atol=ATOL))
    second = model.second.weight.grad
    assert second is not None
    everywhere = [torch.empty(12, 4) for _ in range(dist.get_world_size())]
    dist.all_gather(everywhere, second.to_dense())
    return [*found, all(torch.equal(each, everywhere[0]) for each in everywhere)]


def test_tables_freeze_and_thaw() -> None:
    assert answers("frozen") == [[True] * 9] * 5


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(12, 4, sparse=True)

    def forward(self, x: Tensor, ties: bool) -> Tensor:
        rows = self.table(x).sum(1)
        return rows @ self.table.weight.t() if ties else rows


@on_ranks
def tied(rank: int) -> list[bool]:
    """A table that is used as a dense parameter too, and on one rank alone."""
    found = []
    for ties in (True, rank == 0):
        ddp = DistributedDataParallel(Tied())
        [own] = torch.autograd.grad(ddp.module(words(rank, 0), ties).square().sum(), [ddp.module.table.weight])
        ddp(words(rank, 0), ties).square().sum().backward()
        grad = ddp.module.table.weight.grad
        assert grad is not None
        expected = mean_of(own.to_dense())
        found += [not grad.is_sparse, torch.allclose(grad, expected, atol=1e-4)]
    return found


def test_a_table_with_a_dense_gradient_has_the_dense_mean() -> None:
    assert answers("tied") == [[True] * 4] * 5


@on_ranks
def taken(rank: int) -> list[bool]:
    """An optimizer of zerox takes the table between a backward and its step(), and later one of torch's."""
    found = []
    for stage in (1, 2):
        torch.manual_seed(0)
        ddp, twin = DistributedDataParallel(Tables()), OfTorch(Tables())
        twin.module.load_state_dict(ddp.module.state_dict())
        for each in (ddp, twin):
            each(words(rank, 0), "both").square().sum().backward()
        tables = tables_of(ddp.module)
        optimizer = FusedShardedSGD([{"params": tables, "sparse": True}], lr=0.1, stage=stage)
        optimizer.step()
        torch.optim.SGD(twin.parameters(), lr=0.1).step()
        found.append(torch.allclose(ddp.module.first.weight, twin.module.first.weight, atol=ATOL))
        found.append(ddp._averaging.left_over.unbucketed is None)
        del optimizer
        for each in (ddp, twin):
            each.zero_grad()
            each.module.layer.load_state_dict(ddp.module.layer.state_dict())
            each(words(rank, 1), "both").square().sum().backward()
        grads = [each.module.first.weight.grad for each in (ddp, twin)]
        assert grads[0] is not None
        assert grads[1] is not None
        found.append(torch.allclose(grads[0].to_dense(), grads[1].to_dense(), atol=1e-4))
    return found


def test_a_table_goes_to_an_optimizer_and_back() -> None:
    assert answers("taken") == [[True] * 6] * 5


class Complex(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.turned = nn.Parameter(torch.randn(3, 2, dtype=torch.complex64).t())
        self.wide = nn.Parameter(torch.randn(3, dtype=torch.complex128))
        self.unused = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.real = nn.Parameter(torch.randn(2))

    def forward(self, x: Tensor, scale: bool) -> Tensor:
        found = (x * self.real) @ (self.turned.conj() * 2j).imag
        return found * self.wide.abs().sum() if scale else found


@on_ranks
def complex_ones(rank: int) -> list[Any]:
    """In p.grad as it lies, added to what is there, and of one rank alone."""
    found: list[Any] = []
    for beside in (False, True):
        ddp = DistributedDataParallel(Complex())
        model = ddp.module
        optimizer = FusedShardedAdam([model.real], stage=1) if beside else None
        x = torch.full((1, 2), rank + 1.0)
        used = [model.turned, model.wide]
        own = torch.autograd.grad(model(x, True).sum(), used)
        ddp(x, rank == 0).sum().backward()  # scaled by wide's sum there alone, so that wide has a gradient
        [alone] = torch.autograd.grad(model(x, True).sum(), [model.wide])
        assert model.wide.grad is not None
        found.append(torch.allclose(model.wide.grad, mean_of(alone if rank == 0 else torch.zeros_like(alone))))
        found.append(model.unused.grad is None)
        ddp.zero_grad()
        for times in (1, 2):
            ddp(x, True).sum().backward()
            for param, grad in zip(used, own, strict=True):
                assert param.grad is not None
                found.append(torch.allclose(param.grad, times * mean_of(grad), rtol=1e-4))
                found.append(param.grad.stride() == param.stride())
        del optimizer
    return found


def test_complex_gradients_are_averaged() -> None:
    assert answers("complex_ones") == [[True] * 20] * 5


@on_ranks
def refused(rank: int) -> list[str]:
    class Unknown(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table = nn.Parameter(torch.randn(12, 4))

        def forward(self, x: Tensor) -> Tensor:
            return F.embedding(x, self.table, sparse=True)

    unknown = DistributedDataParallel(Unknown())
    odd = DistributedDataParallel(nn.Embedding(12, 4, sparse=True))
    if rank == 1:
        odd.module.weight.register_hook(lambda grad: grad.to_dense().to_sparse(2))
    compressed = DistributedDataParallel(Complex())
    compressed.register_comm_hook(None, default_hooks.bf16_compress_hook)
    joined = DistributedDataParallel(nn.Embedding(12, 4, sparse=True))
    said = [
        error_of(lambda: unknown(words(rank, 0)).sum().backward()),
        error_of(lambda: odd(words(rank, 0)).sum().backward()),
        error_of(lambda: compressed(torch.ones(1, 2), True)),
        error_of(lambda: joined.join().__enter__()),
    ]
    odd.zero_grad()
    return said


def test_what_it_can_t_average_is_refused_by_name_on_all_ranks() -> None:
    for unknown, odd, compressed, joined in answers("refused"):
        assert "RuntimeError: zerox: parameter 'table' got a sparse gradient" in unknown
        assert "rank 1 has a gradient of parameter 'weight' that can't be averaged" in odd
        assert compressed.startswith("ValueError: ")
        assert "'turned' in torch.complex64 can't be sent in torch.bfloat16" in compressed
        assert joined.startswith("NotImplementedError: zerox.DistributedDataParallel: join() can't follow rows")
        assert "'weight'" in joined


@on_ranks
def dropped(rank: int) -> list[bool]:
    ddp = DistributedDataParallel(nn.EmbeddingBag(12, 4, sparse=True, mode="sum"))
    module = ddp.module
    ddp(words(rank, 0)).sum().backward()
    gone = [weakref.ref(ddp), weakref.ref(ddp._averaging.left_over.unbucketed)]
    gc.disable()
    try:
        del ddp
        found = [each() is None for each in gone]
    finally:
        gc.enable()
    module.weight.grad = None
    module(words(rank, 0)).sum().backward()  # each rank's own from here on
    assert module.weight.grad is not None
    return [*found, not module.weight.grad.is_coalesced(), not module.weight._post_accumulate_grad_hooks]


def test_what_averages_rows_goes_with_its_wrapper() -> None:
    assert answers("dropped") == [[True] * 4] * 5


def raised(rank: int, world_size: int) -> list[Any]:
    """Rank 0's backward raises before it reaches the table; both go on."""
    torch.manual_seed(0)
    ddp = DistributedDataParallel(Tables())

    def fail(grad: Tensor) -> Tensor:
        raise ValueError("on purpose")

    outputs = ddp(words(rank, 0))
    if rank == 0:
        outputs.register_hook(fail)
    said = ""
    try:
        outputs.sum().backward()
    except (ValueError, RuntimeError) as error:
        said = str(error)
    with pytest.warns(UserWarning, match="are discarded"):
        ddp(words(rank, 1)).sum().backward()
    [own] = torch.autograd.grad(ddp.module(words(rank, 1)).sum(), [ddp.module.first.weight])
    grad = ddp.module.first.weight.grad
    assert grad is not None
    return [said, torch.allclose(grad.to_dense(), mean_of(own.to_dense()), atol=ATOL)]


def test_after_a_backward_that_raised_rows_are_averaged_again() -> None:
    (one, right), (other, right_too) = run_ranks(raised, 2)
    assert one == "on purpose"
    assert "rank 0 can't go on" in other
    assert right
    assert right_too
