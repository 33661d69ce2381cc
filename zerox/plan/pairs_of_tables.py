"""The rows of zerox/plan/combinations.py for tables: what does not go with ``sparse=True`` in a param group."""

from __future__ import annotations

from zerox.plan.choices import A_SUBGROUP, SHARDED, SUBGROUP, TABLES, some
from zerox.plan.rulings import BATCHES, ON_GPUS, But, Refused, Row

OF_TABLES = (
    Row(
        some("parameters", "float16"),
        some(TABLES, "True"),
        But(
            "torch can't add two sparse gradients in float16: for several backwards set accumulate_dtype=torch.float32"
        ),
    ),
    Row(
        some("optimizer", SHARDED),
        some(TABLES, "True"),
        Refused("its class knows no rows", "The fused optimizers do"),
    ),
    Row(
        some("reduce_dtype", "torch.bfloat16", "torch.float16"),
        some(TABLES, "True"),
        Refused("rows travel in float32", "Give tables an optimizer of their own"),
    ),
    Row(
        some("capturable", "True"),
        some(TABLES, "True"),
        Refused("a CUDA graph does not know how many rows there are", "Leave it at False"),
    ),
    Row(
        ON_GPUS,
        some(TABLES, "True"),
        But("with stage=3 a lookup takes memory for all of its table while it runs"),
    ),
    Row(
        some(SUBGROUP, A_SUBGROUP),
        some(TABLES, "True"),
        But(
            "in one param group both are refused: rows are dealt among all of the optimizer's ranks. Give tables that "
            "fewer ranks have an optimizer of their own"
        ),
    ),
    Row(
        some("process_group", "a 2-D mesh"),
        some(TABLES, "True"),
        But("stage=3 is refused: parameters are sharded over one axis there, and rows over both. Use stage=2"),
    ),
    Row(
        some("join", "inside"),
        some(TABLES, "True"),
        Refused("a rank that follows has no rows", BATCHES, NotImplementedError),
    ),
    Row(
        some("amsgrad", "True"),
        some(TABLES, "True"),
        Refused("rows have Adam's two moments only", "Leave amsgrad out in this param group"),
    ),
)
