"""Whether a torch.optim class may be cut anywhere, and what it keeps: found out by running it on small tensors.

A rank holds pieces of tensors, 1-D, some of one tensor and some of another. So the class is run twice: one optimizer on
whole tensors, and one for each of three ranks on their pieces, from the same values and with the same gradients. If
every bit of parameters and state is the same after each step, no element depends on another one. Norms, factored or
orthogonalised matrices, global sums and random rounding all show: each optimizer has another seed, as ranks do.

Tensors that will lie whole on one rank have an optimizer each instead. If all bits are the same, no tensor depends on
another one: norms and factored matrices may be, global sums and random rounding still show.
"""

from __future__ import annotations

import contextlib
import itertools
import random
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerox import _torch
from zerox.plan.form import Form
from zerox.rules.rule import MASTERS, STEP, NumberSpec, StateSpec
from zerox.rules.samples import Piece, Samples, draw

Make = Callable[[list[Tensor]], torch.optim.Optimizer]

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
# How bits may differ: what is wrong with the class, and between what.
CUT = "is not elementwise", "whole tensors and the same tensors cut as ranks hold them"
APART = (
    "lets tensors depend on each other",
    "tensors that share an optimizer and the same tensors with an optimizer each",
)
SCALE = "_scale"  # the end of keys that zerox uses beside its own


class NotElementwise(Exception):
    """Why a class can't be cut: a clause that begins with "its" or a verb."""


class Differs(NotElementwise):
    """The same, where that is bits that the user may accept."""


def reason(error: Exception, tried: str) -> str:
    """Why a class can't be sharded, as a clause: also if it raised for what was ``tried``."""
    if isinstance(error, NotElementwise):
        return str(error)
    return f"raised {type(error).__name__} for {tried}: {str(error).rstrip('.')}"


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
    ``writes_grads``: it changes ``p.grad``. ``full_at_start``: its constructor makes state. ``lacking``: by key, of how
    many dimensions the parameters are for which it does not keep it, though it does for others beside them.
    """

    states: tuple[StateSpec, ...] = ()
    numbers: tuple[NumberSpec, ...] = ()
    step: NumberSpec | None = None
    expected: frozenset[str] = frozenset()
    counters: tuple[str, ...] = ()
    writes_grads: bool = False
    full_at_start: bool = False
    lacking: Mapping[str, frozenset[int]] = field(default_factory=dict)

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
    lacking: dict[str, frozenset[int]] = field(default_factory=dict)


def step_without_global_hooks(optimizer: torch.optim.Optimizer, **options: Any) -> None:
    """Hooks on all optimizers run around the step() that the user calls, and not again around those inside it."""
    step = type(optimizer).step
    if getattr(step, "hooked", False) and not _torch.has_own_step_hooks(optimizer):
        step = step.__wrapped__  # type: ignore[attr-defined]
    step(optimizer, **options)


def probe(make: Make, samples: Samples, dtype: torch.dtype, device: torch.device, compare: bool) -> Kinds:
    """Runs what ``make`` builds on what ranks hold, and if asked to ``compare`` on all tensors in one optimizer too.

    Raises NotElementwise, and what the class itself raises. The random state of torch, Python and numpy is restored.
    """
    drawn_starts, drawn_grads = draw(samples.shapes)
    starts = [start.to(device, dtype) for start in drawn_starts]
    with random_state_restored(device), torch.no_grad(), no_messages():
        wholes = [nn.Parameter(start.clone()) for start in starts]
        pieces = [[nn.Parameter(_piece(starts, samples, each).clone()) for each in own] for own in samples.ranks]
        ranks = [make(list(own)) for own in pieces]
        whole = make(list(wholes)) if compare else None
        full_at_start = any(optimizer.state for optimizer in ranks)
        found = Found()
        for number, drawn in enumerate(drawn_grads):
            grads = [grad.to(device, dtype) for grad in drawn]
            for seed, (optimizer, params, own) in enumerate(zip(ranks, pieces, samples.ranks, strict=True)):
                _step(optimizer, params, [_piece(grads, samples, each) for each in own], seed, found)
                _look(optimizer, params, number + 1, found, is_whole=seed >= samples.num_cutting)
            held, cut = list(zip(ranks, pieces, strict=True)), len(samples.cut)
            if samples.dims:
                _find_lacking(held, found, may_lack=not samples.cut)
            if whole is not None:
                _step(whole, wholes, grads, len(ranks), Found())
                _compare((whole, wholes[:cut]), held[: samples.num_cutting], found, number + 1, CUT)
                _compare((whole, wholes[cut:]), held[samples.num_cutting :], found, number + 1, APART)
        shown = [(ranks[rank], params[0]) for rank, params in enumerate(pieces) if params[0].numel() > 1]
        expected = {key for key in found.states if not _makes_itself(*_having(shown, key), key)}
    step = found.numbers.pop(STEP.key, None)
    return Kinds(
        tuple(found.states.values()),
        tuple(found.numbers.values()),
        step,
        frozenset(expected),
        tuple(found.counters),
        found.writes_grads,
        full_at_start,
        found.lacking,
    )


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


def _look(optimizer: torch.optim.Optimizer, params: Sequence[Tensor], count: int, found: Found, is_whole: bool) -> None:
    """Learns what the optimizer keeps. Raises NotElementwise for what has no place on a rank."""
    if foreign := [key for key in optimizer.state if not any(key is param for param in params)]:
        raise NotElementwise(f"keeps state under {foreign[0]!r}, which is no parameter")
    for param in params:
        if param.numel() == 1:  # others show what it keeps
            continue
        for key, value in _state_of(optimizer, param).items():
            spec = _spec_of(param, key, value, is_whole)
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


def _spec_of(param: Tensor, key: Any, value: Any, is_whole: bool) -> StateSpec | NumberSpec | None:
    """``is_whole``: the parameter is no piece of one, so there may be less of its state."""
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
    sums = _sums(value, param) if is_whole and value.layout is torch.strided else None
    if value.numel() == 1 and value.dim() <= 1:
        on_device = value.device.type != "cpu" or param.device.type == "cpu"
        return NumberSpec(key, dtype, None, tuple(value.shape), on_device)
    if (value.shape != param.shape and sums is None) or value.layout is not torch.strided:
        own = " or with one number for each of its rows or columns" if is_whole else ""
        raise NotElementwise(
            f"keeps {key!r} of shape {tuple(value.shape)} for a parameter of shape {tuple(param.shape)}: only numbers, "
            f"and state of the parameter's own shape{own}, can be sharded"
        )
    if value.device != param.device:
        raise NotElementwise(f"keeps {key!r} on {value.device} for a parameter on {param.device}")
    if value.untyped_storage().data_ptr() == param.untyped_storage().data_ptr():
        raise NotElementwise(f"keeps {key!r}, which is the parameter itself and no copy of it")
    spec = StateSpec(key, form=None if value.dtype == param.dtype else Form(dtype, value.itemsize))
    return spec if sums is None else replace(spec, summed=sums.summed, keeps_dims=sums.keeps_dims)


def _sums(value: Tensor, param: Tensor) -> StateSpec | None:
    """Over which dimensions there is one number, as a spec has it; None: over none, or it is of another shape. Sizes of
    samples differ, so that there is one answer, up to five dimensions."""
    axes = range(-1, -param.dim() - 1, -1)
    for count in range(1, param.dim() + 1):
        for summed in itertools.combinations(axes, count):
            for keeps_dims in (True, False):
                spec = StateSpec("", summed=summed, keeps_dims=keeps_dims)
                if spec.shape_of(param.shape) == tuple(value.shape) != tuple(param.shape):
                    return spec
    return None


def _having(shown: Sequence[tuple[torch.optim.Optimizer, Tensor]], key: str) -> tuple[torch.optim.Optimizer, Tensor]:
    """The first of these parameters that has this state."""
    return next((each for each in shown if _state_of(*each).get(key) is not None), shown[0])


def _merge(one: StateSpec | NumberSpec, other: StateSpec | NumberSpec) -> NumberSpec | None:
    """Python's int and float in turn are a float; nothing else goes together."""
    both = [spec for spec in (one, other) if isinstance(spec, NumberSpec) and spec.python in (int, float)]
    return next((spec for spec in both if spec.python is float), None) if len(both) == 2 else None


def _compare(
    whole: tuple[torch.optim.Optimizer, Sequence[Tensor]],
    ranks: Sequence[tuple[torch.optim.Optimizer, Sequence[Tensor]]],
    found: Found,
    count: int,
    how: tuple[str, str],
) -> None:
    """Pieces in their order are the whole tensors in theirs."""
    if not ranks:
        return

    def check(what: str, same: bool) -> None:
        if not same:
            raise Differs(f"{how[0]}: after {count} steps its {what} differ between {how[1]}")

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
        if how == APART:  # one piece is one tensor, which may lack what others have
            check(f"keys ({key!r})", [value is None for value in values] == [value is None for value in pieces])
        else:
            check(f"keys ({key!r})", all((value is None) == (values[0] is None) for value in (*values, *pieces)))
        values, pieces = ([each for each in some if each is not None] for some in (values, pieces))
        if not values:
            continue
        if key in found.numbers:
            # Of a tensor that lies whole it may be its own, such as a norm; pieces of one tensor have one.
            pairs = (
                zip(values, pieces, strict=True) if how == APART else ((values[0], each) for each in (*values, *pieces))
            )
            check(f"numbers {key!r}", all(itertools.starmap(_same_numbers, pairs)))
            continue
        shapes = [piece.shape for piece in pieces] if how == APART else [param.shape for param in whole[1]]
        check(f"shapes of {key!r}", [value.shape for value in values] == shapes)
        check(f"dtypes of {key!r}", {value.dtype for value in values} == {pieces[0].dtype})
        check(f"values of {key!r}", _same(_flat(values), _flat(pieces)))


def _find_lacking(held: Iterable[tuple[torch.optim.Optimizer, Sequence[Tensor]]], found: Found, may_lack: bool) -> None:
    """Learns what it keeps for tensors of some numbers of dimensions only. Raises NotElementwise where they don't
    decide, for numbers, which all have, and unless it ``may_lack`` state."""
    states = [(param, _state_of(optimizer, param)) for optimizer, params in held for param in params]
    for key in (*found.states, *found.numbers):
        having, others = (
            [p.dim() for p, state in states if (state.get(key) is None) is none] for none in (False, True)
        )
        if having and found.lacking.get(key, frozenset(others)) != frozenset(others):
            raise NotElementwise(f"keeps {key!r} for tensors of other numbers of dimensions from step to step")
        if having and others and may_lack and key in found.states and set(having).isdisjoint(others):
            found.lacking[key] = frozenset(others)
        elif having and others:
            raise NotElementwise(
                f"keeps {key!r} for a tensor of {having[0]} dimensions and not for one of {others[0]}, in one param "
                "group: give them groups of their own"
            )


def _piece(tensors: Sequence[Tensor], samples: Samples, piece: Piece) -> Tensor:
    index, start, stop = piece
    return tensors[index].reshape(-1)[start:stop] if index < len(samples.cut) else tensors[index]


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
