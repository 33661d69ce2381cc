"""The update by an optimizer of torch's kind: on this rank's segments of each bucket, as if these were its parameters.

All ranks update all buckets, and then tell each other that they could, before any parameter is sent: an optimizer that
raises on one rank leaves all ranks with the parameters that they had.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from zerox._C import Combine, Range
from zerox.grads.grad_scale import GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket, GradPart
from zerox.ranks.roll_call import summary_of
from zerox.rules.local_optimizer import LocalOptimizerRule, options_of
from zerox.rules.of_groups import Rules
from zerox.rules.probe import Kinds
from zerox.update.local_optimizer_bucket import LocalOptimizerBucket
from zerox.update.update import Groups


class LocalOptimizerUpdate:
    """``buckets``: the core's own list, which grows. ``step_options``: of the next step, for the class's step()."""

    def __init__(
        self, rules: Rules, buckets: Sequence[Bucket], grads: Grads, grad_scale: GradScale, keeps_place: bool
    ) -> None:
        assert isinstance(rules.default, LocalOptimizerRule)
        assert not keeps_place, "it can't be captured"
        self.rule = rules.default
        self.buckets = buckets
        self.grads = grads
        self.grad_scale = grad_scale
        self.local: list[LocalOptimizerBucket] = []
        self.step_options: Mapping[str, Any] = {}
        self.failure = ""
        self.before: dict[int, Tensor] = {}  # shards that nobody has a copy of, as they were before the step

    @property
    def has_step_options(self) -> bool:
        return bool(self.step_options)

    def add_bucket(self, bucket: Bucket, groups: Groups) -> None:
        self.local.append(LocalOptimizerBucket(self.rule, bucket, groups))

    def refresh(self, groups: Groups) -> None:
        raise AssertionError("it can't be captured")

    def note_loaded(self, groups: Groups) -> None:
        self.failure = ""
        options, kinds = (
            [options_of(group) for group in groups],
            [self.rule.optimizer_class.kinds(group) for group in groups],
        )
        for local in self.local:
            local.prepare(options, kinds)

    def regroup(self, groups: Groups) -> None:
        for local in self.local:
            local.regroup(groups)

    def runs(self, groups: Groups, capturing: bool) -> Iterator[Sequence[int]]:
        """One run, of all buckets.

        If the class raises on one rank, RuntimeError on all. Alone, what it raised.
        """
        kinds = [self.rule.optimizer_class.kinds(group) for group in groups]
        counted = self._groups_with_gradients(kinds)
        error: Exception | None = None
        self.before.clear()
        updated: dict[int, list[bool]] = {}
        counters: list[dict[str, Any]] = []
        try:
            counters = self._step(groups, kinds, counted, updated)
        except Exception as raised:
            if self.grads.ranks.size == 1:
                raise
            error = raised
        self._agree(error)
        self.before.clear()
        for index, rows in updated.items():
            self.local[index].finish(rows)
        for group, changed in zip(groups, counters, strict=True):
            group.update(changed)
        yield list(self.grads.manager.params.order)

    def _gradients(self, index: int) -> tuple[list[GradPart], list[int]]:
        """The shard of a bucket, and for each row whether it has a gradient. The host waits for the device."""
        parts = self.grads.parts(index)  # first: whole gradients are looked at here
        return parts, self.grad_scale.present(self.grads.present(index)).tolist()

    def _groups_with_gradients(self, kinds: Sequence[Kinds]) -> list[bool]:
        """By group: whether any rank has a gradient there. Asked only if the class counts something in its groups."""
        if not any(each.counters for each in kinds):
            return [False] * len(kinds)
        found = torch.zeros(len(kinds), dtype=torch.int64, device="cpu")
        for index, local in enumerate(self.local):
            for each, has in zip(local.params, self._gradients(index)[1], strict=True):
                found[each.group] |= int(has)
        self.grads.all_reduce(found, Combine.MAX)
        return [bool(each) for each in found.tolist()]

    def _step(
        self, groups: Groups, kinds: Sequence[Kinds], counted: Sequence[bool], updated: dict[int, list[bool]]
    ) -> list[dict[str, Any]]:
        """Returns the options of each group that the class has changed, and fills ``updated`` with rows of each bucket.

        ``counted``: groups that have a gradient on any rank.
        """
        options = [options_of(group) for group in groups]
        changed: list[dict[str, Any]] = [{} for _ in groups]
        for index in self.grads.manager.params.order:
            local = self.local[index]
            with Range("update", index):
                local.prepare(options, kinds)
                parts, present = self._gradients(index)
                parts = [part._replace(grad=self.grad_scale.clamp(part.grad, index)) for part in parts]
                bucket = self.buckets[index]
                if local.master is None and bucket.buffer.shard_is_apart:
                    self.before[index] = bucket.param_shard.clone()
                updated[index] = local.take_gradients(parts, present, counted, self._scale_of(index))
                del parts  # which may be copies, for this bucket alone
                try:
                    found = local.step(options, self.step_options)
                finally:
                    local.drop_gradients()
            for group, values in found.items():
                known = changed[group] or values
                if str(known) != str(values):
                    raise RuntimeError(
                        f"{self.rule.name} changed options of param group {group} to {known} for one bucket and to "
                        f"{values} for another: they depend on gradients, and can't be shared"
                    )
                changed[group] = values
        return changed

    def _scale_of(self, index: int) -> Tensor | None:
        scale = self.grad_scale.remaining_factor(index)
        return None if scale is not None and scale.device.type == "cpu" and float(scale) == 1.0 else scale

    def _agree(self, error: Exception | None) -> None:
        """Collective. Raises RuntimeError on all ranks, with the parameters as before the step, if one has an error."""
        ranks = self.grads.ranks
        if ranks.size == 1:
            return
        failed = torch.tensor([error is not None], dtype=torch.int64, device="cpu")
        self.grads.all_reduce(failed, Combine.MAX)
        if not failed:
            return
        said = ranks.all_gather_text("" if error is None else summary_of(error))
        rank, reason = next((rank, text) for rank, text in enumerate(said) if text)
        for index, bucket in enumerate(self.buckets):
            self._put_back(bucket, index)
        self.grads.all_reduce(failed, Combine.MAX)  # a rank that raises may read others' shards: all are put back
        self.failure = (
            f"{self.rule.name} raised in step() on rank {rank}, when other ranks had stepped, and its state is not of "
            f"one step any more: {reason}. Load the last state that was saved, on all ranks"
        )
        told = f"rank {rank} raised {reason} in {self.rule.name}'s step(): all parameters are as before"
        raise RuntimeError(told) from error

    def _put_back(self, bucket: Bucket, index: int) -> None:
        """This rank's own values are new, unless a master is; those that others have of its shard are not."""
        if bucket.buffer.shard_is_apart:
            if index in self.before:  # else this rank has not come to the bucket
                bucket.param_shard.copy_(self.before[index])
        elif bucket.master is None:
            flat, first = bucket.buffer.flat, bucket.plan.layout.shard_span(0).stop
            what = f"the old parameters of {bucket.describe(index)}"
            self.grads.ranks.broadcast(flat[:first], what, root=1)
            self.grads.ranks.broadcast(flat[first:], what, root=0)
