"""A byte-level GPT in plain PyTorch: decoder blocks, learned positions, linear layers without biases.

It knows nothing of zerox or of ranks: any `torch.nn.Module` is trained the same way.
"""

from dataclasses import dataclass

import torch
from torch import nn
from torch.nn import functional

NUM_BYTES = 256  # the vocabulary: every byte is a token, so no tokenizer is needed


@dataclass(frozen=True)
class Shape:
    """The four numbers that make a GPT: `width` is split over `heads`, `context` is the longest window in bytes."""

    layers: int
    width: int
    heads: int
    context: int

    def __str__(self) -> str:
        return f"{self.layers} layers, width {self.width}, {self.heads} heads, context {self.context}"


SHAPES = {
    "tiny": Shape(layers=2, width=64, heads=2, context=32),  # seconds on one core
    "small": Shape(layers=4, width=128, heads=4, context=64),  # minutes on two cores
    "medium": Shape(layers=12, width=768, heads=12, context=512),  # a GPU
}


class Block(nn.Module):
    """Attention, then an MLP, each on a normalised copy of the stream and added back to it."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.heads = shape.heads
        self.attention_norm = nn.LayerNorm(shape.width, bias=False)
        self.query_key_value = nn.Linear(shape.width, 3 * shape.width, bias=False)
        self.attention_out = nn.Linear(shape.width, shape.width, bias=False)
        self.mlp_norm = nn.LayerNorm(shape.width, bias=False)
        self.mlp_in = nn.Linear(shape.width, 4 * shape.width, bias=False)
        self.mlp_out = nn.Linear(4 * shape.width, shape.width, bias=False)

    def forward(self, stream: torch.Tensor) -> torch.Tensor:
        stream = stream + self.attention(self.attention_norm(stream))
        return stream + self.mlp(self.mlp_norm(stream))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.mlp_out(functional.gelu(self.mlp_in(x)))

    def attention(self, x: torch.Tensor) -> torch.Tensor:
        batch, length, width = x.shape
        # (batch, length, 3 * width) -> three of (batch, heads, length, width / heads)
        split = self.query_key_value(x).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = split.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class GPT(nn.Module):
    """`forward(tokens)` gives logits; `forward(tokens, targets)` gives the mean loss in nats a byte."""

    def __init__(self, shape: Shape):
        super().__init__()
        self.shape = shape
        self.token_embedding = nn.Embedding(NUM_BYTES, shape.width)
        self.position_embedding = nn.Embedding(shape.context, shape.width)
        self.blocks = nn.ModuleList(Block(shape) for _ in range(shape.layers))
        self.final_norm = nn.LayerNorm(shape.width, bias=False)
        self.to_logits = nn.Linear(shape.width, NUM_BYTES, bias=False)
        self.apply(self.init_weights)

    def init_weights(self, module: nn.Module) -> None:
        """Of one of its modules, and of itself last, as `apply` goes."""
        std = self.shape.width**-0.5
        if isinstance(module, (nn.Linear, nn.Embedding)):
            nn.init.normal_(module.weight, std=std)
        elif isinstance(module, nn.LayerNorm):
            module.reset_parameters()
        elif module is self:
            # Each block adds to the stream twice: the sum of all should not outgrow the start.
            for block in self.blocks:
                for out in (block.attention_out, block.mlp_out):
                    nn.init.normal_(out.weight, std=std / (2 * self.shape.layers) ** 0.5)

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor | None = None) -> torch.Tensor:
        positions = torch.arange(tokens.shape[1], device=tokens.device)
        stream = self.token_embedding(tokens) + self.position_embedding(positions)
        for block in self.blocks:
            stream = block(stream)
        logits = self.to_logits(self.final_norm(stream)).float()  # the softmax in fp32, whatever the parameters are
        if targets is None:
            return logits
        return functional.cross_entropy(logits.flatten(0, 1), targets.flatten())


@torch.no_grad()
def sample_text(model: GPT, prompt: str, num_bytes: int, temperature: float, seed: int) -> str:
    """Continue `prompt` by `num_bytes` bytes drawn one at a time; the same seed gives the same text."""
    device = model.to_logits.weight.device
    generator = torch.Generator().manual_seed(seed)
    tokens = list(prompt.encode())
    for _ in range(num_bytes):
        window = torch.tensor([tokens[-model.shape.context :]], device=device)
        logits = model(window)[0, -1].cpu()
        tokens.append(int(torch.multinomial((logits / temperature).softmax(0), 1, generator=generator)))
    text = bytes(tokens).decode("utf-8", errors="replace")
    # A young model also draws control bytes, which a terminal would obey.
    return "".join(c if c.isprintable() or c in "\n\t" else "\N{REPLACEMENT CHARACTER}" for c in text)
