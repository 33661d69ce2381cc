"""Communication hooks of torch's DistributedDataParallel: those that say what ``reduce_dtype`` says."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

from zerox.engine import Engine

OF_TORCH = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks"
DTYPES: dict[str, torch.dtype | None] = {
    "allreduce_hook": None,
    "fp16_compress_hook": torch.float16,
    "bf16_compress_hook": torch.bfloat16,
}
OF_BUILTINS = {"ALLREDUCE": "allreduce_hook", "FP16_COMPRESS": "fp16_compress_hook"}


def name_of(hook: Callable[..., Any]) -> str:
    """TypeError for what is none, NotImplementedError for any other hook."""
    if not callable(hook):
        raise TypeError(f"Communication hook must be callable, got {hook!r}")
    name = getattr(hook, "__name__", repr(hook))
    if getattr(hook, "__module__", "") != OF_TORCH or name not in DTYPES:
        raise NotImplementedError(
            f"zerox.DistributedDataParallel does not take the communication hook {name}: optimizers of zerox send "
            "gradients themselves, in the dtype that is their reduce_dtype"
        )
    return name


def check_sent_in(name: str, engines: Iterable[Engine]) -> None:
    """ValueError for an optimizer that sends gradients otherwise than the hook of this ``name``."""
    for engine in engines:
        found = engine.inside.grads.reduce_dtype
        if DTYPES[name] is not None and found != DTYPES[name]:
            raise ValueError(
                f"zerox.DistributedDataParallel: {name} was registered, and {type(engine).__name__} sends gradients "
                f"with reduce_dtype={found}: pass reduce_dtype={DTYPES[name]} to it"
            )
