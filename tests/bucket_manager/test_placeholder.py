"""What stands in p.grad once a gradient has left: no values, and never a silent zero. One rank alone suffices."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import Chain, input_of
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.grads.placeholder import ShardedGrad


@pytest.fixture
def model() -> Chain:
    return Chain(2)


@pytest.fixture
def optimizer(model: Chain) -> FusedShardedAdam:
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2)
    backward(model, 0)
    return optimizer


def backward(model: Chain, seed: int) -> None:
    model(input_of(0, seed)).square().mean().backward()


READERS: dict[str, Callable[[list[Tensor]], object]] = {
    "item": lambda grads: grads[0][0, 0].item(),
    "add": lambda grads: grads[0] + 1,
    "add_": lambda grads: grads[0].add_(1),
    "mul_ by many": lambda grads: grads[0].mul_(torch.ones(grads[0].shape)),
    "mul_ by itself": lambda grads: grads[0].mul_(grads[0]),
    "of a plain one by it": lambda grads: torch.ones(grads[0].shape).mul_(grads[0]),
    "div_ with a mode": lambda grads: grads[0].div_(2, rounding_mode="floor"),
    "norm of a dimension": lambda grads: grads[0].norm(dim=0),
    "norm 0": lambda grads: grads[0].norm(0),
    "max": lambda grads: grads[0].max(),
    "abs, then sum": lambda grads: grads[0].abs().sum(),
    "abs, read": lambda grads: grads[0].abs().tolist(),
    "isnan, then sum": lambda grads: grads[0].isnan().sum(),
    "of two, compared": lambda grads: (grads[0] != grads[1]).any(),
    "abs max of a dimension": lambda grads: grads[0].abs().max(0),
    "clone": lambda grads: grads[0].clone(),
    "copy_ from": lambda grads: torch.empty(grads[0].shape).copy_(grads[0]),
    "copy_ into": lambda grads: grads[0].copy_(torch.ones(grads[0].shape)),
    "to float64": lambda grads: grads[0].to(torch.float64).sum(),
    "_foreach_add": lambda grads: torch._foreach_add(grads, 1.0),
    "stack": torch.stack,
    "numpy": lambda grads: grads[0].numpy(),
    "numpy, forced": lambda grads: grads[0].numpy(force=True),
    "tolist": lambda grads: grads[0].tolist(),
    "asarray": lambda grads: np.asarray(grads[0]),
    "array of a dtype": lambda grads: np.array(grads[0], dtype=np.float64),
    "DLPack": lambda grads: torch.from_dlpack(grads[0]),
    "numpy's DLPack": lambda grads: np.from_dlpack(grads[0]),
}


@pytest.mark.usefixtures("optimizer")
@pytest.mark.parametrize("read", READERS)
def test_reading_or_writing_values_raises_naming_the_way_out(model: Chain, read: str) -> None:
    grads = [p.grad for p in model.parameters() if p.dim() == 2]
    with pytest.raises(RuntimeError, match=r"optimizer\.clip_grad_norm_") as caught:
        READERS[read](grads)
    assert "'layers." in str(caught.value)


def where_it_is(rank: int, world_size: int) -> str:
    model = Chain(2)
    optimizer = FusedShardedAdam(model.named_parameters())
    backward(model, rank)
    with pytest.raises(RuntimeError) as caught:
        torch.stack([param.grad for param in model.parameters() if param.grad is not None])
    optimizer.step()
    return str(caught.value)


@pytest.mark.parametrize(("world_size", "where"), [(1, "is kept by the optimizer"), (2, "was sent to the ranks")])
def test_it_says_where_the_gradient_is(world_size: int, where: str) -> None:
    """One rank alone sends nothing."""
    for message in run_ranks(where_it_is, world_size):
        assert f" {where}" in message
        assert ("sent" in message) == (world_size > 1)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64], ids=str)
def test_it_has_the_parameters_shape_dtype_and_device_and_no_storage(dtype: torch.dtype) -> None:
    param = nn.Parameter(torch.randn(6, 4, dtype=dtype).t())
    optimizer = FusedShardedAdam([("some.weight", param)])
    param.sum().backward()
    assert optimizer is not None
    grad = param.grad
    assert isinstance(grad, ShardedGrad)
    assert (grad.shape, grad.dtype, grad.device, grad.layout) == (param.shape, param.dtype, param.device, param.layout)
    assert (grad.stride(), grad.numel(), grad.requires_grad) == (param.stride(), param.numel(), False)
    with pytest.raises(RuntimeError, match="invalid python storage"):
        grad.untyped_storage().data_ptr()
    assert repr(grad) == str(grad) == f"ShardedGrad(some.weight, shape=(4, 6), dtype={dtype})"


@pytest.mark.usefixtures("optimizer")
def test_every_parameter_that_got_a_gradient_has_one(model: Chain) -> None:
    assert all(isinstance(p.grad, ShardedGrad) for p in model.parameters())


@pytest.mark.parametrize("whose", ["model", "optimizer"])
def test_zero_grad_to_none_takes_it_away(model: Chain, optimizer: FusedShardedAdam, whose: str) -> None:
    (model if whose == "model" else optimizer).zero_grad()
    assert all(p.grad is None for p in model.parameters())
    before = [p.detach().clone() for p in model.parameters()]
    optimizer.step()
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))


@pytest.mark.parametrize("whose", ["model", "optimizer", "torch's", "torch's foreach"])
def test_zero_grad_to_zero_keeps_it_and_the_gradient_is_zero(
    model: Chain, optimizer: FusedShardedAdam, whose: str
) -> None:
    if whose in ("model", "optimizer"):
        (model if whose == "model" else optimizer).zero_grad(set_to_none=False)
    elif whose == "torch's":
        torch.optim.Optimizer.zero_grad(optimizer, set_to_none=False)
    else:
        torch._foreach_zero_([p.grad for p in model.parameters()])
    assert all(isinstance(p.grad, ShardedGrad) for p in model.parameters())
    assert optimizer.clip_grad_norm_(1.0) == 0.0
    plain = Chain(2)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for param in plain.parameters():
        param.grad = torch.zeros_like(param)
    optimizer.step()
    reference.step()  # a zero gradient is not an absent one: weights decay
    for ours, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=1e-7)


def test_backward_accumulates_onto_it(model: Chain, optimizer: FusedShardedAdam) -> None:
    backward(model, 1)
    assert all(isinstance(p.grad, ShardedGrad) for p in model.parameters())
    plain = Chain(2)
    backward(plain, 0)
    backward(plain, 1)
    expected = nn.utils.get_total_norm([p.grad for p in plain.parameters()])
    torch.testing.assert_close(optimizer.clip_grad_norm_(1e9), expected, rtol=1e-5, atol=0)


@pytest.mark.usefixtures("optimizer")
def test_it_can_be_taken_away_and_put_back(model: Chain) -> None:
    param = next(model.parameters())
    grad, param.grad = param.grad, None
    param.grad = grad
    assert param.grad is grad
    assert param.grad.detach() is not None
