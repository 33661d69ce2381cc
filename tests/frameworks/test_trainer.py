"""Trainer trains with zerox as with DistributedDataParallel and AdamW: in one process, on 1 rank and on 2."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import EarlyStoppingCallback, Trainer

from tests.frameworks.loops import MOST
from tests.frameworks.trainers import ALONE, BATCH, Noted, ZeroxTrainer, train
from tests.hugging_face import run_anywhere

BEST: dict[str, Any] = {
    "eval_strategy": "steps",
    "eval_steps": 1,
    "save_strategy": "steps",
    "save_steps": 1,
    "load_best_model_at_end": True,
    "metric_for_best_model": "eval_loss",
    "save_total_limit": 2,
}
SENT = {"gradient_accumulation_kwargs": {"sync_each_batch": True}}
FIRST = {"adam_beta1": 0.8, "adam_beta2": 0.9, "adam_epsilon": 1e-4, "warmup_steps": 2, "lr_scheduler_type": "linear"}

Options = dict[str, Any]


def checkpointing(reentrant: bool) -> Options:
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": {"use_reentrant": reentrant}}


# Options of TrainingArguments, and of train().
CASES: dict[str, tuple[Options, Options]] = {
    "defaults": ({}, {}),
    "stage 1": ({}, {"stage": 1}),
    "stage 3": ({}, {"stage": 3}),
    "small clip": ({"max_grad_norm": 0.01}, {}),
    "no clip": ({"max_grad_norm": 0.0}, {}),
    "accumulate, last one uneven": ({"gradient_accumulation_steps": 4, "num_train_epochs": 2, "max_steps": -1}, {}),
    "each batch is sent": ({"gradient_accumulation_steps": 3, "accelerator_config": SENT}, {}),
    "a mean for each rank": ({"average_tokens_across_devices": False, "gradient_accumulation_steps": 2}, {}),
    "bf16": ({"bf16": True}, {}),
    "checkpointing": (checkpointing(reentrant=False), {}),
    "reentrant checkpointing": (checkpointing(reentrant=True), {}),
    "label smoothing": ({"label_smoothing_factor": 0.1}, {}),
    "tied": ({}, {"tied": True}),
    "evaluation in between": ({"eval_strategy": "steps", "eval_steps": 2}, {}),
    "best at the end": (BEST, {"callbacks": [(EarlyStoppingCallback, 1, 10.0)]}),
    "betas, eps, warmup": (FIRST, {}),
    "sgd": ({"optim": "sgd", "learning_rate": 0.1}, {}),
    "rmsprop": ({"optim": "rmsprop", "learning_rate": 1e-4}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_trainer_gives_ddp_s_and_adamw_s_numbers(world_size: int, case: str, tmp_path: Path) -> None:
    options, how = CASES[case]
    ours, theirs = (
        run_anywhere(train, world_size, kind, tmp_path / kind.__name__, options, how)
        for kind in (ZeroxTrainer, Trainer)
    )
    for own, other in zip(ours, theirs, strict=True):
        assert own.rates == other.rates
        assert own.losses == pytest.approx(other.losses, rel=1e-6, abs=1e-4 if case == "bf16" else 0)
        assert own.norms == pytest.approx(other.norms, rel=1e-3 if case == "bf16" else 1e-6)
        assert len(own.norms) >= (len(own.losses) if own is ours[0] else 0) > 0 or own is not ours[0]
        far = {name: float((value - other.weights[name]).abs().max()) for name, value in own.weights.items()}
        assert max(far.values()) <= (5e-4 if case == "bf16" else MOST), far
        assert all(torch.equal(value, ours[0].weights[name]) for name, value in own.weights.items())


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_mean_is_over_all_ranks_tokens_unless_it_is_asked_for_by_rank(accumulate: int, tmp_path: Path) -> None:
    """As of one process that has all ranks' batches, which differ in how many tokens count."""
    how = {"dropout": 0.0}  # random numbers are each rank's own
    common = {"gradient_accumulation_steps": accumulate}
    alone = {**common, "per_device_train_batch_size": 2 * BATCH}
    [whole] = run_anywhere(train, ALONE, Trainer, tmp_path / "alone", alone, how)
    found = {}
    for across in (True, False):
        options = {**common, "average_tokens_across_devices": across}
        found[across] = run_anywhere(train, 2, ZeroxTrainer, tmp_path / str(across), options, how)

    def far(own: Noted) -> float:
        return max(float((value - whole.weights[name]).abs().max()) for name, value in own.weights.items())

    assert all(far(own) <= 1e-6 for own in found[True]), "sums of tokens in another order"
    assert all(own.norms == pytest.approx(whole.norms, rel=1e-5) for own in found[True][:1])
    assert all(far(own) > 1e-3 for own in found[False]), "a mean for each rank"
