"""Each rank writes its part of a checkpoint, as torch.distributed.checkpoint (DCP) plans it.

DCP's own save() agrees on the plan over the user's group, where a rank that dies may cost the others the group's whole
timeout. Here its planner and its writer's interface are called in the same order, and ranks communicate through
Everyone.
"""

from __future__ import annotations

from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.checkpoint.storage import WriteResult

from zerox.checkpoint.everyone import Everyone
from zerox.checkpoint.writer import CheckpointWriter


def write_parts(tensors: dict[str, Tensor], writer: CheckpointWriter, ranks: Everyone, failure: str) -> None:
    """Every part and DCP's metadata are on the disk afterwards. Collective. Raises CheckpointError."""
    planner = DefaultSavePlanner()
    first = ranks.rank == 0
    own, metadata = SavePlan([]), Metadata({})
    results: list[WriteResult] = []
    with ranks.failing_together(failure):
        planner.set_up_planner(tensors, writer.storage_meta(), is_coordinator=first)
        writer.set_up_storage_writer(first)
        own = writer.prepare_local_plan(planner.create_local_plan())
    everyones = ranks.gather(own, failure)
    with ranks.failing_together(failure):
        plans, metadata = planner.create_global_plan(everyones)  # the same on all ranks: none has to be sent
        own = planner.finish_plan(writer.prepare_global_plan(plans)[ranks.rank])
        results = writer.write_data(own, planner).wait()
    written = ranks.gather(results, failure)
    with ranks.failing_together(failure):
        if first:
            writer.finish(metadata, written)
