"""Muon, as users call it: the optimizer, and the param groups of a model."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from zerox.engine import Engine, Surroundings
from zerox.optimizer.on_meta import Init
from zerox.optimizers import by_name
from zerox.options import OptimizerOptions
from zerox.ranks.process_group import GroupArgument
from zerox.rules import muon
from zerox.rules.known import rules_of


class FusedShardedMuon(Engine):
    """Muon for data-parallel training: the momentum of each matrix, made orthogonal; all else as
    :class:`FusedShardedAdam`.

    Each matrix lies whole on one rank, which alone has its momentum and updates it. Parameters and state have the bits
    of ``torch.optim.Muon`` with the same mean gradients, on any number of ranks. Embeddings, heads, norms and biases
    are for another rule in the same optimizer: :func:`zerox.muon_groups` makes the groups.

    Source: Jordan et al., "Muon: An optimizer for hidden layers in neural networks" (2024).

    Args:
        params: with 2 dimensions, or 3: a stack of matrices, as of experts. A group may name another rule.
        lr, weight_decay, momentum, nesterov, ns_coefficients, eps, ns_steps, adjust_lr_fn: as in ``torch.optim.Muon``.
        split_sizes: rows of the parts that a parameter is cut into, each a matrix of its own: ``(768, 768, 768)`` for
            queries, keys and values in one. None: it is one matrix.
        num_heads: the same, in so many equal parts.

    The other arguments, and what is raised, are :class:`FusedShardedAdam`'s; ``state_dtype`` is the momentum's.
    ValueError for a parameter with other dimensions, as from torch.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        ns_coefficients: tuple[float, float, float] = muon.COEFFICIENTS,
        eps: float = 1e-7,
        ns_steps: int = 5,
        adjust_lr_fn: str | None = None,
        *,
        split_sizes: Sequence[int] | None = None,
        num_heads: int | None = None,
        process_group: GroupArgument = None,
        norm_group: Any = None,
        stage: int = 2,
        bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: str | None = "auto",
        accumulate_dtype: torch.dtype | None = None,
        resident_mb: float | None = None,
        gradient_divisor: float | None = None,
        exchange: str | None = None,
        model: torch.nn.Module | None = None,
        init: Init | None = None,
    ) -> None:
        flags: dict[str, bool | None] = {}
        capturable = False  # a CUDA graph would not ask which matrices have gradients
        make_rules, given = partial(rules_of, muon.MUON.name), locals()
        defaults, options = by_name(muon.defaults, given), by_name(OptimizerOptions, given)
        super().__init__(params, make_rules, defaults, options, Surroundings(process_group, norm_group, model, init))
