"""Models with what torch's tests of its DistributedDataParallel are about."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint


class Frozen(nn.Module):
    """Has a frozen bias, and a frozen parameter of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(4, 6), nn.Linear(6, 3, bias=False)
        self.first.bias.requires_grad_(False)
        self.numbers = nn.Parameter(torch.tensor([2, 2]), requires_grad=False)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.last(self.first(inputs).relu()).softmax(1)


class Branches(nn.Module):
    """Four layers; ``way`` says which of them are used, one after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(4))

    def forward(self, inputs: Tensor, *way: int) -> Tensor:
        for index in way:
            inputs = self.layers[index](inputs).tanh()
        return inputs


class TwoOutputs(nn.Module):
    """``box``: what the outputs are put into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.unused = (nn.Linear(4, 4, bias=False) for _ in range(3))

    def forward(self, inputs: Tensor, box: Callable[[Tensor, Tensor], Any] = lambda a, b: (a, b)) -> Any:
        return box(self.a(inputs), self.b(inputs))


class Chained(nn.Module):
    """The second output comes from the first one."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, box: Callable[[Tensor, Tensor], Any]) -> Any:
        middle = self.a(inputs).tanh()
        return box(middle, self.b(middle))


@dataclass
class Answer:
    first: Tensor | None
    others: dict[str, Tensor]


def as_dataclass(skips_first: bool) -> Callable[[Tensor, Tensor], Answer]:
    return lambda a, b: Answer(None if skips_first else a, {"plain": b, "relu": b.relu()})


class Pair(NamedTuple):
    a: Tensor
    b: Tensor


class OfPair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 1)

    def forward(self, pair: Pair) -> Pair:
        assert isinstance(pair, Pair)
        return Pair(self.layer(pair.a * pair.b), pair.b)


class Outside(nn.Module):
    """Gives out a layer, to be called outside of forward."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> tuple[Tensor, nn.Module]:
        return self.a(inputs).tanh(), self.b


class Checkpointed(nn.Module):
    """The second layer is recomputed in backward, ``times`` times in a row; ``moves``: the first one in every other."""

    def __init__(self, reentrant: bool, times: int = 1, shared: bool = False, moves: bool = False) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(4, 4), nn.Linear(4, 4)
        if shared:
            self.first.weight = self.second.weight
        self.reentrant, self.times, self.moves, self.calls = reentrant, times, moves, 0

    def forward(self, inputs: Tensor) -> Tensor:
        self.calls += 1
        layer = self.first if self.moves and self.calls % 2 else self.second
        outputs = inputs if self.moves else self.first(inputs)
        for _ in range(self.times):
            outputs = checkpoint(layer, outputs, use_reentrant=self.reentrant)
        return outputs


class NewTensors(nn.Module):
    """Returns tensors that no parameter is in."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, inputs: Tensor, given: Tensor | None) -> tuple[Tensor, Tensor, Tensor, dict[str, Tensor]]:
        outputs = self.b(F.relu(self.a(inputs)))
        made = torch.ones(1, 4) if given is None else given
        return outputs, outputs.detach(), made, {"made": torch.ones(2)}


class Times(nn.Module):
    """Adds a parameter that it was given, times a factor."""

    def __init__(self, param: nn.Parameter, factor: float) -> None:
        super().__init__()
        self.param, self.factor = param, factor

    def forward(self, inputs: Any) -> Tensor:
        return inputs + self.param * self.factor


class UnusedTwice(nn.Module):
    """An unused parameter with two names."""

    def __init__(self) -> None:
        super().__init__()
        self.unused, self.used = nn.Linear(4, 3, bias=False), nn.Linear(4, 3)
        self.bias = self.unused.bias = nn.Parameter(torch.zeros(3))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.used(inputs).square().sum()


class TwoDtypes(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.wide, self.narrow = nn.Linear(4, 4).double(), nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        return self.narrow(self.wide(inputs.double()).float())


class Buffered(nn.Module):
    """Its forward reads a buffer that it does not write."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.register_buffer("own", torch.randn(4))

    def forward(self, inputs: Tensor) -> Tensor:
        return self.layer(inputs) + self.own


class NoOutputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.used, self.empty = nn.Linear(4, 4), nn.Linear(4, 0)

    def forward(self, inputs: Tensor) -> Tensor:
        outputs = self.used(inputs)
        return outputs.sum() + self.empty(outputs).sum()


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(4, 2, batch_first=True)

    def forward(self, packed: nn.utils.rnn.PackedSequence) -> nn.utils.rnn.PackedSequence:
        return self.lstm(packed)[0]


class Raising(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)

    def forward(self, inputs: Tensor) -> Tensor:
        raise ValueError("on purpose")
