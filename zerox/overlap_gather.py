"""The gather of updated parameters hidden under the next forward: hooks that wait where operators can't.

Operators wait for what they read (csrc/bucket_manager/read_guard.h). A hook before each module's forward does what
they can't: it waits for the module's own parameters on any thread, raises where they don't arrive, and waits for all
that is inside a compiled module. What is compiled without our knowing ends the overlap, with a warning.
"""

from __future__ import annotations

import itertools
import sys
import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves
from torch.utils.hooks import RemovableHandle

from zerox.bucket import Bucket
from zerox.params import ParamGather


class GatherOverlap:
    """Hooks on every module of ``model``, from construction until this object goes."""

    def __init__(self, gather: ParamGather, buckets: Sequence[Bucket], model: nn.Module) -> None:
        self.gather = gather
        self.buckets = buckets  # the optimizer's own list, which grows
        self.bucket_of: dict[int, int] = {}  # by id of the parameter
        self.trained = False  # since the last step a module ran with gradients
        self.refused = False
        self.number = next(_numbers)
        _overlaps[self.number] = self
        torch.compiler.assume_constant_result(_note_traced)
        inside = {m for compiled in filter(_is_compiled, model.modules()) for m in compiled.modules() if m != compiled}
        handles = [handle for module in model.modules() for handle in self._install(module, module in inside)]
        weakref.finalize(self, _remove, handles).atexit = False
        self.learn_buckets()

    def learn_buckets(self) -> None:
        """There are new ones."""
        self.bucket_of = {id(p): index for index, bucket in enumerate(self.buckets) for p in bucket.buffer.params}

    def ready(self) -> bool:
        """Whether this step() may leave its gathers to the next forward; asked once."""
        ready, self.trained = self.trained and not self.refused, False
        return ready

    def before_forward(self, read: Iterable[Tensor]) -> None:
        self.trained = self.trained or torch.is_grad_enabled()
        if self.gather.hidden:
            self.gather.wait_for([self.bucket_of[id(p)] for p in read if id(p) in self.bucket_of])

    def wait_for_all(self) -> None:
        self.gather.wait_for(range(len(self.buckets)))

    def refuse(self) -> None:
        """A module is being compiled that was not when its hook was made."""
        self.wait_for_all()
        if not self.refused:
            self.refused = True
            warnings.warn(
                "zerox: something was compiled that runs modules of the model given to overlap_gather(), and was not "
                "a compiled module then. What it reads can't be seen, so step() waits for all parameters from now on. "
                "Compile modules (module.compile() or torch.compile(module)), then call overlap_gather(model) again",
                stacklevel=2,
            )

    def _install(self, module: nn.Module, inside: bool) -> Iterator[RemovableHandle]:
        whole = BeforeStateDict(self)
        yield module.register_state_dict_pre_hook(whole)
        yield module.register_load_state_dict_pre_hook(whole)
        hook: Callable[..., None] = BeforeForward(self, _is_compiled(module), inside)
        if module._compiled_call_impl is not None:
            hook = torch.compiler.disable(hook)  # it would be compiled with the module
        # Ahead of others, which may read.
        yield module.register_forward_pre_hook(hook, prepend=True, with_kwargs=True)


class ModuleHook:
    """Of one module. A module that is copied or saved keeps it, and nothing of the optimizer."""

    def __init__(self, overlap: GatherOverlap) -> None:
        self.to_overlap: Callable[[], GatherOverlap | None] = weakref.ref(overlap)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "to_overlap": _nobody}


class BeforeStateDict(ModuleHook):
    """Before state_dict() reads, and load_state_dict() writes."""

    def __call__(self, *_: Any) -> None:
        overlap = self.to_overlap()
        if overlap is not None:
            overlap.wait_for_all()


class BeforeForward(ModuleHook):
    """``compiled``: the module is; ``inside``: one around it is."""

    def __init__(self, overlap: GatherOverlap, compiled: bool, inside: bool) -> None:
        super().__init__(overlap)
        self.number = overlap.number
        self.compiled = compiled
        self.inside = inside

    def __call__(self, module: nn.Module, args: Any, kwargs: Any) -> None:
        if torch.compiler.is_compiling():
            if not self.inside:
                _note_traced(self.number)
            return
        overlap = self.to_overlap()
        if overlap is not None:
            overlap.before_forward(self._read_by(module, args, kwargs))

    def _read_by(self, module: nn.Module, args: Any, kwargs: Any) -> Iterator[Tensor]:
        if self.compiled or _is_graphed(module):  # and calls no operators to read
            yield from module.parameters()
            yield from (value for value in tree_leaves((args, kwargs)) if isinstance(value, Tensor))
        else:
            yield from (param for param in module._parameters.values() if param is not None)


def _nobody() -> None:
    return None


def _is_compiled(module: nn.Module) -> bool:
    compiler = sys.modules.get("torch._dynamo")  # what made one has imported it
    return module._compiled_call_impl is not None or (
        compiler is not None and isinstance(module, compiler.OptimizedModule)
    )


def _is_graphed(module: nn.Module) -> bool:
    """Whether torch.cuda.make_graphed_callables() put the replay of a CUDA graph where the forward was."""
    forward = module.__dict__.get("forward")
    return forward is not None and "make_graphed_callables" in getattr(forward, "__qualname__", "")


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()


# torch.compile takes numbers for constants, and would compile anew for each module whose hook had its own.
_numbers = itertools.count()
_overlaps: weakref.WeakValueDictionary[int, GatherOverlap] = weakref.WeakValueDictionary()


def _note_traced(number: int) -> None:
    """Runs while torch.compile traces a hook, as what it takes for a constant."""
    overlap = _overlaps.get(number)
    if overlap is not None:
        overlap.refuse()
