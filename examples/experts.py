"""A GPT whose MLPs are mixtures of experts, and the exchange of its tokens where ranks share the experts out.

A mixture sends each token to one expert, chosen by a learned gate. No token is dropped: ranks with the whole mixture
and ranks that share it out compute the same.
"""

import copy
from typing import Any

import torch
import torch.distributed as dist
from gpt_model import GPT, Block, Shape
from torch import nn

COUNT = 4  # experts of each block


class Mixture(nn.Module):
    """`group`: the ranks that share the experts out, in order; None: all are here. Each has its name in the whole."""

    def __init__(self, router: nn.Linear, experts: list[nn.Module]):
        super().__init__()
        self.router = router
        self.experts = nn.ModuleDict({str(index): expert for index, expert in enumerate(experts)})
        self.group: dist.ProcessGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        tokens = x.flatten(0, -2)
        gate, chosen = self.router(tokens).softmax(-1).max(-1)  # the gate's gradient teaches the router
        order = chosen.argsort(stable=True)
        made = self.at_experts(tokens[order], chosen.bincount(minlength=COUNT))
        return (gate[:, None] * made[order.argsort()]).view_as(x)

    def at_experts(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """What each expert makes of its tokens, which lie in the order of experts, `counts` for each."""
        if self.group is None:
            return self.of_experts(tokens, counts[None])
        sent = counts.view(self.group.size(), -1)  # (rank, its experts)
        received = torch.empty_like(sent)
        dist.all_to_all_single(received, sent, group=self.group)
        there, here = sent.sum(1).tolist(), received.sum(1).tolist()
        made = self.of_experts(Exchange.apply(tokens, here, there, self.group), received)
        return Exchange.apply(made, there, here, self.group)

    def of_experts(self, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """`counts`: (rank, expert), in whose order tokens lie. Each expert has those of all ranks at once."""
        parts = tokens.split(counts.flatten().tolist())
        made = list(parts)
        for index, expert in enumerate(self.experts.values()):
            own = slice(index, None, len(self.experts))
            made[own] = expert(torch.cat(parts[own])).split(counts[:, index].tolist())
        return torch.cat(made)


class Exchange(torch.autograd.Function):
    """Rows to the ranks that they belong to: `received` and `sent` of each rank. Gradients go the way back."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, received: list, sent: list, group: dist.ProcessGroup) -> torch.Tensor:
        ctx.back = (sent, received, group)
        found = rows.new_empty(sum(received), rows.shape[1])
        dist.all_to_all_single(found, rows.contiguous(), received, sent, group=group)
        return found

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple:
        return Exchange.apply(grad, *ctx.back), None, None, None


class BlockOfExperts(Block):
    """`like`: gives all but the MLP, and of that the spread of the values that experts start from."""

    def __init__(self, shape: Shape, like: Block):
        super().__init__(shape)
        self.load_state_dict(like.state_dict())
        one = nn.Sequential(self.mlp_in, nn.GELU(), self.mlp_out)
        self.mixture = Mixture(nn.Linear(shape.width, COUNT, bias=False), [copy.deepcopy(one) for _ in range(COUNT)])
        del self.mlp_in, self.mlp_out
        for weight in self.mixture.experts.parameters():
            nn.init.normal_(weight, std=float(weight.detach().std()))

    def mlp(self, x: torch.Tensor) -> torch.Tensor:
        return self.mixture(x)


def share_out(model: nn.Module, group: dist.ProcessGroup) -> None:
    """Leaves each rank of the group its equal part of every mixture's experts."""
    for mixture in [module for module in model.modules() if isinstance(module, Mixture)]:
        each = COUNT // group.size()
        for index in range(COUNT):
            if index // each != group.rank():
                del mixture.experts[str(index)]
        mixture.group = group


def gpt_of_experts(shape: Shape) -> GPT:
    model = GPT(shape)
    model.blocks = nn.ModuleList(BlockOfExperts(shape, block) for block in model.blocks)
    return model


def is_of_expert(name: str) -> bool:
    return ".experts." in name
