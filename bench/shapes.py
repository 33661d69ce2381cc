"""Parameters of well-known models, as shapes: what can be planned without a byte of them."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

NamedShape = tuple[str, tuple[int, ...]]


@dataclass(frozen=True)
class Model:
    """``shapes`` in registration order, tied weights once."""

    name: str
    shapes: tuple[NamedShape, ...]

    @property
    def numels(self) -> tuple[int, ...]:
        return tuple(math.prod(shape) for _, shape in self.shapes)

    @property
    def numel(self) -> int:
        return sum(self.numels)

    def named_parameters(self, dtype: torch.dtype) -> list[tuple[str, Tensor]]:
        """Tensors of one element of memory each, seen over and over again: a plan asks for no more."""
        return [(name, torch.zeros((), dtype=dtype).expand(shape).requires_grad_()) for name, shape in self.shapes]


def gpt2(name: str, layers: int, width: int, vocabulary: int, context: int) -> Model:
    shapes: list[NamedShape] = [("wte", (vocabulary, width)), ("wpe", (context, width))]
    for layer in range(layers):
        for norm, linears in (
            ("ln_1", {"attn.c_attn": (width, 3 * width), "attn.c_proj": (width, width)}),
            ("ln_2", {"mlp.c_fc": (width, 4 * width), "mlp.c_proj": (4 * width, width)}),
        ):
            shapes += [(f"h.{layer}.{norm}.{each}", (width,)) for each in ("weight", "bias")]
            for part, shape in linears.items():
                shapes += [(f"h.{layer}.{part}.weight", shape), (f"h.{layer}.{part}.bias", shape[1:])]
    return Model(name, (*shapes, ("ln_f.weight", (width,)), ("ln_f.bias", (width,))))


def llama(name: str, layers: int, width: int, inner: int, key_value: int, vocabulary: int) -> Model:
    """``inner``: of the gated MLP; ``key_value``: of all key heads, and of all value heads."""
    shapes: list[NamedShape] = [("embed_tokens", (vocabulary, width))]
    for layer in range(layers):
        block = {
            "self_attn.q_proj": (width, width),
            "self_attn.k_proj": (key_value, width),
            "self_attn.v_proj": (key_value, width),
            "self_attn.o_proj": (width, width),
            "mlp.gate_proj": (inner, width),
            "mlp.up_proj": (inner, width),
            "mlp.down_proj": (width, inner),
            "input_layernorm": (width,),
            "post_attention_layernorm": (width,),
        }
        shapes += [(f"layers.{layer}.{part}", shape) for part, shape in block.items()]
    return Model(name, (*shapes, ("norm", (width,)), ("lm_head", (vocabulary, width))))


MODELS: dict[str, Callable[[], Model]] = {
    "gpt2-124m": lambda: gpt2("gpt2-124m", 12, 768, 50_257, 1_024),
    "llama-8b": lambda: llama("llama-8b", 32, 4_096, 14_336, 1_024, 128_256),
    "llama-70b": lambda: llama("llama-70b", 80, 8_192, 28_672, 1_024, 128_256),
    "llama-405b": lambda: llama("llama-405b", 126, 16_384, 53_248, 1_024, 128_256),
}
