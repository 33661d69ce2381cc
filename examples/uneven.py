"""`--uneven`: ranks with unequal numbers of batches, and batches of unequal sizes, as a real data set has them."""

import torch
import torch.distributed as dist


def steps_of(rank: int, world_size: int, steps: int) -> int:
    """Rank 0 has a batch for every step; others run out earlier, the last one after a little over a half."""
    return steps - steps * rank // (2 * world_size)


def some_of(windows: torch.Tensor, step: int, rank: int) -> torch.Tensor:
    """From half of a batch's windows to all of them."""
    fewer = (step + rank) % (len(windows) // 2 + 1)
    return windows[: len(windows) - fewer]


def num_tokens(windows: torch.Tensor) -> int:
    """Of which each has a loss: all bytes of a window but its first."""
    return windows[:, 1:].numel()


def mean_losses(sums: list[torch.Tensor], counts: list[int], steps: int) -> list[float]:
    """The mean loss of a token at every step, over the ranks that had a batch in it. Collective.

    A rank's means can't be averaged, since they are of unequal numbers of tokens: sums and counts are added up.
    """
    found = torch.zeros(2, steps, dtype=torch.float64)
    if sums:
        found[0, : len(sums)] = torch.stack(sums).double().cpu()
        found[1, : len(counts)] = torch.tensor(counts, dtype=torch.float64)
    if dist.is_initialized():
        on_device = found.to(sums[0].device if sums else "cpu")
        dist.all_reduce(on_device)
        found = on_device.cpu()
    return (found[0] / found[1]).tolist()
