"""Names of torch's DistributedDataParallel that are refused, each with the way out."""

from __future__ import annotations

from typing import Any, TypeVar

from torch.nn.parallel import DistributedDataParallel as OfTorch

T = TypeVar("T", bound=type)

REFUSED = {
    "_get_ddp_logging_data": "torch's logger counts what its reducer does: profile a step, see docs/usage.md",
    "_register_buffer_comm_hook": "buffers are rank 0's: pass forward_sync_buffers=False, and share them by calls of "
    "your own",
    "_register_fused_optim": "step() of an optimizer of zerox is one kernel already: build one",
    "_set_sparse_metadata": "ranks tell each other which rows of a sparse gradient they have: leave it out",
    "_update_process_group": "ranks are fixed: destroy the groups and build model and optimizer again",
}
# What has nothing to act on.
WITHOUT_EFFECT = (
    "_check_reducer_finalized",
    "_set_ddp_runtime_logging_sample_rate",
    "_set_ddp_sink_clone",
)


def refuses(cls: T) -> T:
    """Has a class raise NotImplementedError for these, and do nothing for those."""
    for name, way_out in REFUSED.items():
        setattr(cls, name, _refusing(name, way_out))
    for name in WITHOUT_EFFECT:
        setattr(cls, name, _doing_nothing)
    return cls


def _refusing(name: str, way_out: str) -> Any:
    def refuse(self: OfTorch, *_: Any, **__: Any) -> None:
        raise NotImplementedError(f"zerox.DistributedDataParallel has no {name}(): {way_out}")

    return refuse


def _doing_nothing(self: OfTorch, *_: Any, **__: Any) -> None:
    """torch's acts on its reducer."""
