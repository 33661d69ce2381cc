"""What users did in place to gradients that have left: p.grad.mul_(), torch's clips and scaler, and their like.

Note [Operators on gradients that have left]
p.grad is a placeholder then, and the mean lies with its owners. So an operator is noted on the placeholder, and done by
the owners to their parts, in the shard's dtype: at a sync point next, or when the next backward is about to add to the
gradients. Nothing is sent for it. But ranks may have done different things: after a branch that one rank alone took,
or torch's clip over gradients that one rank lacks, owners would scale their parts unequally. So a digest of what was
done to each gradient goes along with what ranks tell each other anyway. If they differ, all ranks raise before anything
is updated.

Where all gradients of a rank were multiplied by the same numbers, the product is left for the update, as
clip_grad_norm_() leaves it: no pass over the gradients is needed, and gradients that some ranks lack may differ.
"""

from __future__ import annotations

import hashlib
import json
import weakref
from array import array
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from zerox import _torch
from zerox.grads import placeholder_operators  # noqa: F401  # a placeholder's operators
from zerox.grads.placeholder import ShardedGrad
from zerox.params.unwrapped_params import OwnParams
from zerox.ranks.group import Ranks

Number = float | None
PRODUCTS = ("mul_", "div_")
ALL = -1  # instead of a placeholder's number
ALL_FINITE = 0.0  # instead of the order of a norm: a question whether all gradients are finite
WAY_OUT = "do the same to p.grad on all ranks. Then call zero_grad()"


class Operator:
    """One in-place operator with its numbers. ``tensor``: instead of a factor that the host does not know yet."""

    def __init__(self, name: str, numbers: tuple[Number, ...], tensor: Tensor | None = None) -> None:
        self.name = name
        self.numbers = numbers
        self.tensor = tensor

    @property
    def is_product(self) -> bool:
        return self.name in PRODUCTS

    @property
    def is_read(self) -> bool:
        return self.tensor is None or bool(self.numbers)

    def __repr__(self) -> str:
        return f"{self.name}({', '.join(map(repr, self.numbers))})"

    def factor(self, device: torch.device) -> Tensor:
        """Of a product: a float64 scalar."""
        if self.tensor is not None:
            value = self.tensor.double()
            return value if self.name == "mul_" else value.reciprocal()
        [number] = self.numbers
        assert number is not None
        known = torch.full((), number, dtype=torch.float64, device=device)
        return known if self.name == "mul_" else known.reciprocal_()


Chain = tuple[Operator, ...]  # in the order in which they were called


class Notes:
    """What all placeholders of an optimizer share; they may outlive it. ``on_first``: before the first one is noted."""

    def __init__(self) -> None:
        self.is_any = False
        self.count = 0  # rises with each operator, zero_() too
        self.on_first: Callable[[], None] = _do_nothing
        self.known: dict[object, Operator] = {}
        self.last: tuple[str, Tensor, int, Operator] | None = None

    def note(self, grad: ShardedGrad, name: str, numbers: Sequence[Number | Tensor]) -> None:
        if not self.is_any:
            if _torch.in_backward():
                raise RuntimeError(
                    f"zerox: {name} of the gradient of parameter {grad.quoted}, which has left, was called inside a "
                    "backward, where other gradients are still on their way: call it after the backward"
                )
            self.on_first()
            self.is_any = True
        self.count += 1
        grad.done = (*grad.done, self._operator(name, numbers))
        grad.answered = -1

    def repeat(self, grad: ShardedGrad, name: str, number: object) -> bool:
        """Notes it if the last operator was the same, with the same tensor, as it was: False if not."""
        operator = self._last(name, number) if self.is_any else None
        if operator is None:
            return False
        self.count += 1
        grad.done = (*grad.done, operator)
        grad.answered = -1
        return True

    def forget(self) -> None:
        self.is_any = False
        self.known.clear()
        self.last = None

    def _last(self, name: str, number: object) -> Operator | None:
        """The last one, if it was of this name and tensor, as that is now."""
        last = self.last
        is_it = last is not None and last[1] is number and last[0] == name and last[2] == _torch.version_of(last[1])
        return last[3] if last is not None and is_it else None

    def _operator(self, name: str, numbers: Sequence[Number | Tensor]) -> Operator:
        """The same object for the same numbers, so that to compare chains of them is fast."""
        one = numbers[0] if len(numbers) == 1 else None
        if isinstance(one, Tensor):
            if (operator := self._last(name, one)) is not None:
                return operator
            if one.device.type != "cpu":
                made = Operator(name, (), one.detach().reshape(()).clone())
            else:
                made = self._find_operator(name, (float(one),))
            self.last = (name, one, _torch.version_of(one), made)
            return made
        return self._find_operator(name, tuple(None if number is None else float(number) for number in numbers))

    def _find_operator(self, name: str, numbers: tuple[Number, ...]) -> Operator:
        is_plain = all(number and number == number for number in numbers)
        key = (name, numbers if is_plain else repr(numbers))  # 0 and -0 are equal, and NaN is not
        found = self.known.get(key)
        if found is None:
            found = self.known[key] = Operator(name, numbers)
        return found


def _do_nothing() -> None:
    pass


class GradOperators:
    """``placeholders``: of all buckets, which are added later, in an order that all ranks know."""

    def __init__(self) -> None:
        self.notes = Notes()
        self.placeholders: list[ShardedGrad] = []
        self.to_answers: Callable[[], Any] = _do_nothing
        self.own = OwnParams(())  # until the optimizer has all
        self.told: dict[int, Chain] = {}  # at the last sync point
        self.params: list[weakref.ref[Tensor]] = []
        self.present: list[int] = []  # the gradients that had left at the last look()
        # What was done before a later backward, since ranks synchronized: when, and by placeholder.
        self.before: list[tuple[int, dict[str, str]]] = []

    def add(self, placeholders: Sequence[ShardedGrad]) -> None:
        for each in placeholders:
            each.number = len(self.placeholders)
            each.notes = self.notes
            each.to_answers = self.to_answers
            self.placeholders.append(each)
            self.params.append(each._to_param)

    @property
    def is_any(self) -> bool:
        return self.notes.is_any or bool(self.before)

    def chains(self) -> dict[int, Chain]:
        """What was done to each gradient, by its placeholder's number; not to what is discarded. ALL: the same products
        to all that there are."""
        if not self.notes.is_any:
            return {}
        there = {number: each.done for number, each in enumerate(self.placeholders) if each.is_set}
        chain, *others = set(there.values()) or {()}
        if not others and all(operator.is_product for operator in chain):
            return {ALL: chain} if chain else {}
        return {number: chain for number, chain in there.items() if chain}

    def look(self) -> ShardedGrad | None:
        """At which gradients have left. Returns the placeholder of one that is there and has not, if there is one."""
        grads = [None if (param := ref()) is None else param.grad for ref in self.params]
        self.present = [number for number, each in enumerate(self.placeholders) if grads[number] is each]
        if len(self.present) + sum(grad is None for grad in grads) == len(grads):
            return None
        return next(e for e, grad in zip(self.placeholders, grads, strict=True) if grad is not e and grad is not None)

    def tell(self, with_set: bool) -> float:
        """Looks at what was done, at a sync point. Returns a digest, the same on all ranks that did the same; 0 if
        nothing was. ``with_set``: and have the same gradients, as the last look() found them."""
        self.told = self.chains()
        if not (self.told or self.before or with_set):
            return 0.0
        digest = hashlib.blake2b(json.dumps([self.before, _texts(self.told)], sort_keys=True).encode(), digest_size=6)
        if with_set:
            digest.update(array("q", self.present).tobytes())
        return 1.0 + int.from_bytes(digest.digest(), "big")

    def refuse(self, ranks: Ranks, follows: bool, with_set: bool) -> None:
        """Where ranks have told that they differ. Collective: raises on all ranks, and names a gradient."""
        own = {"follows": follows, "done": self._names_for_users(), "set": self.present if with_set else None}
        said = [json.loads(text) for text in ranks.all_gather_text(json.dumps(own))]
        speakers = [(rank, each) for rank, each in enumerate(said) if not each["follows"]]
        different = ((one, two) for one, two in pairwise(speakers) if one[1] != two[1])
        (first, a), (other, b) = next(different, (speakers[0], speakers[-1]))
        if a["set"] != b["set"]:
            number = min(set(a["set"]) ^ set(b["set"]))
            there, missing = (first, other) if number in a["set"] else (other, first)
            raise RuntimeError(
                f"zerox: rank {there} has {self._name_for_users(number)} and rank {missing} has none: "
                "answers of p.grad would differ. Ask for the norm by optimizer.clip_grad_norm_(), or let all ranks "
                "have a gradient of each parameter. Then call zero_grad()"
            )
        mine, theirs = a["done"], b["done"]
        number = min((int(each) for each in {*mine, *theirs} if mine.get(each) != theirs.get(each)), default=ALL)
        what, than = (each.get(str(number), "nothing") for each in (mine, theirs))
        raise RuntimeError(
            f"zerox: ranks did different things to {self._name_for_users(number)}, which had left: rank {first} "
            f"{what}, rank {other} {than}. Nothing was updated: {WAY_OUT}"
        )

    def end_round(self, num_launched: int, has_factor: bool) -> dict[int, Chain]:
        """More gradients are about to be added: what was done so far, which is to be done now. ``num_launched``: so far
        by the manager, the same on all ranks at the same point. ``has_factor``: one was left by operators before."""
        chains = self.chains()
        if chains or has_factor:
            self.before.append((num_launched, _texts(chains) or {str(ALL): "a product"}))
        self._clear()
        return chains

    def take(self) -> dict[int, Chain]:
        """What is left to do once ranks have synchronized. Nothing was done to gradients that were sent just there."""
        chains = self.told
        self.forget()
        return chains

    def forget(self) -> None:
        if self.is_any:
            self.told = {}
            self.before.clear()
            self._clear()

    def _clear(self) -> None:
        if self.notes.is_any:
            for each in self.placeholders:
                each.done = ()
            self.notes.forget()

    # ---- for ranks that follow

    def for_followers(self) -> str:
        of_each = {number: [(each.name, each.numbers) for each in chain] for number, chain in self.told.items()}
        return json.dumps([bool(self.before), of_each])

    def parse_chains(self, text: str) -> dict[int, Chain]:
        """RuntimeError, on all ranks, for what can't be followed."""
        before_backward, of_each = json.loads(text)
        if before_backward:
            raise RuntimeError(
                "zerox: inside join() a rank that has run out of batches can't follow operators on p.grad between two "
                "backwards of a step: call them after the last one"
            )
        return {
            int(number): tuple(Operator(name, tuple(numbers)) for name, numbers in chain)
            for number, chain in of_each.items()
        }

    # ---- inside

    def _names_for_users(self) -> dict[str, str]:
        found: dict[str, str] = {}
        for launched, texts in [*self.before, (None, _texts(self.told))]:
            when = "" if launched is None else f" before a later backward ({launched} buckets had left)"
            for number, text in texts.items():
                found[number] = ", ".join(filter(None, [found.get(number), text + when]))
        return found

    def _name_for_users(self, number: int) -> str:
        return "all gradients" if number == ALL else f"the gradient of parameter {self.placeholders[number].quoted}"


def _texts(chains: dict[int, Chain]) -> dict[str, str]:
    """The same on all ranks that did the same."""
    kinds = set(chains.values())
    _read([operator for chain in kinds for operator in chain])
    texts = {chain: ", ".join(map(repr, chain)) for chain in kinds}
    return {str(number): texts[chain] for number, chain in chains.items()}


def _read(operators: list[Operator]) -> None:
    """Numbers that only the device knows: with one wait for all."""
    unread = [operator for operator in operators if not operator.is_read]
    tensors: list[Any] = [operator.tensor for operator in unread]
    for operator, number in zip(unread, torch.stack(tensors).tolist() if unread else (), strict=True):
        operator.numbers = (number,)
