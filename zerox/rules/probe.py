"""Whether a torch.optim class may be cut anywhere, and what it keeps: found out by running it on small tensors.

A rank holds pieces of tensors, 1-D, some of one tensor and some of another. So the class is run twice: one optimizer on
whole tensors, and one for each of three ranks on their pieces, from the same values and with the same gradients. If
every bit of parameters and state is the same after each step, no element depends on another one. Norms, factored or
orthogonalised matrices, global sums and random rounding all show: each optimizer has another seed, as ranks do.
"""

from __future__ import annotations

import contextlib
import functools
import random
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from zerox import _torch
from zerox.plan.form import Form
from zerox.plan.span import SHARD_ALIGN
from zerox.rules.rule import MASTERS, STEP, NumberSpec, StateSpec

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

NUM_STEPS = 12
SHAPES = ((7, 111), (301,))
# (tensor, start, stop) of each piece of each of three ranks. They are cut where zerox cuts: kernels may round otherwise
# behind the last whole vector register, which is in the same place then.
PIECES = (((0, 0, SHARD_ALIGN),), ((0, SHARD_ALIGN, 777), (1, 0, SHARD_ALIGN)), ((1, SHARD_ALIGN, 301),))
# Gradients lie between 1e-8 and the power of ten of their step. Small ones too: in 16 bits the largest may overflow,
# and where everything is infinite nothing differs.
POWERS = (0, 4, 1, -2, 2, 4)
ZERO_STEPS = {5: 1, 8: 0}  # steps in which the gradient of a whole tensor is zero, and of which
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
SCALE = "_scale"  # the end of keys that zerox uses beside its own


class NotElementwise(Exception):
    """Why a class can't be cut: a clause that begins with "its" or a verb."""


def no_messages() -> AbstractContextManager[None]:
    """Inside, what a class would send to other ranks raises. It would be sent, and change nothing: in a probe all ranks
    have the same, and where they train each has other pieces."""
    sending = _torch.message_namespaces()

    def call(func: Any, args: Any, kwargs: Any) -> Any:
        if func.namespace in sending:
            name = func.name().partition("::")[2].partition(".")[0]
            raise NotElementwise(f"communicates by itself ({name}), and each rank has other pieces of parameters")
        return func(*args, **kwargs)

    return _torch.each_operator(call)


@dataclass(frozen=True)
class Kinds:
    """What a class keeps under some options.

    ``step``: how it counts a parameter's updates; None: not at all. ``expected``: keys of state that it does not make
    by itself once a parameter has other state. ``counters``: options of its groups that it changes in a step.
    ``writes_grads``: it changes ``p.grad``. ``full_at_start``: its constructor makes state.
    """

    states: tuple[StateSpec, ...] = ()
    numbers: tuple[NumberSpec, ...] = ()
    step: NumberSpec | None = None
    expected: frozenset[str] = frozenset()
    counters: tuple[str, ...] = ()
    writes_grads: bool = False
    full_at_start: bool = False

    @property
    def keys(self) -> set[str]:
        return {spec.key for spec in self.states} | {spec.key for spec in self.numbers}


@dataclass
class Found:
    """What is seen of an optimizer on pieces, from step to step."""

    states: dict[str, StateSpec] = field(default_factory=dict)
    numbers: dict[str, NumberSpec] = field(default_factory=dict)
    counters: dict[str, None] = field(default_factory=dict)
    writes_grads: bool = False


def step_without_global_hooks(optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Hooks on all optimizers run around the step() that the user calls, and not again around those inside it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not _torch.has_own_step_hooks(optimizer):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer, **options)


def probe(make: Make, dtype: torch.dtype, device: torch.device, compare: bool) -> Kinds:
    """Runs what ``make`` builds on pieces, and if asked to ``compare`` on whole tensors too.

    Raises NotElementwise, and what the class itself raises. The random state of torch, Python and numpy is restored.
    """
    drawn_starts, drawn_grads = _draw()
    starts = [start.to(device, dtype) for start in drawn_starts]
    with random_state_restored(device), torch.no_grad(), no_messages():
        wholes = [nn.Parameter(start.clone()) for start in starts]
        pieces = [[nn.Parameter(starts[t].reshape(-1)[a:b].clone()) for t, a, b in own] for own in PIECES]
        ranks = [make(list(own)) for own in pieces]
        whole = make(list(wholes)) if compare else None
        full_at_start = any(optimizer.state for optimizer in ranks)
        found = Found()
        for number, drawn in enumerate(drawn_grads):
            grads = [grad.to(device, dtype) for grad in drawn]
            for seed, (optimizer, params, own) in enumerate(zip(ranks, pieces, PIECES, strict=True)):
                _step(optimizer, params, [grads[t].reshape(-1)[a:b] for t, a, b in own], seed, found)
                _look(optimizer, params, number + 1, found)
            if whole is not None:
                _step(whole, wholes, grads, len(ranks), Found())
                _compare((whole, wholes), list(zip(ranks, pieces, strict=True)), found, number + 1)
        expected = {key for key in found.states if not _makes_itself(ranks[0], pieces[0][0], key)}
    step = found.numbers.pop(STEP.key, None)
    return Kinds(
        tuple(found.states.values()),
        tuple(found.numbers.values()),
        step,
        frozenset(expected),
        tuple(found.counters),
        found.writes_grads,
        full_at_start,
    )


def _spread(shape: Sequence[int], powers: tuple[float, float], generator: torch.Generator) -> Tensor:
    """float64, of both signs, evenly over the powers of ten. Most signs are the same in each call: gradients have a
    direction, in which estimates of the distance grow."""
    low, high = powers
    drawn = torch.rand((2, *shape), generator=generator, dtype=torch.float64, device="cpu")
    signs = torch.ones(shape, dtype=torch.float64, device="cpu")
    signs.view(-1)[::2] = -1
    signs[drawn[1] < 0.2] *= -1
    return signs * 10 ** (low + (high - low) * drawn[0])


@functools.cache
def _draw() -> tuple[list[Tensor], list[list[Tensor]]]:
    """Values to start from, and the gradients of each step, float64."""
    generator = torch.Generator(device="cpu").manual_seed(0)
    starts = [_spread(shape, (-3, 0), generator) for shape in SHAPES]
    steps = []
    for number in range(NUM_STEPS):
        grads = [_spread(shape, (-8, POWERS[number % len(POWERS)]), generator) for shape in SHAPES]
        for grad in grads:
            grad[torch.rand(grad.shape, generator=generator, device="cpu") < 0.1] = 0
        if number in ZERO_STEPS:
            grads[ZERO_STEPS[number]].zero_()
        steps.append(grads)
    return starts, steps


def _step(
    optimizer: torch.optim.Optimizer, params: Sequence[Tensor], grads: Sequence[Tensor], seed: int, found: Found
) -> None:
    before = [dict(group) for group in optimizer.param_groups]
    for param, grad in zip(params, grads, strict=True):
        param.grad = grad.clone()
    torch.default_generator.manual_seed(seed)
    if params[0].device.type != "cpu":
        torch.get_device_module(params[0].device).manual_seed(seed)
    random.seed(seed)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(seed)
    step_without_global_hooks(optimizer)
    left = [torch.zeros_like(grad) if p.grad is None else p.grad for p, grad in zip(params, grads, strict=True)]
    found.writes_grads = found.writes_grads or not _same(_flat(left), _flat(grads))
    for param in params:
        param.grad = None
    for then, group in zip(before, optimizer.param_groups, strict=True):
        changed = [key for key in group if key != "params" and group[key] is not then.get(key, then)]
        found.counters.update(dict.fromkeys(changed))


def _look(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], count: int, found: Found) -> None:
    """Learns what the optimizer keeps. Raises NotElementwise for what has no place on a rank."""
    if foreign := [key for key in optimizer.state if not any(key is param for param in params)]:
        raise NotElementwise(f"keeps state under {foreign[0]!r}, which is no parameter")
    for param in params:
        for key, value in _state_of(optimizer, param).items():
            spec = _spec_of(param, key, value)
            if spec is None:
                continue
            known = found.states.get(key) or found.numbers.get(key) or spec
            merged = spec if known == spec else _merge(known, spec)
            if merged is None:
                raise NotElementwise(f"keeps {key!r} now in one form and now in another")
            if isinstance(merged, StateSpec):
                found.states[key] = merged
            else:
                found.numbers[key] = merged
            if key == STEP.key and float(value) != count:
                raise NotElementwise(f"keeps {key!r}, which is {float(value):g} after {count} updates")


def _spec_of(param: Tensor, key: Any, value: Any) -> StateSpec | NumberSpec | None:
    if value is None:
        return None
    reserved = [spec.key for spec in MASTERS]
    if not isinstance(key, str) or "." in key or key in reserved or key.endswith(SCALE):
        raise NotElementwise(f"keeps state under the key {key!r}, which a checkpoint can't have beside its own")
    if type(value) in (bool, int, float):
        return NumberSpec(key, {bool: "bool", int: "int64", float: "float64"}[type(value)], type(value))
    if not isinstance(value, Tensor):
        raise NotElementwise(f"keeps {key!r}, a {type(value).__name__}: only tensors and numbers can be sharded")
    dtype = str(value.dtype).removeprefix("torch.")
    if value.numel() == 1 and value.dim() <= 1:
        on_device = value.device.type != "cpu" or param.device.type == "cpu"
        return NumberSpec(key, dtype, None, tuple(value.shape), on_device)
    if value.shape != param.shape or value.layout is not torch.strided:
        raise NotElementwise(
            f"keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape {tuple(param.shape)}: only numbers, "
            "and state of the parameter's own shape, can be sharded"
        )
    if value.device != param.device:
        raise NotElementwise(f"keeps {key!r} on {value.device} for a parameter on {param.device}")
    if value.untyped_storage().data_ptr() == param.untyped_storage().data_ptr():
        raise NotElementwise(f"keeps {key!r}, which is the parameter itself and no copy of it")
    return StateSpec(key, form=None if value.dtype == param.dtype else Form(dtype, value.itemsize))


def _merge(one: StateSpec | NumberSpec, other: StateSpec | NumberSpec) -> NumberSpec | None:
    """Python's int and float in turn are a float; nothing else goes together."""
    both = [spec for spec in (one, other) if isinstance(spec, NumberSpec) and spec.python in (int, float)]
    return next((spec for spec in both if spec.python is float), None) if len(both) == 2 else None


def _compare(
    whole: tuple[torch.optim.Optimizer, Sequence[Tensor]],
    ranks: Sequence[tuple[torch.optim.Optimizer, Sequence[Tensor]]],
    found: Found,
    count: int,
) -> None:
    """Pieces in their order are the whole tensors in theirs."""

    def check(what: str, same: bool) -> None:
        if not same:
            raise NotElementwise(
                f"is not elementwise: after {count} steps its {what} differ between whole tensors and the same tensors "
                "cut as ranks hold them"
            )

    groups = [optimizer.param_groups[0] for optimizer, _ in (whole, *ranks)]
    for key in found.counters:
        same = all(_same_numbers(groups[0].get(key), group.get(key)) for group in groups)
        check(f"values of {key!r} in param groups", same)
    check("parameters", _same(_flat(whole[1]), _flat([param for _, params in ranks for param in params])))
    theirs = [_state_of(whole[0], param) for param in whole[1]]
    ours = [_state_of(optimizer, param) for optimizer, params in ranks for param in params]
    for key in (*found.states, *found.numbers):
        values: list[Any] = [state.get(key) for state in theirs]
        pieces: list[Any] = [state.get(key) for state in ours]
        check(f"keys ({key!r})", all((value is None) == (values[0] is None) for value in (*values, *pieces)))
        if values[0] is None:
            continue
        if key in found.numbers:
            check(f"numbers {key!r}", all(_same_numbers(values[0], value) for value in (*values, *pieces)))
            continue
        shapes = [(param.shape, pieces[0].dtype) for param in whole[1]]
        check(f"shapes of {key!r}", [(value.shape, value.dtype) for value in values] == shapes)
        check(f"values of {key!r}", _same(_flat(values), _flat(pieces)))


def _state_of(optimizer: torch.optim.Optimizer, param: Tensor) -> Mapping[str, Any]:
    found: Mapping[str, Any] = optimizer.state.get(param, {})
    return found


def _flat(tensors: Sequence[Tensor]) -> Tensor:
    return torch.cat([tensor.reshape(-1) for tensor in tensors])


def _same(one: Tensor, other: Tensor) -> bool:
    """Bit for bit, but any NaN is like any other."""
    bits = BITS[one.itemsize]
    if torch.equal(one.view(bits), other.view(bits)):
        return True
    return bool(((one.view(bits) == other.view(bits)) | (one.isnan() & other.isnan())).all())


def _same_numbers(one: Any, other: Any) -> bool:
    """Or other values, as options may be."""
    if not all(isinstance(each, (bool, int, float)) or _is_number(each) for each in (one, other)):
        return not isinstance(one, Tensor) and not isinstance(other, Tensor) and bool(one == other)
    a, b = float(one), float(other)
    return a == b or (a != a and b != b)


def _is_number(value: Any) -> bool:
    return isinstance(value, Tensor) and value.numel() == 1


def _makes_itself(optimizer: torch.optim.Optimizer, param: Tensor, key: str) -> bool:
    """Whether a step goes on where this state is missing, as SGD's does without a momentum."""
    state: dict[str, Any] = optimizer.state.get(param, {})
    if state.get(key) is None:
        return False
    kept = dict(state)
    del state[key]
    param.grad = torch.ones_like(param)
    try:
        step_without_global_hooks(optimizer)
    except Exception:  # whatever a class raises where it expects its own state
        state.update(kept)
        return False
    made: Mapping[str, Any] = optimizer.state.get(param, {})
    return made.get(key) is not None


@contextlib.contextmanager
def random_state_restored(device: torch.device) -> Iterator[None]:
    """Of torch on the CPU and ``device``, of Python, and of numpy if it was imported."""
    of_python = random.getstate()
    numpy = sys.modules.get("numpy")
    of_numpy = numpy.random.get_state() if numpy is not None else None
    devices = [] if device.type == "cpu" else [device]
    try:
        with torch.random.fork_rng(devices, device_type=device.type if devices else "cuda"):
            yield
    finally:
        random.setstate(of_python)
        if numpy is not None:
            numpy.random.set_state(of_numpy)
