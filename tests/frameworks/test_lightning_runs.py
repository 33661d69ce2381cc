"""Runs under Lightning that stop, go on, average weights, are repeated, or are set up wrongly."""

from __future__ import annotations

import gc
import os
import re
import signal
import subprocess
import sys
import warnings
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint, WeightAveraging
from torch import Tensor
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.optim.swa_utils import get_ema_avg_fn

from tests.frameworks.lightning_rig import Module, data, difference, run, trainer, values
from tests.mortal_ranks import FORKSERVER
from zerox import FusedShardedAdam
from zerox.integrations.lightning import ZeroxStrategy

STAGES = (1, 2, 3)
TOLERANCE = 2e-7


# ---- checkpoints


def epochs(
    rank: int, world_size: int, strategy: str, folder: Path, num_epochs: int, ckpt: str | None, precision: str
) -> list[Tensor]:
    """Each epoch leaves a checkpoint, ``epoch=0.ckpt`` and so on."""
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    options = {"callbacks": [keep], "enable_checkpointing": True, "max_epochs": num_epochs, "precision": precision}
    module = Module()
    trainer(rank, world_size, strategy, **options).fit(module, data(), ckpt_path=ckpt)
    return values(module)


@pytest.mark.parametrize("precision", ["32-true", "bf16-true"])
@pytest.mark.parametrize("stage", STAGES)
def test_a_run_goes_on_bit_for_bit(stage: int, precision: str, tmp_path: Path) -> None:
    strategy = f"zerox_stage_{stage}"
    whole = run(epochs, 2, strategy, tmp_path / "whole", 2, None, precision)
    again = run(epochs, 2, strategy, tmp_path / "again", 2, str(tmp_path / "whole" / "epoch=0.ckpt"), precision)
    for one, other in zip(whole, again, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize(("saved", "resumed"), [(2, 1), (1, 2), (2, 0), (2, 3)])
def test_any_ranks_and_stages_and_ddp_go_on_from_any_other(saved: int, resumed: int, tmp_path: Path) -> None:
    """Also from and to DDP with AdamW, whose checkpoints have the same form."""
    strategies = ["ddp", *(f"zerox_stage_{stage}" for stage in STAGES)]
    for strategy in strategies:
        run(epochs, saved, strategy, tmp_path / strategy, 1, None, "32-true")
    reference: list[Tensor] = []
    for before in strategies:
        path = str(tmp_path / before / "epoch=0.ckpt")
        for after in strategies if before == "ddp" else ["ddp", "zerox_stage_2"]:
            found = run(epochs, resumed, after, tmp_path / "after" / before / after, 2, path, "32-true")
            reference = reference or found[0]
            assert all(difference(each, reference) <= TOLERANCE for each in found), (before, after)


# ---- weights that are averaged, and what comes after a fit


class Validated(Module):
    def __init__(self, norm: bool = False) -> None:
        super().__init__(norm=norm)
        self.seen: list[float] = []

    def validation_step(self, batch: Any, _: int) -> None:
        loss = self.loss(batch)
        self.seen.append(float(loss))
        self.log("val_loss", loss, sync_dist=True)


def averaged(rank: int, world_size: int, strategy: str, folder: Path) -> tuple[list[Tensor], list[float]]:
    module = Validated(norm=True)
    average = WeightAveraging(avg_fn=get_ema_avg_fn(0.7))
    fitted = trainer(rank, world_size, strategy, callbacks=[average], max_epochs=2)
    fitted.fit(module, data(96, 16), data(64, 16))
    fitted.save_checkpoint(folder / f"{strategy}.ckpt")
    return values(module), module.seen


@pytest.mark.parametrize("world_size", [1, 2])
def test_averaged_weights_are_validated_and_saved(world_size: int, tmp_path: Path) -> None:
    """Buffers too, which each rank takes from rank 0 as under DDP."""
    ddp = run(averaged, world_size, "ddp", tmp_path)
    for stage in STAGES:
        ours = run(averaged, world_size, f"zerox_stage_{stage}", tmp_path)
        for (params, seen), (others, seen_by_ddp) in zip(ours, ddp, strict=True):
            assert difference(params, others) <= TOLERANCE
            assert seen == pytest.approx(seen_by_ddp, abs=1e-5)
        saved = [torch.load(tmp_path / f"{each}.ckpt", weights_only=True) for each in ("ddp", f"zerox_stage_{stage}")]
        one, other = (list(each["state_dict"].values()) for each in saved)
        state = saved[1]["optimizer_states"][0]["state"]
        assert [state[index]["exp_avg"].shape for index in sorted(state)] == [each.shape for each in ddp[0][0]]
        assert difference([t.float() for t in one], [t.float() for t in other]) <= TOLERANCE


def repeated(rank: int, world_size: int, strategy: str) -> tuple[list[Tensor], float]:
    module = Validated()
    same = trainer(rank, world_size, strategy)
    same.fit(module, data())
    before = same.validate(module, data(), verbose=False)[0]["val_loss"]
    same.fit_loop.max_epochs = 2
    same.fit(module, data())
    trainer(rank, world_size, strategy).fit(module, data())
    if rank == 0 and world_size > 1:
        assert torch.isfinite(torch.from_numpy(module.net[0].weight.detach().numpy())).all()
    return values(module), before


@pytest.mark.parametrize("world_size", [1, 2])
def test_fit_may_be_repeated_and_weights_are_whole_afterwards(world_size: int) -> None:
    ddp = run(repeated, world_size, "ddp")
    for stage in STAGES:
        for (params, loss), (others, loss_of_ddp) in zip(
            run(repeated, world_size, f"zerox_stage_{stage}"), ddp, strict=True
        ):
            assert difference(params, others) <= TOLERANCE
            assert loss == pytest.approx(loss_of_ddp, abs=1e-5)


def forgotten(rank: int, world_size: int) -> bool:
    module = Module()
    fitted = trainer(rank, world_size, "zerox_stage_2")
    fitted.fit(module, data())
    gone = [weakref.ref(module), weakref.ref(fitted.optimizers[0])]
    del module, fitted
    gc.collect()
    return all(each() is None for each in gone)


def saves_after(rank: int, world_size: int, call: str, folder: Path) -> list[Any]:
    """What a Trainer's checkpoints hold, or the error, after another one had the same module."""
    module, first = Validated(), trainer(rank, world_size, "zerox")
    first.fit(module, data())
    other = trainer(rank, world_size, "zerox")
    getattr(other, call)(module, data())
    found: list[Any] = []
    for each, weights_only in ((first, False), (first, True), (other, False)):
        file = folder / f"{len(found)}.ckpt"
        try:
            each.save_checkpoint(file, weights_only=weights_only)
        except RuntimeError as error:
            found.append(str(error))
        else:
            states = torch.load(file, weights_only=False).get("optimizer_states")
            found.append(states and [len(state["state"]) for state in states])
    first.fit(module, data())  # begins anew
    first.save_checkpoint(again := folder / "again.ckpt", weights_only=False)
    return [*found, len(torch.load(again, weights_only=False)["optimizer_states"])]


@pytest.mark.parametrize("world_size", [0, 2])
@pytest.mark.parametrize("call", ["fit", "validate"])
def test_no_checkpoint_lacks_state_that_another_fit_has_ended(call: str, world_size: int, tmp_path: Path) -> None:
    num_params = len(list(Module().parameters()))
    for kept, weights, others, again in run(saves_after, world_size, call, tmp_path):
        if call == "fit":
            assert re.search("another Trainer began fit.*save before that, with the other Trainer", kept)
            assert others == [num_params]
        else:
            assert kept == [num_params]
        assert weights is None
        assert again == 1


def test_nothing_keeps_a_module_and_its_optimizer_alive() -> None:
    assert all(run(forgotten, 2))


def fit_and_part(pipe: Any, rank: int, folder: Path) -> None:
    """Rank 1 ends after the fit. Rank 0 then reads the model, and lets go of all of it."""
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    module = Module()
    strategy = ZeroxStrategy(stage=3, bucket_cap_mb=1e-6, resident_mb=2e-3)  # some parameters are always released
    fitted = trainer(rank, 2, strategy)
    fitted.fit(module, data())
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    pipe.recv()
    params = [torch.from_numpy(param.detach().numpy().copy()) for param in module.parameters()]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        del fitted, strategy, module
        gc.collect()
    pipe.send(all(bool(each.isfinite().all()) for each in params))


def test_after_a_fit_no_rank_needs_another_one(tmp_path: Path) -> None:
    pipes, processes = [], []
    for rank in range(2):
        here, there = FORKSERVER.Pipe()
        process = FORKSERVER.Process(target=fit_and_part, args=(there, rank, tmp_path), daemon=True)
        process.start()
        pipes.append(here)
        processes.append(process)
    try:
        processes[1].join(60)
        assert not processes[1].is_alive()
        pipes[0].send("rank 1 is gone")
        assert pipes[0].poll(60), "rank 0 waits for rank 1"
        assert pipes[0].recv() is True
    finally:
        for process in processes:
            process.kill()
            process.join()


# ---- set up wrongly


def fit_with(rank: int, world_size: int, make: Any, strategy_options: dict[str, Any]) -> str:
    module = Module(make)
    try:
        trainer(rank, world_size, ZeroxStrategy(**strategy_options)).fit(module, data())
    except Exception as error:
        return f"{type(error).__name__}: {error}"
    return "trained"


def own(params: Any) -> FusedShardedAdam:
    return FusedShardedAdam(params, lr=0.01, stage=3)


def lbfgs(params: Any) -> torch.optim.Optimizer:
    return torch.optim.LBFGS(params)


class NeedsMore(torch.optim.SGD):
    def __init__(self, params: Any, secret: float) -> None:
        super().__init__(params, lr=secret)


def needs_more(params: Any) -> torch.optim.Optimizer:
    return NeedsMore(params, 0.1)


def redundancy(params: Any) -> torch.optim.Optimizer:
    return ZeroRedundancyOptimizer(params, torch.optim.AdamW, lr=0.01)


WRONG: dict[str, tuple[Any, dict[str, Any], str]] = {
    "an optimizer of zerox": (own, {}, "trained"),
    "and options": (own, {"stage": 2}, "the zerox strategy was given stage, which is for optimizers of torch"),
    "no elementwise class": (lbfgs, {}, "LBFGS"),
    "a class whose arguments are not known": (needs_more, {}, "NeedsMore does not keep its argument 'secret'"),
    "one that shards by itself": (redundancy, {}, "shards the state of AdamW over the ranks itself.*build AdamW"),
    "an option that does not fit": (None, {"state_dtype": torch.int8}, "state_dtype"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_does_not_go_together_is_refused_on_all_ranks(case: str) -> None:
    make, options, expected = WRONG[case]
    said = run(fit_with, 2, make, options)
    assert all(re.search(expected, each) for each in said), said


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"find_unused_parameters": True}, "takes no find_unused_parameters: a parameter without a gradient needs no"),
        ({"ddp_comm_hook": print}, "takes no ddp_comm_hook: reduce_dtype is the dtype"),
        ({"bucket_cap": 3}, "has no option 'bucket_cap'; it has norm_group, stage, bucket_cap_mb, reduce_dtype"),
    ],
)
def test_options_that_there_are_not_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(TypeError, match=message):
        ZeroxStrategy(**options)


HIDDEN = """
from importlib import metadata
def version(name): {}
metadata.version = version
"""
OTHERS = {
    HIDDEN.format("raise metadata.PackageNotFoundError(name)"): "zerox.integrations.lightning needs lightning 2.6 or "
    "newer, and it is not installed: pip install 'lightning>=2.6'",
    HIDDEN.format("return '1.9.5'"): "needs lightning 2.6 or newer, and 1.9.5 is installed",
    "from lightning.pytorch.strategies import DDPStrategy\ndel DDPStrategy.configure_ddp": "zerox: DDPStrategy of "
    "lightning 2.6.6 has no configure_ddp, which zerox.integrations.lightning needs: pip install 'lightning==2.6.6'",
}


@pytest.mark.parametrize("before", OTHERS, ids=["missing", "too old", "changed"])
def test_a_framework_that_is_missing_or_has_changed_says_so_in_one_line(before: str) -> None:
    code = f"{before}\ntry:\n import zerox.integrations.lightning\nexcept Exception as error: print(error)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert len(done.stdout.splitlines()) == 1, done.stdout + done.stderr
    assert OTHERS[before] in done.stdout
