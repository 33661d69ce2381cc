"""The rows of zerox/plan/combinations.py about matrices that lie whole on one rank."""

from __future__ import annotations

from zerox.plan.choices import A_SUBGROUP, DTENSORS, FUSED, LIE_AS, MASKS, SPARSITY, SUBGROUP, TABLES, some
from zerox.plan.rulings import ON_GPUS, Refused, Row, Untried

MUON = some("rule", '"muon"')
WHOLE = some("whole", '"matrices"', '"all"')
OF_MATRICES = (
    Row(
        MUON,
        some("maximize", "True"),
        Refused("torch.optim.Muon has no such option", "Negate the loss"),
    ),
    Row(
        MUON,
        some("capturable", "True"),
        Refused(
            "it asks on the host which matrices have gradients, and a CUDA graph asks nothing", "Leave it at False"
        ),
    ),
    Row(
        MUON,
        some(LIE_AS, DTENSORS),
        Refused("no rank has the whole matrix of one", "Give these parameters another rule", NotImplementedError),
    ),
    Row(
        MUON,
        some(MASKS, SPARSITY),
        Refused("what is orthogonal is not so with a mask", "Mask an optimizer of other rules", NotImplementedError),
    ),
    Row(
        MUON,
        some(TABLES, "True"),
        Refused("the rows of a table are updated by themselves", "Leave its group another rule"),
    ),
    Row(
        (*MUON, *WHOLE),
        some("exchange", '"native"'),
        Refused(
            "its ranks own unequal shares of a bucket, and the backend's own collectives move equal ones",
            'Pass exchange="direct", which is the default where parameters need it from the start',
        ),
    ),
    Row((*MUON, *WHOLE), ON_GPUS, Untried("on GPUs and over NCCL; a fake accelerator has run Muon")),
)
# Behind what is said of ShardedOptimizer, whose option it is.
OF_OTHER_CLASSES = (
    Row(
        WHOLE,
        (
            *some("optimizer", FUSED),
            *some("capturable", "True"),
            *some("rule", '"sgd"', '"lion"', '"muon"'),
            *some("state_dtype", "torch.bfloat16", '"8bit"'),
            *some("master_weights", '"remainder"'),
            *some("accumulate_dtype", "torch.float32"),
            *some(LIE_AS, DTENSORS),
            *some(SUBGROUP, A_SUBGROUP),
            *some(MASKS, SPARSITY),
            *some(TABLES, "True"),
        ),
        Refused("it is an option of ShardedOptimizer, which does not go with the other", "Leave one of them out"),
    ),
)
