"""What does not go with an adopted accelerator or a Trainer of zerox's is refused, with the way out."""

from __future__ import annotations

import logging
import re
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch
from accelerate import Accelerator
from accelerate.local_sgd import LocalSGD
from accelerate.utils import DistributedDataParallelKwargs, DistributedType
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from transformers import Trainer

import zerox
from tests.frameworks.loops import Case, make_accelerator
from tests.frameworks.trainers import ZeroxTrainer, arguments, make_data, make_model
from tests.hugging_face import accelerators_environment, run_anywhere
from tests.optimizer.models import batch
from tests.optimizer.models import make_model as make_mixed
from tests.pull.shares import with_shares
from zerox import FusedShardedAdam
from zerox.grads.placeholder import ShardedGrad
from zerox.integrations import requirements
from zerox.integrations.accelerate import ZeroxAccelerator, adopt
from zerox.integrations.transformers import ZeroxTrainerMixin
from zerox.integrations.transformers import adopt as adopt_trainer


def adopted() -> ZeroxAccelerator:
    accelerator = make_accelerator(Case(), "zerox")
    assert isinstance(accelerator, ZeroxAccelerator)
    assert adopt(accelerator) is accelerator
    return accelerator


def two_optimizers(accelerator: Accelerator) -> tuple[Any, Any, Any, Any]:
    one, other = nn.Linear(72, 72), nn.Linear(72, 72)
    return accelerator.prepare(one, FusedShardedAdam(one.parameters()), other, FusedShardedAdam(other.parameters()))


def another_optimizer() -> None:
    adopted().prepare(torch.optim.AdamW(nn.Linear(2, 2).parameters()))


def ddp() -> None:
    adopted().prepare(DistributedDataParallel(nn.Linear(2, 2)))


def a_hook() -> None:
    accelerator = Accelerator(cpu=True, kwargs_handlers=[DistributedDataParallelKwargs(comm_hook="fp16")])
    adopt(accelerator).prepare(nn.Linear(2, 2))


def too_late() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.prepare(nn.Linear(2, 2))
    adopt(accelerator)


def another_way_to_train() -> None:
    accelerator = Accelerator(cpu=True)
    with mock.patch.object(Accelerator, "distributed_type", DistributedType.FSDP):
        adopt(accelerator)


def a_group_of_its_own() -> None:
    accelerator = adopted()
    accelerator.prepare(FusedShardedAdam(nn.Linear(2, 2).parameters(), process_group="alone"))


def a_part_of_several() -> None:
    accelerator = adopted()
    one, _, other, _ = two_optimizers(accelerator)
    accelerator.backward(other(one(batch(0, 0))).square().mean())
    accelerator.clip_grad_norm_([one.weight, other.weight], 1.0)


def the_values_of_a_part() -> None:
    accelerator = adopted()
    one, _, _, _ = two_optimizers(accelerator)
    accelerator.backward(one(batch(0, 0)).square().mean())
    accelerator.clip_grad_value_([one.weight], 1.0)


def an_untrained_gradient() -> None:
    accelerator = adopted()
    model = nn.Sequential(nn.Linear(72, 72), nn.Linear(72, 72))
    model, _ = accelerator.prepare(model, FusedShardedAdam(model[1].parameters()))
    accelerator.backward(model(batch(0, 0)).square().mean())
    accelerator.clip_grad_norm_(model.parameters(), 1.0)


def local_sgd() -> None:
    accelerator = adopted()
    model = nn.Linear(2, 2)
    model, _ = accelerator.prepare(model, FusedShardedAdam(model.parameters()))
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2, enabled=False):
        pass  # as scripts have it that may go without
    with LocalSGD(accelerator=accelerator, model=model, local_sgd_steps=2):
        pass


def a_scaler_of_another_kind() -> None:
    accelerator = Accelerator(cpu=True)
    accelerator.scaler = type("Odd", (torch.amp.GradScaler,), {})("cpu")
    adopt(accelerator)


REFUSED: dict[str, tuple[Callable[[], None], str]] = {
    "another optimizer": (another_optimizer, "AdamW is not an optimizer of zerox.*: use FusedShardedAdam"),
    "DDP": (ddp, r"in DistributedDataParallel already: prepare model\.module"),
    "a hook": (a_hook, "the hook fp16 of DistributedDataParallelKwargs is not taken over: .* reduce_dtype="),
    "too late": (too_late, r"adopt\(\) comes before prepare\(\)"),
    "another way to train": (another_way_to_train, "trains as FSDP"),
    "a group of its own": (a_group_of_its_own, "has 2 processes, and the optimizer averages over 1: build it"),
    "a part of several": (a_part_of_several, "one norm over a part of the parameters of several"),
    "the values of a part": (the_values_of_a_part, r"'param 0' \('bias' in the model\) was not passed: pass all"),
    "an untrained gradient": (
        an_untrained_gradient,
        r"'param 0' \('0.weight' in the model\) has a gradient.*freeze it",
    ),
    "LocalSGD": (
        local_sgd,
        "zerox: LocalSGD averages parameters .* in place of gradients.*: leave LocalSGD out, or use",
    ),
    "a scaler of another kind": (a_scaler_of_another_kind, "scaler is a Odd: use zerox.GradScaler"),
}


def refused(rank: int, world_size: int, what: str) -> None:
    with accelerators_environment(rank, world_size):
        function, message = REFUSED[what]
        with pytest.raises(ValueError, match=message):
            function()


@pytest.mark.parametrize("what", REFUSED)
def test_it_is_refused_with_the_way_out(what: str) -> None:
    run_anywhere(refused, 2, what)


def untrained(rank: int, world_size: int) -> None:
    with accelerators_environment(rank, world_size):
        accelerator = adopted()
        model = accelerator.prepare(nn.Linear(72, 72))
        with pytest.warns(UserWarning, match="Linear to train and no optimizer of zerox with its parameters"):
            accelerator.backward(model(batch(0, 0)).square().mean())
        model.eval()
        other, _, _, _ = two_optimizers(accelerator)
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            accelerator.backward(other(batch(0, 0)).square().mean())


def test_a_model_that_nobody_averages_is_told_of() -> None:
    run_anywhere(untrained, 2)


def nothing_is_sent(rank: int, world_size: int) -> None:
    with accelerators_environment(rank, world_size):
        accelerator = adopted()
        model = make_mixed()
        model, optimizer = accelerator.prepare(model, FusedShardedAdam(model.parameters()))
        with accelerator.no_sync(model):
            accelerator.backward(model(batch(rank, 0)).square().mean())
            assert not any(isinstance(param.grad, ShardedGrad) for param in model.parameters())
        accelerator.backward(model(batch(rank, 1)).square().mean())
        assert any(isinstance(param.grad, ShardedGrad) for param in model.parameters())
        optimizer.step()


def test_nothing_is_sent_inside_no_sync() -> None:
    run_anywhere(nothing_is_sent, 2)


@with_shares
def share_not_saved(rank: int, world_size: int, folder: Path) -> None:
    """Trainer saves on rank 0 alone."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with accelerators_environment(rank, world_size):
        trainer = Trainer(
            model=make_model(),
            args=arguments(folder, max_steps=2),
            train_dataset=make_data(24),
            optimizer_cls_and_kwargs=(FusedShardedAdam, {"lr": 1e-3}),
        )
        adopt(trainer.accelerator)
        trainer.train()
        if rank == 0:
            with pytest.raises(RuntimeError, match=r"share of the state.*transformers\.adopt\(trainer\)"):
                trainer._save_optimizer_and_scheduler(str(folder))
        plain = Trainer(model=make_model(), args=arguments(folder), train_dataset=make_data(24))
        plain.accelerator.prepare(nn.Linear(2, 2))
        with pytest.raises(ValueError, match=r"adopt\(\) comes before"):
            adopt_trainer(plain)


def test_a_trainer_of_which_only_the_accelerator_was_adopted_does_not_save_a_share(tmp_path: Path) -> None:
    run_anywhere(share_not_saved, 2, tmp_path)


def make_trainer(folder: Path, kind: type[Trainer] = Trainer, how: Any = None, **options: Any) -> Trainer:
    model = make_model()
    args = arguments(folder, max_steps=1, **options)
    return kind(model=model, args=args, train_dataset=make_data(8), **(how(model) if how else {}))


def adafactor(folder: Path) -> None:
    make_trainer(folder, ZeroxTrainer, optim="adafactor").train()


def fsdp(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.args.fsdp = True  # the constructor refuses it for one process, but not for ranks on CPUs
    adopt_trainer(trainer)


def fsdp_under_the_mixin(folder: Path) -> None:
    make_trainer(folder, ZeroxTrainer, fsdp=True)


def deepspeed(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.args.deepspeed = {"zero_optimization": {"stage": 2}}  # DeepSpeed is not here, and the constructor asks it
    adopt_trainer(trainer)


def an_optimizer_of_torch(folder: Path) -> None:
    adopt_trainer(make_trainer(folder, how=lambda model: {"optimizers": (torch.optim.AdamW(model.parameters()), None)}))


def an_optimizer_of_torch_under_the_mixin(folder: Path) -> None:
    how = lambda model: {"optimizers": (torch.optim.AdamW(model.parameters()), None)}  # noqa: E731
    make_trainer(folder, ZeroxTrainer, how).train()


def an_optimizer_that_was_made_before(folder: Path) -> None:
    trainer = make_trainer(folder)
    trainer.create_optimizer()
    adopt_trainer(trainer)


def options_for_an_optimizer_that_is_there(folder: Path) -> None:
    how = lambda model: {"optimizers": (FusedShardedAdam(model.parameters(), stage=1), None)}  # noqa: E731
    adopt_trainer(make_trainer(folder, how=how), stage=3)


def options_after_train(folder: Path) -> None:
    trainer = adopt_trainer(make_trainer(folder), stage=1)
    trainer.train()
    with pytest.raises(ValueError, match="are for an optimizer that zerox makes"):
        adopt_trainer(trainer, stage=3)
    trainer.train()
    adopt_trainer(trainer)
    trainer.zerox_options = {"stage": 2}
    trainer.train()


def a_model(folder: Path) -> None:
    adopt_trainer(make_model())  # type: ignore[arg-type]


def an_accelerator(folder: Path) -> None:
    adopt_trainer(make_accelerator(Case(), "torch"))  # type: ignore[arg-type]


def a_trainer(folder: Path) -> None:
    adopt(make_trainer(folder))  # type: ignore[arg-type]


def bases_the_other_way_round(folder: Path) -> None:
    type("Own", (Trainer, ZeroxTrainerMixin), {})


REFUSED_TRAINERS: dict[str, tuple[Callable[[Path], None], str]] = {
    "adafactor": (adafactor, "ValueError: .*Adafactor.*can't be sharded"),
    "fsdp": (fsdp, "ValueError: .* have fsdp=.*leave fsdp= out, and stage=3 shards parameters"),
    "fsdp, mixin": (fsdp_under_the_mixin, "ValueError: .* have fsdp="),
    "deepspeed": (deepspeed, "ValueError: .* have deepspeed=.*leave deepspeed= out"),
    "torch": (
        an_optimizer_of_torch,
        r"ValueError: .*has an optimizer of class AdamW.*pass optimizer_cls_and_kwargs=\(AdamW",
    ),
    "torch, mixin": (an_optimizer_of_torch_under_the_mixin, "ValueError: .*has an optimizer of class AdamW"),
    "made before": (an_optimizer_that_was_made_before, r"ValueError: .*adopt\(\) before create_optimizer\(\)"),
    "options": (options_for_an_optimizer_that_is_there, "ValueError: .*'stage': 3.* FusedShardedAdam was passed"),
    "options after train": (options_after_train, "ValueError: .*'stage': 2.*was made with {'stage': 1}.*before train"),
    "a model": (a_model, r"TypeError: .*is for a Trainer, and got LlamaForCausalLM"),
    "an accelerator": (
        an_accelerator,
        r"TypeError: .*got Accelerator: .* zerox\.integrations\.accelerate\.adopt\(\)",
    ),
    "a trainer": (a_trainer, r"TypeError: .*got Trainer: .* zerox\.integrations\.transformers\.adopt\(\)"),
    "bases": (bases_the_other_way_round, "TypeError: .*Own has ZeroxTrainerMixin after Trainer"),
}


@pytest.mark.parametrize("what", REFUSED_TRAINERS)
def test_a_trainer_that_can_t_be_zerox_s_is_refused_with_the_way_out(what: str, tmp_path: Path) -> None:
    """Alone too, where torch's optimizer would train as well as zerox's."""
    function, message = REFUSED_TRAINERS[what]
    with accelerators_environment(0, 0), pytest.raises((TypeError, ValueError)) as caught:
        function(tmp_path)
    assert re.match(message, f"{type(caught.value).__name__}: {caught.value}"), caught.value


def test_a_prepared_optimizer_is_not_saved_and_what_it_wraps_is(tmp_path: Path) -> None:
    own = FusedShardedAdam((model := nn.Linear(2, 2)).parameters())
    for accelerator in (adopted(), Accelerator(cpu=True)):
        prepared = accelerator.prepare(own)
        for call in (zerox.save, zerox.load):
            with pytest.raises(TypeError, match=r"pass the FusedShardedAdam that it wraps, its \.optimizer"):
                call(tmp_path / "x", model, prepared)
        zerox.save(tmp_path / "x", model, prepared.optimizer)
        zerox.load(tmp_path / "x", model, prepared.optimizer)


def test_a_missing_or_old_framework_is_one_line() -> None:
    missing = r"nothing needs nothing 1.0 or newer, and it is not installed: pip install 'nothing>=1.0'"
    with pytest.raises(ImportError, match=rf"^zerox.integrations.{missing}$"):
        requirements.check_version("nothing", "1.0")
    old = r"accelerate needs accelerate 99.0 or newer, and [\d.]+ is installed: pip install [^\n]*"
    with pytest.raises(ImportError, match=rf"^zerox.integrations.{old}$"):
        requirements.check_version("accelerate", "99.0")


def test_a_name_that_has_moved_is_told() -> None:
    accelerator = Accelerator(cpu=True)
    del accelerator._models
    moved = r"Accelerator of accelerate [\d.]+ has no _models, which [^\n]* with which it was tried"
    with pytest.raises(RuntimeError, match=rf"^zerox: {moved}$"):
        adopt(accelerator)
    with pytest.raises(RuntimeError, match="has no save_state"):
        requirements.check_names("accelerate", "1.15.0", SimpleNamespace(), ["save_state"])
