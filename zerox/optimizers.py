"""The optimizers that users call: a signature each, and the rule that updates."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor

from zerox.engine import Engine, Surroundings
from zerox.optimizer.on_meta import Init
from zerox.options import Inside, LocalOptimizerOptions, OptimizerOptions, check_foreign
from zerox.ranks.process_group import GroupArgument
from zerox.rules import adam, lion, muon, sgd
from zerox.rules.known import rules_of
from zerox.rules.local_optimizer import LocalOptimizerClass, full_name
from zerox.rules.of_groups import Rules
from zerox.update.local_optimizer_update import LocalOptimizerUpdate

T = TypeVar("T")


def _by_name(make: Callable[..., T], given: Mapping[str, Any]) -> Callable[[], T]:
    """``make``, with those of a constructor's arguments that it has by these names."""
    return partial(make, **{name: given[name] for name in inspect.signature(make).parameters})


class FusedShardedAdam(Engine):
    """AdamW (or Adam) for data-parallel training, sharded as ZeRO stage 1, 2 or 3.

    Use it in place of ``DistributedDataParallel`` plus ``torch.optim.AdamW``: gradients are averaged over the group
    while ``loss.backward()`` runs, every rank updates the shard it owns, and the new parameters are gathered. Without
    ``torch.distributed`` it is a fused AdamW for one process.

    Args:
        params: tensors, ``(name, tensor)`` pairs or dict groups, as for any torch.optim optimizer. Their ``.data``
            lie in flat buffers then; their values become those of the group's rank 0. A group may name another rule:
            ``{"params": ..., "rule": "sgd", "momentum": 0.9}``, or "lion". It takes ``lr`` and ``maximize`` from here
            if it has none, and that rule's defaults for its other options.
        lr, betas, eps, weight_decay, amsgrad, maximize: as in ``torch.optim.AdamW``.
        decoupled_weight_decay: True for AdamW, False for Adam with L2.
        process_group: the data-parallel ProcessGroup or DeviceMesh: of one axis, or of two, (replicate, shard), where
            gradients are added up along the second first. Default: all ranks of the default group, which must be there
            first. "alone": this rank by itself, for a teacher or models that differ by rank. A param group's own, a
            sub-group of it, is for experts: see docs/meshes.md.
        norm_group: a ProcessGroup or DeviceMesh whose other ranks have other parts of the model, as the stages of a
            pipeline: norms are over them too. The axes on which parameters are DTensors need not be named.
        stage: 1 shards the state, and leaves whole mean gradients in ``p.grad``; 2 shards gradients too; 3 also shards
            parameters: they are whole only while something reads them (see :meth:`whole`).
        bucket_cap_mb: MiB of parameters a bucket; None: 16, or more where a rank's slice of one would be small,
            and 64 for a rank alone.
        reduce_dtype: dtype of gradients on the wire and in the shard; None: the parameter's own.
        state_dtype: of both moments: torch.float32, torch.bfloat16 (rounded stochastically) or "8bit" (blocks of 256;
            parameters under 4,096 elements keep float32). float64 parameters keep float64 moments in any case.
        master_weights: how 16-bit parameters keep their fp32 value: "remainder" (bf16 parameter plus 16 bits), "fp32",
            None, or "auto": remainder for bfloat16, fp32 for float16.
        capturable: step() may be captured into a CUDA graph, with a tensor lr on the device if it is to change.
            Before each replay call ``synchronize()``; ``clip_grad_norm_()``, ``zero_grad()`` and backward stay outside.
        accumulate_dtype: torch.float32: 16-bit parameters' gradients add up in float32 in ``p.grad``, over backwards
            inside ``no_sync()`` and in stage 1 (``reduce_dtype`` is what they are sent in). None: as torch, in the
            parameter's dtype, or the ``grad_dtype`` that was set on it.
        resident_mb: with ``stage=3``, MiB of parameters that may be whole on a rank at a time. None: the three largest
            buckets, or an eighth of the parameters if that is more; inf: each is fetched once a step.
        gradient_divisor: what the ranks' sum of gradients is divided by: a positive number, 1 for the sum itself; None:
            the number of ranks, for their mean. A param group may have another one. See also :meth:`mean_over`.
        exchange: how ranks exchange gradients and parameters: "direct" (each gradient goes to its owner, who adds up in
            rank order; over gloo ranks of one machine read each other's memory), "messages" (the same, but nobody is
            read) or "native" (the backend's collectives). None: direct over gloo, native over NCCL. The environment
            variable ``ZEROX_EXCHANGE`` wins over it, with a warning where they differ.
        model: the module that has the parameters, where some are on the meta device: they get memory and first values
            here, bucket by bucket, and with ``stage=3`` no rank ever has all of them. Buffers on meta do too.
        init: a function of a module that gives its own parameters and buffers first values. It is called as by
            ``model.apply()``, with rank 0's random numbers. None: each module's ``reset_parameters()``; in
            models of transformers, and adapters of PEFT, these libraries' own functions.
        foreach, fused: as in ``torch.optim.AdamW``, without effect: the update is fused in any case.
        differentiable: must be False.

    Raises:
        ValueError: an option or parameter that doesn't fit, or ranks that disagree about either.
        RuntimeError: under ``torch.inference_mode()``; later, from each collective call, if it was built without a
            group and there are several ranks now.
        TypeError: as torch.optim, for example for a bare tensor.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 1e-2,
        *,
        amsgrad: bool = False,
        maximize: bool = False,
        decoupled_weight_decay: bool = True,
        process_group: GroupArgument = None,
        norm_group: Any = None,
        stage: int = 2,
        bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: str | None = "auto",
        capturable: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        resident_mb: float | None = None,
        gradient_divisor: float | None = None,
        exchange: str | None = None,
        model: torch.nn.Module | None = None,
        init: Init | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        flags = {"foreach": foreach, "fused": fused, "differentiable": differentiable}
        make_rules, given = partial(rules_of, adam.ADAM.name), locals()
        defaults, options = _by_name(adam.defaults, given), _by_name(OptimizerOptions, given)
        super().__init__(params, make_rules, defaults, options, Surroundings(process_group, norm_group, model, init))


class FusedShardedSGD(Engine):
    """SGD for data-parallel training: ``torch.optim.SGD``'s update, all else as :class:`FusedShardedAdam`.

    Args:
        lr, momentum, dampening, weight_decay, nesterov, maximize: as in ``torch.optim.SGD``. Without momentum no state
            is kept. A parameter's ``step`` in the state counts the updates of its momentum.

    The other arguments, and what is raised, are :class:`FusedShardedAdam`'s; ``state_dtype`` is the momentum's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-3,
        momentum: float = 0.0,
        dampening: float = 0.0,
        weight_decay: float = 0.0,
        nesterov: bool = False,
        *,
        maximize: bool = False,
        process_group: GroupArgument = None,
        norm_group: Any = None,
        stage: int = 2,
        bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: str | None = "auto",
        capturable: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        resident_mb: float | None = None,
        gradient_divisor: float | None = None,
        exchange: str | None = None,
        model: torch.nn.Module | None = None,
        init: Init | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        flags = {"foreach": foreach, "fused": fused, "differentiable": differentiable}
        make_rules, given = partial(rules_of, sgd.SGD.name), locals()
        defaults, options = _by_name(sgd.defaults, given), _by_name(OptimizerOptions, given)
        super().__init__(params, make_rules, defaults, options, Surroundings(process_group, norm_group, model, init))


class FusedShardedLion(Engine):
    """Lion for data-parallel training: the sign of an average of gradients; all else as :class:`FusedShardedAdam`.

    Source: Chen et al., "Symbolic Discovery of Optimization Algorithms" (2023), algorithm 2. Where the average is zero,
    a parameter only decays; a NaN in it comes through.

    Args:
        lr: the size of every update; a third to a tenth of AdamW's, says the paper.
        betas: of the update's average, and of the average that is kept.
        weight_decay: multiplies the parameter, as in AdamW; three to ten times AdamW's for the smaller ``lr``.
        maximize: follows the gradient upwards.

    The other arguments, and what is raised, are :class:`FusedShardedAdam`'s; ``state_dtype`` is the average's.
    """

    def __init__(
        self,
        params: Any,
        lr: float | Tensor = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        *,
        maximize: bool = False,
        process_group: GroupArgument = None,
        norm_group: Any = None,
        stage: int = 2,
        bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        state_dtype: torch.dtype | str = torch.float32,
        master_weights: str | None = "auto",
        capturable: bool = False,
        accumulate_dtype: torch.dtype | None = None,
        resident_mb: float | None = None,
        gradient_divisor: float | None = None,
        exchange: str | None = None,
        model: torch.nn.Module | None = None,
        init: Init | None = None,
        foreach: bool | None = None,
        fused: bool | None = None,
        differentiable: bool = False,
    ) -> None:
        flags = {"foreach": foreach, "fused": fused, "differentiable": differentiable}
        make_rules, given = partial(rules_of, lion.LION.name), locals()
        defaults, options = _by_name(lion.defaults, given), _by_name(OptimizerOptions, given)
        super().__init__(params, make_rules, defaults, options, Surroundings(process_group, norm_group, model, init))


class FusedShardedMuon(Engine):
    """Muon for data-parallel training: the momentum of each matrix, made orthogonal; all else as
    :class:`FusedShardedAdam`.

    Each matrix lies whole on one rank, which alone has its momentum and updates it. float32 and float64
    parameters and their state have the bits of ``torch.optim.Muon`` with the same mean gradients and a number as
    ``lr``, on any number of ranks; 16-bit ones those of their float32 masters. Embeddings, heads, norms and biases
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
        defaults, options = _by_name(muon.defaults, given), _by_name(OptimizerOptions, given)
        super().__init__(params, make_rules, defaults, options, Surroundings(process_group, norm_group, model, init))


class ShardedOptimizer(Engine):
    """Any optimizer of torch's kind, sharded as ZeRO stage 1, 2 or 3: SGD, NAdam, Muon, LAMB, or your own. It must be
    elementwise, or with ``whole`` update each tensor by itself.

    ``optimizer_class`` runs unmodified on each rank's own part of the parameters, with the gradients' mean over the
    ranks; everything else is as in :class:`zerox.FusedShardedAdam`. Parameters and state have the bits that the class
    gives unsharded, with the same gradients.

    Args:
        params: as for :class:`zerox.FusedShardedAdam`.
        optimizer_class: for example ``torch.optim.SGD``. It is tried first, on small tensors, for some milliseconds: a
            class in which one element depends on another is refused, and the error says if ``whole`` helps.
        process_group, stage, bucket_cap_mb, reduce_dtype, resident_mb, gradient_divisor, exchange, model, init: as in
            :class:`zerox.FusedShardedAdam`.
        master_weights: "auto" and "fp32": 16-bit parameters have a float32 value, on which the class works; None: it
            works on 16 bits.
        by_position: options of the class, as it takes them behind its parameters.
        elementwise: True: take the class although the probe finds bits that differ (random rounding, say), with a
            warning if it does.
        whole: "none": each rank's part is cut from all parameters, 1-D. "matrices": those of two or more dimensions
            are never cut. Each lies on one rank, which updates it in its own shape, so elements of one matrix may
            depend on each other (``torch.optim.Muon``). "all": the same for all parameters (LAMB, Adafactor).
        defaults: the class's own options, for example ``lr=0.1, momentum=0.9``. Param groups may have others.

    Raises:
        TypeError: ``optimizer_class`` is no optimizer class.
        ValueError: it can't be sharded; and as :class:`zerox.FusedShardedAdam`. What the class raises for its options
            comes through.
    """

    _make_update = LocalOptimizerUpdate

    def __init__(
        self,
        params: Any,
        optimizer_class: type[torch.optim.Optimizer],
        *by_position: Any,
        process_group: GroupArgument = None,
        norm_group: Any = None,
        stage: int = 2,
        bucket_cap_mb: float | None = None,
        reduce_dtype: torch.dtype | None = None,
        master_weights: str | None = "auto",
        resident_mb: float | None = None,
        gradient_divisor: float | None = None,
        exchange: str | None = None,
        model: torch.nn.Module | None = None,
        init: Init | None = None,
        elementwise: bool | None = None,
        whole: str = "none",
        **defaults: Any,
    ) -> None:
        local = LocalOptimizerClass(
            optimizer_class, defaults, elementwise is True, master_weights is not None, by_position, whole
        )

        def make_rules() -> Rules:
            check_foreign(optimizer_class, defaults)
            return local.rules()

        super().__init__(
            params,
            make_rules,
            lambda: dict(local.defaults),
            lambda: LocalOptimizerOptions(
                stage=stage,
                bucket_cap_mb=bucket_cap_mb,
                reduce_dtype=reduce_dtype,
                master_weights=master_weights,
                inside=Inside(full_name(optimizer_class), elementwise, whole),
                resident_mb=resident_mb,
                gradient_divisor=gradient_divisor,
                exchange=exchange,
            ),
            Surroundings(process_group, norm_group, model, init),
        )

    def step(self, closure: Callable[[], Any] | None = None, **step_options: Any) -> Any:  # type: ignore[override]
        """As :meth:`zerox.FusedShardedAdam.step`, with ``step_options`` for the class's own step().

        What the class raises on one rank, all ranks raise as RuntimeError, and their parameters are as before. State is
        then not of one step any more: step() raises until state is loaded. One rank alone raises as the class does.
        """
        update = self._core.update
        assert isinstance(update, LocalOptimizerUpdate)
        update.step_options = step_options
        try:
            return super().step(closure)
        finally:
            update.step_options = {}
