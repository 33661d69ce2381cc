"""Parameters of well-known models, as transformers builds them on the meta device: enough for a plan, and no memory."""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor

LLAMA = {"vocab_size": 128_256, "num_key_value_heads": 8, "head_dim": 128}
# As published: the type of transformers' configuration, and its options.
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "gpt2-124m": ("gpt2", {}),
    "llama-8b": ("llama", {**LLAMA, "num_hidden_layers": 32, "hidden_size": 4_096, "intermediate_size": 14_336}),
    "llama-70b": ("llama", {**LLAMA, "num_hidden_layers": 80, "hidden_size": 8_192, "intermediate_size": 28_672}),
    "llama-405b": ("llama", {**LLAMA, "num_hidden_layers": 126, "hidden_size": 16_384, "intermediate_size": 53_248}),
}


def named_parameters(model: str, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
    """In registration order, tied weights once. ``model``: a key of MODELS. SystemExit without transformers."""
    try:
        from transformers import AutoConfig, AutoModelForCausalLM
    except ModuleNotFoundError:
        sys.exit("bench.network builds its models with transformers: pip install transformers")
    kind, options = MODELS[model]
    heads = {"num_attention_heads": options["hidden_size"] // options["head_dim"]} if options else {}
    with torch.device("meta"):
        made = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **options, **heads), dtype=dtype)
    return list(made.named_parameters())
