"""What p.grad can be asked once the gradient has left: the answers are those of whole gradients, in one message."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import LAYER_CAP, Chain, input_of
from tests.ranks import run_ranks
from tests.thinned import thinned
from zerox import FusedShardedAdam

Question = Callable[[list[Tensor]], Any]
ORDERS = (1.0, 2.0, 3.5, math.inf)
QUESTIONS: dict[str, Question] = {
    **{f"norm {p}": lambda grads, p=p: [grad.norm(p) for grad in grads] for p in ORDERS},
    "vector_norm": lambda grads: [torch.linalg.vector_norm(grad, 3, dtype=torch.float64) for grad in grads],
    "linalg.norm": lambda grads: [torch.linalg.norm(grad) for grad in grads],
    "torch.norm": lambda grads: [torch.norm(grad.detach(), 2.0) for grad in grads],
    "fro": lambda grads: [torch.norm(grad.data, p="fro") for grad in grads],
    "foreach": lambda grads: torch._foreach_norm(grads, 1),
    "get_total_norm": lambda grads: [nn.utils.get_total_norm(grads)],
    "get_total_norm, foreach": lambda grads: [nn.utils.get_total_norm(grads, norm_type=math.inf, foreach=True)],
    "abs max": lambda grads: [grad.abs().max() for grad in grads],
    "abs amax": lambda grads: [torch.amax(torch.abs(grad)) for grad in grads],
    "isfinite": lambda grads: [torch.isfinite(grad).all() for grad in grads],
    "isnan": lambda grads: [grad.isnan().any() for grad in grads],
    "not equal to itself": lambda grads: [(grad != grad).any() for grad in grads],
    "of one": lambda grads: [grads[1].norm()],
    "after a product": lambda grads: [grads[0].mul_(-0.5).norm(), grads[1].norm(), grads[0].norm()],
    "after a clamp": lambda grads: [grad.clamp_(-0.1, 0.1).norm() for grad in grads],
}


def build(stage: int, dtype: torch.dtype = torch.float32) -> tuple[Chain, FusedShardedAdam]:
    model = Chain(3).to(dtype)
    cap = LAYER_CAP / 2**20
    return model, FusedShardedAdam(model.named_parameters(), lr=1e-2, stage=stage, bucket_cap_mb=cap)


def backward(model: Chain, rank: int, seed: int = 0, spoilt: float = 1.0) -> None:
    dtype = model.layers[0].weight.dtype
    (model(input_of(rank, seed).to(dtype)).square().mean() * spoilt).backward()


def grads_of(model: nn.Module) -> list[Tensor]:
    return [param.grad for param in model.parameters() if param.grad is not None]


def answered(rank: int, world_size: int, stage: int, dtype: torch.dtype) -> dict[str, list[tuple[Tensor, ...]]]:
    """By question, the answers before and after step(), of one training: a question a step."""
    found = {}
    model, optimizer = build(stage, dtype)
    for seed, (name, ask) in enumerate(QUESTIONS.items()):
        backward(model, rank, seed)
        optimizer.synchronize()
        found[name] = [ask(grads_of(model))]
        optimizer.step()
        found[name].append(QUESTIONS["norm 2.0"](grads_of(model)))
        optimizer.zero_grad()
    return found


NOT_FINITE = ("isfinite", "isnan", "norm 2.0", "abs max")


def of_spoilt(rank: int, world_size: int, stage: int, spoilt: float) -> dict[str, Any]:
    """Answers where one rank's gradient is not finite."""
    model, optimizer = build(stage)
    backward(model, rank, 0, spoilt if rank == 0 else 1.0)
    optimizer.synchronize()
    return {name: QUESTIONS[name](grads_of(model)) for name in NOT_FINITE}


DTYPES = (torch.float32, torch.bfloat16, torch.float64)


# Who has which part of a gradient does not depend on its dtype.
@pytest.mark.parametrize(("dtype", "world_size"), thinned(DTYPES, [torch.float32], [1, 2, 3], [3]), ids=str)
def test_answers_are_those_of_whole_gradients(world_size: int, dtype: torch.dtype) -> None:
    expected, *_ = run_ranks(answered, world_size, 1, dtype)
    for stage in (2, 3):
        for found in run_ranks(answered, world_size, stage, dtype):
            for name, answers in found.items():
                for ours, theirs in zip(answers, expected[name], strict=True):
                    torch.testing.assert_close(list(ours), list(theirs), msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize("spoilt", [math.inf, math.nan])
def test_what_is_not_finite_on_one_rank_is_so_on_all(spoilt: float) -> None:
    expected, *_ = run_ranks(of_spoilt, 2, 1, spoilt)
    for found in run_ranks(of_spoilt, 2, 2, spoilt):
        for name in NOT_FINITE:
            torch.testing.assert_close(found[name], expected[name], equal_nan=True)


def digits(rank: int, world_size: int) -> list[float]:
    """Each rank has the same batch, so that the mean is the same at every number of ranks."""
    model, _optimizer = build(2)
    backward(model, 0)
    return [float(grad.norm(p)) for p in ORDERS for grad in grads_of(model)]


def test_digits_are_the_same_at_every_number_of_ranks() -> None:
    [alone] = run_ranks(digits, 1)
    assert all(found == alone for world_size in (2, 4) for found in run_ranks(digits, world_size))


def messages(rank: int, world_size: int) -> dict[str, int]:
    model, optimizer = build(2)
    backward(model, rank)
    optimizer.synchronize()
    asked: list[str] = []
    sync, all_reduce = optimizer.inside.sync, optimizer.inside.grads.all_reduce
    optimizer.inside.calls.answers.sync = lambda: lambda *args: asked.append("sync_point") or sync(*args)  # type: ignore
    optimizer.inside.grads.all_reduce = lambda *args: asked.append("message") or all_reduce(*args)  # type: ignore

    def counted(call: Callable[[], object]) -> int:
        asked.clear()
        call()
        assert asked.count("sync_point") == asked.count("message")
        return len(asked) // 2

    params = list(model.parameters())
    norms = lambda p: [float(grad.norm(p)) for grad in grads_of(model)]  # noqa: E731
    return {
        "clip": counted(lambda: nn.utils.clip_grad_norm_(params, 1e-3)),
        "norms of what was clipped": counted(lambda: norms(2)),
        "again": counted(lambda: norms(2)),
        "of another order": counted(lambda: norms(1)),
        "each of two orders": counted(lambda: [(float(g.norm(1)), float(g.norm(2))) for g in grads_of(model)]),
        "one changed, others asked": counted(lambda: (grads_of(model)[0].mul_(2), grads_of(model)[1].norm())),
        "after another backward": counted(lambda: (backward(model, rank, 1), norms(2))),
    }


def test_the_first_question_is_answered_for_all() -> None:
    for found in run_ranks(messages, 2):
        assert found == {
            "clip": 1,
            "norms of what was clipped": 1,
            "again": 0,
            "of another order": 1,
            "each of two orders": 0,
            "one changed, others asked": 0,
            "after another backward": 1,
        }


def an_answer_is_the_asker_s(rank: int, world_size: int) -> list[float]:
    model, _optimizer = build(2)
    backward(model, rank)
    [grad, *_] = grads_of(model)
    first = grad.norm()
    before = float(first)
    first.mul_(3)
    return [float(grad.norm()) - before, float(grad.norm()) - before]


def test_what_is_written_into_an_answer_is_not_the_next_answer() -> None:
    assert run_ranks(an_answer_is_the_asker_s, 2) == [[0.0, 0.0]] * 2


def of_others(rank: int, world_size: int) -> dict[str, tuple[float, float]]:
    """What changes gradients by other ways than p.grad is seen in the next answer. With what is expected."""
    model, optimizer = build(2)
    weight = model.layers[0].weight
    found = {}
    for name, change, factor in (
        ("scale_grads_", lambda: optimizer.scale_grads_(0.5), 0.5),
        ("clip_grad_norm_", lambda: optimizer.clip_grad_norm_(1e-3), None),
        ("set_full_grad_", lambda: optimizer.set_full_grad_(weight, torch.ones_like(weight)), None),
        ("zero_grad(False)", lambda: optimizer.zero_grad(set_to_none=False), 0.0),
        ("model.zero_grad(False)", lambda: model.zero_grad(set_to_none=False), 0.0),
        ("assigned", lambda: [setattr(p, "grad", torch.ones_like(p)) for p in model.parameters()], None),
    ):
        backward(model, rank)
        before = float(weight.grad.norm())  # type: ignore[union-attr]
        change()
        optimizer.synchronize()
        expected = before * factor if factor is not None else float(optimizer.full_grad(weight).norm())  # type: ignore
        found[name] = (float(weight.grad.norm()), expected)  # type: ignore[union-attr]
        optimizer.zero_grad()
    return found


def test_what_changed_gradients_is_seen_in_the_next_answer() -> None:
    for found in run_ranks(of_others, 2):
        for name, (ours, expected) in found.items():
            assert ours == pytest.approx(expected, rel=1e-5), name


def scaled(rank: int, world_size: int, stage: int, bad: int | None) -> tuple[list[float], list[Tensor]]:
    model, optimizer = build(stage)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0, growth_interval=2)
    seen = []
    for step in range(4):
        loss = model(input_of(rank, step)).square().mean()
        scaler.scale(loss * (math.inf if (rank, step) == (1, bad) else 1.0)).backward()
        scaler.unscale_(optimizer)
        seen.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1e-2)))
        scaler.step(optimizer)
        scaler.update()
        seen.append(scaler.get_scale())
        optimizer.zero_grad()
    with optimizer.whole():
        return seen, [param.detach().clone() for param in model.parameters()]


@pytest.mark.parametrize("bad", [None, 1])
def test_torchs_scaler_and_clip_do_as_on_whole_gradients(bad: int | None) -> None:
    """An inf on one rank: all skip. Where a gradient is about eps, its last bit moves the update by some 1e-7."""
    expected, *_ = run_ranks(scaled, 2, 1, bad)
    for stage in (2, 3):
        for found in run_ranks(scaled, 2, stage, bad):
            torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6, equal_nan=True)


def asked_alone(rank: int, world_size: int) -> str:
    model, optimizer = build(2)
    backward(model, rank)
    if rank == 0:
        with pytest.raises(RuntimeError) as caught:
            grads_of(model)[0].norm()
        return str(caught.value)
    with pytest.raises(RuntimeError) as caught:
        optimizer.step()
    return str(caught.value)


def test_a_question_on_one_rank_alone_is_named_on_all() -> None:
    for message in run_ranks(asked_alone, 2):
        assert "norm() of the gradient of parameter 'layers.0.weight'" in message
        assert "on all ranks" in message


def unlike(rank: int, world_size: int) -> str:
    model, _optimizer = build(2)
    backward(model, rank)
    if rank == 1:
        model.layers[1].bias.grad = None
    with pytest.raises(RuntimeError) as caught:
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    return str(caught.value)


def test_a_gradient_that_only_some_ranks_have_is_named_at_the_question() -> None:
    for message in run_ranks(unlike, 2):
        assert "rank 0 has the gradient of parameter 'layers.1.bias' and rank 1 has none" in message


def followed(rank: int, world_size: int) -> list[bool]:
    """Rank 0 runs out: it answers, and its parts count. Beside torch's optimizer on whole gradients."""
    model, optimizer = build(2)
    with optimizer.join():
        for step in range(2 + 2 * rank):
            backward(model, rank, step)
            nn.utils.clip_grad_norm_(model.parameters(), 1e-2)
            optimizer.step()
            optimizer.zero_grad()
    plain = Chain(3)
    reference = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    for step in range(4):
        for each_rank in range(2) if step < 2 else [1]:
            (plain(input_of(each_rank, step)).square().mean() / 2).backward()
        nn.utils.clip_grad_norm_(plain.parameters(), 1e-2)
        reference.step()
        reference.zero_grad()
    return [torch.allclose(a, b, atol=1e-5) for a, b in zip(model.parameters(), plain.parameters(), strict=True)]


def test_a_rank_that_has_run_out_answers() -> None:
    for found in run_ranks(followed, 2):
        assert all(found)


def refused_where(rank: int, world_size: int) -> dict[str, str]:
    def said(call: Callable[[], object]) -> str:
        with pytest.raises(RuntimeError) as caught:
            call()
        return str(caught.value)

    model, optimizer = build(2)
    backward(model, rank)
    old = grads_of(model)[0]
    model.zero_grad()
    found = {"discarded": said(old.norm)}
    with optimizer.no_sync():
        backward(model, rank)
    backward(model, rank)
    model.layers[1].weight.grad = torch.zeros_like(model.layers[1].weight)
    found["by hand"] = said(lambda: nn.utils.clip_grad_norm_(model.layers[0].parameters(), 1.0))
    optimizer.zero_grad()
    backward(model, rank)
    with optimizer.no_sync():
        found["no_sync"] = said(grads_of(model)[0].norm)
    optimizer.zero_grad()
    model.layers[0].weight.register_hook(lambda grad: model.layers[2].weight.grad.norm() * grad)  # type: ignore
    found["in backward"] = said(lambda: backward(model, rank))
    return found


def test_where_there_is_no_answer_it_is_refused_by_name() -> None:
    for found in run_ranks(refused_where, 2):
        assert "norm() of the gradient of parameter 'layers.0.weight' was called after" in found["discarded"]
        assert "the gradient of parameter 'layers.1.weight' has not left yet" in found["by hand"]
        assert "synchronize()" in found["by hand"]
        assert "inside no_sync()" in found["no_sync"]
        assert "parameter 'layers.2.weight' was called inside a backward" in found["in backward"]
