"""Wrong arguments end in an error that names them, on every rank, and never in a hang."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.testing._internal.two_tensor import TwoTensor

from tests.ranks import run_ranks
from zerox import FusedShardedAdam, FusedShardedLion, FusedShardedSGD, estimate


def weight(dtype: torch.dtype = torch.float32) -> nn.Parameter:
    return nn.Parameter(torch.ones(3, dtype=dtype))


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
        ({"stage": 4}, r"stage must be one of \[1, 2, 3\], got 4"),
        ({"reduce_dtype": torch.int8}, r"reduce_dtype must be one of .*torch.bfloat16.*, got torch.int8"),
        ({"reduce_dtype": torch.float64}, r"reduce_dtype must be one of .*torch.float32.*, got torch.float64"),
        ({"reduce_dtype": "bf16"}, r"reduce_dtype must be one of .*torch.bfloat16.*, got 'bf16'"),
        (
            {"state_dtype": torch.float16},
            r"state_dtype must be one of .*float32.*bfloat16.*'8bit'.*, got torch.float16",
        ),
        ({"state_dtype": "4bit"}, r"state_dtype must be one of .*torch.float32.*, got '4bit'"),
        ({"state_dtype": None}, r"state_dtype must be one of .*torch.float32.*, got None"),
        (
            {"master_weights": "fp64"},
            r"master_weights must be one of \('auto', 'remainder', 'fp32', None\), got 'fp64'",
        ),
        (
            {"master_weights": "remainder"},
            'master_weights="remainder" does not go with float32 parameters: .*may be "auto", "fp32" or None',
        ),
        ({"bucket_cap_mb": 0}, "bucket_cap_mb must be a positive number or None, got 0"),
        ({"bucket_cap_mb": float("nan")}, "bucket_cap_mb must be a positive number or None, got nan"),
        ({"bucket_cap_mb": float("inf")}, "bucket_cap_mb must be a positive number or None, got inf"),
        ({"bucket_cap_mb": "16"}, "bucket_cap_mb must be a positive number or None, got '16'"),
        ({"bucket_cap_mb": True}, "bucket_cap_mb must be a positive number or None, got True"),
        ({"resident_mb": "inf", "stage": 3}, "resident_mb must be a positive number, inf or None, got 'inf'"),
        ({"resident_mb": True, "stage": 3}, "resident_mb must be a positive number, inf or None, got True"),
        ({"gradient_divisor": "2"}, "gradient_divisor must be a number from .* or None .*, got '2'"),
        ({"gradient_divisor": True}, "gradient_divisor must be a number from .* or None .*, got True"),
        ({"stage": "2"}, r"stage must be one of \[1, 2, 3\], got '2'"),
        ({"stage": True}, r"stage must be one of \[1, 2, 3\], got True"),
        ({"stage": [2]}, r"stage must be one of \[1, 2, 3\], got \[2\]"),
        ({"accumulate_dtype": "fp32"}, "accumulate_dtype must be one of .*, got 'fp32'"),
        ({"capturable": "no"}, "capturable must be True or False, got 'no'"),
        ({"capturable": None}, "capturable must be True or False, got None"),
        ({"capturable": True, "stage": 1}, "capturable=True does not go with stage=1: .*Use stage=2"),
    ],
    ids=str,
)
def test_options_that_are_unknown_or_don_t_fit_list_what_is_allowed(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        FusedShardedAdam([weight()], **options)
    with pytest.raises(ValueError, match=message):
        estimate([weight()], 2, **options)


# Options of the update, by class: torch takes some of these, and uses them as True or fails at the first step.
OF_UPDATE: list[tuple[Any, dict[str, Any], type[Exception], str]] = [
    (FusedShardedAdam, {"lr": "1e-3"}, TypeError, "lr must be a number, got '1e-3': "),
    (FusedShardedAdam, {"lr": None}, TypeError, "lr must be a number, got None: "),
    (FusedShardedAdam, {"betas": 0.9}, TypeError, "betas must be two numbers, got 0.9: "),
    (FusedShardedAdam, {"betas": (0.9, "b")}, TypeError, r"betas\[1\] must be a number, got 'b': "),
    (FusedShardedAdam, {"eps": "1"}, TypeError, "eps must be a number, got '1': "),
    (FusedShardedAdam, {"weight_decay": "0"}, TypeError, "weight_decay must be a number, got '0': "),
    (FusedShardedAdam, {"amsgrad": "no"}, ValueError, "amsgrad must be True or False, got 'no'"),
    (FusedShardedAdam, {"maximize": None}, ValueError, "maximize must be True or False, got None"),
    (FusedShardedAdam, {"decoupled_weight_decay": "no"}, ValueError, "decoupled_weight_decay must be True or False"),
    (FusedShardedSGD, {"lr": "1"}, TypeError, "lr must be a number, got '1': "),
    (FusedShardedSGD, {"momentum": "0.9"}, TypeError, "momentum must be a number, got '0.9': "),
    (FusedShardedSGD, {"momentum": 0.9, "dampening": "x"}, TypeError, "dampening must be a number, got 'x': "),
    (FusedShardedSGD, {"momentum": 0.9, "nesterov": "x"}, ValueError, "nesterov must be True or False, got 'x'"),
    (FusedShardedLion, {"betas": None}, TypeError, "betas must be two numbers, got None: "),
    (FusedShardedLion, {"betas": ("a", 0.9)}, TypeError, r"betas\[0\] must be a number, got 'a': "),
    (FusedShardedLion, {"maximize": "x"}, ValueError, "maximize must be True or False, got 'x'"),
]


@pytest.mark.parametrize(("make", "options", "kind", "message"), OF_UPDATE, ids=str)
def test_what_is_no_number_or_no_switch_is_refused_by_name_in_groups_too(
    make: Any, options: dict[str, Any], kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        make([weight()], **options)
    with pytest.raises(kind, match=message):
        make([{"params": [weight()], **options}])
    optimizer = make([weight()])
    with pytest.raises(kind, match=message):
        optimizer.add_param_group({"params": [weight()], **options})
    assert len(optimizer.param_groups) == 1


def test_a_model_is_no_option_of_no_sync() -> None:
    """DDP's and Accelerate's are called with it, or on it."""
    with pytest.raises(TypeError, match="takes 1 positional argument but 2 were given"):
        FusedShardedAdam([weight()]).no_sync(nn.Linear(2, 2))  # type: ignore[misc]


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("stage", 1),
        ("reduce_dtype", torch.bfloat16),
        ("state_dtype", "8bit"),
        ("master_weights", None),
        ("bucket_cap_mb", 1),
        ("capturable", True),
    ],
    ids=str,
)
def test_options_of_the_whole_optimizer_are_refused_in_a_group(name: str, value: Any) -> None:
    message = f"{name}={value!r} in a param group would have no effect.*pass {name} to its constructor"
    with pytest.raises(ValueError, match=message):
        FusedShardedAdam([{"params": [weight()], name: value}])
    optimizer = FusedShardedAdam([weight()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [weight()], name: value})
    assert len(optimizer.param_groups) == 1


def test_groups_of_torch_s_adamw_are_taken() -> None:
    """They have capturable=False, as every zerox optimizer on the CPU, and flags that mean nothing here."""
    optimizer = FusedShardedAdam(torch.optim.AdamW([weight()], lr=0.5).param_groups)
    assert optimizer.param_groups[0]["lr"] == 0.5


def test_parameters_are_not_taken_in_under_inference_mode() -> None:
    trainable, added = weight(), weight()
    with torch.inference_mode():
        with pytest.raises(RuntimeError, match=r"can't be built under torch.inference_mode\(\).*build it outside"):
            FusedShardedAdam([trainable])
        poisoned = weight()
    with pytest.raises(ValueError, match=r"'gain' was made under torch.inference_mode\(\)"):
        FusedShardedAdam([("gain", poisoned)])
    optimizer = FusedShardedAdam([trainable])
    with torch.inference_mode(), pytest.raises(RuntimeError, match="build it outside"):
        optimizer.add_param_group({"params": [added]})
    optimizer.add_param_group({"params": [added]})
    (trainable * added).sum().backward()
    optimizer.step()
    assert not torch.equal(trainable, torch.ones(3))
    assert not torch.equal(added, torch.ones(3))


def test_capturable_is_for_cuda_parameters() -> None:
    with pytest.raises(ValueError, match=r"capturable=True does not go with parameters on cpu: .*Move the model"):
        FusedShardedAdam([weight()], capturable=True)


def test_a_remainder_beside_fp16_is_refused() -> None:
    with pytest.raises(ValueError, match=r'"remainder" does not go with float16 parameters: .*"auto", "fp32" or None'):
        FusedShardedAdam([weight(torch.bfloat16), weight(torch.float16)], master_weights="remainder")


@pytest.mark.parametrize(
    ("param", "message"),
    [
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.complex64)), "must be one of .*complex64"),
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.int32), requires_grad=False), "must be one of .*int32"),
        (lambda: nn.Parameter(torch.ones(2, dtype=torch.bool), requires_grad=False), "must be one of .*bool"),
        (lambda: nn.Parameter(torch.ones(2).to(torch.float8_e4m3fn)), "must be one of .*float8_e4m3fn"),
        (lambda: nn.Parameter(torch.ones(2, device="meta")), "meta device"),
        (lambda: nn.Parameter(torch.eye(2).to_sparse()), "dense .*torch.sparse_coo"),
        (lambda: nn.Parameter(torch.eye(2).to_sparse_csr()), "dense .*torch.sparse_csr"),
        (lambda: nn.Parameter(torch.ones(2).to_mkldnn()), "dense .*torch._mkldnn"),
        (lambda: nn.Parameter(quantized(), requires_grad=False), "dense .*quantized"),
        (lambda: nn.Parameter(torch.nested.nested_tensor([torch.ones(2), torch.ones(3)])), "dense .*nested"),
        (lambda: nn.Parameter(TwoTensor(torch.ones(2), torch.ones(2))), "plain tensor, got a TwoTensor"),
        (lambda: nn.LazyLinear(2).weight, "not initialized"),
    ],
)
@pytest.mark.filterwarnings("ignore:.*(Sparse CSR|NestedTensor|nested tensors|quantize)")
def test_parameters_that_can_t_be_sharded_are_named(param: Any, message: str) -> None:
    with pytest.raises(ValueError, match=f"'odd'.*{message}"):
        FusedShardedAdam([("even", weight()), ("odd", param())])


def quantized() -> torch.Tensor:
    return torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.qint8)


def test_parameters_on_two_devices_are_named_with_both() -> None:
    with FakeTensorMode():  # this machine may lack it
        there = nn.Parameter(torch.ones(3, device="cuda"))
    with pytest.raises(ValueError, match="must be on one device: 'here' is on cpu, 'there' on cuda:0"):
        FusedShardedAdam([("here", weight()), ("there", there)])


def test_subclasses_of_tensor_that_have_their_own_values_are_trained() -> None:
    class Named(nn.Parameter):
        pass

    param = Named(torch.ones(3))
    optimizer = FusedShardedAdam([param], lr=0.1, weight_decay=0.0)
    param.sum().backward()
    optimizer.step()
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.9))
    assert type(param) is Named


def shards_of_others(rank: int, world_size: int) -> None:
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, distribute_tensor

    mesh = init_device_mesh("cpu", (world_size,))
    param = nn.Parameter(distribute_tensor(torch.ones(3), mesh, [Replicate()]))
    average = "ranks .* of it average their gradients .* pass the data-parallel axis"
    with pytest.raises(ValueError, match=f"'odd' is a DTensor on axis 0 of its mesh of ranks .*, and {average}"):
        FusedShardedAdam([("odd", param)])


def test_parameters_that_another_library_shards_are_refused() -> None:
    run_ranks(shards_of_others, 2)


def wrong_group(rank: int, world_size: int) -> None:
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("dp", "tp"))
    with pytest.raises(ValueError, match=r"has an axis 'tp': pass the data-parallel axes only, as mesh\[\"dp\"\]"):
        FusedShardedAdam([weight()], process_group=mesh)
    with pytest.raises(ValueError, match="process_group must be"):
        FusedShardedAdam([weight()], process_group="dp")  # type: ignore[arg-type]
    other = [dist.new_group([0]), dist.new_group([1])][1 - rank]
    with pytest.raises(ValueError, match="process_group must be a ProcessGroup this process is in, got"):
        FusedShardedAdam([weight()], process_group=other)
    param = nn.Parameter(torch.full((3,), float(rank)))
    FusedShardedAdam([param], process_group=mesh["dp"])
    assert torch.equal(param, torch.zeros(3)), "the values are those of the group's rank 0"


def mesh_without_rank_1(rank: int, world_size: int) -> None:
    mesh = DeviceMesh("cpu", [0])
    if rank == 1:
        with pytest.raises(ValueError, match="process_group: this process is not in"):
            FusedShardedAdam([weight()], process_group=mesh)


def test_a_mesh_must_have_this_rank() -> None:
    run_ranks(mesh_without_rank_1, 2)


def test_a_group_must_be_one_dimension_of_ranks_that_this_one_is_in() -> None:
    run_ranks(wrong_group, 2)


def test_a_backend_that_can_t_move_the_parameters_is_named() -> None:
    store = FakeStore()
    dist.init_process_group("fake", store=store, rank=0, world_size=2)
    try:
        with pytest.raises(
            ValueError, match="process_group: its backend is fake, and tensors on cpu need nccl or gloo"
        ):
            FusedShardedAdam([weight()])
    finally:
        dist.destroy_process_group()


def test_options_and_params_are_checked_before_anything_changes() -> None:
    param = weight()
    storage = param.data_ptr()
    with pytest.raises(ValueError, match="stage"):
        FusedShardedAdam([param], stage=7)
    assert param.data_ptr() == storage
