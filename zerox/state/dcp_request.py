"""The form in which torch.distributed.checkpoint (DCP) wants state_dict()."""

from __future__ import annotations

import sys
from enum import Enum
from types import FrameType

MODULE = "torch.distributed.checkpoint.state_dict"
GETTER = "_get_optim_state_dict"
LOADER = "_load_optim_state_dict"


class Request(Enum):
    """``WHOLE`` tensors on all ranks or on rank 0, ``SEGMENTS``, or segments to be ``FILLED_FROM_WHOLE`` tensors."""

    WHOLE = "whole"
    WHOLE_ON_RANK_0 = "whole on rank 0"
    SEGMENTS = "segments"
    FILLED_FROM_WHOLE = "filled from whole"


def dcp_request() -> Request | None:
    """None if the caller of state_dict() is not DCP.

    DCP does not pass its StateDictOptions to an optimizer, and gathers by itself only the tensors that it knows:
    DTensor and ShardedTensor. A flat segment of a tensor is neither, and DCP would return one rank's segments as the
    whole. So the options are read from its stack. RuntimeError if another version of torch has them elsewhere.
    """
    getter = _caller(sys._getframe(1), GETTER)
    if getter is None:
        return None
    if _caller(getter, LOADER) is not None:  # the one place that gets state in order to set it
        return Request.FILLED_FROM_WHOLE
    try:
        options = getter.f_locals["info"]
        if not options.full_state_dict:
            return Request.SEGMENTS
        return Request.WHOLE_ON_RANK_0 if options.cpu_offload else Request.WHOLE
    except (KeyError, AttributeError):
        raise RuntimeError(
            "zerox: where this version of torch keeps StateDictOptions is not known, and segments might be taken for "
            "whole tensors. Use zerox.save() or optimizer.full_state_dict()"
        ) from None


def _caller(frame: FrameType | None, function: str) -> FrameType | None:
    while frame is not None and (frame.f_globals.get("__name__"), frame.f_code.co_name) != (MODULE, function):
        frame = frame.f_back
    return frame
