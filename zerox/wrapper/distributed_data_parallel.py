"""``DistributedDataParallel``: what torch's does for a module beside averaging gradients, and its names.

Optimizers of zerox average the gradients of the parameters that they hold, whatever is around the model. This class is
for scripts that were written for torch's: all ranks have rank 0's parameters and buffers where it is built, forwards
hand out buffers, ``no_sync()`` around a forward decides, and gradients that no optimizer of zerox holds are averaged.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.join import Joinable
from torch.nn.parallel import DistributedDataParallel as OfTorch

from zerox import _torch
from zerox.optimizer.profiled import range_named
from zerox.params.compiled_regions import keep_from_dynamo, untraced
from zerox.ranks.calls import warn_caller
from zerox.ranks.wrapped import WrappedModule
from zerox.wrapper import arguments, comm_hooks
from zerox.wrapper.averaging import Averaging
from zerox.wrapper.buffers import Buffers
from zerox.wrapper.first_values import hand_out_first, size_of
from zerox.wrapper.join import Join, Joins
from zerox.wrapper.placement import Placement
from zerox.wrapper.refusals import refuses
from zerox.wrapper.stand_in import Reducer

NOT_COPIED = ("_averaging", "_following")


@untraced
def cut_graphs_for(wrapper: OfTorch | None) -> OfTorch | None:
    """Has torch.compile cut the graph of what it compiles inside a wrapper's forward, so that gradients come while
    backward still runs. Returns for which one it did before. As torch's ``_inside_ddp_forward()``, in a tenth of its
    time."""
    return _torch.set_active_ddp(wrapper)


@refuses
class DistributedDataParallel(Joins, Placement, Buffers, arguments.WithoutEffect, OfTorch):  # type: ignore[misc, override]
    """Takes the place of ``torch.nn.parallel.DistributedDataParallel`` around a model that optimizers of zerox train.

    The constructor gives all ranks rank 0's parameters and buffers of the module, as they stand, trained or frozen, in
    an optimizer or in none; it does not matter whether optimizers are built before it or after it. Forwards hand out
    buffers when torch's do. A backward is sent unless all its forwards ran inside ``no_sync()``. Gradients that no
    optimizer of zerox holds are averaged into ``p.grad``. ``state_dict()`` has the prefix ``module.``; files of zerox
    and its errors have not.

    Args:
        module: as torch's. Its ``_ddp_params_and_buffers_to_ignore`` are each rank's own.
        device_ids, output_device, dim, init_sync: as torch's: inputs are moved to the one device of ``device_ids``.
        broadcast_buffers, forward_sync_buffers: as torch's: whether forwards hand out buffers; the first also says
            whether the constructor does.
        process_group, device_mesh: the ranks that train the module; also those of its optimizers. None: all, or this
            process alone if there is no default group.
        static_graph: True: a parameter may get several gradients in one backward, as from two reentrant checkpoints,
            and as many in every backward. What it gets in the first one is sent where that backward ends.
        find_unused_parameters, gradient_as_bucket_view, skip_all_reduce_unused_params, batched_grad_copy,
            check_reduction: taken, and without effect: a parameter may be unused on any rank in any step.
        bucket_cap_mb, bucket_cap_mb_list: where torch.compile cuts the graph of a forward: the largest of the list.
            Optimizers have a ``bucket_cap_mb`` of their own.
        mixed_precision, delay_all_reduce_named_params, param_to_hook_all_reduce: must be None.

    Raises:
        RuntimeError: as torch's for a module without trained parameters; on all ranks, naming the first, if modules
            differ over the ranks.
        ValueError: an argument that is refused, as torch's for ``device_ids``, and if an optimizer of the module's
            parameters averages over other ranks.
    """

    module: nn.Module

    def __init__(
        self,
        module: nn.Module,
        device_ids: Any = None,
        output_device: Any = None,
        dim: int = 0,
        broadcast_buffers: bool | None = None,
        init_sync: bool = True,
        process_group: dist.ProcessGroup | None = None,
        bucket_cap_mb: float | None = None,
        find_unused_parameters: bool = False,
        check_reduction: bool = False,
        gradient_as_bucket_view: bool = False,
        static_graph: bool = False,
        delay_all_reduce_named_params: Any = None,
        param_to_hook_all_reduce: Any = None,
        mixed_precision: Any = None,
        device_mesh: Any = None,
        skip_all_reduce_unused_params: bool = False,
        bucket_cap_mb_list: list[int] | None = None,
        batched_grad_copy: bool = False,
        forward_sync_buffers: bool | None = None,
    ) -> None:
        nn.Module.__init__(self)  # not torch's: no reducer, and so nobody else who averages
        Joinable.__init__(self)
        arguments.check_refused(
            mixed_precision=mixed_precision,
            delay_all_reduce_named_params=delay_all_reduce_named_params,
            param_to_hook_all_reduce=param_to_hook_all_reduce,
        )
        arguments.check_reduction_is_off(check_reduction)
        group = arguments.choose_group_of(process_group, device_mesh)
        self.device_mesh = device_mesh
        self.parameters_to_ignore = set(_torch.ignored_by_ddp(module))
        params = arguments.trained_params(module, self.parameters_to_ignore)
        self._place(params, device_ids, output_device, dim)
        self.module = module
        self.static_graph = static_graph
        self.find_unused_parameters = find_unused_parameters
        self._keep(gradient_as_bucket_view, batched_grad_copy, skip_all_reduce_unused_params)
        self._keep_caps(bucket_cap_mb, bucket_cap_mb_list)
        self.require_backward_grad_sync = self.require_forward_param_sync = True
        shared = self._share_buffers(*arguments.buffers_to_share(broadcast_buffers, forward_sync_buffers))
        self._wrap(group)
        if init_sync and size_of(group) > 1:
            wrapped = self._averaging.wrapped
            hand_out_first(wrapped.params, shared, group, wrapped.name)

    def _wrap(self, group: dist.ProcessGroup | None) -> None:
        """What is not copied with a wrapper, and sends nothing yet."""
        self._averaging = Averaging(WrappedModule(self.module, self.parameters_to_ignore, group))
        self._averaging.wrapped.decision.set_static(self.static_graph)
        weakref.finalize(self, self._averaging.wrapped.end).atexit = False

    # ---- the training loop

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        """That of the module. Collective where buffers are handed out."""
        with range_named("DistributedDataParallel.forward"):
            is_training = torch.is_grad_enabled()
            self._before_forward(is_training and self.require_backward_grad_sync)
            if is_training:
                self._averaging.before_forward(joins=self._following is not None)
            inputs, kwargs = self._move(inputs, kwargs)  # type: ignore[assignment]
            outer = cut_graphs_for(self)
            try:
                outputs = self.module(*inputs, **kwargs)
            finally:
                cut_graphs_for(outer)
            if is_training:
                self._averaging.after_forward(outputs, self.require_backward_grad_sync, self.find_unused_parameters)
            shares_next = is_training and self.require_backward_grad_sync
            if shares_next is not self.require_forward_param_sync:  # a Module is slow to assign to
                self.require_forward_param_sync = shares_next
            return outputs

    def join(  # type: ignore[override]
        self,
        divide_by_initial_world_size: bool = True,
        enable: bool = True,
        throw_on_early_termination: bool = False,
    ) -> AbstractContextManager[None]:
        """``with ddp.join():`` ranks may have unequal numbers of batches.

        A rank that comes to the end of the block follows the others' forwards, and as :func:`zerox.join` all calls of
        the module's optimizers, until all have come. Of gradients that no optimizer of zerox holds it sends zeros. In
        the end all ranks have such parameters, and the buffers, of a rank that had most batches.

        ``divide_by_initial_world_size``: True: gradients are means over all ranks; False: over those that have batches.
        ``throw_on_early_termination``: as soon as a rank has run out, all raise RuntimeError.
        Collective where it is entered and at its end. If the block raises on one rank, the others raise too: with its
        reason where they follow or come to a call of an optimizer, and where a forward waits after the group's timeout.
        """
        if not enable or size_of(self.process_group) == 1:
            return nullcontext()
        return Join(self, divide_by_initial_world_size, throw_on_early_termination)

    def register_comm_hook(self, state: object, hook: Callable[..., Any]) -> None:
        """torch's ``allreduce_hook``, ``fp16_compress_hook`` and ``bf16_compress_hook``, where the module's optimizers
        have the ``reduce_dtype`` of that name: else ValueError. NotImplementedError for all other hooks."""
        self._averaging.take_hook(comm_hooks.name_of(hook))

    def _register_builtin_comm_hook(self, comm_hook_type: Any) -> None:
        self._averaging.take_hook(comm_hooks.OF_BUILTINS[comm_hook_type.name])

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]
        return self._averaging.wrapped.group

    @property
    def reducer(self) -> Reducer:  # type: ignore[override]
        return Reducer(self._averaging.wrapped.decision)

    # ---- copies

    def __getstate__(self) -> dict[str, Any]:
        """RuntimeError for another group than the default one, which a copy could not have, as torch's."""
        there = dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
        if self.process_group is not there:
            raise RuntimeError(
                "a DistributedDataParallel can be copied or pickled only with the default process group: copy "
                "ddp.module, or wrap the copy"
            )
        return {name: value for name, value in self.__dict__.items() if name not in NOT_COPIED}

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Sends nothing: what a copy needs beside, its first training forward makes, on all ranks."""
        nn.Module.__setstate__(self, state)
        self._wrap(dist.group.WORLD if dist.is_available() and dist.is_initialized() else None)

    # ---- torch's other names

    def _remove_autograd_hooks(self) -> None:
        """This wrapper averages nothing any more, and another one of the module may. Sends nothing.

        What an optimizer of zerox holds goes on being averaged: by that optimizer, which no wrapper is needed for.
        """
        self._averaging.left_over.end()

    def _sync_buffers(self) -> None:
        self._hand_out_buffers()

    def _assign_modules_buffers(self) -> None:
        self._find_buffers()

    def _set_static_graph(self) -> None:
        """RuntimeError after the first training forward, as torch's."""
        if self.static_graph:
            warn_caller("You've set static_graph to be True, no need to set it again.")
            return
        if self._averaging.has_begun:
            raise RuntimeError("_set_static_graph() should be called before the training loop starts")
        self.static_graph = True
        self._averaging.wrapped.decision.set_static(True)


# Where a wrapper is compiled, its module is, and nothing of ours.
keep_from_dynamo(DistributedDataParallel.forward, with_calls=False)
for each in (Joins._before_forward, Averaging.before_forward, Averaging.after_forward, Placement._move):
    keep_from_dynamo(each)
