"""Left-over gradients that no bucket can have: rows of tables, and complex ones.

Note [Gradients outside buckets]
nn.Embedding(sparse=True) makes a gradient that is rows of its table: how many, no layout knows. Kernels know no complex
numbers. So these gradients stay in p.grad while a backward runs, as in no_sync(), and ranks average what p.grad holds
where the backward has ended, right after they have synchronized there. Each says of each parameter how many rows it
has, whether its gradient is dense, or that it has none. Then rows go to all ranks in one message, and dense gradients
are added up by one all-reduce for each dtype. No gradient is sent where no p.grad has changed since. What p.grad held
before is averaged again with it: the mean of equal gradients is the same gradient, as in torch's
DistributedDataParallel.

All ranks add up rows in the order of ranks, and so have the same bits. 16-bit values are added up in float32.
"""

from __future__ import annotations

import weakref
from collections.abc import Collection, Sequence
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from zerox import _C as C
from zerox import _torch
from zerox._C import BucketManager, Decision
from zerox.memory.grad_dtype import NARROW, grad_dtype_of
from zerox.model_names import quote
from zerox.ranks.group import Ranks
from zerox.rows.row_gradient import sparse_of

# What a rank says of a gradient: how many rows it has, or one of these.
ABSENT, DENSE, UNFIT = -1, -2, -3


def tables_in(module: nn.Module | None) -> set[int]:
    """By id, the parameters whose gradients are rows, as torch's DistributedDataParallel tells them."""
    known = () if module is None else module.modules()
    tables = [each for each in known if isinstance(each, nn.Embedding | nn.EmbeddingBag) and each.sparse]
    return {id(param) for each in tables for param in each.parameters(recurse=False)}


class Unbucketed:
    """``reduce_dtype``: as an optimizer's. What it makes of a backward hangs on ``manager``, which ranks synchronize
    by.
    """

    def __init__(
        self,
        ranks: Ranks,
        manager: BucketManager,
        members: Sequence[tuple[str, Tensor]],
        decision: Decision,
        reduce_dtype: torch.dtype | None,
    ) -> None:
        self.ranks = ranks
        self.members = list(members)
        self.reduce_dtype = reduce_dtype
        self.shown: list[tuple[weakref.ref[Tensor], int] | None] = [None] * len(self.members)  # with its version
        handles = [_hook(param, partial(_tell_begin, weakref.ref(manager), decision)) for _, param in self.members]
        weakref.finalize(self, _remove, handles).atexit = False
        manager.synchronizer.set_after_backward_end(partial(_average, weakref.ref(self)))

    def forget(self) -> None:
        """What a backward left that raised."""
        for _, param in self.members:
            param.grad = None

    @torch.no_grad()
    def average(self) -> None:
        """Collective. RuntimeError on all ranks for a gradient that is neither dense nor rows."""
        with C.Doing("the end of backward, where rows and complex gradients are averaged"):
            own = torch.tensor([self._has_new(), *(_kind_of(param) for _, param in self.members)], device="cpu")
            said = torch.stack(self.ranks.gather(own, to=None))
            if not bool(said[:, 0].any()):
                return
            by_rank = said[:, 1:].tolist()
            self._check_fit(by_rank)
            by_param = list(zip(*by_rank, strict=True))
            places = range(len(by_param))
            with self.ranks.failure_told():
                self._average_dense([i for i in places if DENSE in by_param[i]])
                self._average_rows([i for i in places if DENSE not in by_param[i] and max(by_param[i]) >= 0], by_param)
        grads = [param.grad for _, param in self.members]
        self.shown = [None if grad is None else (weakref.ref(grad), _torch.version_of(grad)) for grad in grads]

    # ---- inside

    def _has_new(self) -> bool:
        """Whether some p.grad is another tensor than the mean that it was, or was written since."""
        for (_, param), shown in zip(self.members, self.shown, strict=True):
            grad = param.grad
            if grad is not None and (shown is None or shown[0]() is not grad or shown[1] != _torch.version_of(grad)):
                return True
        return False

    def _check_fit(self, by_rank: Sequence[Sequence[int]]) -> None:
        for rank, said in enumerate(by_rank):
            if UNFIT in said:
                name, param = self.members[said.index(UNFIT)]
                raise RuntimeError(
                    f"zerox: rank {rank} has a gradient of parameter {quote(name, param)} that can't be averaged: it "
                    "is neither dense nor rows of the parameter"
                )

    def _wire(self, param: Tensor) -> torch.dtype:
        return self.reduce_dtype or grad_dtype_of(param)

    def _average_dense(self, places: Collection[int]) -> None:
        """Of parameters some of whose gradients are dense."""
        params = [self.members[i][1] for i in places]
        for dtype in dict.fromkeys(self._wire(param).to_real() for param in params):
            run = [param for param in params if self._wire(param).to_real() is dtype]
            sent = torch.cat([_as_real(_dense_grad(param).to(self._wire(param))).reshape(-1) for param in run])
            sums = sent.to(_wide(dtype), copy=True)
            sums = sums.cpu() if self.ranks.via_host else sums
            self.ranks.all_reduce(sums, dist.ReduceOp.SUM)
            means = sums.div_(self.ranks.size).to(run[0].device, dtype)
            counts = [param.numel() * (2 if param.is_complex() else 1) for param in run]
            for param, mean in zip(run, means.split(counts), strict=True):
                _show(param, torch.view_as_complex(mean.view(*param.shape, 2)) if param.is_complex() else mean)

    def _average_rows(self, places: Collection[int], by_param: Sequence[Sequence[int]]) -> None:
        """Of parameters all of whose gradients are rows. ``by_param``: how many each rank has."""
        if not places:
            return
        sent: list[Tensor] = []
        sizes = [0] * self.ranks.size
        for i in places:
            param = self.members[i][1]
            for rank, count in enumerate(by_param[i]):
                sizes[rank] += max(count, 0) * (8 + param[:1].numel() * self._wire(param).itemsize)
            if param.grad is not None:
                rows, values = _torch.rows_of(param.grad)[0], _torch.values_of(param.grad).to(self._wire(param))
                sent += [rows.contiguous().view(torch.uint8), values.reshape(-1).view(torch.uint8)]
        device = self.members[0][1].device
        own = torch.cat([torch.empty(0, dtype=torch.uint8, device=device), *sent])
        received = self.ranks.gather(nn.functional.pad(own, (0, max(sizes) - own.numel())), to=None)
        at = [0] * self.ranks.size
        for i in places:
            _, param = self.members[i]
            wire, shape = self._wire(param), param.shape[1:]
            parts = []
            for rank, count in enumerate(by_param[i]):
                lengths = [max(count, 0) * 8, max(count, 0) * shape.numel() * wire.itemsize]
                rows, values = received[rank].narrow(0, at[rank], sum(lengths)).split(lengths)
                at[rank] += sum(lengths)
                # Copies, since tensors of other dtypes must lie at multiples of their size.
                parts.append((rows.clone().view(torch.int64), values.clone().view(wire).view(-1, *shape)))
            all_rows = torch.cat([rows for rows, _ in parts]).to(device)
            all_values = torch.cat([values for _, values in parts]).to(device, _wide(wire))
            mean = sparse_of(all_rows, all_values, param.shape).coalesce()
            _torch.values_of(mean).div_(self.ranks.size)
            param.grad = mean.to(wire).to(grad_dtype_of(param))


def _kind_of(param: Tensor) -> int:
    """Brings rows into order, each once."""
    grad = param.grad
    if grad is None:
        return ABSENT
    if grad.shape != param.shape or grad.layout not in (torch.strided, torch.sparse_coo):
        return UNFIT
    if grad.layout is torch.strided:
        return DENSE
    if grad.sparse_dim() != 1:
        return UNFIT
    if not grad.is_coalesced():
        wide = _wide(grad.dtype)
        param.grad = grad = grad.to(wide).coalesce().to(grad.dtype)
    return _torch.num_rows_of(grad)


def _dense_grad(param: Tensor) -> Tensor:
    grad = param.grad
    if grad is None:
        return torch.zeros_like(param)
    return grad.to_dense() if grad.is_sparse else grad


def _show(param: Tensor, mean: Tensor) -> None:
    """In the tensor that p.grad is, if it is dense."""
    if param.grad is None or param.grad.is_sparse:
        param.grad = torch.empty_like(param, dtype=grad_dtype_of(param))
    param.grad.detach().copy_(mean.view(param.shape))


def _wide(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in NARROW else dtype


def _as_real(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor.resolve_conj()) if tensor.is_complex() else tensor


# ---- hooks, which keep nothing alive


def _hook(param: Tensor, hook: Any) -> Any:
    """torch hangs hooks on trained parameters only, and one that is frozen may be thawed."""
    is_trained = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(is_trained)


def _remove(handles: Sequence[Any]) -> None:
    for each in handles:
        each.remove()


def _tell_begin(to_manager: weakref.ref[BucketManager], decision: Decision, _: Tensor) -> None:
    """Has ranks synchronize at the end of a backward that no forward of the wrapper told of."""
    if not _torch.in_backward():
        raise RuntimeError(
            "zerox does not work under compiled autograd: run backward() outside torch._dynamo.compiled_autograd"
        )
    if (manager := to_manager()) is not None:
        manager.backward.begin(decision, accumulates=True)


def _average(to_unbucketed: weakref.ref[Unbucketed]) -> None:
    if (unbucketed := to_unbucketed()) is not None:
        unbucketed.average()
