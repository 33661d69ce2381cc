"""What a checkpoint has of a zerox.Sparsity beside the masks, which are in the optimizer's state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from zerox.checkpoint.manifest import CheckpointError
from zerox.engine import Engine

SPARSITY = "sparsity"
MASKS = "_mask"  # behind a weight's name: that is what torch.nn.utils.prune calls its buffers


def masks_of(optimizer: Engine) -> dict[str, Any]:
    sparsity = optimizer.inside.sparsity
    return {} if sparsity is None else {SPARSITY: sparsity.state_dict()}


def check_masks(optimizer: Engine, host: Mapping[str, Any]) -> None:
    """CheckpointError if masks would be lost, or are of another Sparsity."""
    saved, live = host.get(SPARSITY), optimizer.inside.sparsity
    if saved is not None and live is None:
        raise CheckpointError(
            f"the checkpoint has masks of {constructor_call(saved['targets'])}: build one before loading. "
            "(Its remove() afterwards lets the zeros train)"
        )
    if saved is None and live is not None:
        raise CheckpointError("the checkpoint has no masks: load it first, and build the zerox.Sparsity then")
    if live is not None and saved is not None and (why := live.misfit(saved)):
        raise CheckpointError(why)


def constructor_call(targets: Mapping[str, float | None]) -> str:
    """The call that makes a Sparsity of these, without what else there is to say."""
    if None in targets.values():
        return f"zerox.Sparsity.from_zeros(optimizer, {list(targets)})"
    return f"zerox.Sparsity(optimizer, {targets})"


def take_masks(optimizer: Engine, host: Mapping[str, Any]) -> None:
    """Goes on with the schedule where it was; the masks themselves are loaded."""
    if (sparsity := optimizer.inside.sparsity) is not None:
        sparsity.load_state_dict(host[SPARSITY])
