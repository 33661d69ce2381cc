"""The constructor's options, checked in one place: the optimizer and the memory estimate read them from here."""

from __future__ import annotations

import inspect
import math
import numbers
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, fields
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from zerox import _torch
from zerox._ext import cuda_refusal
from zerox.memory.grad_dtype import NARROW, can_be_set, grad_dtype_of
from zerox.model_names import quote
from zerox.plan import combinations
from zerox.plan.buckets import MIB, BucketPlan, ParamSpec, default_cap_bytes, plan_buckets
from zerox.plan.choices import CHOICES, FUSED, SHARDED
from zerox.plan.form import BFLOAT16, EIGHT_BIT, FLOAT16, FLOAT32, FLOAT64, Form
from zerox.plan.layout import SMALL_NUMEL
from zerox.plan.owners import WHOLE, Load
from zerox.plan.stage import Stage, stage_of
from zerox.ranks.dtensors import is_dtensor, unfit_dtensor
from zerox.ranks.exchange import EXCHANGES
from zerox.ranks.process_group import ALONE
from zerox.ranks.wrapped import bare_names
from zerox.rules.rule import MASTER, REMAINDER, StateSpec, check_switches

PARAM_DTYPES = (torch.float64, torch.float32, torch.bfloat16, torch.float16)
ACCUMULATE_DTYPES = (None, torch.float32)
REDUCE_DTYPES = (None, torch.float32, torch.bfloat16, torch.float16)
STATE_FORMS: dict[torch.dtype | str, Form] = {torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, "8bit": EIGHT_BIT}
IN_FULL = {torch.float64: FLOAT64, torch.float32: FLOAT32, torch.bfloat16: BFLOAT16, torch.float16: FLOAT16}
MASTER_SPECS = {"remainder": REMAINDER, "fp32": MASTER}
MASTER_WEIGHTS = ("auto", *MASTER_SPECS, None)


class Planned(NamedTuple):
    """A (local) tensor, the name of its rule, its gradient's divisor, and the model axes that it is replicated over.
    ``cost``, ``slices``: as ParamSpec has them."""

    name: str
    param: Tensor
    rule: str = ""
    divisor: float | None = None
    replicated_over: tuple[int, ...] = ()
    cost: int | None = None
    slices: int = 1


@dataclass(frozen=True)
class OptimizerOptions:
    """What is not a hyper-parameter of the update. Raises ValueError listing what is allowed."""

    stage: int = 2
    bucket_cap_mb: float | None = None
    reduce_dtype: torch.dtype | None = None
    state_dtype: torch.dtype | str = torch.float32
    master_weights: str | None = "auto"
    capturable: bool = False
    accumulate_dtype: torch.dtype | None = None
    resident_mb: float | None = None
    gradient_divisor: float | None = None
    exchange: str | None = None

    def __post_init__(self) -> None:
        stage_of(self.stage)
        if self.bucket_cap_mb is not None and not (is_number(self.bucket_cap_mb) and 0 < self.bucket_cap_mb < math.inf):
            raise ValueError(f"zerox: bucket_cap_mb must be a positive number or None, got {self.bucket_cap_mb!r}")
        if self.resident_mb is not None and not (is_number(self.resident_mb) and self.resident_mb > 0):
            raise ValueError(f"zerox: resident_mb must be a positive number, inf or None, got {self.resident_mb!r}")
        check_divisor(self.gradient_divisor)
        check_switches(vars(self), "capturable")
        if self.reduce_dtype not in REDUCE_DTYPES:
            raise ValueError(f"zerox: reduce_dtype must be one of {REDUCE_DTYPES}, got {self.reduce_dtype!r}")
        if self.accumulate_dtype not in ACCUMULATE_DTYPES:
            raise ValueError(
                f"zerox: accumulate_dtype must be one of {ACCUMULATE_DTYPES}, got {self.accumulate_dtype!r}"
            )
        if self.accumulate_dtype is not None and not can_be_set():
            raise ValueError(
                f"zerox: accumulate_dtype={self.accumulate_dtype} needs a torch that has Tensor.grad_dtype, and "
                f"{torch.__version__} does not: leave it at None"
            )
        if self.state_dtype not in tuple(STATE_FORMS):
            raise ValueError(f"zerox: state_dtype must be one of {tuple(STATE_FORMS)}, got {self.state_dtype!r}")
        if self.master_weights not in MASTER_WEIGHTS:
            raise ValueError(f"zerox: master_weights must be one of {MASTER_WEIGHTS}, got {self.master_weights!r}")
        if self.exchange not in (None, *EXCHANGES):
            raise ValueError(f"zerox: exchange must be one of {(None, *EXCHANGES)}, got {self.exchange!r}")
        self.check_pairs({})

    def check_group(self, group: Mapping[str, Any], of_rule: Collection[str]) -> None:
        """ValueError for an option of the whole optimizer in a param group, unless it says what holds in any case.

        ``of_rule``: options of the group's rule, which may have one of these names.
        """
        check_divisor(group.get(DIVISOR))
        for name, value in self.named().items():
            if name in group and name not in (DIVISOR, *of_rule) and group[name] != value:
                raise ValueError(
                    f"zerox: {name}={group[name]!r} in a param group would have no effect: it is an option of the "
                    f"whole optimizer, pass {name} to its constructor"
                )

    def named(self) -> dict[str, Any]:
        """As the constructor's arguments are called."""
        return dict(vars(self))

    def divisor_of(self, group: Mapping[str, Any]) -> float | None:
        """What the sum of its gradients over the ranks is divided by; None: their number."""
        found: float | None = group.get(DIVISOR, self.gradient_divisor)
        return None if found is None else float(found)

    @property
    def stage_plan(self) -> Stage:
        return stage_of(self.stage)

    def cap_bytes(self, backend: str, world_size: int) -> int:
        if self.bucket_cap_mb is None:
            return default_cap_bytes(backend, world_size)
        return max(1, int(self.bucket_cap_mb * MIB))

    def wire_dtype(self, param_dtype: torch.dtype) -> torch.dtype:
        return self.reduce_dtype or param_dtype

    def check_pairs(self, others: Mapping[str, Any], **facts: Collection[str]) -> None:
        """Raises for two that zerox.plan.combinations refuses: of these options, ``others``, and facts in its words."""
        of = {"optimizer": {FUSED}}
        combinations.check({**of, **_chosen(self.named()), **_chosen(others), **facts})

    def exchange_words(self, exchange: str) -> set[str]:
        """What zerox.plan.combinations calls the exchange, where it came to this one."""
        return {f'"{exchange}"', *(["None"] if self.exchange is None else [])}

    def masters(self, param_dtype: torch.dtype) -> list[StateSpec]:
        """How the exact value of a parameter is kept: 32- and 64-bit ones need nothing beside themselves."""
        if param_dtype not in NARROW or self.master_weights is None:
            return []
        if self.master_weights == "auto":
            return [REMAINDER if param_dtype is torch.bfloat16 else MASTER]
        return [MASTER_SPECS[self.master_weights]]

    def state_form(self, param: Tensor) -> Form:
        """How the state of a parameter is stored.

        float64 parameters are updated in float64 throughout, and keep float64 state whatever ``state_dtype`` says. In 8
        bits small parameters (under 4,096 elements) keep float32: norms and biases, of which all together are few.
        """
        if param.dtype is torch.float64:
            return FLOAT64
        form = STATE_FORMS[self.state_dtype]
        return FLOAT32 if form.scaled and param.numel() < SMALL_NUMEL else form

    def plan(
        self, params: Iterable[Planned], backend: str, world_size: int, loads: Sequence[Load] | None = None
    ) -> list[BucketPlan]:
        specs = []
        for name, param, rule, divisor, over, cost, slices in params:
            dtype, grads = str(param.dtype), str(grad_dtype_of(param, self.accumulate_dtype))
            form = self.state_form(param)
            of_plan = form, grads, rule, divisor, over, param.is_meta, cost, slices
            specs.append(ParamSpec(name, param.numel(), dtype, param.element_size(), *of_plan))
        return plan_buckets(specs, world_size, self.cap_bytes(backend, world_size), loads)


class Inside(NamedTuple):
    """``optimizer_class``: the full name of a class of torch's kind. The others are as ShardedOptimizer has them."""

    optimizer_class: str = ""
    elementwise: bool | None = None
    whole: str = WHOLE[0]


@dataclass(frozen=True)
class LocalOptimizerOptions(OptimizerOptions):
    """Those of an optimizer with a class of torch's kind inside."""

    inside: Inside = field(default_factory=Inside)

    def __post_init__(self) -> None:
        _, elementwise, whole = self.inside
        if elementwise not in (None, True):
            raise ValueError(f"zerox: elementwise must be None (the class is tried) or True, got {elementwise!r}")
        if whole not in WHOLE:
            raise ValueError(f"zerox: whole must be one of {WHOLE}, got {whole!r}")
        super().__post_init__()

    def named(self) -> dict[str, Any]:
        found = {name: value for name, value in super().named().items() if name != "inside"}
        return {**found, **self.inside._asdict()}

    def check_pairs(self, others: Mapping[str, Any], **facts: Collection[str]) -> None:
        super().check_pairs(others, optimizer={SHARDED}, **facts)

    def masters(self, param_dtype: torch.dtype) -> list[StateSpec]:
        return [MASTER] if param_dtype in NARROW and self.master_weights is not None else []

    def state_form(self, param: Tensor) -> Form:
        """In the dtype in which the class works, unless it says otherwise."""
        if param.dtype is torch.float64 or not self.masters(param.dtype):
            return IN_FULL[param.dtype]
        return FLOAT32


def check_foreign(cls: Any, options: Mapping[str, Any]) -> None:
    """Raises as check_pairs() for options of zerox's own optimizers that a class of torch's kind does not have."""
    try:
        own = inspect.signature(cls).parameters
    except (TypeError, ValueError):  # it has none that Python can tell
        return
    foreign = {name: value for name, value in options.items() if name not in own}
    combinations.check({"optimizer": {SHARDED}, **_chosen(foreign)})


def _chosen(options: Mapping[str, Any]) -> dict[str, set[str]]:
    return {name: {_word(name, value)} for name, value in options.items() if name in CHOICES}


def _word(option: str, value: Any) -> str:
    """What zerox.plan.combinations calls a value of one of its options."""
    if option == "process_group":
        return f'"{ALONE}"' if value == ALONE else "a group"
    word = f'"{value}"' if isinstance(value, str) else str(value)
    if word in CHOICES[option].values:
        return word
    return "a tensor" if isinstance(value, Tensor) else "a number"


def parameter_words(dtypes: Iterable[torch.dtype]) -> set[str]:
    """What zerox.plan.combinations calls a model's parameters: 16-bit ones decide, if there are any."""
    found = set(dtypes) or {torch.float32}
    narrow = {each for each in found if each in NARROW}
    return {str(each).removeprefix("torch.") for each in narrow or found}


DIVISOR = "gradient_divisor"  # the one of these options that a param group may have
OF_LOCAL_OPTIMIZERS = (
    "stage",
    "bucket_cap_mb",
    "reduce_dtype",
    "master_weights",
    "resident_mb",
    DIVISOR,
    "exchange",
)
OF_OPTIMIZER = tuple(field.name for field in fields(OptimizerOptions) if field.name != DIVISOR)


def check_divisor(divisor: float | None) -> None:
    if divisor is not None and not (is_number(divisor) and 1e-30 <= divisor <= 1e30):
        raise ValueError(
            f"zerox: {DIVISOR} must be a number from 1e-30 to 1e30, or None for the number of ranks, got {divisor!r}"
        )


def is_number(value: Any) -> bool:
    """A string of digits is none, nor are True and False, which count as numbers in Python."""
    return isinstance(value, numbers.Real) and not isinstance(value, bool)


def check_params(
    names: Sequence[str], params: Sequence[Tensor], allocated: bool = True, has_model: bool = False
) -> None:
    """ValueError naming the first parameter that can't be sharded, and why. Not ``allocated``: it may be a meta one, as
    with ``has_model``, where it gets memory.

    RuntimeError under torch.inference_mode().
    """
    if allocated and torch.is_inference_mode_enabled():
        raise RuntimeError(
            "zerox: an optimizer can't be built under torch.inference_mode(), its parameters could never be trained: "
            "build it outside"
        )
    first: tuple[str, Tensor] | None = None
    for name, param in zip(names, params, strict=True):
        gets_memory = has_model and param.is_meta
        why = _unfit(param, allocated and not gets_memory)
        first = first or (None if gets_memory else (name, param))
        if not why and not gets_memory and first is not None and param.device != first[1].device:
            raise ValueError(
                f"zerox: all parameters must be on one device: {quote(*first)} is on {first[1].device}, "
                f"{quote(name, param)} on {param.device}"
            )
        if why := why or _foreign(param):
            raise ValueError(f"zerox: parameter {quote(name, param)} {why}")


def _unfit(param: Tensor, allocated: bool) -> str:
    """Why a parameter can't be sharded anywhere; empty if it can."""
    if param.is_meta and allocated:
        return (
            "is on the meta device: pass the model that has it to the constructor as model=, and it gets memory and "
            "first values"
        )
    if is_lazy(param):
        return "is not initialized: run a forward of its lazy module first"
    if param.is_inference() and allocated:
        return "was made under torch.inference_mode() and can't be trained: make the model outside"
    if param.layout is not torch.strided or param.is_quantized or param.is_nested:
        layout = "quantized" if param.is_quantized else "nested" if param.is_nested else param.layout
        return f"must be dense (torch.strided), got {layout}"
    if param.dtype not in PARAM_DTYPES:
        return f"must be one of {PARAM_DTYPES}, got {param.dtype}"
    if (grads := grad_dtype_of(param)) not in PARAM_DTYPES or grads is torch.float64 is not param.dtype:
        return f"of {param.dtype} has grad_dtype {grads}: set it to one of {PARAM_DTYPES[1:]}"
    return ""


def _foreign(param: Tensor) -> str:
    """Why it can't be sharded by this build, or by zerox; empty if it can."""
    if (refusal := device_refusal(param.device)) and not param.is_meta:
        return f"is on {param.device}: {refusal}"
    if _torch.is_updated_inside(param):
        return UPDATED_INSIDE
    if is_dtensor(param):
        return unfit_dtensor(param)
    if type(param).__torch_dispatch__ is not Tensor.__torch_dispatch__:  # it has its values elsewhere
        return (
            f"must be a DTensor or a plain tensor, got a {type(param).__name__}: zerox shards by itself, build it "
            "without FSDP and other wrappers of tensors"
        )
    return ""


UPDATED_INSIDE = (
    "is updated inside backward, by each rank's own gradient (_apply_optimizer_in_backward()): leave that call out, "
    "and call step() of an optimizer after backward"
)


def device_refusal(device: torch.device) -> str | None:
    if device.type == "cuda":
        return cuda_refusal()
    return None if device.type == "cpu" else "zerox has kernels for cpu and cuda"


def listed(params: Any) -> Any:
    """What torch.optim takes, so that it can be looked through twice: iterators become lists, in param groups too. What
    one raises is raised again by what stands for it."""
    if isinstance(params, Iterator):
        try:
            params = list(params)
        except Exception as error:
            return _Raising(error)
    for each in params if isinstance(params, list | tuple) else ():
        if isinstance(each, dict) and "params" in each:
            each["params"] = listed(each["params"])
    return params


class _Raising:
    def __init__(self, error: Exception) -> None:
        self.error = error

    def __iter__(self) -> Iterator[Any]:
        raise self.error


def tensors_in(params: Any) -> list[Tensor]:
    """Those among what listed() returned; none if torch.optim will refuse it."""
    if isinstance(params, Tensor):
        return []
    with suppress(Exception):
        return [tensor for _, tensor, _ in named_tensors(params)]
    return []


def named_tensors(params: Any) -> list[tuple[str, Tensor, dict[str, Any]]]:
    """``(name, tensor, group)`` for whatever torch.optim takes; unnamed ones are called by position, and those without
    a group have one together. TypeError, in torch's words, for anything else."""
    found: list[tuple[str, Tensor, dict[str, Any]]] = []
    plain: dict[str, Any] = {}
    seen: set[int] = set()

    def add(item: Any, group: dict[str, Any]) -> None:
        is_named = isinstance(item, tuple) and len(item) == 2
        name, tensor = item if is_named else (f"param {len(found)}", item)
        if not isinstance(tensor, Tensor):
            raise TypeError(f"optimizer can only optimize Tensors, but one of the params is {type(tensor).__name__}")
        if id(tensor) not in seen:  # one that is given twice is trained once
            seen.add(id(tensor))
            found.append((name, tensor, group))

    for item in params:
        if isinstance(item, dict):
            given = item["params"]
            for each in [given] if isinstance(given, Tensor) else given:
                add(each, item)
        else:
            add(item, plain)
    names = bare_names([name for name, *_ in found], [tensor for _, tensor, _ in found])
    return [(name, tensor, group) for name, (_, tensor, group) in zip(names, found, strict=True)]
