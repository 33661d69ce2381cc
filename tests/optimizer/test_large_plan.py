"""A model as large as any can be planned without a byte of its parameters."""

from __future__ import annotations

import tracemalloc

import torch
from torch import Tensor

from zerox.options import OptimizerOptions

LLAMA_405B = 405_853_388_800  # parameters, as published
LAYERS, WIDTH, INNER, KEY_VALUE, VOCABULARY = 126, 16_384, 53_248, 1_024, 128_256


def named_parameters() -> list[tuple[str, Tensor]]:
    """Tensors of one element of memory each, seen over and over again: a plan asks for no more."""
    block = {
        "self_attn.q_proj": (WIDTH, WIDTH),
        "self_attn.k_proj": (KEY_VALUE, WIDTH),
        "self_attn.v_proj": (KEY_VALUE, WIDTH),
        "self_attn.o_proj": (WIDTH, WIDTH),
        "mlp.gate_proj": (INNER, WIDTH),
        "mlp.up_proj": (INNER, WIDTH),
        "mlp.down_proj": (WIDTH, INNER),
        "input_layernorm": (WIDTH,),
        "post_attention_layernorm": (WIDTH,),
    }
    shapes: dict[str, tuple[int, ...]] = {"embed_tokens": (VOCABULARY, WIDTH)}
    shapes |= {f"layers.{layer}.{part}": shape for layer in range(LAYERS) for part, shape in block.items()}
    shapes |= {"norm": (WIDTH,), "lm_head": (VOCABULARY, WIDTH)}
    element = torch.zeros((), dtype=torch.bfloat16)
    return [(name, element.expand(shape).requires_grad_()) for name, shape in shapes.items()]


def test_a_plan_of_405_b_parameters_over_16384_ranks_takes_no_memory_to_speak_of() -> None:
    named = named_parameters()
    tracemalloc.start()
    plans = OptimizerOptions().plan([(name, param, "adam", None) for name, param in named], "gloo", 16_384)
    assert all(plan.layout.segments(16_383) is not None for plan in plans)
    assert tracemalloc.get_traced_memory()[1] < 50e6
    tracemalloc.stop()
    assert sum(sum(plan.layout.numels) for plan in plans) == sum(param.numel() for _, param in named) == LLAMA_405B
