"""Folders that transformers' save_pretrained() wrote: load_weights() has what from_pretrained() has, to the bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.kernels.shards import same_bits
from tests.models.cases import gpt2, llama, t5
from tests.models.modules import VOCABULARY
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load_weights
from zerox.checkpoint.weight_reader import WeightReader


def bert() -> nn.Module:
    from transformers import BertConfig, BertForMaskedLM

    sizes = {"hidden_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 96}
    return BertForMaskedLM(BertConfig(vocab_size=VOCABULARY, **sizes))


def untied_llama() -> nn.Module:
    return llama(tie_word_embeddings=False)


def tied_llama() -> nn.Module:
    return llama(tie_word_embeddings=True)


MAKE = {each.__name__: each for each in (gpt2, tied_llama, untied_llama, bert, t5)}


def made(name: str, seed: int, dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(seed)
    model = MAKE[name]()
    with torch.no_grad():
        for param in model.parameters():
            param.add_(torch.randn_like(param) / 8)  # norms begin as ones
    return model.to(dtype)


def load(rank: int, size: int, name: str, path: str, dtype: torch.dtype, stage: int) -> tuple[dict[str, Tensor], Any]:
    torch.manual_seed(1)
    model = MAKE[name]().to(dtype)
    read, run = [], WeightReader.run

    def counted(reader: WeightReader) -> None:
        run(reader)
        read.append(reader.nbytes)

    optimizer = FusedShardedAdam(model.parameters(), stage=stage, bucket_cap_mb=0.04)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(WeightReader, "run", counted)
        keys = load_weights(optimizer, path)
    return {key: value.detach().clone() for key, value in model.state_dict().items()}, (tuple(keys), sum(read))


@pytest.mark.parametrize(
    ("size", "stage", "saved", "loaded"),
    [
        (1, 2, torch.float32, torch.float32),
        (2, 3, torch.bfloat16, torch.bfloat16),
        (3, 1, torch.float32, torch.bfloat16),
    ],
    ids=str,
)
@pytest.mark.parametrize("name", MAKE)
def test_a_folder_has_what_from_pretrained_has(
    tmp_path: Path, name: str, size: int, stage: int, saved: torch.dtype, loaded: torch.dtype
) -> None:
    model = made(name, 0, saved)
    model.save_pretrained(tmp_path, max_shard_size="60KB" if size > 1 else "5GB")  # type: ignore[operator]
    files = list(tmp_path.glob("*.safetensors"))
    assert (len(files) > 1) == (tmp_path / "model.safetensors.index.json").exists() == (size > 1)
    theirs = type(model).from_pretrained(tmp_path, dtype=loaded).state_dict()  # type: ignore[attr-defined]
    of_ranks = run_ranks(load, size, name, str(tmp_path), loaded, stage)
    for ours, (keys, _) in of_ranks:
        assert keys == ([], [])
        assert ours.keys() == theirs.keys()
        for each, value in theirs.items():
            assert same_bits(ours[each], value), each
    read, nbytes = sum(told for _, (_, told) in of_ranks), sum(file.stat().st_size for file in files)
    assert 0.5 * nbytes < read <= nbytes
