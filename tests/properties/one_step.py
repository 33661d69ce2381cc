"""One step of a program, as every rank saw it, beside torch's from the same state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from tests.bucket_manager.rig import same_bits
from tests.optimizer.masters import half_away
from tests.properties.programs import DTYPES, Program
from tests.properties.run import Part, RankSeen, exact_values
from tests.tolerances import MOMENT_ULPS, NORM_RTOL, assert_one_step_bound, one_step_allowance, ulp


def assert_same_bits(ours: list[Tensor], theirs: list[Tensor], what: str) -> None:
    for index, (a, b) in enumerate(zip(ours, theirs, strict=True)):
        same = same_bits(a, b)
        assert same, f"{what} ({index}): {a} is not {b}"


def check_norm(program: Program, number: int, grads: list[Tensor | None], seen: list[RankSeen]) -> float | None:
    """All ranks see the norm of the whole mean gradient. Returns torch's factor for it, None without clipping."""
    clip = program.steps[number].clip
    norms = [rank.steps[number].norm for rank in seen]
    if clip is None:
        assert norms == [None] * len(norms)
        return None
    max_norm, order = clip
    for norm in norms:
        assert norm is not None
        assert_same_bits([norm], [norms[0]], "norms on all ranks")
    norm = norms[0]
    present = [grad.double() for grad in grads if grad is not None and grad.numel() > 0]
    expected = torch.linalg.vector_norm(torch.cat(present), order) if present else torch.zeros((), dtype=torch.float64)
    torch.testing.assert_close(norm.double(), expected, rtol=NORM_RTOL, atol=0.0)
    return float(torch.clamp(max_norm / (norm + 1e-6), max=1.0))


def check_owners(program: Program, number: int, seen: list[RankSeen]) -> None:
    """Every element that was ever trained is owned by exactly one rank."""
    owned = sorted((part.key, part.values.numel()) for rank in seen for part in rank.steps[number].after)
    steps = range(number + 1)
    ever = [
        i for i, p in enumerate(program.params) if p.trained_from == 0 or any(program.is_trained(i, s) for s in steps)
    ]
    ends = dict.fromkeys(ever, 0)
    for (index, start), numel in owned:
        assert start == ends[index]
        ends[index] += numel
    assert ends == {index: program.params[index].numel for index in ends}
    assert len(owned) == len({key for key, _ in owned})


def check_parts(
    program: Program,
    grads: list[Tensor | None],
    coefficient: float | None,
    before: list[Part],
    after: list[Part],
    values_before: list[Tensor],
) -> None:
    """What one rank owns, against torch's step from the state that it had."""
    old = {part.key: part for part in before}
    for part in after:
        spec = program.params[part.param]
        span = slice(part.start, part.start + part.values.numel())
        was = old.get(part.key) or newborn(part, values_before[part.param][span])
        grad = grads[part.param]
        if grad is None:
            for key, tensor in part.state.items():
                assert_same_bits([tensor], [was.state[key]], f"parameter {part.param} has no gradient: {key}")
            continue
        assert int(part.state["step"]) == int(was.state["step"]) + 1
        if part.values.numel() == 0:
            continue
        expected, moments = torch_step(was, grad[span], coefficient, program.groups[spec.group])
        pairs = {key: (part.state[key], moments[key]) for key in moments}
        dtype, decay = DTYPES[spec.dtype], decay_of(program.groups[spec.group])
        if part.exact.dtype == was.exact.dtype == expected.dtype:
            assert_one_step_bound(was.exact, part.exact, expected, pairs, decay)
            if "master" in part.state:
                assert_same_bits([part.values], [part.exact.to(dtype)], "a parameter is its master, rounded")
            if "remainder" in part.state:
                assert_same_bits([part.values], [half_away(part.exact)], "a parameter is its master, rounded")
        else:  # 16 bits and no master: rounded once more
            for ours, theirs in pairs.values():
                assert ((ours.double() - theirs.double()).abs() <= MOMENT_ULPS * ulp(theirs)).all()
            rounded = expected.to(dtype)
            allowed = one_step_allowance(was.exact.float(), expected, decay) + ulp(rounded)
            assert ((part.values.double() - rounded.double()).abs() <= allowed).all()


def decay_of(options: dict[str, Any]) -> float:
    return 1 - options["lr"] * options["weight_decay"] if options["decoupled_weight_decay"] else 1.0


def newborn(part: Part, values: Tensor) -> Part:
    """The state of a parameter whose bucket was made in this very step."""
    state = {key: values.float() if key == "master" else torch.zeros_like(t) for key, t in part.state.items()}
    return Part(part.param, part.start, values, exact_values(values, state), state)


def torch_step(was: Part, grad: Tensor, coefficient: float | None, options: dict[str, Any]) -> Any:
    """One step of torch.optim with foreach=False, 16-bit parameters as fp32; the parameter and its moments."""
    exact = was.exact if was.exact.dtype is torch.float64 else was.exact.float()
    leaf = nn.Parameter(exact.clone())
    leaf.grad = grad.to(exact.dtype, copy=True)
    if coefficient is not None:
        leaf.grad.mul_(coefficient)
    kind = torch.optim.AdamW if options["decoupled_weight_decay"] else torch.optim.Adam
    given = {key: value for key, value in options.items() if key != "decoupled_weight_decay"}
    reference = kind([leaf], foreach=False, **given)
    keys = ["exp_avg", "exp_avg_sq", *(["max_exp_avg_sq"] if options["amsgrad"] else [])]
    moments = {key: was.state[key].clone() for key in keys}
    reference.state[leaf] = {"step": was.state["step"].float(), **moments}
    reference.step()
    return leaf.detach(), moments
