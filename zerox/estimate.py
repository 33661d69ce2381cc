"""Bytes per rank by category, by formula: zerox/optimizer/memory_bytes.py has them from the real storages."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from numbers import Integral
from typing import Any

import torch

from zerox.memory.bucket import Member
from zerox.memory.flat import dense_strides
from zerox.memory.mask import stands_for
from zerox.memory.row_table import check_ranks, check_tables, is_sparse
from zerox.optimizer.given import chosen_by, given_params
from zerox.optimizer.local_bytes import Local, Named, bytes_of_own, take_apart
from zerox.optimizer.materialize import planned_turns
from zerox.optimizer.memory_bytes import MemoryBytes
from zerox.optimizer.on_meta import Init, check_asked, find_initialised
from zerox.optimizer.planning import Around, Given, make_plan
from zerox.options import OptimizerOptions, check_params, named_tensors, parameter_words
from zerox.plan.choices import A_SUBGROUP, DTENSORS, FIRST_VALUES, LIE_AS, MASKS, ON_META, SPARSITY, SUBGROUP
from zerox.plan.materialize import most_open
from zerox.plan.plan import Plan
from zerox.plan.rank_bytes import (
    Site,
    flow_of,
    fullest_rank,
    heaviest_shard,
    owned_places,
    parameter_bytes,
    peak_of,
    slowest_rank,
    state_bytes,
)
from zerox.ranks.dtensors import is_dtensor, local_of
from zerox.ranks.exchange import default_exchange
from zerox.ranks.process_group import ALONE, check_group, choose_group
from zerox.ranks.subgroups import OF_GROUP
from zerox.rules.muon import MUON
from zerox.rules.of_groups import Rules
from zerox.update.matrices import most_bytes

BACKENDS = ("gloo", "nccl")


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
    ``exchange`` depend (the option of that name counts, and no environment variable). ``local_world_size``: how many
    ranks share a machine (None: all); over gloo these read each other's gradients, unless ``exchange`` says otherwise,
    and need buffers only for the gradients of other ranks. ``mesh_shape``: (replicate, shard) of a mesh that
    ``process_group`` will be; one that is passed has its own. ``process_group="alone"``: each rank trains by itself.
    ``masks``: the names and patterns that a zerox.Sparsity will have, for ``params`` with names: one bit for each
    element of the buckets that have such a parameter, among ``moments``. ``local``: names, patterns of them, or tensors
    in ``params`` that no DistributedDataParallel will have, beside others that one has: this rank's own. They are
    counted with dense gradients, and ``peak`` lacks what torch's class allocates for them in its step(); a rank alone
    has none. A param group's ``process_group``, as experts have one, may be the number of ranks that it will have.
    Options that don't change memory (lr and so on) are accepted. With ``model=`` and ``init=``, as for the constructor,
    ``peak_of_construction`` is there for parameters on meta. With ``optimizer_class=`` it is for ShardedOptimizer, and
    ``peak`` lacks what the class's own step() allocates for a bucket at a time. With ``whole=``, and of Muon's
    matrices, it is of the rank that owns most, ``fullest_rank``; ``slowest_over_mean`` says how even their work is, and
    ``peak`` lacks what Muon's all-to-all over NCCL allocates. With ``exchange="native"`` over gloo
    ``peak`` lacks the copies that gloo makes: one to three buckets. Gradients of tables (``sparse=True`` in a param
    group) are not in it, since they are as large as what batches name. Raises as the constructor does for ``params``
    and ``options``, and ValueError for arguments of its own.
    """
    _check_arguments(params, world_size, local_world_size, backend=backend, mesh_shape=mesh_shape)
    ranks = _ranks(world_size, local_world_size, mesh_shape, options.get("process_group"))
    chosen, rules, of_groups = chosen_by(rule, options)
    given = given_params(rules, named_tensors(params), of_groups)
    if not given:
        raise ValueError("optimizer got an empty parameter list")  # in torch's words
    has_axes = options.get("norm_group") is not None
    apart = take_apart(local, given, rules, chosen, has_axes) if ranks.world_size > 1 else set()
    of_own = bytes_of_own([given[place] for place in sorted(apart)], rules)
    ours = [each for place, each in enumerate(given) if place not in apart]
    training = _Training(chosen, rules, ranks, backend, ours)
    training.check_params(given)
    words = {"rule": rule, **options}
    training.check_pairs(words)
    masked = training.masked([masks] if isinstance(masks, str) else masks, words)
    plan = training.plan()
    site = dataclasses.replace(training.site(), shard=heaviest_shard(plan))
    most_open = training.most_open(plan, options.get("model"), options.get("init"))
    return _summed(plan, site, chosen.resident_mb, masked, of_own, most_open, training.update_bytes(plan, site))


@dataclasses.dataclass(frozen=True)
class _Ranks:
    """``near``: how many share a machine. ``mesh``: (replicate, shard), if both are more than one."""

    world_size: int
    near: int
    mesh: tuple[int, int] | None


def _ranks(
    world_size: int, local_world_size: int | None, mesh_shape: tuple[int, int] | None, process_group: Any
) -> _Ranks:
    """ValueError for numbers that don't go together."""
    mesh_shape = check_group(process_group) or mesh_shape
    if mesh_shape is not None and math.prod(mesh_shape) != world_size:
        raise ValueError(f"mesh_shape {mesh_shape} is not of {world_size} ranks")
    mesh = None if mesh_shape is not None and 1 in mesh_shape else mesh_shape
    if process_group == ALONE:
        world_size = local_world_size = 1
    if local_world_size is None:
        local_world_size = world_size
    if local_world_size > world_size:
        raise ValueError(f"local_world_size must be in [1, {world_size}], got {local_world_size}")
    return _Ranks(world_size, local_world_size, mesh)


@dataclasses.dataclass(frozen=True)
class _Training:
    """What is estimated. ``ours``: the parameters, with their groups, without those that are each rank's own."""

    chosen: OptimizerOptions
    rules: Rules
    ranks: _Ranks
    backend: str
    ours: Named

    @property
    def exchange(self) -> str:
        has_owners = self.rules.have_owners(group for _, _, group in self.ours)
        return self.chosen.exchange or default_exchange(self.backend, has_owners)

    @property
    def trained(self) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
        """With what lies in a bucket of each."""
        return [(name, local_of(tensor), group) for name, tensor, group in self.ours if tensor.requires_grad]

    @property
    def dense(self) -> list[int]:
        """The places in ``ours`` of those that are trained and no tables."""
        return [
            place for place, (_, each, group) in enumerate(self.ours) if each.requires_grad and not is_sparse(group)
        ]

    @property
    def tables(self) -> list[tuple[str, torch.Tensor, dict[str, Any]]]:
        return [each for each in self.trained if is_sparse(each[2])]

    def subgroup_size(self, place: int) -> int:
        return _subgroup_size(self.ours[place][2].get(OF_GROUP), self.ranks.world_size)

    def check_params(self, given: Named) -> None:
        """Raises as the constructor for parameters and their groups. ``given``: with those that are not ``ours``."""
        chosen, rules, trained = self.chosen, self.rules, self.trained
        for _, tensor, group in trained if rules.default.on_host else given:
            if not rules.default.on_host:
                rules.of(group).check({**group, "params": [tensor]})
            chosen.check_group(group, rules.of(group).defaults)
        for group in {id(group): group for *_, group in trained}.values() if rules.default.on_host else ():
            rules.of(group).check(group)  # a class of torch's kind says what it keeps for all its parameters
        check_params([name for name, _, _ in trained], [tensor for _, tensor, _ in trained], allocated=False)
        for *_, group in self.tables:
            are_some = _subgroup_size(group.get(OF_GROUP), self.ranks.world_size) != self.ranks.world_size
            check_ranks("a param group", are_some, self.ranks.mesh is not None, chosen.stage == 3)

    def facts(self, dense: Iterable[int]) -> dict[str, Collection[str]]:
        """In the words of zerox.plan.combinations, with these parameters."""
        dtypes = parameter_words(local_of(self.ours[place][1]).dtype for place in dense)
        found: dict[str, Collection[str]] = {"parameters": dtypes, "backend": {self.backend}}
        found["exchange"] = self.chosen.exchange_words(self.exchange)
        if any(self.subgroup_size(place) != self.ranks.world_size for place in self.dense):
            found |= {SUBGROUP: {A_SUBGROUP}, "process_group": {"a group" if self.ranks.mesh is None else "a 2-D mesh"}}
        if any(is_dtensor(self.ours[place][1]) for place in dense):
            found[LIE_AS] = {DTENSORS}
        return found

    def check_pairs(self, words: Mapping[str, Any]) -> None:
        """Raises for options that don't go together, and for what is no table. ``words``: the constructor's options."""
        facts = self.facts(self.dense)
        of_tables: list[Any] = [([tensor], group) for _, tensor, group in self.tables]
        of_dense: list[Any] = [([self.ours[place][1] for place in self.dense], {})] if self.dense else []
        for tensors, group in of_tables + of_dense:
            own = {name: value for name, value in group.items() if name != "params"}
            on_meta = words.get("model") is not None and any(tensor.is_meta for tensor in tensors)
            own_facts = {**facts, FIRST_VALUES: {ON_META if on_meta else "in memory"}}
            self.chosen.check_pairs({**words, **own}, **own_facts)
        check_tables(self.ours)

    def masked(self, globs: Iterable[str], words: Mapping[str, Any]) -> set[int]:
        """The places of what a zerox.Sparsity of these takes. ValueError for a name that takes nothing, and for what
        does not go with masks."""
        found: set[int] = set()
        for glob in globs:
            places = [place for place in self.dense if stands_for(glob, self.ours[place][0], self._local(place))]
            if not places:
                raise ValueError(
                    f"masks: {glob!r} stands for no parameter that can be masked; are there names in params?"
                )
            found.update(places)
        if found:
            self.chosen.check_pairs(words, **{**self.facts(found), MASKS: {SPARSITY}})
        return found

    def plan(self) -> Plan:
        """As of an optimizer of them. A subgroup is known by its size."""
        sizes = {place: self.subgroup_size(place) for place in self.dense}
        subgroups = [self.ranks.world_size, *sorted({*sizes.values()} - {self.ranks.world_size})]
        given = [
            Given(name, tensor, group, subgroups.index(sizes.get(place, subgroups[0])))
            for place, (name, tensor, group) in enumerate(self.ours)
        ]
        shards = self.site().shards_params
        return make_plan(Around(self.chosen, self.rules, self.backend, subgroups, shards), given)

    def site(self) -> Site:
        ranks = self.ranks
        types = {tensor.device.type for _, tensor, _ in self.trained}
        on_host = self.backend == "gloo" and types <= {"cpu", "meta"}
        near = ranks.near if on_host and self.exchange == "direct" else 1
        return Site(self.chosen.stage_plan, self.backend, ranks.world_size, near, on_host, self.exchange, ranks.mesh)

    def update_bytes(self, plan: Plan, site: Site) -> int:
        """That the update of the matrices of the ``site``'s shard allocates."""
        found = []
        for place, slices in owned_places(plan, site.shard):
            _, tensor, group = self.ours[place]
            if self.rules.of(group) is MUON:
                local = local_of(tensor)
                found.append(((slices or local.shape[0], *local.shape[1:]), dense_strides(local), group))
        return most_bytes(found, site.on_host)

    def most_open(self, plan: Plan, model: torch.nn.Module | None, init: Init | None) -> int | None:
        """Bytes of buckets that are whole at a time while parameters on meta get their values. Raises as there."""
        members = [Member(name, tensor, place, place) for place, (name, tensor, _) in enumerate(self.ours)]
        check_asked(model, init, members)
        if model is None or not any(member.param.is_meta for member in members):
            return None
        return most_open(*planned_turns(find_initialised(model, init, members), plan, members))

    def _local(self, place: int) -> torch.Tensor:
        found: torch.Tensor = local_of(self.ours[place][1])
        return found


def _summed(
    plan: Plan,
    site: Site,
    resident_mb: float | None,
    masked: Collection[int],
    of_own: MemoryBytes,
    open_bytes: int | None,
    update: int,
) -> MemoryBytes:
    """``of_own``: of parameters that are each rank's own. ``open_bytes``: of most_open(). ``update``: of
    update_bytes()."""
    flows = [flow_of(each, site) for each in plan.trained]
    parameters = parameter_bytes(plan, site, resident_mb)
    master, moments = state_bytes(plan, site, masked)
    filled = parameter_bytes(plan, site, resident_mb, open_bytes or 0)  # state is made behind that
    lasting = parameters + master + moments + of_own.lasting
    local = [flow.local for flow in flows]
    buffers = [flow.flat + flow.received + flow.reducing for flow in flows] if site.world_size > 1 else []
    gradients = sum(flow.shard if site.shards_grads else flow.whole + flow.kept for flow in flows)
    return MemoryBytes(
        parameters=parameters + of_own.parameters,
        gradients=gradients + of_own.gradients,
        master=master,
        moments=moments + of_own.moments,
        exchange=2 * max(buffers, default=0),
        local_gradients=sum(local),
        typical_local_gradients=max(local, default=0) if site.shards_grads else sum(local),
        peak=lasting + max(peak_of(flows, site, keeps_up=False), gradients + update),
        typical_peak=lasting + max(peak_of(flows, site, keeps_up=True), gradients + update),
        peak_of_construction=0
        if open_bytes is None
        else of_own.parameters + max(filled, parameters + master + moments),
        fullest_rank=fullest_rank(plan, site),
        slowest_over_mean=slowest_rank(plan, site.world_size),
    )


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
