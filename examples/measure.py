"""Numbers about trained models: losses over all ranks, bytes on this rank, distances between parameters."""

from collections.abc import Iterable

import torch
import torch.distributed as dist
from corpus import even_windows
from gpt_model import GPT

# Categories of a rank's bytes: attributes of zerox's memory_bytes() and estimate().
CATEGORIES = ("parameters", "gradients", "master", "moments")

HELD_OUT_BYTES = 32768  # enough for two decimals of the loss, in little time


def mean_over_ranks(values: torch.Tensor) -> torch.Tensor:
    """Collective; `values` is overwritten."""
    if dist.is_initialized():
        dist.all_reduce(values)
        values /= dist.get_world_size()
    return values


@torch.no_grad()
def held_out_loss(module: GPT, text: torch.Tensor, batch: int, rank: int, world_size: int) -> float:
    """Mean loss in nats a byte over windows spread over `text`; collective, the ranks share the windows out."""
    device = module.to_logits.weight.device
    sums = torch.zeros(2, device=device)  # of losses, and of windows
    max_windows = max(1, HELD_OUT_BYTES // module.shape.context)
    for windows in even_windows(text, module.shape.context, max_windows)[rank::world_size].split(batch):
        windows = windows.to(device)
        loss = module(windows[:, :-1], windows[:, 1:])
        sums += torch.stack([loss * len(windows), torch.full_like(loss, len(windows))])
    loss_mean, windows_mean = mean_over_ranks(sums).tolist()
    return loss_mean / windows_mean


def bytes_of_zerox(memory: object) -> dict[str, int]:
    """From the result of `optimizer.memory_bytes()` or `zerox.estimate()`."""
    return {category: getattr(memory, category) for category in CATEGORIES}


def bytes_of_torch(module: torch.nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, int]:
    """The same for DDP + torch.optim, each storage counted once: gradients are views of DDP's buckets."""

    def storage_bytes(tensors: Iterable[torch.Tensor]) -> int:
        storages = [tensor.untyped_storage() for tensor in tensors]
        return sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())

    states = optimizer.state.values()
    return {
        "parameters": storage_bytes(module.parameters()),
        "gradients": storage_bytes(p.grad for p in module.parameters()),
        "master": 0,
        "moments": storage_bytes(
            value for state in states for value in state.values() if isinstance(value, torch.Tensor) and value.dim() > 0
        ),
    }


def distances_from_unfused(ours: GPT, fused: GPT, unfused: GPT) -> dict[str, float]:
    """Largest differences of parameters from those of torch's unfused optimizer, the textbook one."""

    def farthest(module: GPT) -> float:
        pairs = zip(module.parameters(), unfused.parameters(), strict=True)
        return max(float((a.detach().double() - b.detach().double()).abs().max()) for a, b in pairs)

    return {
        "zerox_from_unfused": farthest(ours),
        "torch_fused_from_unfused": farthest(fused),
        "largest_parameter": max(float(p.detach().abs().max()) for p in unfused.parameters()),
    }
