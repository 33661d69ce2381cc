"""A loop under Fabric trains with ``strategy="zerox"`` as with ``strategy="ddp"``, in every stage and on all ranks."""

from __future__ import annotations

import copy
import io
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.fabric import Fabric
from lightning.fabric.plugins import MixedPrecision
from torch import Tensor, nn

from tests.frameworks.lightning_rig import Ranks, as_on_rank_0, difference, run
from zerox import FusedShardedAdam, FusedShardedSGD, GradScaler
from zerox.integrations.lightning import ZeroxFabricStrategy

STAGES = (1, 2, 3)
TOLERANCE = 2e-7
STEPS = 6


def make_fabric(rank: int, world_size: int, strategy: Any, **options: Any) -> Fabric:
    plugins = [*options.pop("plugins", []), *([Ranks(rank, world_size)] if world_size else [])]
    fabric = Fabric(accelerator="cpu", devices=max(world_size, 1), strategy=strategy, plugins=plugins, **options)
    fabric.launch()
    return fabric


def make_model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(6, 16, bias=False), nn.BatchNorm1d(16), nn.Tanh(), nn.Linear(16, 1))


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)


def loss_of(model: nn.Module, rank: int, step: int) -> Tensor:
    torch.manual_seed(1000 * step + rank)
    x = torch.randn(16, 6)
    return (model(x) - x.sum(1, keepdim=True)).square().mean()


def state_of(*models: nn.Module) -> list[Tensor]:
    return [each.detach().clone().float() for model in models for each in model.state_dict().values()]


# ---- loops: each trains, and returns what to compare


def plain(fabric: Fabric, rank: int) -> list[Tensor]:
    model, optimizer = fabric.setup(*[(model := make_model(rank)), adamw(model)])
    for step in range(STEPS):
        optimizer.zero_grad()
        fabric.backward(loss_of(model, rank, step))
        optimizer.step()
    return state_of(model)


def clipped(fabric: Fabric, rank: int) -> list[Tensor]:
    model, optimizer = fabric.setup(*[(model := make_model()), adamw(model)])
    norms = []
    for step in range(STEPS):
        fabric.backward(loss_of(model, rank, step))
        norms.append(fabric.clip_gradients(model, optimizer, max_norm=0.1))
        optimizer.step()
        optimizer.zero_grad()
    return [*state_of(model), torch.stack(norms).detach() / 100]  # relative differences count


def clipped_by_value(fabric: Fabric, rank: int) -> list[Tensor]:
    model, optimizer = fabric.setup(*[(model := make_model()), adamw(model)])
    for step in range(STEPS):
        fabric.backward(loss_of(model, rank, step))
        fabric.clip_gradients(model, optimizer, clip_val=0.01)
        optimizer.step()
        optimizer.zero_grad(set_to_none=False)
    return state_of(model)


def accumulated(fabric: Fabric, rank: int) -> list[Tensor]:
    model, optimizer = fabric.setup(*[(model := make_model()), adamw(model)])
    for step in range(STEPS * 2):
        with fabric.no_backward_sync(model, enabled=step % 3 != 2):
            fabric.backward(loss_of(model, rank, step) / 3)
        if step % 3 == 2:
            optimizer.step()
            optimizer.zero_grad()
    if isinstance(optimizer, FusedShardedAdam) and fabric.world_size > 1:
        inside = optimizer.inside
        assert inside.manager.flights.num_launched == STEPS * 2 // 3 * len(inside.buckets), "others were sent too"
    return state_of(model)


def scheduled(fabric: Fabric, rank: int) -> list[Tensor]:
    """The scheduler was built with what setup() got."""
    model = make_model()
    raw = adamw(model)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(raw, 0.7)
    model, optimizer = fabric.setup(model, raw)
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # torch warns if step() has not been called before, or is another one
        for step in range(STEPS):
            fabric.backward(loss_of(model, rank, step))
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
    assert optimizer.param_groups[0]["lr"] == pytest.approx(0.01 * 0.7**STEPS)
    return state_of(model)


def two_models(fabric: Fabric, rank: int) -> list[Tensor]:
    """Set up one after the other; accumulation in one does not hold back the other."""
    one = fabric.setup_module(make_model())
    of_one = fabric.setup_optimizers(torch.optim.SGD(one.parameters(), lr=0.1, momentum=0.9))
    other, of_other = fabric.setup(*[(model := make_model(1)), adamw(model)])
    for step in range(STEPS):
        with fabric.no_backward_sync(one, enabled=step % 2 == 0):
            fabric.backward(loss_of(one, rank, step))
            fabric.backward(loss_of(other, rank, step))
        of_other.step()
        of_other.zero_grad()
        if step % 2:
            of_one.step()
            of_one.zero_grad()
    return state_of(one, other)


def closed(fabric: Fabric, rank: int) -> list[Tensor]:
    model, optimizer = fabric.setup(*[(model := make_model()), adamw(model)])
    for step in range(STEPS):

        def closure(step: int = step) -> Tensor:
            optimizer.zero_grad()
            loss = loss_of(model, rank, step)
            fabric.backward(loss)
            return loss

        assert optimizer.step(closure) > 0
    return state_of(model)


def built_before(rank: int, world_size: int, stage: int) -> list[bool]:
    """Rank 0 writes between the optimizer and setup_module(), and masters follow: a step without a rate keeps it."""
    fabric = make_fabric(rank, world_size, "zerox")
    model = nn.Linear(6, 4, dtype=torch.float16)
    ours = FusedShardedAdam(model.parameters(), lr=0.0, stage=stage)
    with torch.no_grad():
        for param in model.parameters() if rank == 0 else ():
            param.fill_(2.0)
    model = fabric.setup_module(model)
    optimizer = fabric.setup_optimizers(ours)
    fabric.backward(model(torch.ones(1, 6, dtype=torch.float16)).sum())
    optimizer.step()
    with ours.whole():
        return [bool((param == 2.0).all()) for param in model.parameters()]


@pytest.mark.parametrize("stage", [1, 2])  # in stage 3 all ranks write alike
def test_an_optimizer_that_was_built_before_its_module_was_set_up_follows(stage: int) -> None:
    assert run(built_before, 2, stage) == [[True, True]] * 2


LOOPS = {
    "plain": (plain, {}),
    "clip": (clipped, {}),
    "clip by value": (clipped_by_value, {}),
    "accumulate": (accumulated, {}),
    "scheduler": (scheduled, {}),
    "two models": (two_models, {}),
    "closure": (closed, {}),
    "bf16-mixed": (clipped, {"precision": "bf16-mixed"}),
    "16-mixed": (clipped, {"scale": 2.0**4}),
}


def train(rank: int, world_size: int, case: str, strategy: str) -> tuple[list[Tensor], bool]:
    loop, options = LOOPS[case]
    options = dict(options)
    if scale := options.pop("scale", None):
        options["plugins"] = [MixedPrecision("16-mixed", "cpu", torch.amp.GradScaler("cpu", init_scale=scale))]
    found = loop(make_fabric(rank, world_size, strategy, **options), rank)
    return found, as_on_rank_0(found[:1])


def train_all(rank: int, world_size: int, case: str) -> list[tuple[list[Tensor], bool]]:
    return [train(rank, world_size, case, name) for name in ("ddp", *(f"zerox_stage_{stage}" for stage in STAGES))]


@pytest.mark.parametrize("world_size", [0, 1, 2])
@pytest.mark.parametrize("case", LOOPS)
def test_a_loop_trains_as_with_ddp_and_torch_s_optimizer(case: str, world_size: int) -> None:
    for ddp, *ours in run(train_all, world_size, case):
        for stage, (found, same) in zip(STAGES, ours, strict=True):
            assert difference(found, ddp[0]) <= (TOLERANCE if "16" not in case else 2e-6), stage
            assert same


# ---- an overflow, and checkpoints


def overflows(rank: int, world_size: int, strategy: str) -> tuple[list[Tensor], float]:
    """Of one rank's gradients, in one step: all ranks skip it."""
    scaler = (
        GradScaler("cpu", init_scale=2.0**4) if "zerox" in strategy else torch.amp.GradScaler("cpu", init_scale=2.0**4)
    )
    fabric = make_fabric(rank, world_size, strategy, plugins=[MixedPrecision("16-mixed", "cpu", scaler)])
    model, optimizer = fabric.setup(*[(model := make_model()), adamw(model)])
    for step in range(STEPS):
        scale = float("inf") if rank == world_size - 1 and step == 2 else 1.0
        fabric.backward(loss_of(model, rank, step) * scale)
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)[:1], scaler.get_scale()


@pytest.mark.parametrize("world_size", [1, 2])
def test_an_overflow_on_one_rank_skips_the_step_on_all(world_size: int) -> None:
    ddp = run(overflows, world_size, "ddp")
    for stage in STAGES:
        for (params, scale), (others, scale_of_ddp) in zip(
            run(overflows, world_size, f"zerox_stage_{stage}"), ddp, strict=True
        ):
            assert difference(params, others) <= 2e-6
            assert scale == scale_of_ddp == 2.0**3


def goes_on(rank: int, world_size: int, strategy: str, path: Path | None, precision: str, keep: Path | None) -> Any:
    """Half of the steps and save, or load and the other half; without a path all of them."""
    fabric = make_fabric(rank, world_size, strategy, precision=precision)
    model = make_model()
    model, optimizer = fabric.setup(model, adamw(model))
    state = {"optimizer": optimizer, "model": model, "step": 0}  # in the order that is harder to load
    if path is not None:
        assert fabric.load(path, state) == {}
    for step in range(state["step"], STEPS):
        if keep is not None and step == STEPS // 2:
            fabric.save(keep, {**state, "step": step})
        fabric.backward(loss_of(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    return state_of(model)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_loop_goes_on_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    path, strategy = tmp_path / "half.ckpt", f"zerox_stage_{stage}"
    whole = run(goes_on, 2, strategy, None, precision, path)
    for one, other in zip(whole, run(goes_on, 2, strategy, path, precision, None), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2), (2, 3)])
def test_other_ranks_and_ddp_go_on_from_a_checkpoint_and_back(saved: int, resumed: int, tmp_path: Path) -> None:
    names = ["ddp", *(f"zerox_stage_{stage}" for stage in STAGES)]
    for name in names:
        run(goes_on, saved, name, None, "32-true", tmp_path / name)
    reference = run(goes_on, resumed, "ddp", tmp_path / "ddp", "32-true", None)
    for before in names:
        for after in names if before == "ddp" else ["ddp", "zerox_stage_3"]:
            found = run(goes_on, resumed, after, tmp_path / before, "32-true", None)
            for one, other in zip(found, reference, strict=True):
                assert difference(one, other) <= TOLERANCE, (before, after)


# ---- what setup() takes


def becomes(_: int, __: int) -> None:
    fabric = make_fabric(0, 1, ZeroxFabricStrategy(stage=2, state_dtype=torch.bfloat16))
    seen: list[Any] = []
    model = make_model()
    raw = torch.optim.AdamW(model.named_parameters(), lr=torch.tensor(0.01), betas=(0.8, 0.9), amsgrad=True)
    lr = raw.param_groups[0]["lr"]
    raw.register_step_post_hook(lambda *_: seen.append("post"))
    module, optimizer = fabric.setup(model, raw)
    assert type(raw) is FusedShardedAdam
    assert raw.param_groups[0]["lr"] is lr
    assert raw.param_groups[0]["param_names"][0] == "0.weight"
    assert raw.defaults["amsgrad"]
    fabric.backward(loss_of(module, 0, 0))
    optimizer.step()
    assert seen == ["post"]
    assert raw.inside.buckets[0].state["exp_avg"].values.dtype is torch.bfloat16
    assert copy.deepcopy(model)(torch.ones(2, 6)).shape == (2, 1)

    other = make_model()
    sgd = torch.optim.SGD([{"params": other[0].parameters(), "lr": 0.5}, {"params": other[3].parameters()}], lr=0.1)
    other(torch.ones(2, 6)).sum().backward()
    sgd.step()
    fabric.setup(other, sgd)
    assert type(sgd) is FusedShardedSGD
    assert [group["lr"] for group in sgd.param_groups] == [0.5, 0.1]

    third = make_model()
    used = adamw(third)
    third(torch.ones(2, 6)).sum().backward()
    used.step()
    moments = {name: used.state[p]["exp_avg"].clone() for name, p in third.named_parameters()}
    used.zero_grad()
    fabric.setup(third, used)
    for name, p in third.named_parameters():
        assert (used.state[p]["exp_avg"] - moments[name].bfloat16()).abs().max() <= moments[name].abs().max() / 100

    broken = torch.optim.AdamW(make_model().parameters(), differentiable=True)
    before = dict(vars(broken))
    with pytest.raises(ValueError, match="differentiable"):
        fabric.setup_optimizers(broken)
    assert type(broken) is torch.optim.AdamW
    assert vars(broken) == before


def test_an_optimizer_of_torch_becomes_zerox_s_with_all_that_it_has() -> None:
    run(becomes, 1)


# ---- one rank alone


def saves_alone(rank: int, world_size: int, strategy: str) -> bool:
    """The others wait in a barrier of Fabric's."""
    fabric = make_fabric(rank, world_size, strategy)
    model = make_model()
    model, optimizer = fabric.setup(model, adamw(model))
    for step in range(2):
        fabric.backward(loss_of(model, rank, step))
        optimizer.step()
        optimizer.zero_grad()
    file = io.BytesIO()
    if fabric.is_global_zero:
        torch.save(optimizer.state_dict(), file)
    fabric.barrier()
    expected = optimizer.optimizer.full_state_dict()
    if rank > 0:
        return True
    found = torch.load(io.BytesIO(file.getvalue()), weights_only=True)
    assert found["param_groups"] == expected["param_groups"]
    for number, state in expected["state"].items():
        for key, value in state.items():
            assert torch.equal(found["state"][number][key], value)
    return True


@pytest.mark.parametrize("stage", STAGES)
def test_rank_0_alone_saves_the_whole_state(stage: int) -> None:
    assert all(run(saves_alone, 2, f"zerox_stage_{stage}"))
