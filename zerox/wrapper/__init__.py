"""torch's DistributedDataParallel, for modules whose gradients optimizers of zerox average."""

from zerox.wrapper.distributed_data_parallel import DistributedDataParallel

__all__ = ["DistributedDataParallel"]
