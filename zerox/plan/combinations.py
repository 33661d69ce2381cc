"""Which options go together, as data: each pair of values works, is refused, or works with a **But**.

The constructor refuses from this table, `python -m zerox options` and docs/usage.md print it, and
tests/optimizer/test_combinations.py draws its pairs from it. A new option is a Choice in CHOICES (choices.py) and a Row
in ROWS for what does not simply work. The constructor needs no more; the tests fail until they can make each new value,
and until each new But is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Collection, Iterator, Mapping

from zerox.plan.choices import (
    A_SUBGROUP,
    CHOICES,
    DTENSORS,
    FIRST_VALUES,
    LIE_AS,
    MASKS,
    ON_META,
    SHARDED,
    SPARSITY,
    SUBGROUP,
    TABLES,
    Setting,
    some,
)
from zerox.plan.pairs_of_matrices import OF_MATRICES, OF_OTHER_CLASSES
from zerox.plan.pairs_of_tables import OF_TABLES
from zerox.plan.rulings import BATCHES, OF_STAGE_3, ON_GPUS, But, Refused, Row, Ruling, Untried

Chosen = Mapping[str, Collection[str]]  # values by option; several where parameters differ. A mapping has examples


ROWS = (
    Row(
        some("optimizer", SHARDED),
        some("capturable", "True"),
        Refused(
            "it asks on the host which gradients there are, and a CUDA graph asks nothing",
            "Leave it at False, or use FusedShardedAdam",
        ),
    ),
    Row(
        some("optimizer", SHARDED),
        some("rule", '"sgd"', '"lion"', '"muon"'),
        Refused("its class is the rule of all its param groups", "FusedShardedAdam takes groups of several rules"),
    ),
    Row(
        some("optimizer", SHARDED),
        some("state_dtype", "torch.bfloat16", '"8bit"'),
        Refused("the class decides how its state is stored", "FusedShardedAdam stores smaller moments"),
    ),
    Row(
        some("optimizer", SHARDED),
        some("master_weights", '"remainder"'),
        Refused(
            "torch's classes need their parameters' float32 values as tensors",
            'There master_weights may be "auto", "fp32" or None',
        ),
    ),
    Row(
        some("optimizer", SHARDED),
        some("accumulate_dtype", "torch.float32"),
        Refused("it has no such option", "Set grad_dtype of the parameters, which is the same"),
    ),
    Row(
        some("capturable", "True"),
        some("stage", "1"),
        Refused("p.grad has no lasting address there, and a CUDA graph reads where it read before", "Use stage=2"),
    ),
    Row(
        some("capturable", "True"),
        OF_STAGE_3,
        Refused("parameters are fetched when they are read, and a CUDA graph asks nobody", "Use stage=2"),
    ),
    *OF_TABLES,
    *OF_MATRICES,
    Row(
        some(MASKS, SPARSITY),
        some("optimizer", SHARDED),
        Refused("its class would see masked gradients and state", "Use FusedShardedAdam", NotImplementedError),
    ),
    Row(
        some(MASKS, SPARSITY),
        some("capturable", "True"),
        Refused("a replay of step() would go on with the masks that it was captured with", "Leave capturable at False"),
    ),
    Row(
        some(MASKS, SPARSITY),
        some("parameters", "float64"),
        Refused("magnitudes are compared as float32", "Name others"),
    ),
    Row(
        some(MASKS, SPARSITY),
        some(LIE_AS, DTENSORS),
        Refused("no one has tried both yet", "Give these parameters an optimizer of their own", NotImplementedError),
    ),
    Row(
        some(MASKS, SPARSITY),
        some("join", "inside"),
        Refused("a rank that follows can't change masks", BATCHES, NotImplementedError),
    ),
    Row(
        OF_STAGE_3,
        ON_GPUS,
        But("where a rank can't read its neighbours' GPU memory, buckets come through the host's, as fast as its bus"),
    ),
    Row(
        some("stage", "3"),
        some("overlap_gather", "called"),
        But("it warns that there is nothing to hide: parameters are fetched when they are read"),
    ),
    Row(
        some("stage", "1", "2"),
        some("resident_mb", "a number"),
        Refused("all parameters stay whole there", "Use stage=3, or leave resident_mb out"),
    ),
    Row(
        some("capturable", "True"),
        some("device", "cpu"),
        Refused("CUDA graphs hold the work of a GPU", "Move the model to the GPU before you build the optimizer"),
    ),
    Row(
        some("capturable", "True"),
        some("backend", "gloo"),
        But("step() raises where it is captured, since gloo works on the host. Use NCCL, or one rank"),
    ),
    Row(
        some("capturable", "True"),
        some("overlap_gather", "called"),
        But("a captured step() hides nothing: its graph ends with whole parameters"),
    ),
    Row(
        some("process_group", "a 2-D mesh"),
        some("capturable", "True"),
        Refused("no one has tried its two exchanges in a CUDA graph", "Leave capturable at False, or use a group"),
    ),
    Row(
        some("optimizer", SHARDED),
        (*some(LIE_AS, DTENSORS), *some(SUBGROUP, A_SUBGROUP)),
        Refused("it is not tried so yet", "Use FusedShardedAdam"),
    ),
    Row(
        some("capturable", "True"),
        some(LIE_AS, DTENSORS),
        Refused("Partial gradients are summed by the host", "Leave capturable at False"),
    ),
    Row(
        some("accumulate_dtype", "torch.float32"),
        some(LIE_AS, DTENSORS),
        Refused("torch adds up their gradients", "Leave accumulate_dtype out"),
    ),
    Row(
        some("join", "inside"),
        some(LIE_AS, DTENSORS),
        Refused("a rank that follows has no part in them yet", BATCHES, NotImplementedError),
    ),
    Row(
        OF_STAGE_3,
        some(SUBGROUP, A_SUBGROUP),
        Refused("parameters are sharded over all ranks there", "Use stage=2"),
    ),
    Row(
        some("capturable", "True"),
        some(SUBGROUP, A_SUBGROUP),
        Refused("no one has tried several exchanges in a CUDA graph", "Leave capturable at False"),
    ),
    Row(
        some("process_group", "a 2-D mesh"),
        some(SUBGROUP, A_SUBGROUP),
        Refused("its gradients go over two axes", "Pass a group, or one axis"),
    ),
    Row(
        some(SUBGROUP, A_SUBGROUP),
        some(LIE_AS, DTENSORS),
        Refused("no one has tried both yet", "Pass local tensors, as experts' are"),
    ),
    Row(
        some("join", "inside"),
        some(SUBGROUP, A_SUBGROUP),
        Refused("its parameters are others on other ranks", BATCHES, NotImplementedError),
    ),
    Row(
        some(FIRST_VALUES, ON_META),
        some(LIE_AS, DTENSORS),
        Refused("a part of a tensor has no draw of its own", "Make the model in memory"),
    ),
    Row(
        some(FIRST_VALUES, ON_META),
        some(SUBGROUP, A_SUBGROUP),
        Refused("all ranks draw the same numbers, so all experts would be one", "Make the model in memory"),
    ),
    Row(
        some(FIRST_VALUES, ON_META),
        some(TABLES, "True"),
        Refused("a table is in no bucket, and would be whole while it is drawn", "Make tables in memory"),
    ),
    Row(some(FIRST_VALUES, ON_META), ON_GPUS, Untried("on GPUs; a fake accelerator has run it")),
    Row(
        (*some(LIE_AS, DTENSORS), *some(SUBGROUP, A_SUBGROUP)),
        ON_GPUS,
        Untried("over NCCL, and on several GPUs; ranks that share one over gloo have run it"),
    ),
    Row(
        some("join", "inside"),
        some("capturable", "True"),
        Refused("a CUDA graph asks no rank whether it has run out of batches", "Leave capturable at False"),
    ),
    Row(
        some("join", "inside"),
        some("lr", "a tensor"),
        Refused("ranks compare the numbers in their param groups there", "Make lr a number"),
    ),
    Row(
        some("join", "inside"),
        some("optimizer", SHARDED),
        But("a rank that has run out of batches can't follow a step() with options of the class's own"),
    ),
    Row(
        some("join", "inside"),
        some("stage", "3"),
        But("while a rank follows, backward does not wait for the exchange, and gradients take up to their whole size"),
    ),
    Row(
        some("mean_over", "called"),
        some("stage", "1"),
        But("p.grad is scaled at once, and rounded to its dtype, where other stages round in the update only"),
    ),
    Row(
        some("backend", "nccl"),
        some("device", "cpu"),
        Refused("NCCL moves the tensors of GPUs only", 'Use the backend "gloo", or move the model to the GPU first'),
    ),
    Row(
        some("master_weights", '"remainder"'),
        some("parameters", "float16", "float32", "float64"),
        Refused(
            "the remainder is what a bfloat16 parameter lacks of its float32 value",
            'Without bfloat16 parameters, or with float16 ones, master_weights may be "auto", "fp32" or None',
        ),
    ),
    Row(
        some("master_weights", "None"),
        some("parameters", "bfloat16", "float16"),
        But("updates below half a unit in a parameter's last place are lost"),
    ),
    Row(
        some("state_dtype", "torch.bfloat16", '"8bit"'),
        some("parameters", "float64"),
        But("moments are stored in float64"),
    ),
    Row(
        some("exchange", '"native"'),
        some("parameters", "bfloat16", "float16"),
        But("the backend sums gradients in 16 bits, unless reduce_dtype=torch.float32. In float16 sums may overflow"),
    ),
    Row(
        some("exchange", '"native"'),
        some("reduce_dtype", "torch.bfloat16", "torch.float16"),
        But("the backend sums gradients in 16 bits. In float16 sums may overflow"),
    ),
    Row(
        some("exchange", '"native"'),
        some("bucket_cap_mb", "a number"),
        But("the number may change the last bits of a mean over three or more ranks"),
    ),
    Row(
        some("rule", '"sgd"', '"lion"', '"muon"'),
        some("amsgrad", "True"),
        Refused("only Adam keeps a largest second moment", 'Leave amsgrad out, or take rule="adam"'),
    ),
    Row(
        some("rule", '"sgd"', '"lion"', '"muon"'),
        some("decoupled_weight_decay", "False"),
        Refused(
            "SGD always adds the decay to the gradient, and Lion and Muon always multiply the parameter",
            'Leave decoupled_weight_decay out, or take rule="adam"',
        ),
    ),
    Row(
        some("foreach", "True"),
        some("fused", "True"),
        Refused(
            "`fused` and `foreach` cannot be `True` together",  # in torch's words
            "Leave both out: the update is fused in any case",
            RuntimeError,
        ),
    ),
    *OF_OTHER_CLASSES,
)


def pairs() -> Iterator[tuple[Setting, Setting]]:
    """Every value of an option with every value of every other one."""
    for one, other in itertools.combinations(CHOICES.values(), 2):
        yield from itertools.product(some(one.option, *one.values), some(other.option, *other.values))


def ruling(one: Setting, other: Setting) -> Ruling | None:
    """None: the pair works."""
    return next((row.ruling for row in ROWS if {one, other} in map(set, row.pairs())), None)


def check(chosen: Chosen) -> None:
    """Raises for the first pair of these that is refused. What has no Choice is ignored."""
    for row in ROWS:
        for pair in row.pairs():
            if isinstance(row.ruling, Refused) and all(each.value in chosen.get(each.option, ()) for each in pair):
                row.ruling.raise_of(*(_with_example(each, chosen[each.option]) for each in pair))


def _with_example(setting: Setting, of: Collection[str]) -> str:
    return f"{setting}, as {of[setting.value]}" if isinstance(of, Mapping) else str(setting)


def rows() -> str:
    """In Markdown: the options, and what to know of pairs."""
    values = [f"| `{choice.option}` | {', '.join(map(_value, choice.values))} |" for choice in CHOICES.values()]
    known = [f"| {_list_settings(row.ones)} | {_list_settings(row.others)} | {row.ruling} |" for row in ROWS]
    return "\n".join(["| option | values |", "|---|---|", *values, "", "| this | with | |", "|---|---|---|", *known])


def _value(value: str) -> str:
    return value if " " in value or value == "called" else f"`{value}`"


def _list_settings(settings: tuple[Setting, ...]) -> str:
    return " or ".join(f"`{each}`" if each.is_code else str(each) for each in settings)
