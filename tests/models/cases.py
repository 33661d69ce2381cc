"""The architectures, tiny and with random values, each with what is awkward about it for an optimizer with hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from tests.models.modules import VOCABULARY, ExpertModules, SyncBatchNorm, TiedPerceptron, sync_batch_norms

SEQUENCE, ROWS = 10, 2
PIXELS, CLASSES = 16, 5


def llama(**options: Any) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    options = {"hidden_size": 48, "intermediate_size": 96, "num_key_value_heads": 2, **options}
    return LlamaForCausalLM(
        LlamaConfig(vocab_size=VOCABULARY, num_hidden_layers=2, num_attention_heads=4, use_cache=False, **options)
    )


def gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    # Dropout stays at its 0.1, and the output's matrix is the embedding's.
    return GPT2LMHeadModel(GPT2Config(vocab_size=VOCABULARY, n_positions=32, n_embd=48, n_layer=2, n_head=4))


def t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    sizes = {"d_model": 48, "d_kv": 12, "d_ff": 96, "num_layers": 2, "num_heads": 4}
    return T5ForConditionalGeneration(T5Config(vocab_size=VOCABULARY, decoder_start_token_id=0, **sizes))


def mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_local_experts": 8, "num_experts_per_tok": 1}
    return MixtralForCausalLM(
        MixtralConfig(
            vocab_size=VOCABULARY,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            output_router_logits=True,
            **sizes,
        )
    )


def vit() -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    sizes = {"hidden_size": 48, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 4}
    return ViTForImageClassification(ViTConfig(image_size=PIXELS, patch_size=4, num_labels=CLASSES, **sizes))


def resnet() -> nn.Module:
    from transformers import ResNetConfig, ResNetForImageClassification

    sizes = {"embedding_size": 16, "hidden_sizes": [16, 40], "depths": [1, 2]}
    return ResNetForImageClassification(ResNetConfig(layer_type="basic", num_labels=CLASSES, **sizes))


def convnext() -> nn.Module:
    from transformers import ConvNextConfig, ConvNextForImageClassification

    sizes = {"hidden_sizes": [16, 32], "depths": [1, 1], "num_stages": 2}
    return ConvNextForImageClassification(ConvNextConfig(num_labels=CLASSES, image_size=PIXELS, **sizes))


def checkpointed(model: Any, use_reentrant: bool) -> nn.Module:
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    if use_reentrant:
        model.enable_input_require_grads()  # a reentrant segment needs an input that does
    return model


def tokens_of(seed: int) -> dict[str, Tensor]:
    tokens = torch.randint(0, VOCABULARY, (ROWS, SEQUENCE), generator=torch.Generator().manual_seed(seed))
    return {"input_ids": tokens, "labels": tokens}


def images_of(seed: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(ROWS, 3, PIXELS, PIXELS, generator=generator)
    return {"pixel_values": images, "labels": torch.randint(0, CLASSES, (ROWS,), generator=generator)}


def bare_tokens_of(seed: int) -> dict[str, Tensor]:
    return {"tokens": tokens_of(seed)["input_ids"]}


@dataclass(frozen=True)
class Case:
    """``make()`` builds the model from torch's random numbers, ``batch(seed)`` its arguments; it returns the loss.

    ``loop``: "plain", "trainer" (as transformers.Trainer uses an optimizer) or "closure" (as Lightning does).
    """

    make: Callable[[], nn.Module]
    batch: Callable[[int], dict[str, Tensor]] = tokens_of
    options: dict[str, Any] = field(default_factory=dict)
    accumulate: int = 1
    clip: float | None = None
    loop: str = "plain"
    autocast: bool = False
    no_decay: bool = False  # biases and norms in a group of their own
    backend: str | None = None  # of torch.compile

    def model(self, seed: int) -> nn.Module:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            return self.make().train()

    def compiled(self, model: nn.Module) -> nn.Module:
        """Copies of a compiled module are not compiled: this is for each of them."""
        if self.backend is not None:
            model.compile(backend=self.backend, fullgraph=True, dynamic=False)
        return model

    def groups(self, model: nn.Module) -> Any:
        """For the optimizer: all named parameters, or the two groups of every training script."""
        named = list(model.named_parameters())
        if not self.no_decay:
            return named
        matrices = [(name, param) for name, param in named if param.ndim > 1]
        others = [(name, param) for name, param in named if param.ndim <= 1]
        return [{"params": matrices, "weight_decay": 0.1}, {"params": others, "weight_decay": 0.0}]

    def loss(self, model: nn.Module, rank: int, step: int, micro: int) -> Tensor:
        seed = 1000 * rank + 10 * step + micro
        torch.manual_seed(seed)  # dropout's
        with torch.autocast("cpu", torch.bfloat16) if self.autocast else contextlib.nullcontext():
            loss = model(**self.batch(seed))
        return loss if isinstance(loss, Tensor) else loss.loss

    def has_sync_batch_norm(self, model: nn.Module) -> bool:
        return any(isinstance(module, SyncBatchNorm) for module in model.modules())


CASES = {
    "decoder": Case(llama),
    "decoder in bf16 with masters": Case(lambda: llama().bfloat16(), clip=0.1),
    "decoder with tied weights, groups, clip, Trainer's loop": Case(
        gpt2, accumulate=2, clip=0.1, loop="trainer", no_decay=True
    ),
    "encoder-decoder, Lightning's closure": Case(t5, clip=0.1, loop="closure"),
    "mixture of experts in 3-D parameters": Case(mixtral),
    "mixture of experts as modules": Case(ExpertModules, batch=bare_tokens_of),
    "vision under autocast": Case(vit, batch=images_of, autocast=True),
    "convolution with batch norm": Case(resnet, batch=images_of, accumulate=2),
    "convolution with batch norm over all ranks": Case(lambda: sync_batch_norms(resnet()), batch=images_of),
    "convolution, channels last": Case(lambda: convnext().to(memory_format=torch.channels_last), batch=images_of),
    "checkpointed blocks": Case(lambda: checkpointed(gpt2(), use_reentrant=False), clip=0.1),
    "checkpointed blocks, reentrant": Case(lambda: checkpointed(gpt2(), use_reentrant=True), clip=0.1),
}
COMPILED = {
    "aot_eager": Case(lambda: llama(tie_word_embeddings=True), backend="aot_eager"),
    # Its compiler takes a second for each kernel: a minute for the decoder.
    "inductor": Case(TiedPerceptron, batch=bare_tokens_of, backend="inductor"),
}
ALL = {**CASES, **COMPILED}
