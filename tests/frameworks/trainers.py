"""Small models, data and trainings for Hugging Face's Trainer, of zerox's kind and as it is (with DDP and AdamW)."""

from __future__ import annotations

import copy
import logging
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM, Trainer, TrainerCallback, TrainingArguments

from tests.hugging_face import ALONE, accelerators_environment
from zerox.engine import Engine
from zerox.integrations.transformers import ZeroxTrainerMixin
from zerox.residency.residency import Residency

WORDS, LENGTH, BATCH = 64, 12, 2
# Some gradients of an untrained model are next to nothing, those of keys most of all. Divided by AdamW's own 1e-8, the
# last bits of matrix products, which differ from one CPU to the other, would be larger than what these tests allow.
EPS = 1e-4


class ZeroxTrainer(ZeroxTrainerMixin, Trainer):
    pass


def make_model(tied: bool = False, seed: int = 0, dropout: float = 0.1) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    return LlamaForCausalLM(
        LlamaConfig(
            vocab_size=WORDS,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=2,
            num_attention_heads=2,
            num_key_value_heads=1,
            max_position_embeddings=32,
            tie_word_embeddings=tied,
            attention_dropout=dropout,
        )
    )


def make_data(count: int, seed: int = 0) -> list[dict[str, Tensor]]:
    """Sequences of which more or fewer tokens count, from 1 to all."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for row in range(count):
        words = torch.randint(0, WORDS, (LENGTH,), generator=generator)
        labels = words.clone()
        labels[: (7 * row) % (LENGTH - 1)] = -100
        rows.append({"input_ids": words, "attention_mask": torch.ones_like(words), "labels": labels})
    return rows


class Noted(NamedTuple):
    norms: list[float]
    rates: list[float]
    losses: list[float]
    weights: dict[str, Tensor]
    state: dict[int, dict[str, Tensor]]  # of zerox's optimizer, on rank 0, when the training began


class Notes(TrainerCallback):
    """Reads what Trainer logs."""

    def __init__(self) -> None:
        self.logged: list[dict[str, float]] = []
        self.state: dict[int, dict[str, Tensor]] = {}

    def on_train_begin(self, args: Any, state: Any, control: Any, optimizer: Any = None, **_: Any) -> None:
        if isinstance(optimizer.optimizer, Engine):
            self.state = optimizer.optimizer.full_state_dict().get("state", {})

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        self.logged.append(dict(logs or {}))

    def of(self, key: str) -> list[float]:
        return [float(each[key]) for each in self.logged if key in each]


def arguments(folder: Path, kind: type = TrainingArguments, **options: Any) -> Any:
    wanted: dict[str, Any] = {
        "output_dir": str(folder),
        "use_cpu": True,
        "report_to": [],
        "per_device_train_batch_size": BATCH,
        "max_steps": 5,
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-3,
        "adam_epsilon": EPS,
        "weight_decay": 0.1,
        "lr_scheduler_type": "cosine",
        "dataloader_num_workers": 0,
        "seed": 3,
    }
    return kind(**(wanted | options))


def train(
    rank: int, world_size: int, kind: type[Trainer], folder: Path, options: dict[str, Any], how: dict[str, Any]
) -> Noted:
    """``options`` of TrainingArguments; ``how``: see below."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with accelerators_environment(rank, world_size):
        args = arguments(folder, **copy.deepcopy(options))  # Trainer writes into them
        model = make_model(how.get("tied", False), rank, how.get("dropout", 0.1)).to(how.get("dtype", torch.float32))
        notes = Notes()
        trainer = kind(
            model=model,
            args=args,
            train_dataset=make_data(how.get("rows", 24)),
            eval_dataset=make_data(6, seed=1),
            callbacks=[notes, *(each(*of) for each, *of in how.get("callbacks", ()))],
            **how.get("trainer", {}),
        )
        if isinstance(trainer, ZeroxTrainerMixin):
            trainer.zerox_options = {"stage": how.get("stage", 2), **how.get("options", {})}
        if "scaler" in how:  # Accelerate makes none on CPUs
            trainer.accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=how["scaler"])
        trainer.train(resume_from_checkpoint=how.get("resume"))
        if isinstance(trainer, ZeroxTrainerMixin):
            inside = trainer.optimizer.optimizer.inside
            assert inside.grads.sharded == (trainer.zerox_options["stage"] > 1)
            assert isinstance(inside.gather, Residency) == (trainer.zerox_options["stage"] == 3 and world_size > 1)
        weights = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        return Noted(notes.of("grad_norm"), notes.of("learning_rate"), notes.of("loss"), weights, notes.state)


__all__ = ["ALONE", "ZeroxTrainer", "arguments", "make_data", "make_model", "train"]
