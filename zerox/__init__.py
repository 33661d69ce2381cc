"""zerox: sharded fused optimizers for PyTorch."""

from typing import TYPE_CHECKING

_broken = ""
_cause: Exception | None = None
try:
    from zerox import _ext  # noqa: F401  the extension first: its error says what is wrong with the installation
    from zerox.estimate import estimate
    from zerox.memory.row_table import sparse_params
    from zerox.optimizer.clip_together import clip_grad_norm_
    from zerox.optimizer.join import join
    from zerox.optimizer.memory_bytes import MemoryBytes
    from zerox.optimizer.muon_groups import muon_groups
    from zerox.optimizers import (
        FusedShardedAdam,
        FusedShardedLion,
        FusedShardedMuon,
        FusedShardedSGD,
        ShardedOptimizer,
    )
    from zerox.scaler import GradScaler
    from zerox.sparsity.schedules import cubic, rigl, set_
    from zerox.sparsity.sparsity import Sparsity
    from zerox.wrapper import DistributedDataParallel
except Exception as error:
    # `python -m zerox env` must still run and report this; every name below raises the reason.
    _broken = str(error) if isinstance(error, ImportError) else f"zerox: {type(error).__name__}: {error}"
    _cause = error
if TYPE_CHECKING:
    from zerox.checkpoint import CheckpointError, latest, load, load_weights, remove, save, save_weights

__all__ = [
    "CheckpointError",
    "DistributedDataParallel",
    "FusedShardedAdam",
    "FusedShardedLion",
    "FusedShardedMuon",
    "FusedShardedSGD",
    "GradScaler",
    "MemoryBytes",
    "ShardedOptimizer",
    "Sparsity",
    "clip_grad_norm_",
    "cubic",
    "estimate",
    "join",
    "latest",
    "load",
    "load_weights",
    "muon_groups",
    "remove",
    "rigl",
    "save",
    "save_weights",
    "set_",
    "sparse_params",
]


def __getattr__(name: str) -> object:
    if name == "__version__":  # on first use: reading an installation's metadata takes milliseconds
        return globals().setdefault(name, _version())
    if _broken and not name.startswith("__"):
        raise ImportError(_broken) from (None if isinstance(_cause, ImportError) else _cause)
    if name in __all__:  # zerox.checkpoint's: torch.distributed.checkpoint takes a second to import
        from zerox import checkpoint

        return getattr(checkpoint, name)
    raise AttributeError(f"module 'zerox' has no attribute '{name}'")


def _version() -> str:
    """That of pyproject.toml, as pip has noted it, or the build if these are sources that nobody has installed."""
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version("zerox")
    except PackageNotFoundError:
        try:
            from zerox._build_info import BUILD_INFO  # not by way of _ext, which wants an extension that loads
        except ImportError:
            raise AttributeError(f"zerox.__version__ is not known, zerox is not installed: {_broken}") from None
        return str(BUILD_INFO["version"])
