"""Everything that zerox uses of torch and that torch keeps private, but for zerox/integrations.

A later torch may lack any of it. To import this module takes none of it, and a function that needs what is gone either
does without, or raises ImportError that names it: never RuntimeError, which callers expect of torch itself. Each says
what it means "Without it". csrc/torch_internals.h has the same for C++.

When a new torch comes, look at these two files, and run tests/test_private_names.py, which takes each name away.
"""

from __future__ import annotations

import functools
import inspect
import operator
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from types import CodeType
from typing import Any, NamedTuple, ParamSpec, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.autograd import profiler
from torch.distributed.algorithms import join as torch_join
from torch.nn.parallel import DistributedDataParallel
from torch.optim import optimizer as optimizers

P = ParamSpec("P")
R = TypeVar("R")


def error_of_changed(name: str, what: str) -> ImportError:
    """The error for a name that torch lacks, or that means something else now."""
    return ImportError(
        f"zerox: torch {torch.__version__} lacks {name}, or has changed it, and zerox needs it {what}: use a version "
        "of torch that zerox was tested with, see docs/install.md"
    )


def _needs(name: str, what: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Has a function raise that, instead of whatever torch raises where it lacks the name."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            try:
                return function(*args, **kwargs)
            except (AttributeError, ImportError) as error:
                raise error_of_changed(name, what) from error

        return call

    return decorate


# ---- tensors. Those that hot code calls are plain lookups: Python's AttributeError names what is missing.

# How often a tensor was written. Without it: rows, local optimizers, and gradients that were averaged without an
# optimizer can't tell whether somebody wrote them.
version_of: Callable[[Tensor], int] = operator.attrgetter("_version")
# Rows and values of a sparse tensor that isn't coalesced, and how many. Without them: no sparse gradients.
rows_of: Callable[[Tensor], Tensor] = operator.methodcaller("_indices")
values_of: Callable[[Tensor], Tensor] = operator.methodcaller("_values")
num_rows_of: Callable[[Tensor], int] = operator.methodcaller("_nnz")
# A DTensor's local tensor, and how it lies. Without them: no DTensors.
local_tensor_of: Callable[[Any], Any] = operator.attrgetter("_local_tensor")
spec_of: Callable[[Any], Any] = operator.attrgetter("_spec")
# A module's own parameters and children, also half built, and not those that a class of the user's wants to show.
# Without them: overlap_gather() can't wait for a module, and errors call parameters by position.
own_params_of: Callable[[nn.Module], dict[str, nn.Parameter | None]] = operator.attrgetter("_parameters")
children_of: Callable[[nn.Module], dict[str, nn.Module | None]] = operator.attrgetter("_modules")


def set_local_tensor(dtensor: Any, local: Tensor) -> None:
    """Without it: as of local_tensor_of()."""
    dtensor._local_tensor = local


@_needs("torch.distributed.tensor._utils.compute_local_shape_and_global_offset", "to place a DTensor's part")
def offsets_of(dtensor: Any) -> tuple[int, ...]:
    """Where a DTensor's local tensor begins in the whole one. Without it: cut DTensors are refused."""
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offsets = compute_local_shape_and_global_offset(dtensor.shape, dtensor.device_mesh, dtensor.placements)
    return tuple(offsets)


@_needs("torch.Tensor._make_wrapper_subclass", "for placeholders in p.grad and for state_dict()")
def make_wrapper(cls: type, sizes: Sequence[int], strides: Sequence[int], **of: Any) -> Any:
    """A tensor without memory. Without it: no placeholders (stages 2 and 3) and no state_dict() of several ranks."""
    return Tensor._make_wrapper_subclass(cls, sizes, strides, **of)  # type: ignore[attr-defined, arg-type]


@_needs("torch.autograd.grad_mode._unsafe_preserve_version_counter", "to hand out buffers")
def keep_versions(tensors: Sequence[Tensor]) -> AbstractContextManager[Any]:
    """Inside, writes don't count. Without it: no buffers are handed out, since a backward would refuse them."""
    from torch.autograd.grad_mode import _unsafe_preserve_version_counter

    return _unsafe_preserve_version_counter(tuple(tensors))  # type: ignore[no-any-return, no-untyped-call]


@_needs("torch._C._current_graph_task_id", "to know whether a backward runs")
def in_backward() -> bool:
    """Whether this thread is inside a backward. Without it: questions of placeholders and the wrapper's forward raise,
    since in a backward they would meet other ranks in another order."""
    return torch._C._current_graph_task_id() != -1


def is_updated_inside(param: Tensor) -> bool:
    """By torch.distributed.optim._apply_optimizer_in_backward(). Without it: such a parameter is not refused."""
    return bool(getattr(param, "_in_backward_optimizers", None))


# ---- operators


def written_by(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Any]:
    """The arguments that an operator changes. Without its schema: all, and operators that only read raise too."""
    if getattr(operator, "namespace", "") == "c10d":  # schemas of collectives don't say
        return [] if "send" in str(operator) else list(args[:1])
    try:
        known = operator._schema.arguments
        written = [each.alias_info is not None and each.alias_info.is_write for each in known]
    except AttributeError:
        return [*args, *kwargs.values()]
    places = dict(zip((each.name for each in known), written, strict=True))
    found = [arg for arg, is_written in zip(args, written, strict=False) if is_written]
    return [*found, *(value for name, value in kwargs.items() if places.get(name, True))]


def returns_views(operator: Any) -> bool:
    """Whether what an operator returns may lie in its arguments. Without its schema: yes."""
    try:
        return any(each.alias_info is not None for each in operator._schema.returns)
    except AttributeError:
        return True


def overloads(*names: str) -> tuple[Any, ...]:
    """Those of aten that torch has, of ``"_foreach_mul_.Scalar"`` and so on. Without one: it is as if it were unknown,
    and raises where a tensor without values meets it."""
    found = []
    for name in names:
        with suppress(AttributeError):
            found.append(functools.reduce(getattr, name.split("."), torch.ops.aten))
    return tuple(found)


# Operators that are known for tensors without values.
TO_COPY = overloads("_to_copy.default")
ALL_MUL = overloads("_foreach_mul_.Scalar", "_foreach_mul_.Tensor")
ALL_DIV = overloads("_foreach_div_.Scalar", "_foreach_div_.Tensor")
ALL_CLAMP_MIN = overloads("_foreach_clamp_min_.Scalar")
ALL_CLAMP_MAX = overloads("_foreach_clamp_max_.Scalar")
ALL_ZERO = overloads("_foreach_zero_.default")
ALL_NORMS = overloads("_foreach_norm.Scalar")
UNSCALE = overloads("_amp_foreach_non_finite_check_and_unscale_.default")


def for_each(name: str, tensors: Sequence[Tensor], *others: Any, **options: Any) -> Any:
    """``torch._foreach_NAME``: the method of that name of each tensor, in few launches. ``others``: lists, with one for
    each tensor, or values for all. Without it: one by one."""
    if together := getattr(torch, f"_foreach_{name}", None):
        return together(tensors, *others, **options)
    lists = [each if isinstance(each, list) else [each] * len(tensors) for each in others]
    return [getattr(tensor, name)(*own, **options) for tensor, *own in zip(tensors, *lists, strict=True)]


@_needs("torch._amp_foreach_non_finite_check_and_unscale_", "to unscale gradients")
def unscale(grads: list[Tensor], found_inf: Tensor, inverse_scale: Tensor) -> None:
    """As torch's GradScaler does. Without it: unscale_() of placeholders beside plain gradients raises."""
    torch._amp_foreach_non_finite_check_and_unscale_(grads, found_inf, inverse_scale)


@_needs("torch.utils._python_dispatch.TorchDispatchMode", "to try a class of optimizers")
def each_operator(call: Callable[[Any, Any, Any], Any]) -> AbstractContextManager[Any]:
    """Inside, ``call(func, args, kwargs)`` in the place of operators. Without it: ShardedOptimizer raises."""
    from torch.utils._python_dispatch import TorchDispatchMode

    class Mode(TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return call(func, args, kwargs or {})

    return Mode()


MESSAGES = {"c10d": "allreduce_", "_c10d_functional": "all_reduce"}  # namespaces, and an operator that each has


@functools.cache
def message_namespaces() -> frozenset[str]:
    """Of operators that send. Without one: ShardedOptimizer raises, since it could not see a class send."""
    for namespace, one in MESSAGES.items() if dist.is_available() else ():
        if not hasattr(getattr(torch.ops, namespace), one):
            raise error_of_changed(
                f"the operator {namespace}::{one}", "to see whether a class of optimizers sends messages"
            )
    return frozenset(MESSAGES)


# ---- optimizers and scalers


def profiler_is_on() -> bool:
    """Without it: ranges are always opened, which takes microseconds."""
    return getattr(profiler, "_is_profiler_enabled", True)


def has_own_step_hooks(optimizer: Any) -> bool:
    """Without it: True, and step() runs torch's code for hooks, which takes microseconds."""
    try:
        return bool(optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks)
    except AttributeError:
        return True


def has_step_hooks(optimizer: Any) -> bool:
    """The same, also of those for all optimizers. Without it: True."""
    try:
        of_all = optimizers._global_optimizer_pre_hooks or optimizers._global_optimizer_post_hooks
    except AttributeError:
        return True
    return bool(of_all) or has_own_step_hooks(optimizer)


def trace_step(optimizer: Any) -> None:
    """For tracers of Python, which look for this call. Without it: they see no step."""
    step_code = getattr(optimizer, "_optimizer_step_code", None)
    if step_code is not None:
        step_code()


def zero_grad_name(optimizer: Any) -> str:
    """What a profiler calls zero_grad(). Without it: what torch called it in 2.11."""
    return getattr(optimizer, "_zero_grad_profile_name", f"Optimizer.zero_grad#{type(optimizer).__name__}.zero_grad")


def without_dynamo(method: Callable[..., Any]) -> Callable[..., Any]:
    """What torch wrapped in what imports Dynamo. Without it: the wrapper, and a second in the first optimizer."""
    is_torch_s = getattr(method, "__globals__", {}).get("__name__") == "torch._compile"  # not of somebody's patch
    return getattr(method, "__wrapped__", method) if is_torch_s else method


SCALER = ("_unscale_grads_", "_maybe_opt_step")


def check_scaler() -> None:
    """Without what zerox.GradScaler overrides it raises: it would be torch's, which skips steps on one rank alone."""
    for name in SCALER:
        if not hasattr(torch.amp.GradScaler, name):
            raise error_of_changed(f"torch.amp.GradScaler.{name}", "for zerox.GradScaler")


class JoinConfig(NamedTuple):
    """As torch's _JoinConfig, which torch's Join puts into ``_join_config`` of all that it joins."""

    enable: bool
    throw_on_early_termination: bool
    is_first_joinable: bool


OFF = JoinConfig(False, False, False)


def check_join() -> None:
    """Without ``_join_config`` torch's Join raises over what is zerox's: it could not say that it begins."""
    if "_join_config" not in torch_join.Joinable.__init__.__code__.co_names:
        raise error_of_changed("torch.distributed.algorithms.Joinable._join_config", "to follow torch's Join")


# ---- groups


@_needs("torch.distributed.distributed_c10d._world.pg_map", "to find a process group's store")
def listed_groups() -> dict[Any, tuple[str, Any]]:
    """The groups that torch.distributed made: a backend's name and the store of each. Without it: no ranks."""
    return dist.distributed_c10d._world.pg_map


def groups_before_fork() -> dict[Any, tuple[str, Any]]:
    """The same, where a fork must not fail. Without it: none, as listed_groups() has refused to train."""
    world = getattr(sys.modules.get("torch.distributed.distributed_c10d"), "_world", None)
    return dict(getattr(world, "pg_map", {}))


@_needs("torch.distributed.ProcessGroup._get_backend", "to know what a process group can send")
def backend_of(group: dist.ProcessGroup, device: torch.device) -> Any:
    """RuntimeError if the group has none for the device. Without it: no ranks."""
    return group._get_backend(device)


def timeout_in(options: object) -> Any:
    """Of a backend. Without it: None, and zerox's groups have the backend's default."""
    return getattr(options, "_timeout", None)


def set_timeout(options: Any, timeout: Any) -> None:
    """Without it: an attribute that nobody reads, and the backend's default."""
    options._timeout = timeout


@_needs("torch.distributed.ProcessGroup._register_backend or _set_default_backend", "to make a group of its own")
def set_backend(group: Any, device: torch.device, kind: Any, backend: Any) -> None:
    """The one backend of a group that torch does not list. Without it: no ranks over gloo."""
    group._register_backend(device, kind, backend)
    group._set_default_backend(kind)


# ---- another process's memory on a device. Callers warn of errors, and read through the host.


@_needs("torch.UntypedStorage._share_cuda_", "to read shards from another GPU")
def share_cuda(tensor: Tensor) -> tuple[Any, ...]:
    """Without it: sharded parameters (stage 3) are fetched through the host, with a warning."""
    return tensor.untyped_storage()._share_cuda_()


@_needs("torch.UntypedStorage._new_shared_cuda", "to read shards from another GPU")
def open_cuda(*shared: Any) -> Any:
    """Without it: as of share_cuda()."""
    return torch.UntypedStorage._new_shared_cuda(*shared)


def decline_cuda(counter: bytes, offset: int) -> None:
    """Never raises. Without it: the owner keeps the memory until it ends."""
    with suppress(AttributeError):
        torch.UntypedStorage._release_ipc_counter_cuda(counter, offset)


# ---- how modules get their first values


def storage_of(tensor: Tensor) -> int:
    """What two tensors have in common that share a storage, also on the meta device. Without it all differ."""
    return getattr(tensor.untyped_storage(), "_cdata", id(tensor))


def reset_of(module: nn.Module) -> Callable[[], Any] | None:
    """What gives a module's own parameters their first values: ``reset_parameters()``, which some of torch's modules
    have under another name. Without that, as for a module that has neither, None."""
    return getattr(module, "reset_parameters", None) or (
        getattr(module, "_reset_parameters", None) if isinstance(module, RESET_BY_ANOTHER) else None
    )


RESET_BY_ANOTHER = (nn.MultiheadAttention, nn.Transformer)


# ---- files of torch.save()


def offset_in_file(tensor: Tensor) -> int | None:
    """Where the storage of a tensor begins in the file from which torch.load() has made it on the meta device. None for
    a tensor that was saved without elements. Without it: None, and load_weights() refuses files of torch.save()."""
    return getattr(tensor.untyped_storage(), "_checkpoint_offset", None)


# ---- torch's DistributedDataParallel


def ignored_by_ddp(module: nn.Module) -> frozenset[str]:
    """Names of what a user has DistributedDataParallel leave alone. Without it: nothing is left alone."""
    return frozenset(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def set_active_ddp(wrapper: DistributedDataParallel | None) -> DistributedDataParallel | None:
    """For which wrapper Dynamo cuts graphs; returns the one before. Without it: it cuts none, and gradients come where
    a backward ends."""
    before = getattr(DistributedDataParallel, "_active_ddp_module", None)
    DistributedDataParallel._active_ddp_module = wrapper  # type: ignore[assignment]
    return before


@_needs("torch._utils._get_device_index", "for DistributedDataParallel(device_ids=)")
def device_index(device: Any) -> int:
    """Without it: device_ids of an accelerator raise."""
    from torch._utils import _get_device_index

    return _get_device_index(device, True)


@_needs("torch.distributed.utils._to_kwargs", "for DistributedDataParallel(device_ids=)")
def move_to(inputs: Any, kwargs: Any, device: torch.device) -> Any:
    """A forward's arguments on a device. Without it: as of device_index()."""
    from torch.distributed.utils import _to_kwargs

    return _to_kwargs(inputs, kwargs, device, True)


@_needs("torch.utils._pytree.tree_leaves", "to find tensors in what a forward returns")
def leaves_of(outputs: object) -> list[object]:
    """Of what a user has registered with pytree. Without it: a wrapper's forward raises that returns anything else than
    tensors in lists, tuples, sets, dicts and dataclasses."""
    from torch.utils._pytree import tree_leaves

    return tree_leaves(outputs)


# ---- torch.distributed.checkpoint (DCP). Its modules take a second to import; callers have imported them.


@_needs("torch.distributed.checkpoint.filesystem._StorageInfo", "for zerox.save()")
def storage_info(file: str, offset: int, length: int) -> Any:
    """What ``.metadata`` says of a tensor's place. Without it: zerox.save() raises."""
    from torch.distributed.checkpoint.filesystem import _StorageInfo

    return _StorageInfo(file, offset, length)


@_needs("torch.distributed.checkpoint.metadata._MEM_FORMAT_ENCODING", "to load what Python 3.11.2 saved")
def memory_formats() -> Any:
    """The enumeration in ``.metadata``. Without it: checkpoints that Python 3.11.2 wrote are refused."""
    from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING

    return _MEM_FORMAT_ENCODING


DCP = "torch.distributed.checkpoint.state_dict"
GETTER, LOADER, OPTIONS = "_get_optim_state_dict", "_load_optim_state_dict", "info"


@functools.cache
def check_dcp() -> None:
    """Without these functions of DCP, whose calls state_dict() looks for in its stack, a state_dict() that DCP calls
    raises: DCP would take segments for whole tensors."""
    for name in (GETTER, LOADER):
        function = inspect.unwrap(getattr(sys.modules[DCP], name, check_dcp))
        if function.__name__ != name or OPTIONS not in inspect.signature(function).parameters:
            raise error_of_changed(f"{DCP}.{name}(..., {OPTIONS})", "to know whether DCP wants whole tensors")


# ---- Dynamo


def skip_frames(code: CodeType, with_calls: bool) -> bool:
    """Has Dynamo compile no call of this code by itself, and ``with_calls`` nothing that it calls. False without it:
    then torch.compile breaks graphs at the hooks of overlap_gather(), and looks into calls of zerox."""
    try:
        dynamo = torch._C._dynamo.eval_frame
        of_calls = dynamo._FrameAction.SKIP if with_calls else dynamo._FrameAction.DEFAULT
        dynamo.set_code_exec_strategy(code, dynamo._FrameExecStrategy(dynamo._FrameAction.SKIP, of_calls))
    except (AttributeError, TypeError):
        return False
    return True


def end_graphs_at(function: Any, why: str) -> None:
    """Has Dynamo call a function, where it compiles what calls it. Without it: Dynamo traces zerox, which is slow."""
    function._torchdynamo_disable = True
    function._torchdynamo_disable_msg = why


def note_start(mark: Callable[[Any], None]) -> bool:
    """Has Dynamo keep ``mark`` until it is reset, among what it calls when it compiles. False if it did already.
    Without it: True, as if Dynamo were reset all the time, and regions that show what they read wait for everything."""
    try:
        from torch._dynamo.callback import callback_handler

        if mark in callback_handler.start_callbacks:
            return False
        callback_handler.register_start_callback(mark)
    except (ImportError, AttributeError):
        pass
    return True


# What Dynamo calls a region that it compiled, and what autograd calls the function in it that has a backward, with the
# files of torch that say so. See Note [Reads wait for what they read] in csrc/params/read_guard.h.
REGIONS = {
    "_dynamo/convert_frame.py": '"Torch-Compiled Region: "',
    "_functorch/_aot_autograd/runtime_wrappers.py": "class CompiledFunction(torch.autograd.Function)",
}
BACKWARD = "Backward"  # behind a function's name, of its backward


@functools.cache
def check_regions() -> None:
    """Without these labels overlap_gather() and stage 3 raise: compiled code would read parameters before they are
    there. The text is looked at, since to import Dynamo takes a second, and most scripts never do."""
    for file, text in REGIONS.items():
        path = Path(torch.__file__).parent / file
        if not path.is_file() or text not in path.read_text():
            raise error_of_changed(f"{text} in torch/{file}", "to know what compiled code reads")
    if getattr(_Announced, "_backward_cls", _Announced).__name__ != _Announced.__name__ + BACKWARD:
        raise error_of_changed("the name of an autograd function's backward", "to know what that reads")


class _Announced(torch.autograd.Function):
    pass
