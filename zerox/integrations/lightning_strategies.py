"""What the strategies for Lightning do, whichever of its packages they are for: ``lightning`` or ``pytorch_lightning``.

Both have the same classes under different names, so these are mixins: they come before that package's DDPStrategy.
The arguments of DDPStrategy are spelled out in both, since LightningCLI reads its options from the signature.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from datetime import timedelta
from typing import Any, Literal
from weakref import WeakKeyDictionary, ref

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout

from zerox.engine import Engine
from zerox.integrations.engines import warn_of_untrained
from zerox.integrations.on_meta import check_made, is_on_meta, move_rest
from zerox.integrations.requirements import check_names
from zerox.integrations.sharding import Sharding, scale_over_ranks, unwrap
from zerox.ranks.calls import named
from zerox.ranks.wrapped import note_hand_out
from zerox.wrapper.values import broadcast, named_buffers_of

OLDEST, TRIED = "2.6", "2.6.6"

# By LightningModule: the strategy of its last fit, whose optimizers live on for save_checkpoint().
_strategy_of: WeakKeyDictionary[Any, ref[TrainerStrategy]] = WeakKeyDictionary()
StartMethod = Literal["popen", "spawn", "fork", "forkserver"]


class TrainerStrategy:
    """Comes before the DDPStrategy of a Trainer."""

    PRECISION: type  # the package's base class of precision plugins
    lightning_module: Any
    root_device: torch.device
    precision_plugin: Any
    optimizers: list[Any]
    lr_scheduler_configs: list[Any]
    _restores_late = False  # the module was on the meta device when it was set up
    has_lost_optimizers = False  # to another Trainer's fit with the same module

    def __init__(
        self,
        stage: int | None = None,
        *,
        replicate_size: int = 1,
        broadcast_buffers: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision_plugin: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision_plugin=precision_plugin,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.sharding = Sharding(stage, options, replicate_size)
        self._broadcasts_buffers = broadcast_buffers
        self._buffers: BufferSync | None = None

    def configure_ddp(self) -> None:
        """There is no wrapper."""

    def _setup_model(self, model: nn.Module) -> nn.Module:
        return model

    @property
    def restore_checkpoint_after_setup(self) -> bool:
        """A checkpoint's values would be lost on the meta device."""
        return self._restores_late or is_on_meta(self.lightning_module)

    def model_to_device(self) -> None:
        """What is on the meta device stays there: the optimizer makes it."""
        module = self.lightning_module
        self._restores_late = is_on_meta(module)
        if not self._restores_late:
            super().model_to_device()  # type: ignore[misc]
        elif module.trainer.state.fn == "fit":
            move_rest(module, self.root_device)
        else:
            raise ValueError(
                f"zerox: {type(module).__name__} is on the meta device, where only fit() has an optimizer that gives "
                "it values: call fit() before, or make the module in memory"
            )

    def _end_fit_before(self) -> None:
        """Two optimizers can't have the same parameters. Only fit() makes some: validate() and test() end none."""
        last = _strategy_of.get(self.lightning_module)
        if last is not None and (before := last()) is not None:
            before.has_lost_optimizers = before is not self and bool(before.optimizers)
            before.optimizers, before.lr_scheduler_configs = [], []
        _strategy_of[self.lightning_module] = ref(self)
        self.has_lost_optimizers = False

    def setup_optimizers(self, trainer: Any) -> None:
        self._end_fit_before()
        module = self.lightning_module
        assert module is not None
        super().setup_optimizers(trainer)  # type: ignore[misc]
        self.optimizers = [self.sharding.take(each, self.root_device, module) for each in self.optimizers]
        warn_of_untrained([each for each in self.optimizers if isinstance(each, Engine)], module, "Lightning")
        trained = {id(member.param) for each in self.sharding.optimizers for member in each.inside.members}
        others = [param for param in module.parameters() if id(param) not in trained]
        broadcast([*others, *module.buffers()], default_group(), f"values of {type(module).__name__}")
        self._buffers = BufferSync(module, self.sharding.syncs) if self._broadcasts_buffers else None

    def save_checkpoint(self, checkpoint: dict[str, Any], *args: Any, **options: Any) -> None:
        """RuntimeError for a checkpoint that would lack the optimizers' state, since another fit has ended them."""
        if self.has_lost_optimizers and "optimizer_states" in checkpoint:
            raise RuntimeError(
                "zerox: this Trainer's optimizers ended when another Trainer began fit() with the same module, so its "
                "checkpoint would lack their state: save before that, with the other Trainer, or with weights_only=True"
            )
        super().save_checkpoint(checkpoint, *args, **options)  # type: ignore[misc]

    @named("trainer.save_checkpoint()")
    def optimizer_state(self, optimizer: Any) -> dict[str, Any]:
        """As Lightning's. Collective."""
        found: dict[str, Any] = super().optimizer_state(optimizer)  # type: ignore[misc]
        return found

    def setup_precision_plugin(self) -> None:
        super().setup_precision_plugin()  # type: ignore[misc]
        if self.sharding.optimizers:
            scale_over_ranks(self.precision_plugin)
            _clip_whole_gradients(self.precision_plugin, self.PRECISION)

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        with self.sharding.no_sync():
            yield

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._buffers is None else self._buffers.around_forward():
            return super().training_step(*args, **kwargs)  # type: ignore[misc]

    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        with nullcontext() if self._buffers is None else self._buffers.around_forward():
            return super().validation_step(*args, **kwargs)  # type: ignore[misc]

    def teardown(self) -> None:
        self._buffers, self._restores_late = None, False
        module = self.lightning_module
        trainer = None if module is None else module._trainer
        if trainer is not None and trainer.state.status != "interrupted":
            for optimizer in self.sharding.optimizers:
                optimizer.unshard()
        with no_module(self) if module is not None and is_on_meta(module) else nullcontext():
            super().teardown()  # type: ignore[misc]


def _clip_whole_gradients(precision: Any, base: type) -> None:
    """gradient_clip_val goes by the whole mean gradient, unless a plugin of the user's clips in its own way."""

    def by_norm(optimizer: Any, clip_val: float) -> None:
        unwrap(optimizer).clip_grad_norm_(clip_val)

    def by_value(optimizer: Any, clip_val: float) -> None:
        unwrap(optimizer).clip_grad_value_(clip_val)

    for name, clip in (("clip_grad_by_norm", by_norm), ("clip_grad_by_value", by_value)):
        if getattr(type(precision), name) is getattr(base, name):
            setattr(precision, name, clip)


@contextmanager
def no_module(strategy: Any) -> Iterator[None]:
    """Inside, the strategy has none that it could move, where an error came before its optimizer had made it."""
    module, strategy._lightning_module = strategy._lightning_module, None
    try:
        yield
    finally:
        strategy._lightning_module = module


class FabricStrategy:
    """Comes before the DDPStrategy of Fabric."""

    root_device: torch.device
    precision: Any

    def __init__(
        self,
        stage: int | None = None,
        *,
        replicate_size: int = 1,
        broadcast_buffers: bool = True,
        process_group_backend: str | None = None,
        timeout: timedelta | None = default_pg_timeout,
        start_method: StartMethod = "popen",
        accelerator: Any = None,
        parallel_devices: list[torch.device] | None = None,
        cluster_environment: Any = None,
        checkpoint_io: Any = None,
        precision: Any = None,
        **options: Any,
    ) -> None:
        super().__init__(  # type: ignore[call-arg]
            accelerator=accelerator,
            parallel_devices=parallel_devices,
            cluster_environment=cluster_environment,
            checkpoint_io=checkpoint_io,
            precision=precision,
            process_group_backend=process_group_backend,
            timeout=timeout,
            start_method=start_method,
        )
        self.sharding = Sharding(stage, options, replicate_size)
        self._broadcasts_buffers = broadcast_buffers
        self._backward_sync_control = _NoSync(self.sharding)
        self._not_looked_at: list[ref[nn.Module]] = []

    def setup_module(self, module: nn.Module) -> nn.Module:
        """There is no wrapper: rank 0's values on all ranks are what DistributedDataParallel would begin with."""
        check_made(module, "fabric.setup(model, optimizer)")
        values = [*module.parameters(), *module.buffers()]
        broadcast(values, default_group(), f"values of {type(module).__name__}")
        if self._broadcasts_buffers:
            BufferSync(module, self.sharding.syncs).watch()
        self._not_looked_at.append(ref(module))
        return module

    def backward(self, *args: Any, **options: Any) -> None:
        """As Fabric's. Warns once of a module that no optimizer of zerox trains."""
        for module in filter(None, (each() for each in self._not_looked_at)):
            warn_of_untrained(self.sharding.optimizers, module, "Fabric")
        self._not_looked_at.clear()
        super().backward(*args, **options)  # type: ignore[misc]

    def load_checkpoint(self, path: Any, state: Any = None, *args: Any, **options: Any) -> dict[str, Any]:
        """Modules first: a 16-bit parameter's exact value, which the optimizer keeps, is of the value that it has."""
        if not isinstance(state, dict):
            return super().load_checkpoint(path, state, *args, **options)  # type: ignore[misc]
        in_order = dict(sorted(state.items(), key=lambda item: not isinstance(item[1], nn.Module)))
        rest = super().load_checkpoint(path, in_order, *args, **options)  # type: ignore[misc]
        state.update(in_order)
        return rest

    @named("fabric.save()")
    def get_optimizer_state(self, optimizer: torch.optim.Optimizer) -> dict[str, Any]:
        """Whole on each rank, also where one alone asks, if others' state is read where it lies. Else as Fabric's of an
        optimizer that shards: whole on rank 0, empty elsewhere, and collective."""
        if isinstance(optimizer, Engine) and optimizer.inside.loading.pulls.is_complete:
            return optimizer.state_dict()
        found: dict[str, Any] = super().get_optimizer_state(optimizer)  # type: ignore[misc]
        return found

    def setup_optimizer(self, optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
        scale_over_ranks(self.precision)
        return self.sharding.take(optimizer, self.root_device)

    def clip_gradients_norm(
        self,
        module: nn.Module,
        optimizer: torch.optim.Optimizer,
        max_norm: float,
        norm_type: float = 2.0,
        error_if_nonfinite: bool = True,
    ) -> Tensor:
        if not isinstance(optimizer, Engine):
            return super().clip_gradients_norm(module, optimizer, max_norm, norm_type, error_if_nonfinite)  # type: ignore[misc]
        self.precision.unscale_gradients(optimizer)
        return optimizer.clip_grad_norm_(max_norm, norm_type, error_if_nonfinite)

    def clip_gradients_value(self, module: nn.Module, optimizer: torch.optim.Optimizer, clip_val: float) -> None:
        if not isinstance(optimizer, Engine):
            super().clip_gradients_value(module, optimizer, clip_val)  # type: ignore[misc]
            return
        self.precision.unscale_gradients(optimizer)
        optimizer.clip_grad_value_(clip_val)


class _NoSync:
    def __init__(self, sharding: Sharding) -> None:
        self.sharding = sharding

    def no_backward_sync(self, module: nn.Module, enabled: bool = True) -> AbstractContextManager[None]:
        return self.sharding.no_sync(module) if enabled else nullcontext()


def check_package(package: str, ddp: type, precision: type, wrappers: Any, fabric_ddp: type) -> None:
    """RuntimeError, in one line, for a package whose classes have lost a name that is needed here."""
    for owner, names in (
        (ddp, ["configure_ddp", "block_backward_sync", "setup_optimizers", "setup_precision_plugin"]),
        (precision, ["clip_grad_by_norm", "clip_grad_by_value"]),
        (wrappers, ["LightningOptimizer", "_MockOptimizer"]),
        (fabric_ddp, ["setup_module", "setup_optimizer", "clip_gradients_norm", "clip_gradients_value"]),
        (fabric_ddp(), ["_backward_sync_control"]),
    ):
        check_names(package, TRIED, owner, names)


def register(registry: Any, strategy: type) -> None:
    """Gives a strategy the names "zerox", "zerox_stage_1" and so on."""
    for suffix, stage in (("", None), ("_stage_1", 1), ("_stage_2", 2), ("_stage_3", 3)):
        registry.register(f"zerox{suffix}", strategy, description="ZeRO without a wrapper", override=True, stage=stage)


class BufferSync:
    """Before a forward all ranks take rank 0's buffers, unless the forward before sent no gradients.

    ``syncs(module)``: whether a backward now would send them.
    """

    def __init__(self, module: nn.Module | None, syncs: Callable[[nn.Module], bool] = bool) -> None:
        self._module = module
        self._syncs = syncs
        self._is_due = True
        if module is not None:
            note_hand_out(module)

    @contextmanager
    def around_forward(self) -> Iterator[None]:
        self._before()
        yield
        self._after()

    def watch(self) -> None:
        """From now on, around each forward of the module itself. Copies of the module do without."""
        if self._module is not None and next(self._module.buffers(), None) is not None:
            self._module.register_forward_pre_hook(self._before)
            self._module.register_forward_hook(self._after)

    def __reduce__(self) -> tuple[type[BufferSync], tuple[None]]:
        return BufferSync, (None,)

    def _before(self, *_: Any) -> None:
        if self._module is not None and self._is_due:
            buffers = named_buffers_of(self._module).values()
            broadcast(buffers, default_group(), f"buffers of {type(self._module).__name__}")

    def _after(self, *_: Any) -> None:
        self._is_due = self._module is not None and torch.is_grad_enabled() and self._syncs(self._module)


def default_group() -> dist.ProcessGroup | None:
    return dist.group.WORLD if dist.is_initialized() else None
