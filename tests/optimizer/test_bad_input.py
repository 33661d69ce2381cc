"""Wrong arguments end in an error that names them, on every rank, and never in a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.ranks import run_ranks
from zerox import FusedShardedAdam, estimate


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype))


@pytest.mark.parametrize(
    "options",
    [
        {"lr": -1.0},
        {"lr": torch.tensor([0.1, 0.2])},
        {"eps": -1.0},
        {"betas": (1.0, 0.9)},
        {"betas": (0.9, -0.1)},
        {"weight_decay": -1.0},
        {"lr": float("nan")},
    ],
    ids=str,
)
def test_hyper_parameters_are_refused_as_torch_refuses_them(options: dict[str, Any]) -> None:
    refusal = "Invalid|1-element"
    with pytest.raises(ValueError, match=refusal) as ours:
        FusedShardedAdam([weight()], **options)
    with pytest.raises(ValueError, match=refusal) as theirs:
        torch.optim.AdamW([weight()], foreach=False, **options)
    assert str(ours.value) == str(theirs.value)


def test_parameters_are_refused_as_torch_refuses_them() -> None:
    shared = weight()
    with pytest.raises(ValueError, match="empty parameter list"):
        FusedShardedAdam([])
    with pytest.raises(TypeError, match="iterable of Tensors"):
        FusedShardedAdam(weight())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="more than one parameter group"):
        FusedShardedAdam([{"params": [shared]}, {"params": [shared]}])
    with pytest.raises(ValueError, match="leaf"):
        FusedShardedAdam([shared * 2])


def test_a_parameter_given_twice_warns_and_is_trained_once() -> None:
    shared = weight()
    with pytest.warns(UserWarning, match="duplicate"):
        optimizer = FusedShardedAdam([shared, shared], lr=0.1, weight_decay=0.0)
    shared.grad = torch.ones(3)
    optimizer.step()
    torch.testing.assert_close(shared.detach(), torch.full((3,), 0.9))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"stage": 3}, r"stage must be one of \[1, 2\], got 3"),
        ({"reduce_dtype": torch.int8}, "reduce_dtype must be one of"),
        ({"reduce_dtype": torch.float64}, "reduce_dtype must be one of"),
        (
            {"state_dtype": torch.float16},
            r"state_dtype must be one of .*float32.*bfloat16.*'8bit'.*, got torch.float16",
        ),
        ({"state_dtype": "4bit"}, "state_dtype must be one of .*, got '4bit'"),
        ({"master_weights": "fp64"}, "master_weights must be one of"),
        ({"master_weights": "remainder"}, "remainder.*float32"),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be positive"),
        ({"capturable": True, "stage": 1}, "capturable=True needs stage=2, got stage=1"),
    ],
    ids=str,
)
def test_options_that_are_unknown_or_don_t_fit_list_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedShardedAdam([weight()], **options)
    with pytest.raises(ValueError, match=message):
        estimate([weight()], 2, **options)


def test_capturable_is_for_cuda_parameters() -> None:
    with pytest.raises(ValueError, match="capturable=True needs CUDA parameters, got parameters on cpu"):
        FusedShardedAdam([weight()], capturable=True)


def test_a_remainder_beside_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match="remainder"):
        FusedShardedAdam([weight(torch.bfloat16), weight(torch.float16)], master_weights="remainder")


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)), "complex64"),
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False), "int32"),
        (lambda: nn.Parameter(torch.ones(2, device="meta")), "meta device"),
        (lambda: nn.Parameter(torch.eye(2).to_sparse()), "dense"),
    ],
)
def test_parameters_that_can_t_be_sharded_are_named(param: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"'odd'.*{message}"):
        FusedShardedAdam([("even", weight()), ("odd", param())])


def disagree(rank: int, world_size: int, what: str) -> str:
    params: dict[str, Any] = {"params": [("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(4)))]}
    if rank == 1:
        params |= {
            "shape": {"params": [("a", nn.Parameter(torch.ones(3))), ("b", nn.Parameter(torch.ones(2, 2)))]},
            "dtype": {"params": [("a", nn.Parameter(torch.ones(3).half())), ("b", nn.Parameter(torch.ones(4)))]},
            "name": {"params": [("a", nn.Parameter(torch.ones(3))), ("c", nn.Parameter(torch.ones(4)))]},
            "number": {"params": [("a", nn.Parameter(torch.ones(3)))]},
            "option": {"lr": 0.5},
            "stage": {"stage": 1},
        }[what]
    with pytest.raises(ValueError, match="ranks must agree") as error:
        FusedShardedAdam(**params)
    return str(error.value)


@pytest.mark.parametrize(
    ("what", "sides"),
    [
        ("shape", ["'b' (4,)", "'b' (2, 2)"]),
        ("dtype", ["'a' (3,) torch.float32", "'a' (3,) torch.float16"]),
        ("name", ["'b'", "'c'"]),
        ("number", ["'b' (4,)", "nothing"]),
        ("option", ["'lr': 0.001", "'lr': 0.5"]),
        ("stage", ["stage=2", "stage=1"]),
    ],
)
def test_ranks_that_disagree_raise_on_all_naming_both_sides(what: str, sides: list[str]) -> None:
    for message in run_ranks(disagree, 3, what):
        assert message.startswith("ranks must agree: rank 0 has")
        assert "rank 1 has" in message
        assert all(side in message for side in sides), message


def wrong_group(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh

    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match="1 dimension, got 2"):
        FusedShardedAdam([weight()], process_group=mesh)
    with pytest.raises(ValueError, match="process_group must be"):
        FusedShardedAdam([weight()], process_group="dp")  # type: ignore[arg-type]
    param = nn.Parameter(torch.full((3,), float(rank)))
    FusedShardedAdam([param], process_group=mesh["dp"])
    assert torch.equal(param, torch.zeros(3)), "the values are those of the group's rank 0"


def test_a_mesh_must_have_one_dimension() -> None:
    run_ranks(wrong_group, 2)


def test_options_and_params_are_checked_before_anything_changes() -> None:
    param = weight()
    storage = param.data_ptr()
    with pytest.raises(ValueError, match="stage"):
        FusedShardedAdam([param], stage=7)
    assert param.data_ptr() == storage
