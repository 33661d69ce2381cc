"""The gather of updated parameters hidden under the next forward: hooks that wait where operators can't.

Operators and compiled code wait for what they read (csrc/params/read_guard.h). Kernels that are launched
without an operator (Triton's, other libraries') don't, so a module's forward waits for the module's own parameters, and
raises if they don't arrive.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from zerox import _torch
from zerox.memory.bucket import Bucket
from zerox.params.compiled_regions import run_eagerly
from zerox.params.params import ParamGather

NOTHING_TO_HIDE = (
    "zerox: with stage=3 no gather follows step(), and overlap_gather() has nothing to hide: parameters are fetched "
    "when they are read"
)


class GatherOverlap:
    """Hooks on every module of ``model``, from construction until this object goes."""

    def __init__(self, gather: ParamGather, buckets: Sequence[Bucket], model: nn.Module) -> None:
        _torch.check_regions()
        _keep_hook_from_dynamo()
        self.gather = gather
        self.buckets = buckets  # the optimizer's own list, which grows
        self.bucket_of: dict[int, int] = {}  # by id of the parameter
        handles = [handle for module in model.modules() for handle in self._install(module)]
        weakref.finalize(self, _remove, handles).atexit = False
        self.learn_buckets()

    def learn_buckets(self) -> None:
        """Call this when there are new ones."""
        self.bucket_of = {id(p): index for index, bucket in enumerate(self.buckets) for p in bucket.buffer.params}

    def wait_for(self, params: Iterable[nn.Parameter | None]) -> None:
        if self.gather.hidden:
            self.gather.wait_for([self.bucket_of[id(p)] for p in params if id(p) in self.bucket_of])

    def wait_for_all(self) -> None:
        self.gather.wait_for(range(len(self.buckets)))

    def _install(self, module: nn.Module) -> Iterator[RemovableHandle]:
        whole = BeforeStateDict(self)
        yield module.register_state_dict_pre_hook(whole)
        yield module.register_load_state_dict_pre_hook(whole)
        yield module.register_forward_pre_hook(BeforeForward(self), prepend=True)  # ahead of hooks that read


class ModuleHook:
    """A hook of one module. A module that is copied or saved keeps it, and nothing of the optimizer."""

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
    def __call__(self, module: nn.Module, _: Any) -> None:
        if torch.compiler.is_compiling():  # the compiled code waits by itself
            return
        overlap = self.to_overlap()
        if overlap is not None:
            overlap.wait_for(module.parameters() if _is_graphed(module) else _torch.own_params_of(module).values())


@functools.cache
def _keep_hook_from_dynamo() -> None:
    BeforeForward.__call__ = run_eagerly(BeforeForward.__call__)  # type: ignore[method-assign]


def _nobody() -> None:
    return None


def _is_graphed(module: nn.Module) -> bool:
    """Whether torch.cuda.make_graphed_callables() put the replay of a CUDA graph where the forward was."""
    forward = module.__dict__.get("forward")
    return forward is not None and "make_graphed_callables" in getattr(forward, "__qualname__", "")


def _remove(handles: Iterable[RemovableHandle]) -> None:
    for handle in handles:
        handle.remove()
