"""More of torch_cases.py: other modules, dtypes, memory formats, and what is saved."""

from __future__ import annotations

import copy
import functools
import io
from contextlib import nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.wrapper import torch_models as models
from tests.wrapper.beside import Run, data
from tests.wrapper.torch_cases import CASES, with_options


@with_options("a parameter in two modules", "plain", "as views")
def shared(run: Run, **options: Any) -> None:
    param = nn.Parameter(torch.ones(6))
    model = nn.Sequential(*(models.Times(param, run.rank + 1.0) for _ in range(2)))
    run.train(model, [lambda ddp: ddp(1).square().sum()] * 3, **options)


@with_options("an unused parameter with two names", "find unused", "static graph, find unused")
def unused_twice(run: Run, **options: Any) -> None:
    run.train(models.UnusedTwice(), [lambda ddp, i=i: ddp(data(run.rank, i)).div_(10) for i in range(3)], **options)


@with_options("tensors made in forward", "plain", "static graph", "find unused")
def new_tensors(run: Run, **options: Any) -> None:
    def loss(ddp: Any, step: int) -> Tensor:
        outputs, detached, made, others = ddp(data(run.rank, step), given[-1])
        assert made.grad_fn is None
        assert others["made"].grad_fn is None
        assert not detached.requires_grad
        given.append(made)
        return (outputs + detached).square().mean()

    given: list[Tensor | None] = [None]
    run.train(models.NewTensors(), [functools.partial(loss, step=step) for step in range(2)], **options)


@with_options("two forwards and one backward", "plain", "static graph")
def two_forwards(run: Run, **options: Any) -> None:
    """With batch norm, whose buffers the second forward hands out though the first one saved them."""
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
    run.train(model, [lambda ddp: ddp(data(run.rank)).exp().sum() + ddp(data(run.rank, 1)).exp().sum()] * 3, **options)


@with_options("hooks of modules", "plain")
def hooks(run: Run, **options: Any) -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 2))
    model[0].register_forward_pre_hook(lambda module, inputs: inputs[0].relu())
    model[0].register_forward_hook(lambda module, inputs, output: F.gelu(output))
    model[0].register_full_backward_hook(lambda module, grads, _: (F.celu(grads[0]),))
    run.train(model, [lambda ddp: ddp(data(run.rank).requires_grad_()).square().sum()] * 2, **options)


@with_options("autocast and a scaler", "plain", "as views")
def scaled(run: Run, **options: Any) -> None:
    ddp = run.wrap(models.Frozen(), **options)
    optimizer = run.optimizer([param for param in ddp.parameters() if param.requires_grad])
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for step in range(4):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = ddp(data(run.rank, step)).float().square().mean()
        scaler.scale(loss).backward()
        run.look(ddp)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    run.keep(ddp, optimizer)


@with_options("convolutions in channels_last", "plain")
def layouts(run: Run, **options: Any) -> None:
    """Gradients have the strides of their parameters, small buckets or large ones: apart() looks."""
    for cap in (1e-6, 25.0):
        model = nn.Sequential(nn.Conv2d(4, 6, 2).to(memory_format=torch.channels_last), nn.Conv2d(6, 4, 2))
        losses = [lambda ddp, i=i: ddp(data(run.rank, i, (2, 4, 5, 5))).square().mean() for i in range(3)]
        run.train(model, losses, bucket_cap_mb=cap, **options)


@with_options("layers in float64 and float32", "plain", "as views")
def two_dtypes(run: Run, **options: Any) -> None:
    run.train(models.TwoDtypes(), [lambda ddp: ddp(data(run.rank)).square().sum()] * 2, **options)


@with_options("a sum that would overflow in fp16", "plain", "as views")
def large_halves(run: Run, **options: Any) -> None:
    """61440 and 32768: the mean is a number of fp16, the sum is none."""
    layer = nn.Linear(1, 1, bias=False).half()
    ddp = run.wrap(layer, **options)
    optimizer = run.optimizer(ddp.parameters())
    ddp(torch.full((1, 1), (61440.0, 32768.0)[run.rank], dtype=torch.float16)).sum().backward()
    run.look(ddp)
    norm = nn.utils.get_total_norm([param.grad for param in ddp.parameters() if param.grad is not None])
    assert norm == 47104.0, norm
    run.keep(ddp, optimizer)


@with_options("packed sequences", "plain")
def packed(run: Run, **options: Any) -> None:
    batch = nn.utils.rnn.pack_padded_sequence(data(run.rank, 0, (3, 5, 4)), torch.tensor([5, 3, 2]), batch_first=True)
    run.train(models.Recurrent(), [lambda ddp: ddp(batch).data.sum()] * 2, **options)


@with_options("a layer without outputs", "plain")
def without_outputs(run: Run, **options: Any) -> None:
    run.train(models.NoOutputs(), [lambda ddp: ddp(data(run.rank)).sum()] * 2, **options)


@with_options("a backward with create_graph", "plain")
def create_graph(run: Run, **options: Any) -> None:
    ddp = run.wrap(nn.Linear(4, 1, bias=False), **options)
    optimizer = run.optimizer(ddp.parameters())
    for step in range(3):
        ddp(data(run.rank, step)).pow(2).sum().backward(create_graph=True)
        run.look(ddp)
        assert all(param.requires_grad for param in ddp.parameters())
    optimizer.step()
    optimizer.zero_grad()  # a gradient with a graph and its parameter keep each other
    run.keep(ddp, optimizer)


@with_options("compiled", "plain", "static graph")
def compiled(run: Run, **options: Any) -> None:
    ddp = run.wrap(nn.Linear(4, 4), **options)
    optimizer = run.optimizer(ddp.parameters())
    faster = torch.compile(ddp, backend="eager")
    for step in range(2):
        faster(data(run.rank, step)).square().sum().backward()
        run.look(ddp)
        optimizer.step()
        optimizer.zero_grad()
    run.keep(ddp, optimizer)


@with_options("state dicts, loaded in mid-training", "plain")
def reloaded(run: Run, **options: Any) -> None:
    """With and without the prefix of the wrapper."""
    ddp = run.wrap(models.Frozen(), **options)
    optimizer = run.optimizer([param for param in ddp.parameters() if param.requires_grad])
    for step in range(4):
        if step in (1, 2, 3):
            file = io.BytesIO()
            torch.save(copy.deepcopy(ddp.state_dict()), file)
            file.seek(0)
            state = torch.load(file)
            assert all(name.startswith("module.") for name in state)
            with torch.no_grad():
                for param in ddp.parameters():
                    param.zero_()
            if step == 1:
                ddp.load_state_dict(state)
            else:
                nn.modules.utils.consume_prefix_in_state_dict_if_present(state, "module.")
                ddp.module.load_state_dict(state)
        ddp(data(run.rank, step)).square().sum().backward()
        run.look(ddp)
        optimizer.step()
        optimizer.zero_grad()
    run.keep(ddp, optimizer)


def saved_whole(run: Run) -> None:
    """The wrapper itself, by torch.save(): what is read back trains on, with a new optimizer."""
    ddp = run.wrap(models.Frozen())
    for _ in range(2):
        optimizer = run.optimizer([param for param in ddp.parameters() if param.requires_grad])
        ddp(data(run.rank)).square().sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        file = io.BytesIO()
        with optimizer.whole() if run.kind == "stage 3" else nullcontext():  # type: ignore[attr-defined]
            torch.save(ddp, file)
        run.keep(ddp, optimizer)
        file.seek(0)
        ddp = torch.load(file, weights_only=False)


CASES["the wrapper saved and read back"] = saved_whole
