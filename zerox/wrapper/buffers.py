"""When a forward hands out rank 0's buffers, and which: as in torch's DistributedDataParallel."""

from __future__ import annotations

import torch.distributed as dist
from torch import Tensor, nn

from zerox.wrapper.values import broadcast, named_buffers_of


class Buffers:
    module: nn.Module
    process_group: dist.ProcessGroup | None
    parameters_to_ignore: set[str]
    forward_sync_buffers: bool
    require_forward_param_sync: bool  # False after a forward whose gradients are not sent
    named_module_buffers: dict[str, Tensor]  # as the last hand-out found them, since modules assign others

    @property
    def modules_buffers(self) -> list[Tensor]:
        return list(self.named_module_buffers.values())

    @property
    def broadcast_buffers(self) -> bool:
        """torch's older name."""
        return self.forward_sync_buffers

    @broadcast_buffers.setter
    def broadcast_buffers(self, value: bool) -> None:
        self.forward_sync_buffers = value

    def will_sync_module_buffers(self) -> bool:
        """Whether the next forward hands out buffers."""
        return self.require_forward_param_sync and self.forward_sync_buffers and bool(self.named_module_buffers)

    def _share_buffers(self, in_forward: bool, at_first: bool) -> dict[str, Tensor]:
        """Returns those that the constructor hands out."""
        self.forward_sync_buffers = in_forward
        self._find_buffers()
        return self.named_module_buffers if at_first else {}

    def _find_buffers(self) -> None:
        self.named_module_buffers = named_buffers_of(self.module, self.parameters_to_ignore)

    def _hand_out_buffers(self, root: int = 0) -> None:
        """Those of rank ``root``. Collective."""
        self._find_buffers()
        name = type(self.module).__name__
        try:
            broadcast(self.modules_buffers, self.process_group, f"buffers of {name}", root)
        except RuntimeError as error:
            raise RuntimeError(
                f"zerox: rank 0's buffers of {name} did not come to all ranks in DistributedDataParallel's forward, "
                "which all ranks call. A rank that evaluates alone calls the module itself: ddp.module(x), or passes "
                f"broadcast_buffers=False: {error}"
            ) from error
