"""Bytes per rank by category, by formula: zerox/optimizer/memory_bytes.py has them from the real storages."""

from __future__ import annotations

import dataclasses
import difflib
import math
from collections.abc import Collection, Iterable, Iterator, Sequence
from numbers import Integral
from typing import Any

import torch

from zerox.memory.grad_dtype import grad_dtype_of
from zerox.memory.mask import num_bytes_of, stands_for
from zerox.memory.pages import storage_bytes
from zerox.memory.row_owners import most_rows
from zerox.memory.row_table import check_ranks, is_sparse
from zerox.memory.stored import stored_bytes
from zerox.optimizer.local_bytes import Local, bytes_of_own, take_apart
from zerox.optimizer.memory_bytes import MemoryBytes
from zerox.options import (
    OF_LOCAL_OPTIMIZERS,
    LocalOptimizerOptions,
    OptimizerOptions,
    check_foreign,
    check_params,
    named_tensors,
    parameter_words,
)
from zerox.plan.buckets import BucketPlan
from zerox.plan.choices import A_SUBGROUP, MASKS, SPARSITY, SUBGROUP
from zerox.plan.peak import AHEAD_IF_PACED, Flow, peak_alone, peak_of_sharded, peak_of_whole, peak_on_streams
from zerox.plan.resident import resident_limit
from zerox.plan.stage import SHARDED
from zerox.ranks.dtensors import local_of
from zerox.ranks.model_axes import axes_of
from zerox.ranks.process_group import ALONE, check_group, choose_group
from zerox.ranks.subgroups import OF_GROUP
from zerox.rules.known import check_options, options_of, rules_of
from zerox.rules.local_optimizer import LocalOptimizerClass, full_name
from zerox.rules.of_groups import Rules

BACKENDS = ("gloo", "nccl")
OF_ALL = ("process_group", "norm_group", "optimizer_class")  # of the constructors' arguments, those that are no options


def estimate(
    params: Any,
    world_size: int,
    *,
    backend: str = "gloo",
    local_world_size: int | None = None,
    mesh_shape: tuple[int, int] | None = None,
    rule: str = "adam",
    masks: str | Iterable[str] = (),
    local: Local = (),
    **options: Any,
) -> MemoryBytes:
    """Bytes per rank of training ``params`` with ``FusedShardedAdam(params, **options)`` over ``world_size`` ranks.

    ``params``: as for the optimizer, or on the meta device; nothing is allocated or changed. ``rule``: "sgd" or "lion"
    for FusedShardedSGD or FusedShardedLion. ``backend``: "gloo" or "nccl", on which the default bucket size and
    ``exchange`` depend (with the backend's default of ZEROX_EXCHANGE). ``local_world_size``: how many ranks share a
    machine (None: all); over gloo these read each other's gradients, and need buffers only for the gradients of other
    ranks. ``mesh_shape``: (replicate, shard) of a mesh that ``process_group`` will be; one that is passed has its own.
    ``process_group="alone"``: each rank trains by itself. ``masks``: the names and patterns that a zerox.Sparsity will
    have, for ``params`` with names: one bit for each element of the buckets that have such a parameter, among
    ``moments``. ``local``: names, patterns of them, or tensors in ``params`` that no DistributedDataParallel will have,
    beside others that one has: this rank's own. They are counted with dense gradients, and ``peak`` lacks what torch's
    class allocates for them in its step(); a rank alone has none. A param group's ``process_group``, as experts have
    one, may be the number of ranks that it will have. Options that don't change memory (lr and so on) are accepted.
    With ``optimizer_class=`` it is for ShardedOptimizer, and ``peak`` lacks what the class's own step() allocates for a
    bucket at a time. Gradients of tables (``sparse=True`` in a param group) are not in it, since they are as large as
    what batches name. Raises as the constructor does for ``params`` and ``options``, and ValueError for arguments of
    its own.
    """
    _check_arguments(params, world_size, local_world_size, backend=backend, mesh_shape=mesh_shape)
    mesh_shape = check_group(options.get("process_group")) or mesh_shape
    if mesh_shape is not None and math.prod(mesh_shape) != world_size:
        raise ValueError(f"mesh_shape {mesh_shape} is not of {world_size} ranks")
    mesh_shape = None if mesh_shape is not None and 1 in mesh_shape else mesh_shape
    if options.get("process_group") == ALONE:
        world_size = local_world_size = 1
    if local_world_size is None:
        local_world_size = world_size
    if local_world_size > world_size:
        raise ValueError(f"local_world_size must be in [1, {world_size}], got {local_world_size}")
    chosen, rules, of_groups = _chosen(rule, options)
    everything = [(name, tensor, _options_of(rules, group, of_groups)) for name, tensor, group in named_tensors(params)]
    if not everything:
        raise ValueError("optimizer got an empty parameter list")  # in torch's words
    has_axes = options.get("norm_group") is not None
    apart_here = take_apart(local, everything, rules, chosen, has_axes) if world_size > 1 else set()
    of_own = bytes_of_own([everything[place] for place in sorted(apart_here)], rules)
    checked = everything
    everything = [each for place, each in enumerate(everything) if place not in apart_here]
    trained = [(name, local_of(tensor), group) for name, tensor, group in everything if tensor.requires_grad]
    for _, tensor, group in trained if rules.default.on_host else checked:
        rules.of(group).check({**group, "params": [tensor]})  # a class of torch's kind says what it keeps for it
        chosen.check_group(group, rules.of(group).defaults)
    check_params([name for name, _, _ in trained], [tensor for _, tensor, _ in trained], allocated=False)
    tables = [each for each in trained if is_sparse(each[2])]
    for *_, group in tables:
        are_some = _subgroup_size(group.get(OF_GROUP), world_size) != world_size
        check_ranks("a param group", are_some, mesh_shape is not None, chosen.stage == 3)
    trained = [each for each in trained if not is_sparse(each[2])]
    tensors = [tensor for _, tensor, _ in trained]
    dtypes = parameter_words(tensor.dtype for tensor in tensors)
    sizes = [_subgroup_size(group.get(OF_GROUP), world_size) for _, _, group in trained]
    facts: dict[str, Collection[str]] = {"parameters": dtypes, "backend": {backend}}
    if any(size != world_size for size in sizes):
        facts |= {SUBGROUP: {A_SUBGROUP}, "process_group": {"a group" if mesh_shape is None else "a 2-D mesh"}}
    for group in [group for *_, group in tables] or [{}]:
        own = {name: value for name, value in group.items() if name != "params"}
        chosen.check_pairs({"rule": rule, **options, **own}, **facts)

    types = {tensor.device.type for tensor in (*tensors, *(table for _, table, _ in tables))}
    on_host = backend == "gloo" and types <= {"cpu", "meta"}
    sharded = chosen.stage_plan.grads is SHARDED
    near = local_world_size if on_host else 1
    apart = chosen.stage_plan.params is SHARDED and world_size > 1
    frozen = [(name, local_of(tensor), "", None, ()) for name, tensor, _ in everything if not tensor.requires_grad]
    parameters = 0 if apart else sum(tensor.nbytes for _, tensor, *_ in frozen)
    for _, table, _ in tables:
        num_kept = most_rows(table.shape[0], world_size) if apart else table.shape[0]
        parameters += num_kept * table.shape[1] * table.element_size()
    whole: list[tuple[str, int]] = []  # buckets whose shard is apart, and tables that lookups give memory as a whole
    if apart and not on_host:
        whole += [(f"table {name}", tensor.nbytes) for name, tensor, _ in tables]

    def parameters_of(plan: BucketPlan, first: str, dtype: torch.dtype) -> int:
        nbytes = plan.layout.numel * dtype.itemsize
        if not apart:
            return nbytes
        whole.append((f"the bucket of {first}", nbytes))
        together = mesh_shape[0] if mesh_shape is not None else 1  # parameters are sharded over the other axis only
        return storage_bytes(together * plan.layout.shard_numel, dtype.itemsize, on_host, 1)

    for plan in chosen.plan(frozen, backend, world_size) if apart else ():
        first, tensor, *_ = frozen[plan.params[0]]
        parameters += parameters_of(plan, first, tensor.dtype)
    masked = _masked([masks] if isinstance(masks, str) else masks, trained)
    if masked:
        of_masks = {**facts, "parameters": parameter_words(tensors[place].dtype for place in masked), MASKS: {SPARSITY}}
        chosen.check_pairs({"rule": rule, **options}, **of_masks)
    master, moments = 0, 0
    for _, table, group in tables:
        num_own, width = most_rows(table.shape[0], world_size), table.shape[1]
        form = chosen.state_form(table)
        a_row = width * form.itemsize + form.num_scales(width) * torch.float32.itemsize
        moments += num_own * a_row * len(rules.of(group).wanted_states([group]))
        master += sum(num_own * width * spec.form.itemsize for spec in chosen.masters(table.dtype) if spec.form)
    flows = []
    named = [(name, tensor, rules.of(group).name, chosen.divisor_of(group), ()) for name, tensor, group in trained]
    for plan in (plan for size in set(sizes) for plan in _plans_of(size, sizes, named, backend, chosen)):
        size = plan.layout.world_size
        layout, dtype = plan.layout, tensors[plan.params[0]].dtype
        parameters += parameters_of(plan, trained[plan.params[0]][0], dtype)
        groups = [trained[index][2] for index in plan.params]
        of_bucket = rules.of(groups[0])
        kept = of_bucket.wanted_states(groups)
        place = (plan.state_form, layout.shard_numel, on_host)
        moments += sum(stored_bytes(of_bucket, spec, *place) for spec in kept)
        moments += num_bytes_of(layout.shard_numel) if masked.intersection(plan.params) else 0
        master += sum(stored_bytes(of_bucket, spec, *place) for spec in chosen.masters(dtype))
        wire = chosen.wire_dtype(dtype)
        grads = grad_dtype_of(tensors[plan.params[0]], chosen.accumulate_dtype)
        divided_alone = size == 1 and chosen.divisor_of(groups[0]) not in (None, 1.0)
        stay = on_host and wire == grads and not divided_alone  # large gradients, where autograd left them
        zero_copy = plan.num_zero_copy if stay else 0
        flow = _flow(plan, grads, wire, 0 if mesh_shape else zero_copy, alone=world_size == 1)
        if mesh_shape is None:
            beside = (
                near if size == world_size else size if near == world_size else 1
            )  # of a subgroup perhaps nobody else
            received, reducing = _received(plan, wire, backend, size - beside), 0
        else:
            received, reducing = _on_mesh(plan, wire, backend, mesh_shape, near)
        flows.append(dataclasses.replace(flow, received=received if size > 1 else 0, reducing=reducing))

    of_tables = sum(table.nbytes for _, table, _ in tables) if apart and on_host else 0
    limit = resident_limit(whole, chosen.resident_mb, of_tables)
    parameters += int(min(limit, sum(nbytes for _, nbytes in whole) + of_tables))
    before_exchange = [flow.local for flow in flows]
    buffers = [flow.flat + flow.received + flow.reducing for flow in flows] if world_size > 1 else []
    made = MemoryBytes(
        parameters=parameters,
        gradients=sum(flow.shard if sharded else flow.whole + flow.kept for flow in flows),
        master=master,
        moments=moments,
        exchange=2 * max(buffers, default=0),
        local_gradients=sum(before_exchange),
        typical_local_gradients=max(before_exchange, default=0) if sharded else sum(before_exchange),
    )
    slow = AHEAD_IF_PACED if apart else None
    on_streams = backend == "nccl" and world_size > 1
    peaks = [_peak(flows, world_size, sharded, on_streams, ahead) for ahead in (slow, 0)]
    peak, typical = (parameters + master + moments + of_own.lasting + each for each in peaks)
    lasting = {name: getattr(made, name) + getattr(of_own, name) for name in ("parameters", "gradients", "moments")}
    return dataclasses.replace(made, **lasting, peak=peak, typical_peak=typical)


def _check_arguments(params: Any, *counts: Any, backend: str, mesh_shape: Any) -> None:
    """``counts``: world_size and local_world_size."""
    if isinstance(params, torch.nn.Module):
        raise TypeError(
            f"zerox.estimate() takes what the optimizer takes, got a model ({type(params).__name__}): pass "
            "model.parameters() or model.named_parameters()"
        )
    if isinstance(params, torch.Tensor):
        raise TypeError(f"zerox.estimate() takes an iterable of tensors or param groups, got a {type(params).__name__}")
    for name, count in zip(("world_size", "local_world_size"), counts, strict=True):
        if not _is_count(count) and not (count is None and name == "local_world_size"):
            raise ValueError(f"{name} must be a positive integer, got {count!r}")
    if backend not in BACKENDS:
        raise ValueError(f"backend must be one of {BACKENDS}, got {backend!r}")
    is_shape = isinstance(mesh_shape, Sequence) and len(mesh_shape) == 2 and all(map(_is_count, mesh_shape))
    if mesh_shape is not None and not is_shape:
        raise ValueError(f"mesh_shape must be two positive integers (replicate, shard), got {mesh_shape!r}")


def _is_count(value: Any) -> bool:
    return isinstance(value, Integral) and value is not True and int(value) > 0


def _chosen(rule: str, options: dict[str, Any]) -> tuple[OptimizerOptions, Rules, dict[str, Any]]:
    """As the constructor with these ``options``: ShardedOptimizer's, if a class is among them.

    The last are what param groups take from the constructor, beside the defaults of their rule.
    """
    axes_of(options.get("norm_group"))
    cls = options.get("optimizer_class")
    if cls is None:
        rules = rules_of(rule)
        known = {field.name for field in dataclasses.fields(OptimizerOptions)}
        chosen = OptimizerOptions(**{name: value for name, value in options.items() if name in known})
        chosen.check_pairs({"rule": rule, **options})  # which know of options that only other rules have
        taken = {*known, *options_of(rule), *OF_ALL}
        if unknown := [name for name in options if name not in taken]:
            near = difflib.get_close_matches(unknown[0], taken, n=1)
            raise TypeError(
                f"zerox.estimate() got an unexpected keyword argument '{unknown[0]}', which the optimizer of "
                f'rule="{rule}" does not take' + (f": did you mean '{near[0]}'?" if near else "")
            )
        check_options(rule, options)
        return chosen, rules, options
    own = {name: value for name, value in options.items() if name in OF_LOCAL_OPTIMIZERS}
    others = (*OF_LOCAL_OPTIMIZERS, *OF_ALL)
    of_class = {name: value for name, value in options.items() if name not in others}
    check_foreign(cls, of_class)
    local = LocalOptimizerClass(
        cls, of_class, own.get("elementwise") is True, own.get("master_weights", "auto") is not None
    )
    return LocalOptimizerOptions(**own, optimizer_class=full_name(cls)), local.rules(), {}


def _subgroup_size(given: Any, world_size: int) -> int:
    """Of the ranks that have a param group. ``given``: its ``process_group``, or how many ranks that will have."""
    if given is None:
        return world_size
    if isinstance(given, int):
        size = given
    else:
        check_group(given)
        group = choose_group(given)
        size = 1 if group is None else group.size()
    if not (1 <= size <= world_size and world_size % size == 0):
        raise ValueError(
            f"a param group's process_group can't have {size} of {world_size} ranks: all subgroups are as large"
        )
    return size


def _plans_of(
    size: int, sizes: Sequence[int], named: Sequence[Any], backend: str, chosen: OptimizerOptions
) -> Iterator[BucketPlan]:
    """Of the parameters that so many ranks have."""
    places = [place for place, each in enumerate(sizes) if each == size]
    for plan in chosen.plan([named[place] for place in places], backend, size):
        yield dataclasses.replace(plan, params=tuple(places[place] for place in plan.params))


def _masked(globs: Iterable[str], trained: Sequence[tuple[str, torch.Tensor, Any]]) -> set[int]:
    """The places in ``trained`` of what a zerox.Sparsity of these takes. ValueError for a name that takes nothing."""
    found: set[int] = set()
    for glob in globs:
        places = [place for place, (name, tensor, _) in enumerate(trained) if stands_for(glob, name, tensor)]
        if not places:
            raise ValueError(f"masks: {glob!r} stands for no parameter that can be masked; are there names in params?")
        found.update(places)
    return found


def _options_of(rules: Rules, group: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """As the constructor with these ``options`` completes a param group."""
    found = dict(group)
    rules.complete(found, "a param group", options)
    return {**rules.of(found).defaults, **(options if rules.of(found) is rules.default else {}), **found}


def _flow(plan: BucketPlan, grads: torch.dtype, wire: torch.dtype, num_zero_copy: int, alone: bool) -> Flow:
    layout = plan.layout
    shard = layout.shard_numel * wire.itemsize
    flat = layout.world_size * _slice_numel(plan) * wire.itemsize - layout.end_of(num_zero_copy) * wire.itemsize
    zero_copy = sum(layout.numels[:num_zero_copy]) * grads.itemsize
    return Flow(
        local=sum(layout.numels) * grads.itemsize,
        flat=flat,
        zero_copy=zero_copy,
        received=0,
        shard=flat + zero_copy if alone else shard,  # alone, gradients are the mean
        whole=(sum(layout.numels) if alone else layout.numel) * grads.itemsize,
        kept=shard if torch.promote_types(grads, wire) != grads else 0,
        last=max(layout.numels[num_zero_copy:], default=0) * grads.itemsize,
    )


def _slice_numel(plan: BucketPlan) -> int:
    return plan.layout.shard_numel + plan.layout.trailer_numel


def _received(plan: BucketPlan, wire: torch.dtype, backend: str, num_far: int) -> int:
    """Over gloo a slice from each rank that has to send one; else one slice, which has their sum.

    ``num_far``: ranks whose gradients can't be read.
    """
    return (num_far if backend == "gloo" else 1) * _slice_numel(plan) * wire.itemsize


def _on_mesh(plan: BucketPlan, wire: torch.dtype, backend: str, shape: tuple[int, int], near: int) -> tuple[int, int]:
    """What is received on the shard axis; and while it is reduced the sum of that, what is received on the other, its
    sum.

    Sums are float32, and once more where they are rounded to ``wire``: see csrc/grads/two_level.cpp. ``near``: how many
    ranks can read each other's memory.
    """
    replicate, shard = shape
    wide = torch.promote_types(wire, torch.float32)
    inner = _received(plan, wire, backend, shard - min(near, shard)) * replicate
    outer = _received(plan, wide, backend, replicate - max(1, near // shard))
    sums = (replicate + 1) * _slice_numel(plan) * wide.itemsize
    rounded = plan.layout.shard_numel * wide.itemsize if wide != wire else 0
    return inner, outer + sums + rounded


def _peak(flows: list[Flow], world_size: int, sharded: bool, on_streams: bool, ahead: int | None) -> int:
    if world_size == 1:
        return peak_alone(flows, sharded)
    if not sharded:
        return peak_of_whole(flows, stalled=on_streams or ahead != 0)
    return peak_on_streams(flows) if on_streams else peak_of_sharded(flows, ahead)
