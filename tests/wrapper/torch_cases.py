"""What is trained in torch's own tests of its DistributedDataParallel, in our words: beside.py says what comes of it.

A case trains with what a Run gives it. Its name says what it has, and the options of the wrapper.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.wrapper import torch_models as models
from tests.wrapper.beside import Case, Run, data

CASES: dict[str, Case] = {}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "as views": {"gradient_as_bucket_view": True},
    "static graph": {"static_graph": True},
    "find unused": {"find_unused_parameters": True},
    "static graph, find unused": {"static_graph": True, "find_unused_parameters": True},
}


def with_options(name: str, *options: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Has the case ``name`` tried under each of ``options``."""

    def add(function: Callable[..., None]) -> Callable[..., None]:
        for option in options:
            CASES[f"{name}: {option}"] = functools.partial(function, **OPTIONS[option])
        return function

    return add


@with_options("half batches and frozen parameters", "plain", "as views", "static graph")
def half_batches(run: Run, **options: Any) -> None:
    run.train(models.Frozen(), [lambda ddp, i=i: ddp(data(run.rank, i)).square().sum() for i in range(3)], **options)


@with_options("updated by hand, gradients zeroed in place", "plain", "as views")
def by_hand(run: Run, **options: Any) -> None:
    model = models.Frozen()
    ddp = run.wrap(model, **options)
    trained = [param for param in model.parameters() if param.requires_grad]
    for step in range(2):
        ddp(data(run.rank, step)).square().sum().backward()
        run.look(ddp)
        for param in trained:
            assert param.grad is not None
            with torch.no_grad():
                param -= param.grad
            param.grad.requires_grad_(False)
            param.grad.zero_()
    run.params += [param.detach().clone() for param in trained]


@with_options("accumulated in no_sync", "plain", "as views")
def accumulated(run: Run, **options: Any) -> None:
    ddp = run.wrap(models.Frozen(), **options)
    optimizer = run.optimizer([param for param in ddp.parameters() if param.requires_grad])
    with torch.no_grad(), ddp.no_sync():
        ddp(data(run.rank))
    for step in range(4):
        with ddp.no_sync() if step % 2 == 0 else nullcontext():
            ddp(data(run.rank, step)).square().sum().backward()
        if step % 2:
            run.look(ddp)
            optimizer.step()
            optimizer.zero_grad()
    run.keep(ddp, optimizer)


@with_options("no_sync, other layers on each rank", "find unused")
def accumulated_apart(run: Run, **options: Any) -> None:
    ddp = run.wrap(models.Branches(), **options)
    optimizer = run.optimizer(ddp.parameters())
    with ddp.no_sync():
        ddp(data(run.rank), 2 * run.rank).square().sum().backward()
    ddp(data(run.rank, 1), 2 * run.rank + 1).square().sum().backward()
    run.look(ddp)
    optimizer.step()
    run.keep(ddp, optimizer)


def by_ways(run: Run, ways: Mapping[int, list[tuple[int, ...]]], **options: Any) -> None:
    """``ways``: by rank, the layers that are used in each step."""
    losses = [lambda ddp, i=i, way=way: ddp(data(run.rank, i), *way).sum() for i, way in enumerate(ways[run.rank])]
    run.train(models.Branches(), losses, **options)


UNUSED = {
    "unused on one rank, and on all": {0: [(0,)] * 2, 1: [(1,)] * 2},
    "all used on rank 0 alone": {0: [(0, 1, 2, 3)] * 2, 1: [(1, 2, 3)] * 2},
}
CHANGING = {
    "control flow, the same on all ranks": {0: [(0,), (0, 1)] * 2, 1: [(0,), (0, 1)] * 2},
    "control flow, another on each rank": {0: [(0,)] * 4, 1: [(0,), (0, 1)] * 2},
}
for name, ways in {**UNUSED, **CHANGING}.items():
    with_options(name, "find unused")(functools.partial(by_ways, ways=ways))
with_options(next(iter(UNUSED)), "static graph, find unused")(
    functools.partial(by_ways, ways=next(iter(UNUSED.values())))
)


@with_options("outputs that nobody uses", "plain", "find unused")
def ignored_outputs(run: Run, **options: Any) -> None:
    def loss(ddp: Any, step: int) -> Tensor:
        for seed in range(2):
            ddp(data(run.rank, 9 + seed), *used)
        return ddp(data(run.rank, step), *used).sum()

    used = (0, 1) if options else (0, 1, 2, 3)
    run.train(models.Branches(), [functools.partial(loss, step=step) for step in range(2)], **options)


@with_options("one of two outputs in the loss", "find unused")
def half_of_the_outputs(run: Run, **options: Any) -> None:
    """A gradient that no backward reaches stays as it is, None or not."""
    for box, unbox in BOXES.values():
        ddp = run.wrap(models.TwoOutputs(), **options)
        optimizer = run.optimizer(ddp.parameters())
        for step in range(4):
            a, b = unbox(ddp(data(run.rank, step), box))
            (a @ b if step in (1, 2) else b).sum().backward()
            run.look(ddp)
            if step == 0:
                ddp.zero_grad()
        optimizer.step()
        run.keep(ddp, optimizer)


BOXES: dict[str, tuple[Callable[..., Any], Callable[..., Any]]] = {
    "tuple": (lambda a, b: (a, b), lambda out: out),
    "list": (lambda a, b: ["text", a, 1, b], lambda out: (out[1], out[3])),
    "dict": (lambda a, b: {"text": "more", "a": a, "b": b}, lambda out: (out["a"], out["b"])),
    "list of a dict": (lambda a, b: ["text", {"a": a, "b": b}], lambda out: (out[1]["a"], out[1]["b"])),
    "dict of a list": (
        lambda a, b: {"text": "more", "list": [0, a, 1, (b,)]},
        lambda o: (o["list"][1], o["list"][3][0]),
    ),
    "named tuple": (models.Pair, lambda out: out),
}


@with_options("outputs in containers", "static graph", "find unused")
def containers(run: Run, **options: Any) -> None:
    for box, unbox in BOXES.values():
        run.train(
            models.Chained(),
            [lambda ddp, i=i: unbox(ddp(data(run.rank, i), box))[1].square().sum() for i in range(2)],  # noqa: B023
            **options,
        )


@with_options("outputs in a dataclass", "find unused")
def dataclasses(run: Run, **options: Any) -> None:
    for skips in (False, True):

        def loss(ddp: Any, skips: bool = skips) -> Tensor:
            out = ddp(data(run.rank), models.as_dataclass(skips))
            return sum(part.square().sum() for part in [out.first, *out.others.values()] if part is not None)

        run.train(models.TwoOutputs(), [loss] * 2, **options)


@with_options("a named tuple goes in and comes out", "plain")
def named_tuple(run: Run, **options: Any) -> None:
    run.train(models.OfPair(), [lambda ddp: ddp(models.Pair(data(run.rank), data(run.rank, 1))).a.sum()] * 2, **options)


@with_options("two outputs, a backward of each", "find unused", "as views")
def two_backwards(run: Run, **options: Any) -> None:
    model = models.TwoOutputs()
    del model.unused
    ddp = run.wrap(model, gradient_as_bucket_view=options.get("gradient_as_bucket_view", False))
    optimizer = run.optimizer(ddp.parameters())
    for output in ddp(data(run.rank)):
        output.square().sum().backward()
    run.look(ddp)
    optimizer.step()
    run.keep(ddp, optimizer)


@with_options("a layer called outside of forward", "plain")
def outside(run: Run, **options: Any) -> None:
    def loss(ddp: Any) -> Tensor:
        outputs, layer = ddp(data(run.rank))
        return layer(outputs).square().sum()

    run.train(models.Outside(), [loss] * 2, **options)


CHECKPOINTED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "once, reentrant": ({"reentrant": True}, {}),
    "once": ({"reentrant": False}, {"find_unused_parameters": True}),
    "twice": ({"reentrant": False, "times": 2}, {"find_unused_parameters": True}),
    "twice, reentrant": ({"reentrant": True, "times": 2}, {"static_graph": True}),
    "twice, reentrant, weights shared": ({"reentrant": True, "times": 2, "shared": True}, {"static_graph": True}),
    "another layer each time": ({"reentrant": False, "moves": True}, {"find_unused_parameters": True}),
    "another layer each time, weights shared": (
        {"reentrant": False, "moves": True, "shared": True},
        {"find_unused_parameters": True},
    ),
}


def checkpointed(run: Run, made: dict[str, Any], options: dict[str, Any]) -> None:
    model = models.Checkpointed(**made)
    run.train(
        model, [lambda ddp, i=i: ddp(data(run.rank, i).requires_grad_()).square().sum() for i in range(3)], **options
    )


for name, (made, options) in CHECKPOINTED.items():
    CASES[f"checkpointed {name}"] = functools.partial(checkpointed, made=made, options=options)


@with_options("the wrapper itself checkpointed, weights shared", "plain", "static graph")
def checkpointed_whole(run: Run, **options: Any) -> None:
    for reentrant in (False, True):
        first, second = nn.Linear(4, 4), nn.Linear(4, 4)
        first.weight = second.weight

        def loss(ddp: Any, reentrant: bool = reentrant) -> Tensor:
            return checkpoint(ddp, data(run.rank).requires_grad_(), use_reentrant=reentrant).square().sum()

        run.train(nn.Sequential(first, second), [loss] * 2, **options)


@with_options("the wrapper itself checkpointed, an unused parameter", "find unused")
def checkpointed_with_unused(run: Run, **options: Any) -> None:
    """No backward outside the checkpoint is seen, and the one inside does not reach all parameters."""
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    model[0].unused = nn.Linear(4, 4)

    def loss(ddp: Any) -> Tensor:
        return checkpoint(ddp, data(run.rank).requires_grad_(), use_reentrant=True).square().sum()

    run.train(model, [loss] * 3, **options)
