"""zerox: sharded fused Adam for PyTorch."""

try:
    from zerox import _ext  # noqa: F401  the extension first: it says what is wrong with an installation
    from zerox.estimate import MemoryBytes, estimate
    from zerox.optimizer import FusedShardedAdam
    from zerox.scaler import GradScaler
except ImportError as error:
    # `python -m zerox env` must still run, to report this; whoever wants a name from here gets the reason.
    _reason = str(error)

    def __getattr__(name: str) -> object:
        if name.startswith("__"):
            raise AttributeError(name)
        raise ImportError(_reason)


__all__ = ["FusedShardedAdam", "GradScaler", "MemoryBytes", "estimate"]
