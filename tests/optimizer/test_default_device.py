"""Under another default device (``with torch.device(...)``, ``torch.set_default_device()``) zerox works as without."""

from __future__ import annotations

import ast
import contextlib
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.kernels.shards import same_bits
from tests.optimizer.models import KINDS, backward, batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, GradScaler, load, save

ROOT = Path(__file__).parents[2]
# What torch puts on the default device where none is named.
FACTORIES = {
    *("arange", "asarray", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "rand", "randint"),
    *("randn", "randperm", "scalar_tensor", "tensor", "zeros"),
}


def trained(rank: int, world_size: int, kind: str, stage: int, path: str, device: str | None) -> list[torch.Tensor]:
    """Everything that makes tensors, with nothing but zerox's own calls under the other default device."""

    def elsewhere() -> Any:
        return torch.device(device) if device else contextlib.nullcontext()

    def train(model: Any, optimizer: FusedShardedAdam, steps: range) -> None:
        for step in steps:
            backward(model, batch(rank, step, dtype=dtype))
            with elsewhere():
                optimizer.clip_grad_norm_(0.5)
                optimizer.step()
                optimizer.zero_grad()

    dtype, options = KINDS[kind]
    model, other = make_model(dtype), make_model(dtype, seed=1)
    with elsewhere():
        optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.05, **options)
        fresh = FusedShardedAdam(other.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=0.03, **options)
    train(model, optimizer, range(2))
    scaler = GradScaler("cpu", init_scale=4.0)
    scaler.scale(model(batch(rank, 2, dtype=dtype)).float().square().mean()).backward()
    with elsewhere():
        if dtype is not torch.float16:
            scaler.unscale_(optimizer)
        scaler.step(optimizer)
        optimizer.zero_grad()
        optimizer.param_groups[0]["amsgrad"] = True
    train(model, optimizer, range(3, 4))
    with elsewhere():
        optimizer.load_state_dict(optimizer.state_dict())
        full = optimizer.full_state_dict()
        save(path, model, optimizer)
        load(path, other, fresh)
    train(other, fresh, range(4, 5))
    values = [tensor for state in full.get("state", {}).values() for tensor in state.values()]
    return [*values, *(p.detach() for p in other.parameters())]


@pytest.mark.parametrize(
    ("kind", "stage"), [("fp32", 1), ("bf16 remainder, 8-bit moments", 2), ("fp16 fp32", 2), ("amsgrad", 2)]
)
@pytest.mark.parametrize("world_size", [1, 2])
def test_another_default_device_changes_nothing(tmp_path: Path, world_size: int, kind: str, stage: int) -> None:
    without, under = (
        run_ranks(trained, world_size, kind, stage, str(tmp_path / str(device)), device) for device in (None, "meta")
    )
    for ours, expected in zip(under[0], without[0], strict=True):
        assert same_bits(ours, expected)


def unnamed_devices(source: str) -> list[int]:
    """Lines with a factory of torch's that doesn't say where."""
    return [
        node.lineno
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and ast.unparse(node.func.value) == "torch"
        and node.func.attr in FACTORIES
        and "device" not in {keyword.arg for keyword in node.keywords}
    ]


def test_every_tensor_that_is_made_says_where() -> None:
    paths = sorted((ROOT / "zerox").rglob("*.py"))
    assert len(paths) > 100
    assert not {str(path): lines for path in paths if (lines := unnamed_devices(path.read_text()))}


def test_a_tensor_that_does_not_say_where_is_found() -> None:
    assert unnamed_devices("import torch\nx = torch.zeros(3, dtype=torch.int64)\ny = torch.ones(2, device='cpu')") == [
        2
    ]
