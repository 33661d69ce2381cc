"""The options whose pairs zerox/plan/combinations.py is about, with their values."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Choice:
    """An option with its values, of which each makes zerox do something else; the first is the default.

    Values are as Python writes them, or words that stand for many. ``form`` puts one into a sentence; empty:
    ``option=value``.
    """

    option: str
    values: tuple[str, ...]
    form: str = ""


@dataclass(frozen=True)
class Setting:
    option: str
    value: str

    @property
    def is_code(self) -> bool:
        return not CHOICES[self.option].form and " " not in self.value

    def __str__(self) -> str:
        if self.is_code:
            return f"{self.option}={self.value}"
        return (CHOICES[self.option].form or "{value} for {option}").format(option=self.option, value=self.value)


def some(option: str, *values: str) -> tuple[Setting, ...]:
    return tuple(Setting(option, value) for value in values)


FUSED, SHARDED = "FusedShardedAdam", "ShardedOptimizer"
LIE_AS, DTENSORS = "placement", "DTensors"
SUBGROUP, A_SUBGROUP = "process_group of a param group", "a sub-group"
TABLES = "sparse"  # of a param group
FIRST_VALUES, ON_META = "first values", "on meta"
MASKS, SPARSITY = "masks", "a Sparsity"
CHOICES = {
    choice.option: choice
    for choice in (
        Choice("optimizer", (FUSED, SHARDED), "{value}"),
        Choice("stage", ("2", "1", "3")),
        Choice("parameters", ("float32", "bfloat16", "float16", "float64"), "{value} parameters"),
        Choice(LIE_AS, ("plain tensors", DTENSORS), "parameters that are {value}"),
        Choice(FIRST_VALUES, ("in memory", ON_META), "parameters {value}"),
        Choice("device", ("cpu", "cuda"), "parameters on {value}"),
        Choice("process_group", ("a group", "a 2-D mesh", '"alone"'), "{value}"),
        Choice(SUBGROUP, ("None", A_SUBGROUP), "a param group on {value}"),
        Choice("backend", ("gloo", "nccl"), "a group over {value}"),
        Choice("exchange", ("None", '"direct"', '"messages"', '"native"')),
        Choice("bucket_cap_mb", ("None", "a number")),
        Choice("resident_mb", ("None", "a number")),
        Choice("reduce_dtype", ("None", "torch.float32", "torch.bfloat16", "torch.float16")),
        Choice("gradient_divisor", ("None", "a number")),
        Choice("accumulate_dtype", ("None", "torch.float32")),
        Choice("state_dtype", ("torch.float32", "torch.bfloat16", '"8bit"')),
        Choice("master_weights", ('"auto"', '"remainder"', '"fp32"', "None")),
        Choice("capturable", ("False", "True")),
        Choice("overlap_gather", ("not called", "called"), "{option}() {value}"),
        Choice("mean_over", ("not called", "called"), "{option}() {value}"),
        Choice("join", ("outside", "inside"), "{value} join()"),
        Choice(MASKS, ("None", SPARSITY), "{value} for {option}"),
        Choice("whole", ('"none"', '"matrices"', '"all"')),
        Choice("lr", ("a number", "a tensor")),
        Choice(TABLES, ("False", "True")),
        Choice("rule", ('"adam"', '"sgd"', '"lion"', '"muon"')),
        Choice("amsgrad", ("False", "True")),
        Choice("maximize", ("False", "True")),
        Choice("decoupled_weight_decay", ("True", "False")),
        Choice("foreach", ("None", "True")),
        Choice("fused", ("None", "True")),
    )
}
