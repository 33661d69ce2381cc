"""What can't be initialised is named before anything is made; what an init forgets, afterwards."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tests.meta.rig import on_meta, reset
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ShardedOptimizer


class Odd(nn.Module):
    """No way to initialise it."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 3)
        self.weight = nn.Parameter(torch.ones(5))


class Buffers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("angles", torch.arange(4.0), persistent=False)
        self.linear = nn.Linear(3, 3)


class Hidden(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table = torch.arange(4.0)
        self.linear = nn.Linear(3, 3)


class Mixed(nn.Linear):
    def __init__(self) -> None:
        super().__init__(3, 3)
        self.bias = nn.Parameter(torch.ones(3, device="cpu"))


class Norm(nn.BatchNorm1d):
    """Its buffers alone are on meta."""

    def __init__(self) -> None:
        super().__init__(3)
        self.weight = nn.Parameter(torch.ones(3, device="cpu"))
        self.bias = nn.Parameter(torch.ones(3, device="cpu"))


class Sharing(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one = nn.Linear(3, 3, bias=False)
        self.other = nn.Linear(3, 3, bias=False)
        self.other.weight = nn.Parameter(self.one.weight.detach())


def with_gradient() -> nn.Module:
    model = nn.Linear(3, 3)
    model.weight.grad = torch.empty_like(model.weight)
    return model


def with_node() -> nn.Module:
    model = nn.Linear(3, 3)
    model.node = model.weight.expand_as(model.weight).grad_fn  # type: ignore[assignment]
    return model


def partly_whole() -> nn.Module:
    model = nn.Transformer(4, 2, 1, 1, 8)
    model.decoder.norm = nn.LayerNorm(4, device="cpu")
    return model


NAMED: dict[str, tuple[Callable[[], nn.Module], str]] = {
    "no way": (Odd, r"Odd has a parameter of shape \(5,\) on the meta device and no reset_parameters\(\): pass init="),
    "a buffer": (Buffers, "Buffers has a buffer 'angles' on the meta device and no reset_parameters"),
    "a plain tensor": (Hidden, "Hidden has a tensor on the meta device as 'table'"),
    "one in memory": (Mixed, r"Mixed has parameters on the meta device beside others that have values"),
    "buffers beside parameters": (Norm, "Norm has a buffer 'running_mean' on the meta device beside parameters that"),
    "shared memory": (Sharing, "'one.weight' and 'other.weight' on the meta device share memory"),
    "a gradient": (with_gradient, "parameter 'weight' is on the meta device and has a gradient"),
    "a node": (with_node, "parameter 'weight' is on the meta device and has a node in autograd's graph"),
    "parts in memory": (partly_whole, "Transformer initialises the modules in it, of which only some"),
}


@pytest.mark.parametrize("name", sorted(NAMED))
def test_it_is_named_and_nothing_is_made(name: str) -> None:
    make, said = NAMED[name]
    model = on_meta(make)
    before = {name: param.is_meta for name, param in model.named_parameters()}
    with pytest.raises(ValueError, match=said):
        FusedShardedAdam(model.named_parameters(), stage=3, model=model)
    assert {name: param.is_meta for name, param in model.named_parameters()} == before


def test_without_model_it_is_named() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises(
        ValueError, match=r"'weight' is on the meta device: pass the model that has it to the constructor as model="
    ):
        FusedShardedAdam(model.named_parameters(), stage=3)
    with pytest.raises(ValueError, match="parameter 'weight' is not in model: pass the model that has all"):
        FusedShardedAdam(model.named_parameters(), model=nn.Linear(3, 3))


def test_a_model_that_has_a_part_of_the_parameters_is_refused() -> None:
    """save_weights() would write that part."""
    model = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2))
    with pytest.raises(ValueError, match=r"parameter '1\.weight' is not in model: pass the model that has all"):
        FusedShardedAdam(model.named_parameters(), model=model[0])


def test_a_parameter_of_the_model_that_was_not_given_is_named() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises(ValueError, match="parameter 'bias' of the model is on the meta device, and the optimizer was"):
        FusedShardedAdam([("weight", model.weight)], model=model)


def test_arguments_that_mean_nothing() -> None:
    whole, model = nn.Linear(3, 3), on_meta(lambda: nn.Linear(3, 3))
    with pytest.raises(ValueError, match="init is for parameters on the meta device, and none is there"):
        FusedShardedAdam(whole.named_parameters(), model=whole, init=reset)
    with pytest.raises(TypeError, match="init must be a function of a module or None, got str"):
        FusedShardedAdam(model.named_parameters(), model=model, init="normal")  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"model must be a torch\.nn\.Module or None, got list"):
        FusedShardedAdam(model.named_parameters(), model=[model])  # type: ignore[arg-type]
    FusedShardedAdam(whole.named_parameters(), model=whole).step()


def test_the_other_optimizers_take_it_too() -> None:
    model = on_meta(lambda: nn.Linear(3, 3))
    optimizer = ShardedOptimizer(model.named_parameters(), torch.optim.SGD, lr=0.1, stage=3, model=model)
    model(torch.ones(1, 3)).sum().backward()
    optimizer.step()


# ---- what init forgets


def forgets(rank: int, world_size: int, stage: int, case: str) -> str:
    def init(module: nn.Module) -> None:
        if case == "a parameter" and isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)
        elif case == "some elements" and isinstance(module, nn.Linear):
            nn.init.ones_(module.bias)
            module.weight[1:].fill_(1)
        elif case == "a buffer" and isinstance(module, nn.BatchNorm1d):
            nn.init.ones_(module.weight)
            nn.init.ones_(module.bias)
            module.running_var.fill_(1)  # type: ignore[union-attr]
            module.num_batches_tracked.fill_(-1)  # type: ignore[union-attr,operator]
        elif case == "a counter" and isinstance(module, nn.BatchNorm1d):
            module.reset_running_stats = lambda: None  # type: ignore[method-assign]
            module.reset_parameters()
            module.running_mean.zero_()  # type: ignore[union-attr]
            module.running_var.fill_(1)  # type: ignore[union-attr]
        else:
            reset(module)

    model = on_meta(lambda: nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50)))
    with pytest.raises(ValueError, match="was on the meta device, and has elements to which nothing gave") as raised:
        FusedShardedAdam(model.named_parameters(), stage=stage, model=model, init=init)
    if dist.is_initialized():
        dist.barrier()
    return str(raised.value)


FORGOTTEN = {
    "a parameter": "'0.bias'",
    "some elements": "'0.weight'",
    "a buffer": "'1.running_mean'",
    "a counter": "'1.num_batches_tracked'",
}


@pytest.mark.parametrize("stage", [2, 3])
@pytest.mark.parametrize("case", sorted(FORGOTTEN))
def test_memory_that_init_leaves_without_values_is_named(stage: int, case: str) -> None:
    for said in run_ranks(forgets, 2, stage, case):
        assert f"{FORGOTTEN[case]} was on the meta device" in said


INTEGERS = {
    torch.int64: [-1, 0, 2**62, -(2**63)],
    torch.int32: [-1, 7],
    torch.int16: [-1] * 3,
    torch.int8: [*range(-128, 128)],
    torch.uint8: [*range(256)],
    torch.bool: [True, True],
}


class Whole(nn.Module):
    """An integer buffer of each kind beside a floating-point one."""

    def __init__(self) -> None:
        super().__init__()
        for dtype, values in INTEGERS.items():
            self.register_buffer(f"of_{str(dtype)[6:]}", torch.empty(len(values), dtype=dtype))
        self.register_buffer("none", torch.empty(0, dtype=torch.int32))
        self.register_buffer("angles", torch.empty(3))


def write_by_data(rank: int, world_size: int, left: str) -> str:
    def init(module: nn.Module) -> None:
        if not isinstance(module, Whole):
            reset(module)
            return
        for dtype, values in INTEGERS.items():
            if (name := f"of_{str(dtype)[6:]}") != left:
                module.get_buffer(name).data.copy_(torch.tensor(values, dtype=dtype))
        module.angles.data[: 2 if left == "angles" else 3] = 1.0  # type: ignore[index]

    model = on_meta(lambda: nn.Sequential(nn.Linear(30, 50), Whole()))
    try:
        FusedShardedAdam(model.named_parameters(), model=model, init=init)
    except ValueError as error:
        return str(error)
    for dtype, values in INTEGERS.items():
        assert model[1].get_buffer(f"of_{str(dtype)[6:]}").tolist() == values  # type: ignore[index]
    return ""


@pytest.mark.parametrize("left", ["", "angles", *(f"of_{str(dtype)[6:]}" for dtype in INTEGERS)])
def test_integers_of_any_value_are_values_also_where_data_was_written(left: str) -> None:
    """-1 has the bits of a NaN."""
    for said in run_ranks(write_by_data, 2, left):
        assert said.startswith(f"zerox: buffer '1.{left}' was on the meta device") if left else not said, said


class Namesakes(nn.Module):
    """The optimizer is given the parameters of ``inner`` by their names in that: one is a buffer's of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.LayerNorm(9)
        self.register_buffer("weight", torch.empty(3, dtype=torch.int64))


def forgets_a_namesake(rank: int, world_size: int, case: str) -> str:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.LayerNorm):
            nn.init.zeros_(module.bias)
            if case == "differs":
                nn.init.constant_(module.weight, rank)
        else:
            module.weight.fill_(5)  # type: ignore[union-attr,operator]

    model = on_meta(Namesakes)
    with pytest.raises((ValueError, RuntimeError)) as raised:
        FusedShardedAdam(model.inner.named_parameters(), model=model, init=init)  # type: ignore[union-attr]
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "text"),
    [("forgets", "zerox: parameter 'weight' was on the meta device"), ("differs", "parameter 'weight' with first val")],
)
def test_a_parameter_with_a_buffers_name_is_looked_at(case: str, text: str) -> None:
    for said in run_ranks(forgets_a_namesake, 2, case):
        assert text in said


def test_a_parent_may_give_them_later() -> None:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Sequential):
            for each in module:
                each.reset_parameters()  # type: ignore[operator]

    model = on_meta(lambda: nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50)))
    FusedShardedAdam(model.named_parameters(), model=model, init=init)


def test_after_an_init_that_raised_the_next_one_begins_anew() -> None:
    """Also with what has had its turn, in a bucket that had not all its values."""

    def fails(module: nn.Module) -> None:
        reset(module)
        if isinstance(module, nn.BatchNorm1d):
            raise OSError("no such table")

    model = on_meta(lambda: nn.Sequential(nn.Linear(30, 50), nn.BatchNorm1d(50), nn.Linear(50, 3)))
    with pytest.raises(OSError, match="no such table"):
        FusedShardedAdam(model.named_parameters(), model=model, init=fails)
    assert all(param.is_meta for param in model.parameters())
    assert all(buffer.is_meta for buffer in model.buffers())
    FusedShardedAdam(model.named_parameters(), model=model)
    assert not any(each.isnan().any() for each in (*model.parameters(), *model.buffers()))


# ---- one rank alone


def disagrees(rank: int, world_size: int, case: str) -> str:
    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 3))

    model = make() if case == "memory" and rank == 1 else on_meta(make)

    def draws(module: nn.Module) -> None:
        for param in module.parameters(recurse=False):
            nn.init.normal_(param)

    def fails(module: nn.Module) -> None:
        if rank == 1 and isinstance(module, nn.Linear) and module.out_features == 3:
            raise OSError("no such table")
        reset(module)

    options = {"memory": {}, "init": {"init": draws} if rank == 1 else {}, "raises": {"init": fails}}[case]
    with pytest.raises((ValueError, RuntimeError, OSError)) as raised:
        FusedShardedAdam(model.named_parameters(), stage=3, model=model, **options)
    return str(raised.value)


@pytest.mark.parametrize(
    ("case", "said"),
    [
        ("memory", "on meta"),
        ("init", "first values"),
        ("raises", "no such table"),
    ],
)
def test_ranks_that_disagree_are_told(case: str, said: str) -> None:
    for each in run_ranks(disagrees, 2, case):
        assert said in each
