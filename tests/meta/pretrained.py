"""Small models of transformers, and what its own functions make of the whole of one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from tests.meta.rig import SEED, on_meta

WORDS = 64
SIZES: dict[str, Any] = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}


def config_of(kind: str, tied: bool = True) -> Any:
    import transformers as hf

    all_: dict[str, Any] = {"vocab_size": WORDS, "tie_word_embeddings": tied}
    experts = {"num_local_experts": 4, "num_experts_per_tok": 2, "num_key_value_heads": 2}
    if kind == "gpt2":  # keeps generation's tokens within its few words
        return hf.GPT2Config(n_positions=32, n_embd=32, n_layer=2, n_head=4, bos_token_id=0, eos_token_id=0, **all_)
    if kind == "llama":
        return hf.LlamaConfig(num_key_value_heads=2, **SIZES, **all_)
    if kind == "bert":
        return hf.BertConfig(max_position_embeddings=32, **SIZES, **all_)
    if kind == "t5":
        return hf.T5Config(d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0, **all_)
    assert kind == "mixtral", kind
    return hf.MixtralConfig(**experts, **SIZES, **all_)


def maker(kind: str, tied: bool = True, **options: Any) -> Callable[[], nn.Module]:
    """A function that makes the model as a program does that trains it from scratch."""
    import transformers as hf

    autos = {"bert": hf.AutoModelForMaskedLM, "t5": hf.AutoModelForSeq2SeqLM}
    return lambda: autos.get(kind, hf.AutoModelForCausalLM).from_config(config_of(kind, tied), **options)


KINDS = ["gpt2", "llama", "bert", "t5", "mixtral"]


def pretrained_twin(make: Callable[[], nn.Module], seed: int = SEED) -> nn.Module:
    """In memory as a whole, by one call of transformers."""
    model: Any = on_meta(make).to_empty(device="cpu")
    model.tie_weights()
    torch.manual_seed(seed)
    model.initialize_weights()
    return model  # type: ignore[no-any-return]


def losses(
    model: Any, optimizer: Any, rank: int, steps: int = 3, backward: Callable[[Tensor], Any] = Tensor.backward
) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(steps):
        words = torch.randint(WORDS, (4, 12), generator=generator)
        torch.manual_seed(rank)  # of dropout
        loss = model(input_ids=words, labels=words).loss
        backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found
