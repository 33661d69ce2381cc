"""Hugging Face Accelerate: ``adopt(accelerator)``, and what was written for DistributedDataParallel trains with zerox.

Accelerate has no interface for another reducer. So the accelerator gets a class of ours on top of its own, with the few
methods that are about DistributedDataParallel. What it prepares stays as it was otherwise.
"""

from __future__ import annotations

import functools
import warnings
import weakref
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.amp.grad_scaler import OptState
from torch.nn.parallel import DistributedDataParallel

from zerox.engine import Engine
from zerox.integrations import engines as of_engines
from zerox.integrations.engines import takes_all_ranks
from zerox.integrations.on_meta import check_made
from zerox.integrations.requirements import check_names, check_version
from zerox.optimizer.join import join
from zerox.ranks.calls import named, waiting
from zerox.ranks.dtensors import is_dtensor
from zerox.state.dcp_request import dcp_request

OLDEST, TRIED = "1.12.0", "1.15.0"

check_version("accelerate", OLDEST)  # before its names are looked for
from accelerate import Accelerator
from accelerate.data_loader import DataLoaderDispatcher
from accelerate.optimizer import AcceleratedOptimizer
from accelerate.utils import DDPCommunicationHookType, DistributedType

TYPES = (DistributedType.NO, DistributedType.MULTI_CPU, DistributedType.MULTI_GPU)
METHODS = ["prepare_model", "prepare_optimizer", "no_sync", "backward", "unscale_gradients", "clip_grad_norm_"]
METHODS += ["clip_grad_value_", "save_state", "load_state", "join_uneven_inputs", "wait_for_everyone"]
METHODS += ["gather", "reduce"]
KEPT = ["_models", "_optimizers", "_dataloaders", "scaler", "ddp_handler", "fp8_enabled", "project_configuration"]


class PreparedOptimizer(AcceleratedOptimizer):
    """What prepare() makes of an optimizer of zerox."""

    _shared: list[weakref.ref[nn.Module]]  # models whose buffers ranks share after each step
    _whole: dict[str, Any] | None = None  # what state_dict() returns while save_state() runs
    _is_consolidated = False  # the next state_dict() is of use to whoever saves it

    def step(self, closure: Any = None) -> Any:
        """As AcceleratedOptimizer's. Then all ranks have rank 0's buffers, as with DistributedDataParallel."""
        done = super().step(closure)
        if self.gradient_state.sync_gradients and self.optimizer.inside.joining.divide is None:
            self.share_buffers()
        return done

    def share_buffers(self) -> None:
        """Collective."""
        for model in filter(None, (reference() for reference in self._shared)):
            of_engines.share_buffers(self.optimizer, model)

    def consolidate_state_dict(self, to: int = 0) -> None:
        """Makes the next state_dict() on rank ``to`` whole. Collective."""
        self.optimizer.consolidate_state_dict(to)
        self._is_consolidated = True

    def state_dict(self) -> dict[str, Any]:
        """RuntimeError where it is one rank's share and was not consolidated: its file would lack the others' state."""
        if self._whole is not None:
            return self._whole
        inside = self.optimizer.inside
        is_share = inside.ranks.size > 1 and not inside.loading.pulls.is_complete
        if is_share and not self._is_consolidated and dcp_request() is None:
            raise RuntimeError(
                "zerox: state_dict() of a prepared optimizer is one rank's share of the state. To save all of it call "
                "accelerator.save_state() or zerox.save() on all ranks, or first optimizer.consolidate_state_dict(); "
                "for a Trainer call zerox.integrations.transformers.adopt(trainer). The share itself is "
                "optimizer.optimizer.state_dict()"
            )
        self._is_consolidated = False
        found: dict[str, Any] = self.optimizer.state_dict()
        return found

    @contextmanager
    def whole(self, to: Sequence[int]) -> Iterator[None]:
        """Inside, state_dict() is whole on ranks ``to``. Collective, unless others' state is read where it lies."""
        ranks = self.optimizer.inside.ranks
        for rank in to if ranks.size > 1 and not self.optimizer.inside.loading.pulls.is_complete else ():
            self.optimizer.consolidate_state_dict(rank)
            if rank == ranks.rank:
                self._whole = self.optimizer.state_dict()
        self._whole = self._whole or self.optimizer.state_dict()
        try:
            yield
        finally:
            self._whole = None


class ZeroxAccelerator(Accelerator):
    """The methods that :func:`adopt` gives an accelerator."""

    # ---- what it prepares

    def prepare_model(self, model: nn.Module, device_placement: Any = None, evaluation_mode: bool = False) -> nn.Module:
        """As Accelerator's, without DistributedDataParallel: zerox averages the gradients."""
        if isinstance(model, DistributedDataParallel):
            raise ValueError("zerox: the model is in DistributedDataParallel already: prepare model.module")
        hook = getattr(self.ddp_handler, "comm_hook", None)
        if hook is not None and getattr(hook, "value", hook) != DDPCommunicationHookType.NO.value:
            raise ValueError(
                f"zerox: the hook {getattr(hook, 'value', hook)} of DistributedDataParallelKwargs is not taken over: "
                "build the optimizer with reduce_dtype="
            )
        check_made(model, "accelerator.prepare(model, optimizer)")
        prepared: nn.Module = super().prepare_model(model, device_placement, evaluation_mode=True)
        if not evaluation_mode and num_shares(self) == self.num_processes:  # else ranks have other parts
            of_engines.hand_out(prepared)
        self._share_buffers()
        return prepared

    def prepare_optimizer(self, optimizer: torch.optim.Optimizer, device_placement: Any = None) -> Any:
        """As Accelerator's. Raises ValueError for one that is not zerox's if there are several processes."""
        own = optimizer.optimizer if isinstance(optimizer, AcceleratedOptimizer) else optimizer
        if not isinstance(own, Engine):
            if self.num_processes > 1:
                raise ValueError(
                    f"zerox: {type(own).__name__} is not an optimizer of zerox, and with an adopted accelerator "
                    "nobody else averages gradients over the ranks: use FusedShardedAdam or ShardedOptimizer, or an "
                    "accelerator of its own"
                )
            return super().prepare_optimizer(optimizer, device_placement)
        of_engines.check_size(own, num_shares(self), "Accelerate")
        self._take_scaler()
        prepared = super().prepare_optimizer(optimizer, device_placement)
        if type(prepared) is AcceleratedOptimizer:
            prepared.__class__ = PreparedOptimizer
            prepared._shared = []
        self._share_buffers()
        return prepared

    def _take_scaler(self) -> None:
        if not takes_all_ranks(self.scaler):
            raise ValueError(f"zerox: accelerator.scaler is a {type(self.scaler).__name__}: use zerox.GradScaler")

    def _share_buffers(self) -> None:
        """Once a model and an optimizer of its parameters are both here. Collective."""
        if self.num_processes == 1 or (self.ddp_handler is not None and not self.ddp_handler.broadcast_buffers):
            return
        taken = {id(each()) for prepared in self._find_prepared() for each in prepared._shared}
        for model in self._models:
            having = of_engines.engines_of(self._engines(), model.parameters())
            if having and id(model) not in taken:
                of_engines.share_buffers(having[0], model)
                [prepared] = [each for each in self._find_prepared() if each.optimizer is having[0]]
                prepared._shared.append(weakref.ref(model))

    def _find_prepared(self) -> list[PreparedOptimizer]:
        return [each for each in self._optimizers if isinstance(each, PreparedOptimizer)]

    def _engines(self) -> list[Engine]:
        return [each.optimizer for each in self._find_prepared()]

    # ---- the training loop

    def backward(self, loss: Tensor, **kwargs: Any) -> None:
        """As Accelerator's. Warns once if a prepared model trains without an optimizer of zerox."""
        looked_at = (len(self._models), len(self._optimizers))
        if looked_at != getattr(self, "_looked_at", None):
            self._looked_at = looked_at
            for model in self._models:
                of_engines.warn_of_untrained(self._engines(), model, "Accelerate")
        super().backward(loss, **kwargs)

    @contextmanager
    def no_sync(self, model: nn.Module) -> Iterator[None]:
        """Inside, the optimizers that train ``model`` send nothing. accumulate() uses it."""
        with of_engines.no_sync(of_engines.engines_of(self._engines(), model.parameters())):
            yield

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """As Accelerator's, also with a scaler that was set by hand; what is unscaled already stays as it is."""
        if self.scaler is None or not self.scaler.is_enabled():
            return
        given = self._optimizers if optimizer is None else optimizer
        for each in given if isinstance(given, tuple | list) else [given]:
            while isinstance(each, AcceleratedOptimizer):
                each = each.optimizer
            if self.scaler._per_optimizer_states[id(each)]["stage"] is OptState.READY:
                self.scaler.unscale_(each)

    def clip_grad_norm_(self, parameters: Tensor | Iterable[Tensor], max_norm: float, norm_type: float = 2) -> Tensor:
        """As Accelerator's, of the mean gradient. Collective; the scaling happens inside step().

        ValueError for parameters with a gradient that no optimizer of zerox trains, and for a part of several
        optimizers' parameters.
        """
        params, trained = self._resolve(parameters)
        if not trained:
            found: Tensor = super().clip_grad_norm_(params, max_norm, norm_type)
            return found
        self.unscale_gradients(trained)
        return of_engines.clip_grad_norm_(trained, params, max_norm, norm_type)

    def clip_grad_value_(self, parameters: Tensor | Iterable[Tensor], clip_value: float) -> None:
        """As Accelerator's, of the mean gradient. Collective; it comes last. ValueError for a part of one's."""
        params, trained = self._resolve(parameters)
        if not trained:
            super().clip_grad_value_(params, clip_value)
            return
        self.unscale_gradients(trained)
        of_engines.clip_grad_value_(trained, params, clip_value)

    def _resolve(self, parameters: Tensor | Iterable[Tensor]) -> tuple[list[Tensor], list[Engine]]:
        params = [parameters] if isinstance(parameters, Tensor) else list(parameters)
        return params, of_engines.engines_of(self._engines(), params)

    @contextmanager
    def join_uneven_inputs(self, joinables: Sequence[Any], even_batches: bool | None = None) -> Iterator[None]:
        """Ranks may have unequal numbers of batches, on CPUs too: zerox.join() of the optimizers.

        ``joinables`` are models and optimizers; those that train them are joined. ``even_batches`` is as Accelerator's.
        """
        engines = [each for each in self._engines() if self._is_joined(each, joinables)]
        changed = []
        if even_batches is not None:
            for loader in self._dataloaders:
                if isinstance(loader, DataLoaderDispatcher):
                    warnings.warn("zerox: even_batches= is not for data loaders over iterable datasets", stacklevel=3)
                else:
                    changed.append((loader.batch_sampler, loader.batch_sampler.even_batches))
                    loader.batch_sampler.even_batches = even_batches
        is_even = self.even_batches if even_batches is None else even_batches
        try:
            with nullcontext() if is_even or not engines else join(engines):
                yield
        finally:
            for sampler, was in changed:
                sampler.even_batches = was
        for prepared in self._find_prepared():
            if prepared.optimizer in engines:
                prepared.share_buffers()

    def _is_joined(self, engine: Engine, joinables: Iterable[Any]) -> bool:
        """Among ``joinables`` are the optimizer, prepared or not, or a model that it trains."""
        for each in joinables:
            if isinstance(each, nn.Module):
                if of_engines.engines_of([engine], each.parameters()):
                    return True
            elif engine in (each, getattr(each, "optimizer", None)):
                return True
        return False

    def wait_for_everyone(self) -> None:
        """As Accelerator's. A rank that needs this one meanwhile, in a call that it makes alone, raises there."""
        with of_engines.standing_outside(self._engines(), "accelerator.wait_for_everyone()"):
            super().wait_for_everyone()

    # ---- files

    @named("accelerator.save_state()")
    def save_state(self, output_dir: str | None = None, safe_serialization: bool = True, **kwargs: Any) -> Any:
        """As Accelerator's; an optimizer's file is whole, and torch.optim's class and any number of ranks load it.

        ValueError where parameters are DTensors, which Accelerate does not write.
        """
        for member in (member for engine in self._engines() for member in engine.inside.members):
            if is_dtensor(member.param):
                raise ValueError(
                    f"zerox: Accelerate writes whole tensors, and parameter {member.quoted} is a DTensor: call "
                    "zerox.save() on all ranks, and zerox.load()"
                )
        on_each_node = self.project_configuration.save_on_each_node
        saves = self.is_local_main_process if on_each_node else self.is_main_process
        saving = ranks_that_save(saves, on_each_node, self.num_processes)
        with ExitStack() as stack:
            for each in self._find_prepared():
                stack.enter_context(each.whole(saving))
            return super().save_state(output_dir, safe_serialization, **kwargs)

    def load_state(self, input_dir: str | None = None, load_kwargs: Any = None, **kwargs: Any) -> None:
        """As Accelerator's, by way of the host's memory: a device may have no room for the whole state."""
        super().load_state(input_dir, load_kwargs, **{"map_location": "cpu", **kwargs})


def num_shares(accelerator: Accelerator) -> int:
    """Into how many parts Accelerate divides the batches: tensor-parallel ranks have the same ones."""
    config = accelerator.parallelism_config
    size: int = accelerator.num_processes
    return size if config is None else size // int(config.tp_size)


def data_parallel_mesh(accelerator: Accelerator) -> Any:
    """What optimizers take as ``process_group`` with the accelerator's ``parallelism_config``; None for all ranks.

    A mesh (replicate, shard) where both sizes are more than 1, else the axis that is; "alone" if none is.
    """
    mesh = accelerator.torch_device_mesh
    if mesh is None or accelerator.num_processes == 1:
        return None
    names = [name for name in ("dp_replicate", "dp_shard") if name in mesh.mesh_dim_names]
    return mesh[tuple(names)] if names else "alone"


def ranks_that_save(saves: bool, on_each_node: bool, num_processes: int) -> list[int]:
    """``saves``: whether this rank does. Collective if it happens on each node; else it is rank 0."""
    if not on_each_node or num_processes == 1:
        return [0]
    everyones: list[Any] = [None] * num_processes
    assert dist.group.WORLD is not None
    with waiting(dist.group.WORLD):
        dist.all_gather_object(everyones, saves)
    return [rank for rank, each in enumerate(everyones) if each]


def adopt(accelerator: Accelerator) -> Accelerator:
    """Lets ``accelerator`` prepare models without DistributedDataParallel, for optimizers of zerox. Returns it.

    Call it once the accelerator is made, before prepare(). Its no_sync(), accumulate(), clip_grad_norm_(),
    clip_grad_value_(), join_uneven_inputs(), save_state() and load_state() are zerox's then, and its scaler is a
    :class:`zerox.GradScaler`. Raises ValueError for an accelerator that has another way to train over ranks (FSDP,
    DeepSpeed, tensor parallelism, fp8), or that has prepared a model already, and TypeError for anything else.
    """
    if not isinstance(accelerator, Accelerator):
        raise TypeError(
            f"zerox.integrations.accelerate.adopt() is for an Accelerator, and got {type(accelerator).__name__}: for "
            "a Trainer there is zerox.integrations.transformers.adopt()"
        )
    if isinstance(accelerator, ZeroxAccelerator):
        return accelerator
    check_names("accelerate", TRIED, accelerator, [*METHODS, *KEPT])
    if accelerator.distributed_type not in TYPES:
        raise ValueError(
            f"zerox: this accelerator trains as {accelerator.distributed_type.value}, and zerox takes the place of "
            "DistributedDataParallel only"
        )
    if (config := accelerator.parallelism_config) is not None and (config.cp_size > 1 or config.sp_size > 1):
        raise ValueError(
            "zerox: this accelerator divides sequences (cp_size or sp_size of its parallelism_config), which "
            "Accelerate offers with FSDP and DeepSpeed only: use dp_replicate_size, dp_shard_size and tp_size"
        )
    if accelerator.fp8_enabled:
        raise ValueError("zerox: mixed_precision='fp8' is not supported: use 'bf16'")
    if accelerator._models or accelerator._optimizers:
        raise ValueError("zerox: adopt() comes before prepare(), and this accelerator has prepared something")
    own = type(accelerator)
    # For an accelerator of a class of its own, as a framework may have.
    bases = (ZeroxAccelerator,) if own is Accelerator else (ZeroxAccelerator, own)
    accelerator.__class__ = ZeroxAccelerator if own is Accelerator else type(f"Zerox{own.__name__}", bases, {})
    accelerator._take_scaler()
    refuse_local_sgd(ZeroxAccelerator)
    return accelerator


WHY = (
    "zerox: LocalSGD averages parameters now and then in place of gradients, and this accelerator's optimizers average "
    "gradients in each step: leave LocalSGD out, or use an accelerator that is not adopted, and an optimizer of torch"
)


def refuse_local_sgd(adopted: type) -> None:
    """Has LocalSGD raise ValueError where it begins with an accelerator of the class ``adopted``. It would ask the
    model for ``no_sync``, which only DistributedDataParallel has."""
    from accelerate.local_sgd import LocalSGD

    enter = LocalSGD.__enter__
    if hasattr(enter, "__wrapped__"):
        return

    @functools.wraps(enter)
    def checked(self: Any) -> Any:
        if self.enabled and isinstance(self.accelerator, adopted):
            raise ValueError(WHY)
        return enter(self)

    LocalSGD.__enter__ = checked
