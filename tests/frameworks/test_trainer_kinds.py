"""Other trainers than Trainer, adapters, compiled models, and other ways to bring an optimizer."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import peft
import pytest
import torch
from datasets import Dataset
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import (
    BartConfig,
    BartForConditionalGeneration,
    PreTrainedTokenizerFast,
    Seq2SeqTrainer,
    Seq2SeqTrainingArguments,
    Trainer,
)
from trl import SFTConfig, SFTTrainer

from tests.frameworks.loops import MOST
from tests.frameworks.trainers import ALONE, WORDS, ZeroxTrainer, arguments, make_data, make_model
from tests.hugging_face import accelerators_environment, run_anywhere
from zerox import FusedShardedAdam
from zerox.integrations import accelerate as of_accelerate
from zerox.integrations.transformers import ZeroxTrainerMixin, adopt

SAVES = {"save_strategy": "steps", "save_steps": 2, "max_steps": 4}


class ZeroxSFTTrainer(ZeroxTrainerMixin, SFTTrainer):
    zerox_options: ClassVar[dict[str, Any]] = {"stage": 1}


def make_tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({f"w{number}": number for number in range(WORDS)}, unk_token="w0"))
    return PreTrainedTokenizerFast(tokenizer_object=words, unk_token="w0", eos_token="w1", pad_token="w2")


def seq2seq(folder: Path, zerox: bool) -> Trainer:
    torch.manual_seed(0)
    config = BartConfig(
        vocab_size=WORDS, d_model=16, encoder_layers=1, decoder_layers=1, encoder_attention_heads=2,
        decoder_attention_heads=2, encoder_ffn_dim=32, decoder_ffn_dim=32, max_position_embeddings=32,
    )  # fmt: skip
    data = make_data(24)
    args = arguments(folder, Seq2SeqTrainingArguments, predict_with_generate=True, generation_max_length=6, **SAVES)
    trainer = Seq2SeqTrainer(
        model=BartForConditionalGeneration(config), args=args, train_dataset=data, eval_dataset=data[:3]
    )
    return adopt(trainer, stage=1) if zerox else trainer


def sft(folder: Path, zerox: bool) -> Trainer:
    rows = [{key: row[key].tolist() for key in ("input_ids", "labels")} for row in make_data(24)]
    args = arguments(folder, SFTConfig, max_length=None, dataset_kwargs={"skip_prepare_dataset": True}, **SAVES)
    kind = ZeroxSFTTrainer if zerox else SFTTrainer
    return kind(model=make_model(), args=args, train_dataset=Dataset.from_list(rows), processing_class=make_tokenizer())


def lora(folder: Path, zerox: bool) -> Trainer:
    model = peft.get_peft_model(make_model(), peft.LoraConfig(r=4, target_modules=["q_proj", "v_proj"]))
    return (ZeroxTrainer if zerox else Trainer)(
        model=model, args=arguments(folder, **SAVES), train_dataset=make_data(24)
    )


def sharded_lora(folder: Path, zerox: bool) -> Trainer:
    trainer = lora(folder, zerox)
    return adopt(trainer, stage=3) if zerox else trainer


def compiled(folder: Path, zerox: bool) -> Trainer:
    args = arguments(folder, torch_compile=True, torch_compile_backend="aot_eager", **SAVES)
    return (ZeroxTrainer if zerox else Trainer)(model=make_model(), args=args, train_dataset=make_data(24))


def given_class(folder: Path, zerox: bool) -> Trainer:
    model = make_model()
    kind, chosen = (ZeroxTrainer, FusedShardedAdam) if zerox else (Trainer, torch.optim.AdamW)
    return kind(
        model=model,
        args=arguments(folder, **SAVES),
        train_dataset=make_data(24),
        optimizer_cls_and_kwargs=(chosen, {"lr": 2e-3, "betas": (0.8, 0.9)}),
    )


def given_optimizer(folder: Path, zerox: bool) -> Trainer:
    model = make_model()
    args = arguments(folder, **SAVES)
    assert args.device.type == "cpu"  # asking for it makes the process group
    kind, chosen = (ZeroxTrainer, FusedShardedAdam) if zerox else (Trainer, torch.optim.AdamW)
    return kind(
        model=model,
        args=args,
        train_dataset=make_data(24),
        optimizers=(chosen(model.parameters(), lr=2e-3), None),
    )


def accelerator_only(folder: Path, zerox: bool) -> Trainer:
    """Without a checkpoint of the optimizer: see below."""
    chosen = (FusedShardedAdam if zerox else torch.optim.AdamW, {"lr": 1e-3})
    trainer = Trainer(
        model=make_model(),
        args=arguments(folder, save_only_model=True, **SAVES),
        train_dataset=make_data(24),
        optimizer_cls_and_kwargs=chosen,
    )
    if zerox:
        of_accelerate.adopt(trainer.accelerator)
    return trainer


MAKERS: dict[str, Callable[[Path, bool], Trainer]] = {
    "Seq2SeqTrainer": seq2seq,
    "SFTTrainer": sft,
    "LoRA": lora,
    "LoRA, stage 3": sharded_lora,
    "torch_compile": compiled,
    "optimizer_cls_and_kwargs": given_class,
    "optimizers": given_optimizer,
    "the accelerator alone": accelerator_only,
}


def train(rank: int, world_size: int, make: str, folder: Path, zerox: bool, resume: str | None) -> dict[str, Tensor]:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with accelerators_environment(rank, world_size):
        torch.manual_seed(0)
        trainer = MAKERS[make](folder, zerox)
        trainer.train(resume_from_checkpoint=resume)
        if make == "torch_compile":
            assert isinstance(trainer.model_wrapped, torch._dynamo.OptimizedModule) or not zerox
        if "LoRA" in make and zerox:
            total = sum(param.numel() for param in trainer.model.parameters())
            trained = sum(param.numel() for param in trainer.model.parameters() if param.requires_grad)
            assert 0 < trained < total / 10
            assert trainer.optimizer.optimizer.memory_bytes().moments < 8 * total / 5, "they are padded to 4 KiB"
        found = {name: value.detach().clone() for name, value in trainer.model.state_dict().items()}
        if make == "Seq2SeqTrainer":
            found["predictions"] = torch.as_tensor(trainer.predict(trainer.eval_dataset).predictions)
        return found


@pytest.mark.parametrize("make", MAKERS)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_it_trains_as_with_ddp_and_adamw_and_goes_on_bit_for_bit(world_size: int, make: str, tmp_path: Path) -> None:
    ours = run_anywhere(train, world_size, make, tmp_path / "zerox", True, None)
    theirs = run_anywhere(train, world_size, make, tmp_path / "torch", False, None)
    for own, other in zip(ours, theirs, strict=True):
        assert own.keys() == other.keys()
        far = {name: float((value.double() - other[name].double()).abs().max()) for name, value in own.items()}
        assert max(far.values()) <= MOST, far
    if make == "the accelerator alone":
        return
    again = run_anywhere(train, world_size, make, tmp_path / "again", True, str(tmp_path / "zerox/checkpoint-2"))
    for own, other in zip(ours, again, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in own.items())


def notebook(rank: int, world_size: int, folder: Path, zerox: bool) -> dict[str, Tensor]:
    """Cells that are run again: an evaluation first, train() twice, and another trainer of the same model and name."""
    logging.getLogger("transformers").setLevel(logging.ERROR)
    with accelerators_environment(rank, world_size):
        model = make_model()
        for options in ({}, {"learning_rate": 5e-4, "auto_find_batch_size": True}):
            args = arguments(folder, max_steps=3, **options)
            trainer = Trainer(model=model, args=args, train_dataset=make_data(24), eval_dataset=make_data(8))
            if zerox:
                adopt(trainer, stage=3)
            trainer.evaluate()
            if not zerox:  # else Trainer leaves DistributedDataParallel away now, and each rank trains alone
                vars(model).pop("_is_accelerate_prepared", None)
            trainer.train()
            trainer.train()
            trainer.predict(make_data(4))
        return {name: value.detach().clone() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("world_size", [ALONE, 2])
def test_cells_of_a_notebook_are_run_again(world_size: int, tmp_path: Path) -> None:
    ours, theirs = (run_anywhere(notebook, world_size, tmp_path, zerox) for zerox in (True, False))
    for own, other in zip(ours, theirs, strict=True):
        far = {name: float((value - other[name]).abs().max()) for name, value in own.items()}
        assert max(far.values()) <= MOST, far
