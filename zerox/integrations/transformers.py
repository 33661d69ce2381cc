"""Hugging Face Trainer: ``class MyTrainer(ZeroxTrainerMixin, Trainer)``, or ``adopt(trainer)`` for one that is made.

The optimizer is the one of TrainingArguments, sharded, or the one that was passed; the accelerator is adopted
(zerox.integrations.accelerate); checkpoints have the whole state in ``optimizer.pt``.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from types import MappingProxyType
from typing import Any

import torch

from zerox.engine import Engine
from zerox.integrations.on_meta import class_for, is_on_meta, move_rest
from zerox.integrations.requirements import check_names, check_version
from zerox.integrations.sharding import OURS
from zerox.optimizers import ShardedOptimizer
from zerox.ranks.calls import named

OLDEST, TRIED = "5.20.0", "5.23.0"

check_version("transformers", OLDEST)  # before its names are looked for
from transformers import Trainer, TrainingArguments

from zerox.integrations import accelerate

USED = ["create_accelerator_and_postprocess", "create_optimizer", "get_optimizer_cls_and_kwargs"]
USED += ["_save_optimizer_and_scheduler", "_move_model_to_device"]


class ZeroxTrainerMixin:
    """Before Trainer, or a subclass of it, among the bases of a class: trains with zerox in place of
    DistributedDataParallel and ``args.optim``.

    ``zerox_options``: further arguments of the optimizer, such as ``{"stage": 3}``, as an attribute of the class or,
    before train(), of the trainer. TrainingArguments give it lr, betas, eps, weight decay and its groups.
    """

    zerox_options: Mapping[str, Any] = MappingProxyType({})
    accelerator: Any
    _options_of_optimizer: Mapping[str, Any] | None = None  # which the one that create_optimizer() made was made with

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if Trainer in cls.__mro__ and cls.__mro__.index(Trainer) < cls.__mro__.index(ZeroxTrainerMixin):
            raise TypeError(
                f"zerox: {cls.__name__} has ZeroxTrainerMixin after Trainer, whose methods it must come before"
            )

    def create_accelerator_and_postprocess(self: Any) -> None:
        check_names("transformers", TRIED, self, USED)
        _check_arguments(self.args)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.adopt(self.accelerator)

    def _move_model_to_device(self: Any, model: Any, device: torch.device) -> None:
        """What is on the meta device stays there: create_optimizer() makes it."""
        if is_on_meta(model):
            move_rest(model, device)
        else:
            super()._move_model_to_device(model, device)  # type: ignore[misc]

    def create_optimizer(self: Any, model: Any = None) -> torch.optim.Optimizer:
        """As Trainer's, sharded. Raises ValueError for an ``args.optim`` that can't be, and for options or an optimizer
        that came too late or from elsewhere."""
        if self.optimizer is not None:
            _check_optimizer(self, self.zerox_options)
            found: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
            return found
        given = self.optimizer_cls_and_kwargs
        trained = self.model if model is None else model
        wanted = given or self.get_optimizer_cls_and_kwargs(self.args, trained)
        mesh = accelerate.data_parallel_mesh(self.accelerator)
        of_mesh = {} if mesh is None else {"process_group": mesh}
        kind, options = shard_class(wanted[0], wanted[1], {**of_mesh, **self.zerox_options})
        self.optimizer_cls_and_kwargs = (class_for(kind, trained) if is_on_meta(trained) else kind), options
        try:
            found = super().create_optimizer(model)  # type: ignore[misc]
        finally:
            self.optimizer_cls_and_kwargs = given
        self._options_of_optimizer = dict(self.zerox_options)
        return found

    @named("the Trainer's save of a checkpoint")
    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """With all ranks' state in the file that one rank writes."""
        ours = isinstance(self.optimizer, accelerate.PreparedOptimizer)
        saving = accelerate.ranks_that_save(self.args.should_save, self.args.save_on_each_node, self.args.world_size)
        with self.optimizer.whole(saving) if ours else nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def _check_arguments(args: TrainingArguments) -> None:
    for name in ("fsdp", "deepspeed"):
        if getattr(args, name, None):
            raise ValueError(
                f"zerox: TrainingArguments have {name}=, which shards the model itself, where zerox takes the place of "
                f"DistributedDataParallel: leave {name}= out, and stage=3 shards parameters, or leave zerox out"
            )


def _check_optimizer(trainer: Any, options: Mapping[str, Any]) -> None:
    """``trainer.optimizer`` is there before create_optimizer(), and ``options`` would not reach it."""
    optimizer, made_with = trainer.optimizer, getattr(trainer, "_options_of_optimizer", None)
    while not isinstance(optimizer, Engine) and hasattr(optimizer, "optimizer"):
        optimizer = optimizer.optimizer
    name = type(optimizer).__name__
    if not isinstance(optimizer, Engine):
        raise ValueError(
            f"zerox: this trainer already has an optimizer of class {name}, which zerox does not change: call adopt() "
            f"before create_optimizer(), or in place of optimizers= pass optimizer_cls_and_kwargs=({name}, {{...}})"
        )
    if dict(options) != (made_with or {}):
        came = "was passed" if made_with is None else f"was made with {dict(made_with)}"
        raise ValueError(
            f"zerox: the options {dict(options)} are for an optimizer that zerox makes, and this trainer's {name} "
            f"{came}: give them before train(), or to the constructor of the optimizer that you pass"
        )


def shard_class(kind: Any, options: dict[str, Any], further: Mapping[str, Any]) -> tuple[type[Engine], dict[str, Any]]:
    """zerox's class for torch's, with the arguments of both. ValueError for a class that can't be sharded."""
    both = {**options, **further}
    if isinstance(kind, type) and issubclass(kind, Engine):
        return kind, both
    if kind in OURS and kind is not torch.optim.Adam:  # whose defaults, which are not in the arguments, are its own
        return OURS[kind], both
    foreign = {"params", "model", "optimizer_dict"} & options.keys()
    if foreign or not (isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)):
        name = getattr(kind, "__name__", str(kind))
        raise ValueError(
            f"zerox: {name}, which TrainingArguments ask for, can't be sharded: take another optim, or pass "
            "optimizer_cls_and_kwargs=(zerox.FusedShardedAdam, {...})"
        )
    return ShardedOptimizer, {"optimizer_class": kind, **both}


def adopt(trainer: Trainer, **options: Any) -> Trainer:
    """Makes ``trainer``, of any class of Trainer's kind, one that has :class:`ZeroxTrainerMixin`. Returns it.

    Call it before train(). ``options``: further arguments of the optimizer, such as ``stage=3``. Raises ValueError if
    the trainer has prepared its model already, has an optimizer that is not zerox's, or trains with FSDP or DeepSpeed;
    TypeError for anything else than a Trainer.
    """
    if not isinstance(trainer, Trainer):
        raise TypeError(
            f"zerox.integrations.transformers.adopt() is for a Trainer, and got {type(trainer).__name__}: for an "
            "Accelerator there is zerox.integrations.accelerate.adopt()"
        )
    if not isinstance(trainer, ZeroxTrainerMixin):
        check_names("transformers", TRIED, trainer, USED)
        _check_arguments(trainer.args)
    if trainer.optimizer is not None:
        _check_optimizer(trainer, options or getattr(trainer, "zerox_options", {}))
    if not isinstance(trainer, ZeroxTrainerMixin):
        accelerate.adopt(trainer.accelerator)
        own = type(trainer)
        trainer.__class__ = type(f"Zerox{own.__name__}", (ZeroxTrainerMixin, own), {"__module__": own.__module__})
    if options:
        trainer.zerox_options = options
    return trainer
