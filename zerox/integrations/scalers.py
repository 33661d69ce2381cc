"""Loss scalers that frameworks make, which must find inf and NaN on all ranks."""

from __future__ import annotations

import torch

from zerox.scaler import GradScaler

OF_TORCH = (torch.amp.GradScaler, torch.cuda.amp.GradScaler, torch.cpu.amp.grad_scaler.GradScaler)


def takes_all_ranks(scaler: object) -> bool:
    """Makes a scaler of torch's a zerox.GradScaler, in place. False for one of another kind; None is no scaler."""
    if type(scaler) in OF_TORCH:
        scaler.__class__ = GradScaler  # it has methods only
    return scaler is None or isinstance(scaler, GradScaler)
