"""Optimizer classes that nobody of zerox's wrote: some of torch's own with options, and small ones that do odd things.

The small ones are written from the papers' formulas, as short as shows the point.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

optim = torch.optim
Options = dict[str, Any]

# Every elementwise class of torch.optim, some with the options that change what they keep.
ELEMENTWISE: dict[str, tuple[Any, Options]] = {
    "SGD": (optim.SGD, {"lr": 0.1}),
    "SGD, momentum": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01}),
    "SGD, nesterov": (optim.SGD, {"lr": 0.1, "momentum": 0.9, "nesterov": True, "maximize": True}),
    "Adam": (optim.Adam, {"lr": 1e-2, "weight_decay": 0.1}),
    "AdamW": (optim.AdamW, {"lr": 1e-2, "amsgrad": True}),
    "Adamax": (optim.Adamax, {"lr": 1e-2}),
    "NAdam": (optim.NAdam, {"lr": 1e-2}),
    "RAdam": (optim.RAdam, {"lr": 1e-2}),
    "Adadelta": (optim.Adadelta, {}),
    "Adagrad": (optim.Adagrad, {"lr": 1e-2, "initial_accumulator_value": 0.1, "lr_decay": 0.1}),
    "ASGD": (optim.ASGD, {"lr": 1e-2, "t0": 2.0}),
    "Rprop": (optim.Rprop, {"lr": 1e-2}),
    "RMSprop": (optim.RMSprop, {"lr": 1e-3, "centered": True, "momentum": 0.9}),
}


class Simple(optim.Optimizer):
    """One formula for each parameter that has a gradient, in ``update(param, state, group)``."""

    def __init__(self, params: Any, lr: float = 1e-2, **options: Any) -> None:
        super().__init__(params, {"lr": lr, **options})

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:  # type: ignore[override]
        loss = None if closure is None else closure()
        for group in self.param_groups:
            for param in group["params"]:
                if param.grad is not None:
                    self.update(param, self.state[param], group)
        return loss

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        raise NotImplementedError


# ---- whose elements depend on each other


class Lamb(Simple):
    """You et al. 2020: Adam's step, scaled by the ratio of two norms of the whole parameter."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if not state:
            state |= {"step": 0, "first": torch.zeros_like(param), "second": torch.zeros_like(param)}
        state["step"] += 1
        state["first"].mul_(0.9).add_(param.grad, alpha=0.1)
        state["second"].mul_(0.999).addcmul_(param.grad, param.grad, value=0.001)
        step = (state["first"] / (1 - 0.9 ** state["step"])) / (
            (state["second"] / (1 - 0.999 ** state["step"])).sqrt() + 1e-6
        )
        ratio = param.norm() / step.norm().clamp(min=1e-6)
        param.sub_(step * (group["lr"] * ratio))


class Lars(Simple):
    """You et al. 2017: momentum, with a rate for each layer from its norms."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        rate = 1e-3 * param.norm() / param.grad.norm().clamp(min=1e-6)  # type: ignore[union-attr]
        state.setdefault("momentum", torch.zeros_like(param)).mul_(0.9).add_(param.grad * rate)
        param.sub_(state["momentum"], alpha=group["lr"])


class Prodigy(Simple):
    """Mishchenko and Defazio 2023, without its moments: an estimate of the distance, from sums over all parameters."""

    def __init__(self, params: Any, lr: float = 1.0) -> None:
        super().__init__(params, lr, d=1e-6, numerator=0.0)

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            with_grad = [param for param in group["params"] if param.grad is not None]
            for param in with_grad:
                state = self.state[param]
                if not state:
                    state |= {"start": param.detach().clone(), "sum": torch.zeros_like(param)}
                state["sum"].add_(param.grad, alpha=group["d"])
                group["numerator"] += group["d"] * float((param.grad * (state["start"] - param)).sum())
            below = sum(float(self.state[param]["sum"].abs().sum()) for param in with_grad)
            group["d"] = max(group["d"], group["numerator"] / max(below, 1e-30))
        return super().step(closure)

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        param.sub_(param.grad.sign(), alpha=group["lr"] * group["d"])  # type: ignore[union-attr]


class ClippingAdamW(optim.AdamW):
    """Clips by the norm of all gradients before it steps."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        torch.nn.utils.clip_grad_norm_([p for group in self.param_groups for p in group["params"]], 1.0)
        return super().step(closure)


class RandomRounding(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        exact = param - group["lr"] * param.grad  # type: ignore[operator]
        param.copy_(torch.floor(exact * 1024 + torch.rand_like(exact)) / 1024)


class OneDrawAStep(Simple):
    """A number for all parameters, which would be another one on each rank."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        self.drawn = float(torch.rand(()))
        return super().step(closure)

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        param.sub_(param.grad, alpha=group["lr"] * self.drawn)  # type: ignore[arg-type]


class DecayOfMatrices(Simple):
    """Reads the shape, which pieces of a matrix don't have."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if param.dim() > 1:
            param.mul_(1 - group["lr"])
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]


class KeyOfMatrices(Simple):
    """Keeps something for matrices only."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if param.dim() > 1:
            state.setdefault("mean", torch.zeros_like(param)).lerp_(param.grad, 0.5)
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]


class SumInGroup(Simple):
    """Adds up gradients in its group, and uses the sum only later."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, total=0.0)

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        group["total"] += float(param.grad.sum())  # type: ignore[union-attr]


# ---- whose state has no place on a rank


class Factored(Simple):
    """Shazeer and Stern 2018, with the mean of gradients: of matrices without a mean square for each element. As some
    do, it keeps a norm of each parameter."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        square = param.grad.square() + 1e-30  # type: ignore[union-attr]
        state["norm"] = float(param.norm())
        if param.dim() < 2:
            state.setdefault("square", torch.zeros_like(param)).lerp_(square, 0.1)
            scale = state["square"].sqrt()
        else:
            mean = state.setdefault("mean", torch.zeros_like(param))
            mean.lerp_(param.grad, 0.5)  # type: ignore[arg-type]
            if "rows" not in state:
                state["rows"], state["columns"] = square.mean(-1), square.mean(-2)
            rows = state["rows"].lerp_(square.mean(-1), 0.1)
            columns = state["columns"].lerp_(square.mean(-2), 0.1)
            scale = (rows.unsqueeze(-1) * columns.unsqueeze(-2)).div_(rows.mean(-1)[..., None, None]).sqrt_()
        step = state.get("mean", param.grad) / (scale + 1e-3)
        param.sub_(step, alpha=group["lr"] / max(1.0, float(step.norm())))


class RowSums(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        state["rows"] = param.grad.reshape(-1, 1).sum(1, keepdim=True)  # type: ignore[union-attr]


class History(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        state.setdefault("history", []).append(0.0)


class GlobalState(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        self.state["everything"] = {"count": 1}  # type: ignore[index]


class NoCount(Simple):
    """Its "step" is something else."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        state["step"] = 2.0


class OwnMaster(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        state["master"] = param.clone()


class NeedsClosure(Simple):
    def step(self, closure: Any) -> Any:  # type: ignore[override]
        return closure()


# ---- elementwise, each in a way of its own


class Counting(Simple):
    """Counts steps, and adds up weights, in its groups, as schedule-free optimizers do; but not without gradients."""

    def __init__(self, params: Any, lr: float = 1e-2) -> None:
        super().__init__(params, lr, k=0, weight_sum=0.0)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        for group in self.param_groups:
            if any(param.grad is not None for param in group["params"]):
                group["weight_sum"] += group["lr"] / (group["k"] + 1)
                group["k"] = group["k"] + 1
        return super().step(closure)

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        average = state.setdefault("average", param.clone())
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]
        average.lerp_(param, group["lr"] / (group["k"] * group["weight_sum"]))


class PythonNumbers(Simple):
    """Keeps numbers as Python has them, and one as a tensor of one dimension; replaces its tensors in each step."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        if not state:
            state |= {"step": 0, "weight": 1.0, "odd": False, "length": torch.ones(1), "mean": torch.zeros_like(param)}
        state["step"] += 1
        state["weight"] *= 0.9
        state["odd"] = not state["odd"]
        state["length"] = state["length"] * 1.25
        state["mean"] = 0.5 * state["mean"] + param.grad
        factor = state["weight"] * float(state["length"]) / math.sqrt(state["step"]) * (1 + state["odd"])
        param.sub_(state["mean"], alpha=group["lr"] * factor)


class WritesGradients(Simple):
    """Decays through the gradient, in place, as SGD of old did."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        param.grad.add_(param, alpha=0.1)  # type: ignore[union-attr]
        param.sub_(param.grad, alpha=group["lr"])  # type: ignore[arg-type]


class NarrowState(Simple):
    """Keeps bfloat16 whatever the parameters are."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        kept = state.setdefault("narrow", torch.zeros_like(param, dtype=torch.bfloat16))
        kept.copy_(0.5 * kept.float() + param.grad)
        param.sub_(kept.to(param.dtype), alpha=group["lr"])


class ByteState(Simple):
    """Keeps numbers of 8 bits that are no codes."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        count = state.setdefault("count", torch.zeros_like(param, dtype=torch.uint8)).add_(1)
        param.sub_((param.grad.float() / count.float()).to(param.dtype), alpha=group["lr"])  # type: ignore[union-attr]


class NewKey(optim.SGD):
    """Puts an option into its group in each step."""

    def step(self, closure: Any = None) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        self.param_groups[0]["new_key"] = 0.1
        return loss


class WithStepOptions(optim.SGD):
    def step(self, closure: Any = None, heard: list[int] | None = None) -> Any:  # type: ignore[override]
        if heard is not None:
            heard.append(len(self.param_groups))
        return super().step(closure)


class Failing(optim.SGD):
    """Raises in the middle of a step when it is told to, on the ranks that it is told."""

    def step(self, closure: Any = None, fails: bool = False) -> Any:  # type: ignore[override]
        loss = super().step(closure)
        if fails:
            raise ArithmeticError("this rank can't")
        return loss


OWN: dict[str, tuple[Any, Options]] = {
    "counting": (Counting, {}),
    "Python's numbers": (PythonNumbers, {}),
    "writes gradients": (WritesGradients, {}),
    "narrow state": (NarrowState, {}),
    "bytes": (ByteState, {}),
    "new key": (NewKey, {"lr": 0.1}),
}


# ---- whose options or dtypes decide


class ClippingOnRequest(Simple):
    """Clips by the norm of each tensor if the group says so."""

    def __init__(self, params: Any, lr: float = 1e-2, clip: float = 0.0) -> None:
        super().__init__(params, lr, clip=clip)

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        grad = param.grad
        assert grad is not None
        if group["clip"]:
            grad = grad * (group["clip"] / grad.norm().clamp(min=group["clip"]))
        param.sub_(grad, alpha=group["lr"])


class NormIn16Bits(Simple):
    def update(self, param: Tensor, state: Options, group: Options) -> None:
        size = param.norm() if param.dtype is torch.bfloat16 else 1.0
        param.sub_(param.grad, alpha=group["lr"] * float(size))  # type: ignore[arg-type]


class LateKey(Simple):
    """Begins to keep something in its fifteenth step, which no probe sees."""

    def update(self, param: Tensor, state: Options, group: Options) -> None:
        state["step"] = state.get("step", 0) + 1
        if state["step"] > 14:
            state["late"] = torch.zeros_like(param)
