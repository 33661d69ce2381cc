"""Parameters of an optimizer that no DistributedDataParallel has, where one has others of them: each rank's own.

Note [Each rank's own]
torch's wrapper leaves alone what it does not wrap, such as embedding tables that are spread over the ranks, or what it
was told to ignore. Such parameters may be in one optimizer with those that it wraps; ranks may have other ones, and
other numbers of them. So they are neither averaged nor handed out, sharded or compared, and step() has the class of
torch.optim that the param group's rule is named after update them, as it would under torch's wrapper. Its state stands
in ``optimizer.state``, as torch has it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from zerox._C import Combine
from zerox.memory.bucket import Member
from zerox.memory.row_table import is_sparse
from zerox.model_names import in_text
from zerox.options import DIVISOR, OptimizerOptions
from zerox.ranks.group import Ranks
from zerox.ranks.wrapped import has_wrapped, unwrapped_beside_wrapped
from zerox.rules.of_groups import Rules

UNNAMED = "param 0"  # which the model's name replaces
BESIDE = "parameters that no DistributedDataParallel has, as {}, beside others that one has"
APART = "give them an optimizer of torch.optim of their own"
NOT_OF_OWN = {
    "mean_over()": "divide the loss, or " + APART,
    "GradScaler.unscale_()": "use torch.amp.GradScaler, or " + APART,
    "zerox.save()": "save state_dict() on each rank, or " + APART,
    "zerox.load()": "load state_dict() on each rank, or " + APART,
    "zerox.clip_grad_norm_()": "call optimizer.clip_grad_norm_(), or " + APART,
}


AllReduce = Callable[[Tensor, Combine], object]  # over the optimizer's ranks, in place


class Shown(Protocol):
    """``optimizer.state``, and what is to be called once that was written."""

    state: Any

    def note_seen(self) -> None: ...


class OwnParams:
    """``params``: this rank's, by id. ``are_some``: whether any rank has some, once ranks have told each other."""

    def __init__(self, params: Sequence[Tensor]) -> None:
        self.params = unwrapped_beside_wrapped(params)
        self.are_some = False
        self._updates: dict[int, torch.optim.Optimizer] = {}  # by param group

    # ---- which they are

    def note(self, added: Sequence[Tensor], known: Sequence[Tensor]) -> None:
        """``added`` to an optimizer that has the parameters ``known``, which ranks share."""
        found, before = unwrapped_beside_wrapped([*added, *known]), {id(param) for param in known}
        self.params |= {number: param for number, param in found.items() if number not in before}

    def keep(self, groups: Sequence[Mapping[str, Any]]) -> None:
        """Those that are in these param groups."""
        self.params = {id(param): param for param in self.of(groups)}

    def of(self, groups: Sequence[Mapping[str, Any]]) -> list[Tensor]:
        return [param for group in groups for param in group["params"] if id(param) in self.params]

    @property
    def first(self) -> str:
        """What an error calls one of them."""
        if not self.params:
            return "another rank's"
        param = next(iter(self.params.values()))
        name = in_text(UNNAMED, [(UNNAMED, param)])
        return f"one of shape {tuple(param.shape)}" if name == UNNAMED else f"'{name}'"

    def check(self, groups: Sequence[Mapping[str, Any]], rules: Rules, options: OptimizerOptions) -> None:
        """ValueError for what torch's class can't do for them."""
        for index, group in enumerate(groups):
            rule, own = rules.of(group), self.of([group])
            refusals = {
                "capturable=True": options.capturable,
                f"the rule {rule.name!r}": not rule.has_torch_class(group),
                DIVISOR: options.divisor_of(group) is not None,
                "sparse=True": is_sparse(group),
            }
            if own and (why := next((each for each, holds in refusals.items() if holds), "")):
                raise ValueError(f"param group {index}: {why} does not go with {BESIDE.format(self.first)}: {APART}")

    def refusal(self, call: str) -> str:
        """Why a call can't be made; empty if it can."""
        if not self.are_some or call not in NOT_OF_OWN:
            return ""
        return f"{call} does not go with {BESIDE.format(self.first)}: {NOT_OF_OWN[call]}"

    def agree(self, ranks: Ranks, members: Sequence[Member]) -> None:
        """Ranks tell each other whether they have some, if ``members``, which they share, are wrapped. Collective."""
        if has_wrapped([member.param for member in members]):
            self.are_some = self.are_some or any(map(int, ranks.all_gather_text(str(len(self.params)))))

    # ---- in step() and before it

    @torch.no_grad()
    def update(self, groups: Sequence[dict[str, Any]], rules: Rules, shows: Shown) -> None:
        """Those that have a gradient, as the class of torch does."""
        for index, group in enumerate(groups) if self.params else ():
            params = [param for param in self.of([group]) if param.grad is not None]
            if not params:
                continue
            optimizer = self._updates.get(index) or rules.of(group).torch_optimizer(group, params)
            self._updates[index] = optimizer
            [live] = optimizer.param_groups
            live.update({key: group[key] for key in live if key in group}, params=params)
            optimizer.state.clear()
            optimizer.state.update({param: shows.state[param] for param in params if param in shows.state})
            _step_of(optimizer)()
            shows.state.update(optimizer.state)
        if self.params:
            shows.note_seen()

    def zero(self, set_to_none: bool) -> None:
        for param in self.params.values():
            if set_to_none:
                param.grad = None
            elif param.grad is not None:
                param.grad.detach_().zero_()

    def state(self) -> list[Tensor]:
        """What torch's classes keep of them, since the last step()."""
        kept = [of_one for optimizer in self._updates.values() for of_one in optimizer.state.values()]
        return [value for of_one in kept for value in of_one.values() if isinstance(value, Tensor)]

    def multiply(self, factor: Tensor) -> None:
        for grad in self._grads():
            grad.mul_(factor.to(grad.device, grad.dtype))

    def limit(self, most: float) -> None:
        for grad in self._grads():
            grad.clamp_(-most, most)

    def norm_beside(self, norm: Tensor, finite: Tensor, p: float, all_reduce: AllReduce) -> tuple[Tensor, Tensor]:
        """The norm of all gradients, each rank's own ones once, from that of those which ranks share, and whether all
        elements are finite, as float64 scalars. Collective."""
        own = [torch.linalg.vector_norm(grad.double(), p).to(norm.device) for grad in self._grads()]
        every = torch.stack(own) if own else torch.zeros(1, dtype=torch.float64, device=norm.device)
        is_max = math.isinf(p)
        total = (every.amax() if is_max else every.pow(p).sum()).reshape(1)
        all_reduce(total, Combine.MAX if is_max else Combine.SUM)
        norm = torch.maximum(norm, total[0]) if is_max else (norm.pow(p) + total[0]).pow(1.0 / p)
        return norm, finite * norm.isfinite()

    def all_finite(self, finite: Tensor, all_reduce: AllReduce) -> Tensor:
        """``finite``, of the shared gradients, and whether all of these are: the same on all ranks. Collective if any
        rank has some."""
        if not self.are_some:
            return finite
        found = torch.stack([finite, *(grad.isfinite().all().to(finite) for grad in self._grads())]).amin().neg()
        all_reduce(found := found.reshape(1), Combine.MAX)
        return found.neg().reshape(finite.shape)

    def has_grads(self, given: Sequence[Tensor]) -> bool:
        """Whether these are gradients of this rank's own parameters."""
        return {grad.data_ptr() for grad in given} <= {grad.data_ptr() for grad in self._grads()}

    def _grads(self) -> list[Tensor]:
        """Their values; of sparse ones, those that they have."""
        found = []
        for param in self.params.values():
            if param.grad is not None and param.grad.is_sparse:
                param.grad = param.grad.coalesce()
            if param.grad is not None:
                found.append(param.grad._values() if param.grad.is_sparse else param.grad.detach())
        return found


def _step_of(optimizer: torch.optim.Optimizer) -> Callable[[], Any]:
    """Without the hooks around step(), which are about the optimizer that the user has."""
    step = type(optimizer).step
    found: Callable[[], Any] = getattr(step, "__wrapped__", step).__get__(optimizer)
    return found
