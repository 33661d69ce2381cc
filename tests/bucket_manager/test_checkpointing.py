"""Activation checkpointing, graphs that are kept, and graphs of graphs: the gradients are those of a plain backward."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.bucket_manager.rig import (
    LAYER_CAP,
    Chain,
    GradsOfModel,
    gradients_of,
    input_of,
    mean_of,
    message_of,
)
from tests.ranks import run_ranks
from zerox import FusedShardedAdam
from zerox.ranks.group import find_ranks


class Segments(nn.Module):
    """A chain in two checkpointed segments, with layers outside of them ("some") or none ("all"), maybe one unused."""

    def __init__(self, inside: str, unused: bool = False) -> None:
        super().__init__()
        self.chain = Chain(5)
        self.inside = inside
        if unused:
            self.unused = Chain(1, seed=1)

    def forward(self, x: Tensor, use_reentrant: bool | None) -> Tensor:
        first, *middle, last = self.chain.layers
        segments = [middle[:2], middle[2:]] if self.inside == "some" else [[first, *middle[:2]], [*middle[2:], last]]
        if self.inside == "some":
            x = first(x).tanh()
        else:
            x = x.requires_grad_()  # a reentrant segment needs an input that does
        for segment in segments:
            run = nn.Sequential(*(module for layer in segment for module in (layer, nn.Tanh())))
            x = run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)
        return last(x).tanh() if self.inside == "some" else x


def checkpointed(
    rank: int, world_size: int, stage: int, use_reentrant: bool, inside: str, unused: bool
) -> tuple[int, int]:
    model = Segments(inside, unused)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP, stage)
    launched = []
    for seed in range(3):
        expected = mean_of(
            [
                gradients_of(model, model(input_of(r, seed), use_reentrant=None).square().sum())
                for r in range(world_size)
            ]
        )
        model(input_of(rank, seed), use_reentrant).square().sum().backward()
        launched.append(ours.manager.flights.num_launched)
        ours.sync()
        ours.expect(expected)
        if stage == 1:
            for param, want in zip(model.parameters(), expected, strict=True):
                assert (param.grad is None) == (want is None)
                if want is not None:
                    torch.testing.assert_close(param.grad, want)
        ours.grads.zero(set_to_none=True)
    assert ours.manager.flights.num_reduced == 3 * len(ours.buckets)
    return launched[0], launched[1] - len(ours.buckets)


@pytest.mark.parametrize("inside", ["some", "all"])
@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_gradients_equal_those_without_checkpointing(stage: int, use_reentrant: bool, inside: str) -> None:
    launched = run_ranks(checkpointed, 2, stage, use_reentrant, inside, False)
    assert launched == [(5, 5)] * 2  # everything has left when backward ends


@pytest.mark.parametrize("use_reentrant", [False, True])
@pytest.mark.parametrize("stage", [1, 2])
def test_with_an_unused_parameter_the_rest_leaves_at_the_next_call(stage: int, use_reentrant: bool) -> None:
    launched = run_ranks(checkpointed, 2, stage, use_reentrant, "all", True)
    # The unused layer's bucket is the first at first, and so holds back all others; later it is known to be the last.
    expected = (0, 5) if use_reentrant else (6, 6)
    assert launched == [expected] * 2


class Shared(nn.Module):
    """One layer used in two segments."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.shared, self.between = Chain(3).layers

    def forward(self, x: Tensor, use_reentrant: bool | None) -> Tensor:
        x = self.before(x).tanh()
        for layers in ([self.shared, self.between], [self.shared]):
            run = nn.Sequential(*layers)
            x = run(x) if use_reentrant is None else checkpoint(run, x, use_reentrant=use_reentrant)
        return x


def shared_by_segments(rank: int, world_size: int, stage: int, use_reentrant: bool) -> list[str]:
    model = Shared()
    optimizer = FusedShardedAdam(model.named_parameters(), stage=stage, bucket_cap_mb=LAYER_CAP / 2**20)
    before = [p.detach().clone() for p in model.parameters()]
    messages = [message_of(model(input_of(rank), use_reentrant).square().sum().backward)]
    messages.append(message_of(optimizer.step))
    optimizer.zero_grad()
    if use_reentrant:
        assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    model(input_of(rank, 1), use_reentrant=None).square().sum().backward()
    optimizer.step()
    return messages


@pytest.mark.parametrize("stage", [1, 2])
def test_a_parameter_shared_by_two_reentrant_segments_is_refused_with_the_way_out(stage: int) -> None:
    for backward, step in run_ranks(shared_by_segments, 2, stage, True):
        assert "'shared." in backward
        assert "use_reentrant=False" in backward
        assert "zero_grad" in step
    assert run_ranks(shared_by_segments, 2, stage, False) == [["no error", "no error"]] * 2


def two_reentrant_backwards(rank: int, world_size: int) -> tuple[str, str]:
    """With an unused parameter the end of the first can't be seen: synchronize() says where it was."""
    model = Segments("all", unused=True)
    optimizer = FusedShardedAdam(model.named_parameters(), bucket_cap_mb=LAYER_CAP / 2**20)

    def backward(seed: int) -> None:
        model(input_of(rank, seed), use_reentrant=True).square().sum().backward()

    backward(0)
    optimizer.synchronize()
    backward(1)
    with_synchronize = message_of(optimizer.step)
    optimizer.zero_grad()
    backward(2)
    without = message_of(lambda: backward(3))
    optimizer.zero_grad()
    backward(4)
    optimizer.step()
    return with_synchronize, without


def test_two_reentrant_backwards_with_an_unused_parameter_need_synchronize_between() -> None:
    for with_synchronize, without in run_ranks(two_reentrant_backwards, 2):
        assert with_synchronize == "no error"
        assert "optimizer.synchronize()" in without


def retained(rank: int, world_size: int, stage: int) -> None:
    """loss.backward(retain_graph=True) twice: the second adds the same again."""
    model = Chain(3)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP, stage)
    expected = mean_of([gradients_of(model, *[model(input_of(r)).square().sum()] * 2) for r in range(world_size)])
    loss = model(input_of(rank)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()
    ours.sync()
    ours.expect(expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_second_backward_through_a_kept_graph_adds_the_same_again(stage: int) -> None:
    run_ranks(retained, 2, stage)


def penalised(model: Chain, x: Tensor) -> Tensor:
    """A gradient penalty: the loss has the gradient of another loss in it."""
    x = x.requires_grad_()
    loss = model(x).square().sum()
    (slope,) = torch.autograd.grad(loss, x, create_graph=True)
    return loss + slope.square().sum()


def double_backward(rank: int, world_size: int, stage: int) -> None:
    model = Chain(3)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP, stage)
    expected = mean_of([gradients_of(model, penalised(model, input_of(r))) for r in range(world_size)])
    penalised(model, input_of(rank)).backward()
    ours.sync()
    ours.expect(expected)


@pytest.mark.parametrize("stage", [1, 2])
def test_a_gradient_penalty_is_differentiated_through(stage: int) -> None:
    run_ranks(double_backward, 2, stage)


def backward_with_create_graph(rank: int, world_size: int, stage: int) -> None:
    model = Chain(3)
    ours = GradsOfModel(find_ranks(None), list(model.parameters()), LAYER_CAP, stage)
    expected = mean_of([gradients_of(model, model(input_of(r)).square().sum()) for r in range(world_size)])
    model(input_of(rank)).square().sum().backward(create_graph=True)
    ours.sync()
    ours.expect(expected)
    ours.grads.zero(set_to_none=True)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph")
@pytest.mark.parametrize("stage", [1, 2])
def test_backward_with_create_graph_gives_the_same_mean(stage: int) -> None:
    run_ranks(backward_with_create_graph, 2, stage)


def backward_of_chosen_inputs(rank: int, world_size: int, stage: int) -> None:
    model = Chain(3)
    params = list(model.parameters())
    ours = GradsOfModel(find_ranks(None), params, LAYER_CAP, stage)
    expected = mean_of([gradients_of(model, model(input_of(r)).square().sum()) for r in range(world_size)])
    model(input_of(rank)).square().sum().backward(inputs=params[2:4])
    ours.sync()
    ours.expect([None, None, *expected[2:4], None, None])


@pytest.mark.parametrize("stage", [1, 2])
def test_backward_of_chosen_inputs_leaves_the_others_absent(stage: int) -> None:
    run_ranks(backward_of_chosen_inputs, 2, stage)
