"""Weights of transformers' models that zerox wrote: from_pretrained() reads them to the bit, and ties them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.models.cases import gpt2, images_of, llama, mixtral, resnet, t5, tokens_of
from tests.models.modules import VOCABULARY
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, save_weights


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def untied_gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    sizes = {"n_positions": 32, "n_embd": 48, "n_layer": 2, "n_head": 4}
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, tie_word_embeddings=False, **sizes))


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


def narrow_llama() -> nn.Module:
    return llama().bfloat16()


MAKE = {each.__name__: each for each in (gpt2, untied_gpt2, llama, tied_llama, narrow_llama, bert, t5, mixtral, resnet)}


TIED = ("gpt2", "tied_llama", "bert", "t5")


def trained(name: str, options: dict[str, Any]) -> tuple[Any, FusedShardedAdam]:
    torch.manual_seed(0)
    model: Any = MAKE[name]().train()
    optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.05, **options)
    model(**(images_of(0) if name == "resnet" else tokens_of(0))).loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return model, optimizer


def saves(rank: int, _: int, name: str, folder: Path, size: Any, options: dict[str, Any]) -> tuple[Any, bool, Any]:
    """The model's class, whether it is tied, and its whole state. transformers' own save is beside ours."""
    model, optimizer = trained(name, options)
    if rank == 0:
        model.config.save_pretrained(folder)
    save_weights(optimizer, folder, size)
    with optimizer.whole():
        state = {key: each.detach().clone() for key, each in model.state_dict().items()}
        if rank == 0:
            model.save_pretrained(folder.with_name("theirs"), max_shard_size=size, save_original_format=False)
    return type(model), is_tied(model), state


def is_tied(model: Any) -> bool:
    """Whether some parameter has two names."""
    return len(list(model.named_parameters(remove_duplicate=False))) > len(list(model.parameters()))


def same_bits(one: dict[str, Tensor], other: dict[str, Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        each.dtype == other[name].dtype and torch.equal(each, other[name]) for name, each in one.items()
    )


def files_in(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.glob("model*")}


@pytest.mark.parametrize(
    ("name", "world_size", "size", "options"),
    [
        ("gpt2", 2, "5GB", {"stage": 3}),
        ("gpt2", 2, "40KB", {"stage": 2}),
        ("untied_gpt2", 2, "40KB", {"stage": 3}),
        ("llama", 3, "60KB", {"stage": 3}),
        ("tied_llama", 2, "5GB", {"stage": 1}),
        ("narrow_llama", 2, "30KB", {"stage": 3}),
        ("bert", 2, "50KB", {"stage": 3}),
        ("t5", 2, "50KB", {"stage": 3}),
        ("mixtral", 2, "50KB", {"stage": 3}),
        ("resnet", 2, "5GB", {"stage": 2}),
    ],
    ids=str,
)
def test_from_pretrained_reads_them_to_the_bit(
    tmp_path: Path, name: str, world_size: int, size: str, options: dict[str, Any]
) -> None:
    [(kind, tied, state), *_] = run_ranks(saves, world_size, name, tmp_path / "x", size, options)
    model, about = kind.from_pretrained(tmp_path / "x", output_loading_info=True, dtype="auto")
    assert same_bits(dict(model.state_dict()), state)
    assert {what: list(found) for what, found in about.items() if found} == {}, "nothing is missing or unexpected"
    assert is_tied(model) == tied == (name in TIED)
    assert (tmp_path / "x" / "model.safetensors.index.json").exists() == (size != "5GB")


@pytest.mark.parametrize("name", ["gpt2", "t5", "bert", "llama", "narrow_llama", "resnet"])
def test_files_are_those_of_save_pretrained(tmp_path: Path, name: str) -> None:
    """Byte for byte, the index too."""
    run_ranks(saves, 2, name, tmp_path / "x", "40KB", {"stage": 3})
    ours, theirs = files_in(tmp_path / "x"), files_in(tmp_path / "theirs")
    assert ours.keys() == theirs.keys()
    assert len(ours) > 2
    index = "model.safetensors.index.json"
    assert json.loads(ours[index]) == json.loads(theirs[index])
    assert ours == theirs
