"""Models with tables, and the twin that one process trains with torch.optim.SparseAdam on the mean of all gradients."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn

from zerox import FusedShardedAdam, sparse_params
from zerox.residency.residency import Residency

ROWS, WIDTH = 300, 12  # five blocks, the last one not whole
WIDE = (1000, 64)  # several pages
OPTIONS: dict[str, Any] = {"lr": 0.05, "betas": (0.875, 0.99), "eps": 1e-6}
NARROW: dict[str, tuple[torch.dtype, dict[str, Any]]] = {  # 16-bit tables, and how their exact values are kept
    "bf16": (torch.bfloat16, {}),
    "fp16": (torch.float16, {"accumulate_dtype": torch.float32}),  # torch can't add two sparse gradients in float16
    "bf16, fp32": (torch.bfloat16, {"master_weights": "fp32"}),
    "bf16, none": (torch.bfloat16, {"master_weights": None, "accumulate_dtype": torch.float32}),
}


class Model(nn.Module):
    """Two tables and a dense layer. ``branch``: whether the second table is used."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(ROWS, WIDTH, sparse=True, padding_idx=3)
        self.bags = nn.EmbeddingBag(ROWS // 2, WIDTH, sparse=True, mode="sum")
        self.means = nn.EmbeddingBag(70, WIDTH, sparse=True, mode="mean")
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, ids: Tensor, branch: bool = True) -> Tensor:
        ids = ids.to(self.head.weight.device)
        hidden = self.words(ids).sum(1)
        if branch:
            hidden = hidden + self.bags(ids % (ROWS // 2)) + self.means(ids % 70)
        loss: Tensor = self.head(hidden).square().sum()
        return loss


def ids_of(rank: int, step: int, micro: int = 0) -> Tensor:
    """[n, 3]: few different rows for rank 0, so that they come often; many for others; none for rank 1 in step 1."""
    generator = torch.Generator().manual_seed(100 * step + 10 * rank + micro)
    most = 7 if rank == 0 else ROWS
    return torch.randint(0, most, (0 if (rank, step) == (1, 1) else 20, 3), generator=generator)


def backward(model: Model, rank: int, step: int) -> None:
    """What a rank does in a step, of one backward or two."""
    branch = not (rank == 1 and step == 2) and step != 3  # in step 3 no rank has a gradient of the branch
    model(ids_of(rank, step), branch).backward()
    if step % 2 == 0:
        model(ids_of(rank, step, 1), branch).backward()


def build(model: nn.Module, hostile: bool = True, **options: Any) -> FusedShardedAdam:
    """``hostile``: in stage 3 rows and buckets are released as soon as no operator uses them."""
    tables = sparse_params(model)
    known = {id(param) for param in tables}
    dense = [param for param in model.parameters() if id(param) not in known]
    groups = [{"params": tables, "sparse": True, "weight_decay": 0.0}]
    groups = [{"params": dense}, *groups] if dense else groups
    optimizer = FusedShardedAdam(groups, **OPTIONS, **options)
    if isinstance(optimizer.inside.gather, Residency):
        optimizer.inside.gather.residents.set_hostile(hostile)
        optimizer.inside.gather.residents.release_all()
    return optimizer


def numbered(dtype: torch.dtype = torch.float32, **options: Any) -> tuple[nn.Embedding, FusedShardedAdam]:
    """A table alone, in stage 3, whose values are the numbers of their rows."""
    values = torch.arange(WIDE[0], dtype=torch.float32)[:, None].repeat(1, WIDE[1])
    table = nn.Embedding.from_pretrained(values.to(dtype), freeze=False, sparse=True)
    group = {"params": [("words", table.weight)], "sparse": True, "weight_decay": 0.0}
    return table, FusedShardedAdam([group], **{"lr": 0.5, "stage": 3, **options})


def mean_of(grads: Sequence[Tensor | None], divisor: float) -> Tensor | None:
    """Of the ranks' sparse gradients: each rank's rows added up, then ranks in order, divided once; in float32."""
    found = [grad.float().coalesce() for grad in grads if grad is not None]
    if not found:
        return None
    total = found[0]
    for grad in found[1:]:
        total = (total + grad).coalesce()
    indices, values = total._indices(), total._values() / total._values().new_tensor(divisor)  # not its reciprocal
    return torch.sparse_coo_tensor(indices, values, total.shape, is_coalesced=True, check_invariants=False)


def rounded(exact: Tensor, dtype: torch.dtype, masters: str | None) -> Tensor:
    """Of float32 values: with remainders bfloat16 is rounded half away from zero, else as torch rounds."""
    if dtype is torch.bfloat16 and masters == "auto":
        return ((exact.view(torch.int32) + 2**15) >> 16).to(torch.int16).view(dtype)
    return exact.to(dtype)


class Twin:
    """All ranks' gradients in one process. The dense layer is copied from the model, which is not what is tested.

    ``tables``: what SparseAdam updates: the model's own, or of 16-bit ones their exact values, in float32.
    """

    def __init__(
        self,
        model: Model,
        world_size: int,
        master_weights: str | None = "auto",
        accumulate_dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        self.world_size = world_size
        self.masters = master_weights
        self.model = Model().to(model.head.weight)
        self.model.load_state_dict(model.state_dict())
        self.tables = sparse_params(self.model)
        if self.is_narrow:
            self.tables = [nn.Parameter(param.detach().float()) for param in self.tables]
            for param in sparse_params(self.model):
                param.grad_dtype = accumulate_dtype or param.dtype
        self.optimizer = torch.optim.SparseAdam(self.tables, **{**OPTIONS, **options})

    @property
    def is_narrow(self) -> bool:
        return self.model.words.weight.dtype is not torch.float32

    @torch.no_grad()
    def step(self) -> None:
        self.optimizer.step()
        for param, exact in zip(sparse_params(self.model), self.tables if self.is_narrow else (), strict=False):
            param.copy_(rounded(exact, param.dtype, self.masters))
            if self.masters is None:
                exact.copy_(param)

    def take_gradients(self, step: int) -> None:
        of_ranks = []
        for rank in range(self.world_size):
            self.model.zero_grad()
            backward(self.model, rank, step)
            of_ranks.append([param.grad for param in sparse_params(self.model)])
        for param, grads in zip(self.tables, zip(*of_ranks, strict=True), strict=True):
            param.grad = mean_of(grads, self.world_size)

    def copy_dense(self, model: Model) -> None:
        self.model.head.load_state_dict(model.head.state_dict())

    def check(self, optimizer: FusedShardedAdam, model: Model) -> None:
        """Parameters on this rank, and the whole state, have the twin's bits. Collective."""
        state = [entry for _, entry in sorted(optimizer.full_state_dict().get("state", {}).items())]
        state = [entry for entry in state if entry["exp_avg"].dim() == 2 and entry["exp_avg"].shape[1] == WIDTH][-3:]
        has_masters = self.is_narrow and self.masters is not None
        for index, (ours, theirs) in enumerate(zip(sparse_params(model), sparse_params(self.model), strict=True)):
            exact = self.tables[index]
            assert torch.equal(ours, theirs), (index, (ours - theirs).abs().max())
            assert not state or ("master" in state[index]) is has_masters
            assert not state or not has_masters or torch.equal(state[index]["master"], exact.cpu())
            if state and (kept := self.optimizer.state[exact]):
                assert float(state[index]["step"]) == kept["step"]
                assert torch.equal(state[index]["exp_avg"], kept["exp_avg"].cpu())
                assert torch.equal(state[index]["exp_avg_sq"], kept["exp_avg_sq"].cpu())
