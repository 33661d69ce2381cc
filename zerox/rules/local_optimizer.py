"""An optimizer class of torch's kind as a rule: what it keeps is learned by running it on small tensors."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from zerox.plan import combinations
from zerox.plan.choices import SHARDED
from zerox.plan.form import Form
from zerox.plan.owners import WHOLE, cost_of_whole
from zerox.rules.of_groups import RULE, Rules
from zerox.rules.probe import Differs, Kinds, NotElementwise, probe, reason
from zerox.rules.rule import STEP, NumberSpec, Rule, StateSpec
from zerox.rules.samples import Samples, kind_of_option, option_for_probe, samples_of

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
WHAT_LIES_WHOLE = {"matrices": "parameters of two or more dimensions", "all": "all parameters"}
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
    ``whole``: which parameters lie whole on one rank, as WHOLE has it.

    What it keeps may depend on which options are on (momentum), and on whether tensors are matrices, so each set of
    these is tried once, when a param group first has it, in each dtype of ``tried``.
    """

    def __init__(
        self,
        cls: Any,
        options: Mapping[str, Any],
        trusted: bool,
        has_masters: bool,
        by_position: Sequence[Any] = (),
        whole: str = WHOLE[0],
    ) -> None:
        self.cls = cls
        self.options = dict(options)
        self.by_position = list(by_position)
        self.trusted = trusted
        self.has_masters = has_masters
        self.whole = whole
        self.defaults: dict[str, Any] = {}
        self.states: list[StateSpec] = []
        self.numbers: list[NumberSpec] = []
        self.tried: dict[tuple[torch.dtype, torch.device], None] = {}
        self.known: dict[Pattern, Kinds] = {}
        self.kept: dict[tuple[str, int], bool] = {}  # whether it keeps a key for parameters of so many dimensions

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
        """What the class keeps under the options of a group, which may lack some, for its parameters. Raises as
        learn()."""
        pattern = self._pattern(group)
        found = self.known.get(pattern)
        if found is None:
            found = self._merge([self._probe(group, *place) for place in self.tried or (USUAL,)])
            self._note_kept(group, found)
            self._grow(found)
            self.known[pattern] = found
        return found

    def lacks(self, spec: StateSpec, shape: Sequence[int]) -> bool:
        """Whether it keeps no such state for parameters of so many dimensions."""
        return self.kept.get((spec.key, len(shape))) is False

    def knows(self, group: Mapping[str, Any]) -> bool:
        return self._pattern(group) in self.known

    def least_dims(self, group: Mapping[str, Any]) -> int:
        """Of the tensors of this group that the class gets."""
        samples = self._samples(group, self.whole)
        return 1 if samples.cut else min(samples.dims)

    def _pattern(self, group: Mapping[str, Any]) -> Pattern:
        """Which options are on, and what is tried for the parameters. Numbers don't matter, nor does lr: it is tried as
        if it were on."""
        own = tuple(kind_of_option(group.get(key, value)) for key, value in self.defaults.items() if key not in LR)
        more = (key for key in group if key not in self.defaults and key not in NOT_OPTIONS and key not in LR)
        return self._samples(group, self.whole), own, tuple((key, kind_of_option(group[key])) for key in more)

    def _samples(self, group: Mapping[str, Any], whole: str) -> Samples:
        return samples_of(group.get("params", ()), whole)

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

    def _runner(
        self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device
    ) -> Callable[[Samples, bool], Kinds]:
        options = {**self.defaults, **options_of(group)}
        chosen = {key: option_for_probe(key, value) for key, value in options.items()}

        def make(params: list[Tensor]) -> torch.optim.Optimizer:
            return self.make([{**chosen, "params": params}])

        return lambda samples, compare: probe(make, samples, dtype, device, compare)

    def _note_kept(self, group: Mapping[str, Any], found: Kinds) -> None:
        """A class that keeps rows and columns of matrices keeps something else of vectors. Groups of both share
        buckets, so it is tried with both, also if this group has one only."""
        samples = self._samples(group, self.whole)
        self._note(samples, found)
        both = replace(samples, dims=tuple(sorted({1, 2, *samples.dims})))
        if both != samples and not samples.cut and any(spec.summed for spec in found.states):
            of_both = Kinds()
            with suppress(Exception):  # it may not take the others, which then come in no group
                of_both = self._runner(group, *USUAL)(both, False)
            self._note(both, of_both)

    def _note(self, samples: Samples, found: Kinds) -> None:
        """ValueError where it is otherwise than it was under other options: shards are laid out by then."""
        for spec in found.states:
            for dims in samples.dims:
                is_kept = dims not in found.lacking.get(spec.key, ())
                if self.kept.setdefault((spec.key, dims), is_kept) != is_kept:
                    raise ValueError(
                        f"{self.name} keeps {spec.key!r} for {dims}-D parameters under some options only: give each an "
                        "optimizer of its own"
                    )

    def _probe(self, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device) -> Kinds:
        run = self._runner(group, dtype, device)
        samples = self._samples(group, self.whole)
        if self.trusted:
            try:
                return run(samples, True)
            except Exception as error:  # also what it raises for whole tensors, which it will not get
                refused = error
        try:
            found = run(samples, not self.trusted)
            if self.trusted:
                self._warn(refused)
            return found
        except Exception as error:
            why = reason(error, f"small tensors of zerox's own, {samples}")
            way_out = self._way_out(error, group, lambda other: run(other, True))
            cause = None if isinstance(error, NotElementwise) else error
            raise ValueError(f"{self.name} can't be sharded: it {why}. {way_out}") from cause

    def _warn(self, refused: Exception) -> None:
        if self.name not in _warned:
            _warned.add(self.name)
            said = reason(refused, "small tensors of zerox's own")
            warnings.warn(
                f"zerox: {self.name} {said}. With elementwise=True it is taken all the same, and its results depend on "
                "the number of ranks and on bucket_cap_mb, which cut the tensors",
                stacklevel=2,
            )

    def _way_out(self, error: Exception, group: Mapping[str, Any], run: Callable[[Samples], Kinds]) -> str:
        """Another ``whole`` under which the class can be sharded, or what is wrong there too."""
        seen, why = {self._samples(group, self.whole)}, ""
        for whole in WHAT_LIES_WHOLE if self.whole != "all" else ():
            samples = self._samples(group, whole)
            if samples in seen or not samples.dims:
                continue
            seen.add(samples)
            try:
                run(samples)
            except Exception as other:  # as _probe()
                why = f"With whole={whole!r} it {reason(other, f'small tensors, {samples}')}. "
            else:
                return f"Pass whole={whole!r}: {WHAT_LIES_WHOLE[whole]} then lie whole on one rank each"
        alone = replace(self._samples(group, "matrices"), cut=())
        if alone.dims and alone not in seen:
            with suppress(Exception):
                run(alone)
                matrices = WHAT_LIES_WHOLE["matrices"]
                return f"{why}Give it only {matrices}, with whole='matrices', and the others to another optimizer"
        accepts = ", or pass elementwise=True if the difference is one that you accept"
        return f"{why}{WAY_OUT}{accepts if isinstance(error, Differs) else ''}"

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

    def shape_of(self, spec: StateSpec, shape: Sequence[int]) -> tuple[int, ...] | None:
        return None if self.optimizer_class.lacks(spec, shape) else super().shape_of(spec, shape)

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

    @property
    def has_owners(self) -> bool:
        return self.optimizer_class.whole != "none"

    def cost(self, shape: Sequence[int], group: Mapping[str, Any]) -> int | None:
        whole = self.optimizer_class.whole
        return super().cost(shape, group) if whole == "none" else cost_of_whole(whole, shape)

    def check_loaded(self, group: Mapping[str, Any]) -> None:
        refuse_flags(group)
        self.optimizer_class.kinds(group)


def _form_of(dtype: torch.dtype) -> Form:
    return Form(str(dtype).removeprefix("torch."), dtype.itemsize)


def _on_host_if_meta(device: torch.device) -> torch.device:
    return torch.device("cpu") if device.type == "meta" else device


def refuse_flags(group: Mapping[str, Any]) -> None:
    """ValueError for flags of torch's classes that can't hold where zerox updates."""
    combinations.check({"capturable": {str(bool(group.get("capturable")))}, "optimizer": {SHARDED}})
    if group.get("differentiable"):
        raise ValueError("differentiable=True: zerox updates parameters below autograd; use the class itself for that")
