"""Rank 0's values of plain tensors on all ranks, in few messages."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox import _C as C
from zerox import _torch
from zerox.ranks.calls import waiting
from zerox.ranks.compared import digest, first_that_differs, line_of

MOST_BYTES = 250 << 20  # of a message, as in torch's DistributedDataParallel


def named_buffers_of(module: nn.Module, ignored: Collection[str] | None = None) -> dict[str, Tensor]:
    """Those that DistributedDataParallel hands out, by name."""
    if ignored is None:
        ignored = _torch.ignored_by_ddp(module)
    return {name: buffer for name, buffer in module.named_buffers() if name not in ignored}


def broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None, what: str, root: int = 0) -> None:
    """Gives all ranks of ``group`` those of rank ``root``; alone it does nothing. Collective. ``what``: for errors."""
    if group is None or group.size() == 1:
        return
    first = dist.get_global_rank(group, root)
    with C.Doing(f"the broadcast of rank {root}'s {what}"), waiting(group):
        give_out(list(tensors), lambda values: dist.broadcast(values, first, group), is_root=group.rank() == root)


@torch.no_grad()
def give_out(tensors: Sequence[Tensor], send: Callable[[Tensor], object], is_root: bool = False) -> None:
    """``send``: gives all ranks rank 0's bytes of a 1-D tensor, in place. Versions stay: a tensor that autograd has
    saved may be handed out again before its backward, as in DistributedDataParallel."""
    with _torch.keep_versions(tensors):
        for run in _runs(tensors):
            plain = [tensor.resolve_conj().resolve_neg().contiguous() for tensor in run]
            sent = torch.cat([tensor.view(-1).view(torch.uint8) for tensor in plain])
            send(sent)
            if not is_root:
                for tensor, values in zip(run, sent.split([tensor.nbytes for tensor in run]), strict=True):
                    tensor.copy_(values.view(tensor.dtype).view(tensor.shape))


def _runs(tensors: Sequence[Tensor]) -> list[list[Tensor]]:
    """Of one device, each within MOST_BYTES but for a single tensor; the largest elements first, so that in a message
    all are aligned."""
    runs: list[list[Tensor]] = []
    last: dict[torch.device, tuple[list[Tensor], int]] = {}
    for tensor in sorted(tensors, key=lambda each: -each.element_size()):
        if tensor.numel() == 0:
            continue
        run, nbytes = last.get(tensor.device, ([], MOST_BYTES + 1))
        if nbytes + tensor.nbytes > MOST_BYTES:
            run, nbytes = [], 0
            runs.append(run)
        run.append(tensor)
        last[tensor.device] = run, nbytes + tensor.nbytes
    return runs


def check_same(lines: Sequence[str], group: dist.ProcessGroup | None, device: torch.device, way_out: str = "") -> None:
    """RuntimeError on all ranks of ``group``, naming the first line that differs, unless all pass the same. Collective.

    Over the user's group, where there is none of zerox's own. What is sent first has one size on all ranks.
    """
    if group is None or group.size() == 1:
        return
    number = digest("\n".join(lines))
    extremes = torch.tensor([number, -number], device=device)
    with C.Doing("a comparison of what ranks have"), waiting(group):
        dist.all_reduce(extremes, dist.ReduceOp.MAX, group)
        most, least = extremes.tolist()
        if most == -least:
            return
        everyone: list[list[str]] = [[]] * group.size()
        dist.all_gather_object(everyone, list(lines), group)
    if (found := first_that_differs(everyone)) is not None:
        rank, index = found
        raise RuntimeError(
            f"zerox: ranks must agree: rank 0 has {line_of(everyone[0], index)}; rank {rank} has "
            f"{line_of(everyone[rank], index)}{way_out}"
        )
