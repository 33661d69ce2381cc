"""Checkpoints in logical form: each parameter by its name, state as the whole tensors that ranks have segments of."""

from zerox.checkpoint.manifest import CheckpointError
from zerox.checkpoint.place import remove
from zerox.checkpoint.store import latest, load, save

__all__ = ["CheckpointError", "latest", "load", "remove", "save"]
