"""An optimizer class of torch's kind as a rule: what it keeps is learned by running it on small tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerox.plan import combinations
from zerox.plan.choices import SHARDED
from zerox.plan.form import Form
from zerox.rules.of_groups import RULE, Rules
from zerox.rules.probe import Kinds, NotElementwise, probe
from zerox.rules.rule import STEP, NumberSpec, Rule, StateSpec

LEAST_LR = 1e-2  # with which the class is tried: under a schedule's first lr, often 0, nothing would differ
NOT_OPTIONS = ("params", "param_names", RULE)
WAY_OUT = "Use it under DistributedDataParallel"
REFUSED = {
    torch.optim.LBFGS: "it searches along one direction for all parameters, and evaluates the loss inside step()",
    torch.optim.SparseAdam: "it is for sparse gradients, and zerox shards dense ones",
}
OF_RANKS = {  # by their full names, since they take long to import
    "torch.distributed.optim.zero_redundancy_optimizer.ZeroRedundancyOptimizer": (
        "it shards by itself. Give ShardedOptimizer the class inside it"
    ),
    "torch.distributed.optim.post_localSGD_optimizer.PostLocalSGDOptimizer": (
        f"it averages parameters over the ranks by itself. {WAY_OUT}"
    ),
}
LR = ("lr", "initial_lr")
_warned: set[str] = set()  # classes of which it was said that they are not elementwise
USUAL = (torch.float32, torch.device("cpu"))
Pattern = tuple[Any, ...]


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key not in NOT_OPTIONS}


def full_name(cls: type) -> str:
    return f"{cls.__module__}.{cls.__qualname__}"


class LocalOptimizerClass:
    """``cls(params, *by_position, **options)``, as a rule. With ``trusted`` it is taken though it is not elementwise.

    What it keeps may depend on which options are on (momentum), so each set of these is tried once, when a
    param group first has it, in each dtype of ``tried``.
    """

    def __init__(
        self,
        cls: Any,
        options: Mapping[str, Any],
        trusted: bool,
        has_masters: bool,
        by_position: Sequence[Any] = (),
    ) -> None:
        self.cls = cls
        self.options = dict(options)
        self.by_position = list(by_position)
        self.trusted = trusted
        self.has_masters = has_masters
        self.defaults: dict[str, Any] = {}
        self.states: list[StateSpec] = []
        self.numbers: list[NumberSpec] = []
        self.tried: dict[tuple[torch.dtype, torch.device], None] = {}
        self.known: dict[Pattern, Kinds] = {}

    @property
    def name(self) -> str:
        return full_name(self.cls)

    def rules(self) -> Rules:
        """Raises TypeError for what is no optimizer class, ValueError for one that can't be sharded, and what the class
        raises for its options."""
        self._check_class()
        self.options |= self._name_options()
        made = self.make([{"params": [nn.Parameter(torch.zeros(2, 3, device="cpu"))]}])
        of_group = {key: value for key, value in made.param_groups[0].items() if key != "params"}
        self.defaults = {**made.defaults, **of_group}
        if RULE in self.defaults:
            raise ValueError(f"{self.name} has an option {RULE!r}, which in zerox's param groups names a rule")
        rule = LocalOptimizerRule(
            name=self.name,
            states=self.states,
            defaults=self.defaults,
            # torch adds flags from version to version, and fills them in where an old state lacks them.
            needed_options=tuple(k for k, v in self.defaults.items() if not (v is None or isinstance(v, bool))),
            columns=(),
            check=self.learn,
            torch_class=lambda group: self.name,
            keeps_step=False,  # or under some options only
            numbers=self.numbers,
            optimizer_class=self,
        )
        return Rules(rule, {rule.name: rule})

    def make(self, groups: Sequence[Mapping[str, Any]]) -> torch.optim.Optimizer:
        made: torch.optim.Optimizer = self.cls([dict(group) for group in groups], **self.options)
        return made

    def learn(self, group: Mapping[str, Any]) -> None:
        """Tries the options of a param group, in the dtypes and on the devices of its parameters.

        Raises ValueError for a class that can't be sharded under these.
        """
        refuse_flags(group)
        places = {(self.dtype_of(param), _on_host_if_meta(param.device)): None for param in group["params"]}
        if not places.keys() <= self.tried.keys():
            self.tried |= places
            self.known = {}  # what is known was tried elsewhere only; the specs that it gave stay
        self.kinds(group)

    def dtype_of(self, param: Tensor) -> torch.dtype:
        """The dtype in which the class works on a parameter: 16-bit ones have masters, or none has."""
        return torch.float32 if self.has_masters and param.itemsize == 2 else param.dtype

    def kinds(self, group: Mapping[str, Any]) -> Kinds:
        """What the class keeps under the options of a group, which may lack some. Raises as learn()."""
        pattern = self._pattern(group)
        found = self.known.get(pattern)
        if found is None:
            options = {**self.defaults, **options_of(group)}
            found = self._merge([self._probe(options, *place) for place in self.tried or (USUAL,)])
            self._grow(found)
            self.known[pattern] = found
        return found

    def knows(self, group: Mapping[str, Any]) -> bool:
        return self._pattern(group) in self.known

    def _pattern(self, group: Mapping[str, Any]) -> Pattern:
        """Which options are on. Their numbers don't matter, nor does lr: it is tried as if it were on."""
        own = tuple(_kind(group.get(key, value)) for key, value in self.defaults.items() if key not in LR)
        more = (key for key in group if key not in self.defaults and key not in NOT_OPTIONS and key not in LR)
        return own, tuple((key, _kind(group[key])) for key in more)

    @property
    def step(self) -> NumberSpec | None:
        return next((kinds.step for kinds in self.known.values() if kinds.step is not None), None)

    def _check_class(self) -> None:
        cls = self.cls
        if not (isinstance(cls, type) and issubclass(cls, torch.optim.Optimizer)):
            raise TypeError(
                f"optimizer_class must be a class of torch.optim.Optimizer's kind, got {cls!r}: give the class, and "
                "its options as keywords"
            )
        if any(base.__module__.partition(".")[0] == "zerox" for base in cls.__mro__):
            raise ValueError(f"optimizer_class must not be {cls.__name__}, which shards by itself: use it as it is")
        for refused, why in REFUSED.items():
            if issubclass(cls, refused):
                raise ValueError(f"{self.name} can't be sharded: {why}. {WAY_OUT}")
        for base in cls.__mro__:
            if (name := full_name(base)) in OF_RANKS:
                raise ValueError(f"{self.name} can't be sharded: {OF_RANKS[name]}")

    def _name_options(self) -> dict[str, Any]:
        """What came by position, by the names that the class has for it. TypeError as Python raises it."""
        given, self.by_position = self.by_position, []
        if not given:
            return {}
        try:
            known = list(inspect.signature(self.cls).parameters.values())[1:]
        except (TypeError, ValueError):  # it has none that Python can tell
            known = []
        names = [each.name for each in known if each.kind is inspect.Parameter.POSITIONAL_OR_KEYWORD]
        if len(given) > len(names):
            raise TypeError(
                f"{self.name} takes {', '.join(names) or 'nothing'} by position behind its parameters, and got "
                f"{len(given)} more: pass its options as keywords"
            )
        if twice := [name for name in names[: len(given)] if name in self.options]:
            raise TypeError(f"{self.name} got multiple values for argument {twice[0]!r}")
        return dict(zip(names, given, strict=False))

    def _probe(self, options: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Kinds:
        chosen = {key: _for_probe(key, value) for key, value in options.items()}

        def make(params: list[Tensor]) -> torch.optim.Optimizer:
            return self.make([{**chosen, "params": params}])

        if self.trusted:
            try:
                return probe(make, dtype, device, compare=True)
            except Exception as error:  # also what it raises for whole tensors, which it will not get
                refused = error
        try:
            found = probe(make, dtype, device, compare=not self.trusted)
            if self.trusted:
                self._warn(refused)
            return found
        except NotElementwise as error:
            raise ValueError(f"{self.name} can't be sharded: it {error}. {self._way_out(error)}") from None
        except Exception as error:
            raise ValueError(
                f"{self.name} can't be sharded: it raised {type(error).__name__} for small tensors of zerox's own, "
                f"1-D as a rank's piece of any parameter and 2-D: {str(error).rstrip('.')}. {WAY_OUT}"
            ) from error

    def _warn(self, refused: Exception) -> None:
        if self.name not in _warned:
            _warned.add(self.name)
            said = (
                str(refused) if isinstance(refused, NotElementwise) else f"raised {type(refused).__name__}: {refused}"
            )
            warnings.warn(
                f"zerox: {self.name} {said}. With elementwise=True it is taken all the same, and its results depend on "
                "the number of ranks and on bucket_cap_mb, which cut the tensors",
                stacklevel=2,
            )

    def _way_out(self, error: NotElementwise) -> str:
        if "is not elementwise" not in str(error):
            return WAY_OUT
        return f"{WAY_OUT}, or pass elementwise=True if the difference is one that you accept"

    def _merge(self, found: Sequence[Kinds]) -> Kinds:
        """Of several dtypes of parameters: state in the parameter's dtype in each, or in one dtype in all."""
        first, places = found[0], list(self.tried or (USUAL,))
        states = []
        for spec in first.states:
            specs = [other for kinds in found for other in kinds.states if other.key == spec.key]
            if len(specs) == len(found) and all(other.form is None for other in specs):
                states.append(spec)
                continue
            forms = {other.form or _form_of(dtype) for other, (dtype, _) in zip(specs, places, strict=False)}
            if len(specs) < len(found) or len(forms) > 1:
                raise ValueError(
                    f"{self.name} keeps {spec.key!r} otherwise for some of the dtypes "
                    f"{sorted({str(dtype) for dtype, _ in places})}. Give it parameters of one dtype"
                )
            states.append(replace(spec, form=forms.pop()))
        return replace(first, states=tuple(states))

    def _grow(self, kinds: Kinds) -> None:
        """All ranks learn the same in the same order, so all have the same lists."""
        known: list[StateSpec | NumberSpec] = [*self.states, *self.numbers]
        found: list[StateSpec | NumberSpec] = [*kinds.states, *kinds.numbers]
        forms = {spec.key: spec for spec in known}
        for spec in found:
            if forms.setdefault(spec.key, spec) != spec:
                raise ValueError(f"{self.name} keeps {spec.key!r} in another form for other parameters or options")
        self.states += [spec for spec in kinds.states if spec not in self.states]
        self.numbers += [spec for spec in kinds.numbers if spec not in self.numbers]


@dataclass(frozen=True, kw_only=True)
class LocalOptimizerRule(Rule):
    """The rule of a :class:`LocalOptimizerClass`. Its ``states`` and ``numbers`` grow as the class is tried."""

    optimizer_class: LocalOptimizerClass

    @property
    def on_host(self) -> bool:
        return True

    @property
    def step(self) -> NumberSpec:
        return self.optimizer_class.step or STEP

    def is_wanted(self, spec: StateSpec | NumberSpec, group: Mapping[str, Any]) -> bool:
        return spec.key in self.optimizer_class.kinds(group).keys

    def late(self, group: Mapping[str, Any]) -> list[StateSpec]:
        wanted = self.optimizer_class.kinds(group).keys
        return [spec for spec in self.states if spec.key in wanted]

    def knows(self, group: Mapping[str, Any]) -> bool:
        return self.optimizer_class.knows(group)

    def starts_itself(self, key: str) -> bool:
        having = [kinds for kinds in self.optimizer_class.known.values() if key in kinds.keys]
        return bool(having) and all(key not in kinds.expected for kinds in having)

    def has_torch_class(self, group: Mapping[str, Any]) -> bool:
        return True

    def torch_optimizer(self, group: Mapping[str, Any], params: Sequence[Tensor]) -> torch.optim.Optimizer:
        return self.optimizer_class.make([{"params": list(params)}])

    def check_loaded(self, group: Mapping[str, Any]) -> None:
        refuse_flags(group)
        self.optimizer_class.kinds(group)


def _kind(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float)):
        return bool(value)
    if isinstance(value, (list, tuple)):
        return tuple(map(_kind, value))
    return value if isinstance(value, str) else type(value).__name__


def _form_of(dtype: torch.dtype) -> Form:
    return Form(str(dtype).removeprefix("torch."), dtype.itemsize)


def _for_probe(key: str, value: Any) -> Any:
    if isinstance(value, Tensor):
        value = value.detach().clone()
        return value.clamp_(min=LEAST_LR) if key == "lr" else value
    if key == "lr" and isinstance(value, (int, float)):
        return max(float(value), LEAST_LR)
    return list(value) if isinstance(value, list) else value


def _on_host_if_meta(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def refuse_flags(group: Mapping[str, Any]) -> None:
    """ValueError for flags of torch's classes that can't hold where zerox updates."""
    combinations.check({"capturable": {str(bool(group.get("capturable")))}, "optimizer": {SHARDED}})
    if group.get("differentiable"):
        raise ValueError("differentiable=True: zerox updates parameters below autograd; use the class itself for that")
