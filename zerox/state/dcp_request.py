"""The form in which torch.distributed.checkpoint (DCP) wants state_dict()."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from enum import Enum
from types import FrameType

from zerox import _torch


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
    whole. So the options are read from its stack. ImportError or RuntimeError if another torch has them elsewhere.
    """
    frames = {frame.f_code.co_name: frame for frame in _of_dcp(sys._getframe(1))}
    if not frames:
        return None
    _torch.check_dcp()
    if _torch.GETTER not in frames:
        return None
    if _torch.LOADER in frames:  # the one place that gets state in order to set it
        return Request.FILLED_FROM_WHOLE
    try:
        options = frames[_torch.GETTER].f_locals[_torch.OPTIONS]
        if not options.full_state_dict:
            return Request.SEGMENTS
        return Request.WHOLE_ON_RANK_0 if options.cpu_offload else Request.WHOLE
    except (KeyError, AttributeError):
        raise RuntimeError(
            "zerox: where this version of torch keeps StateDictOptions is not known, and segments might be taken for "
            "whole tensors. Use zerox.save() or optimizer.full_state_dict()"
        ) from None


def is_asked_by_dcp() -> bool:
    """Whether DCP has called the caller of this function. To load flat state it asks an optimizer which keys it has."""
    return bool(sys._getframe(2).f_globals.get("__name__") == _torch.DCP)


def _of_dcp(frame: FrameType | None) -> Iterator[FrameType]:
    """The frames of its functions, from ``frame`` outwards."""
    while frame is not None:
        if frame.f_globals.get("__name__") == _torch.DCP:
            yield frame
        frame = frame.f_back
