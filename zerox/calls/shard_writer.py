"""Does to the shards of the mean gradient what users did in place to its placeholders in p.grad.

See Note [Operators on gradients that have left] in grad_operators.py.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from zerox import _C as C
from zerox.calls.phases import Visit
from zerox.grads.grad_operators import ALL, Chain
from zerox.grads.grad_scale import Divisor, GradScale
from zerox.grads.grads import Grads
from zerox.memory.bucket import Bucket


class ShardWriter:
    """``buckets``: the core's own list, which grows."""

    def __init__(self, grads: Grads, grad_scale: GradScale, buckets: Sequence[Bucket]) -> None:
        self.grads = grads
        self.scale = grad_scale
        self.buckets = buckets

    def do_as_noted(self, visit: Visit) -> None:
        """Where ranks have synchronized, and all have noted the same. Collective where a rank follows."""
        operators, result = self.grads.operators, visit.result
        if operators is None:
            return
        if not result.operators:
            operators.forget()  # what was done to gradients that are discarded
            return
        if result.followed:
            said = self.grads.ranks.all_gather_text(operators.for_followers())
            chains = operators.parse_chains(said[result.speaker])
            operators.forget()
            operators.notes.on_first()  # a rank that follows has noted none of its own
        else:
            chains = operators.take()
        self._do(chains)
        if chains:
            self.grads.manager.flights.await_all()

    def fold(self) -> None:
        """The next backward is about to add to the gradients: what was done to them so far comes before it. On this
        rank alone, without waiting for others. RuntimeError for what can't be told apart any more."""
        operators, scale = self.grads.operators, self.scale
        if operators is None or not (operators.is_any or scale.requested.by_operators):
            return
        if not any(each.is_set for each in operators.placeholders):
            operators.forget()
            if scale.requested.by_operators and scale.num_added is None:
                scale.reset()
            return
        self._check_fold(operators.chains())
        with torch.no_grad():
            self._do(operators.end_round(self.grads.manager.flights.num_launched, scale.requested.by_operators))
            if scale.num_added is None:  # else step() raises
                self._fold_scale()

    def multiply(self, slots: Mapping[int, Iterable[int]], factor: Tensor) -> None:
        """Some gradients, by bucket, at once, where everything has been reduced."""
        calls = [C.InPlace(*span, "mul_", [], factor) for index in slots for span in self._spans(index, slots[index])]
        self.grads.manager.grads.do_in_place(calls)
        self.grads.manager.flights.await_all()

    # ---- inside

    def _check_fold(self, chains: Mapping[int, Chain]) -> None:
        if self.grads.manager.backward.sums_wait:
            raise RuntimeError(
                "zerox: p.grad was changed after a backward inside no_sync(outer=True), whose sums wait for the next "
                "one: change it after the last backward of a step"
            )
        for number, chain in chains.items():
            if number != ALL and not all(each.is_product for each in chain):
                index, slot = self._place(number)
                if self.grads.manager.grads.is_zeroed(index, slot):
                    raise RuntimeError(
                        f"zerox: p.grad of parameter {self.buckets[index].members[slot].quoted} was zeroed and then "
                        f"given {chain[-1]}, and another backward is to be added: assign a tensor to p.grad instead"
                    )

    def _place(self, number: int) -> tuple[int, int]:
        """The bucket and the slot of a placeholder."""
        for index, bucket in enumerate(self.buckets):
            if number < len(bucket.members):
                return index, number
            number -= len(bucket.members)
        raise IndexError(number)

    def _do(self, chains: Mapping[int, Chain]) -> None:
        if not chains:
            return
        if ALL in chains:
            factor = torch.stack([each.factor(self.scale.device) for each in chains[ALL]]).prod()
            self.scale.leave_factor(factor)
        else:
            if not all(each.is_product for chain in set(chains.values()) for each in chain):
                self._fold_scale()
            places = ((*self._place(number), chain) for number, chain in chains.items())
            calls = [
                C.InPlace(*span, each.name, each.numbers)
                for index, slot, chain in places
                for span in self._spans(index, [slot])
                for each in chain
            ]
            self.grads.manager.grads.do_in_place(calls)

    def _spans(self, index: int, slots: Iterable[int]) -> Iterator[tuple[int, int, int]]:
        """Where this rank's elements lie: the bucket, and the first and the last but one in its shard."""
        spans = self.buckets[index].own_spans
        return ((index, spans[slot].start, spans[slot].stop) for slot in slots if slot in spans)

    def _fold_scale(self) -> None:
        self._multiply(self.scale.values)
        self.scale.values = dict.fromkeys(self.scale.values)
        self.scale.requested.by_operators = False

    def _multiply(self, values: Mapping[Divisor, Tensor | None]) -> None:
        """All gradients, each by its divisor's: by numbers, since a tensor might be freed before a stream reads it."""
        numbers = {divisor: float(value) for divisor, value in values.items() if value is not None}
        calls = [
            C.InPlace(index, 0, self.buckets[index].param_shard.numel(), "mul_", [numbers[divisor]])
            for index, divisor in enumerate(self.scale.divisors)
            if divisor in numbers
        ]
        self.grads.manager.grads.do_in_place(calls)
