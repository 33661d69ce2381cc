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
from zerox.integrations.from_torch import OURS
from zerox.integrations.requirements import check_names, check_version
from zerox.optimizers import ShardedOptimizer

OLDEST, TRIED = "5.20.0", "5.23.0"

check_version("transformers", OLDEST)  # before its names are looked for
from transformers import Trainer

from zerox.integrations import accelerate

USED = ["create_accelerator_and_postprocess", "create_optimizer", "get_optimizer_cls_and_kwargs"]
USED += ["_save_optimizer_and_scheduler"]


class ZeroxTrainerMixin:
    """Before Trainer, or a subclass of it, among the bases of a class: trains with zerox in place of
    DistributedDataParallel and ``args.optim``.

    ``zerox_options``: further arguments of the optimizer, such as ``{"stage": 3}``, as an attribute of the class or,
    before train(), of the trainer. TrainingArguments give it lr, betas, eps, weight decay and its groups.
    """

    zerox_options: Mapping[str, Any] = MappingProxyType({})
    accelerator: Any

    def create_accelerator_and_postprocess(self) -> None:
        check_names("transformers", TRIED, self, USED)
        super().create_accelerator_and_postprocess()  # type: ignore[misc]
        accelerate.adopt(self.accelerator)

    def create_optimizer(self: Any, model: Any = None) -> torch.optim.Optimizer:
        """As Trainer's, sharded. Raises ValueError for an ``args.optim`` that can't be."""
        if self.optimizer is not None:
            found: torch.optim.Optimizer = super().create_optimizer(model)  # type: ignore[misc]
            return found
        given = self.optimizer_cls_and_kwargs
        wanted = given or self.get_optimizer_cls_and_kwargs(self.args, self.model if model is None else model)
        self.optimizer_cls_and_kwargs = sharded(wanted[0], wanted[1], self.zerox_options)
        try:
            found = super().create_optimizer(model)  # type: ignore[misc]
        finally:
            self.optimizer_cls_and_kwargs = given
        return found

    def _save_optimizer_and_scheduler(self: Any, output_dir: str) -> None:
        """With all ranks' state in the file that one rank writes."""
        ours = isinstance(self.optimizer, accelerate.PreparedOptimizer)
        saving = accelerate.ranks_that_save(self.args.should_save, self.args.save_on_each_node, self.args.world_size)
        with self.optimizer.whole(saving) if ours else nullcontext():
            super()._save_optimizer_and_scheduler(output_dir)  # type: ignore[misc]


def sharded(kind: Any, options: dict[str, Any], further: Mapping[str, Any]) -> tuple[type[Engine], dict[str, Any]]:
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
    the trainer has prepared its model already.
    """
    if not isinstance(trainer, ZeroxTrainerMixin):
        check_names("transformers", TRIED, trainer, USED)
        accelerate.adopt(trainer.accelerator)
        own = type(trainer)
        trainer.__class__ = type(f"Zerox{own.__name__}", (ZeroxTrainerMixin, own), {"__module__": own.__module__})
    if options:
        trainer.zerox_options = options
    return trainer
