"""Files whose names, or tensors, transformers converts as it loads them: load_weights() asks it how."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zerox
from tests.checkpoint.weight_folders import write_safetensors
from tests.meta.pretrained import SIZES, WORDS, maker, pretrained_twin
from tests.meta.rig import differing, on_meta
from zerox import FusedShardedAdam, load_weights
from zerox.checkpoint import pretrained_names
from zerox.checkpoint.weight_files import Kind, Stored, WeightFiles

hf = pytest.importorskip("transformers")


def loaded(make: Any, folder: Path, **options: Any) -> Any:
    model = on_meta(make)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, model=model)
    return model, load_weights(optimizer, folder, **options)


def test_more_experts_than_ten_lie_in_the_order_of_their_numbers(tmp_path: Path) -> None:
    sizes = {**SIZES, "vocab_size": WORDS, "num_experts": 12, "moe_intermediate_size": 16, "head_dim": 8}
    config = hf.Qwen3MoeConfig(num_experts_per_tok=2, num_key_value_heads=2, **sizes)

    def make() -> Any:
        return hf.AutoModelForCausalLM.from_config(config)

    pretrained_twin(make, seed=5).save_pretrained(tmp_path)  # type: ignore[operator]
    model, _ = loaded(make, tmp_path)
    assert model.model.layers[0].mlp.experts.gate_up_proj.shape == (12, 32, 32)
    assert differing(model, type(model).from_pretrained(tmp_path)) == []


def test_old_names_are_read(tmp_path: Path) -> None:
    """As in the first files of BERT."""
    make = maker("bert")
    twin: Any = pretrained_twin(make, seed=5)
    twin.save_pretrained(tmp_path)
    tensors = {name: value.detach() for name, value in twin.named_parameters()}
    old = {name.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta") for name in tensors}
    assert old != {*tensors}
    renamed = {n.replace("Norm.weight", "Norm.gamma").replace("Norm.bias", "Norm.beta"): v for n, v in tensors.items()}
    write_safetensors(renamed, tmp_path / "model.safetensors")
    model, keys = loaded(make, tmp_path)
    assert keys == ([], [])
    assert differing(model, twin) == []


def test_a_model_reads_the_file_of_the_model_inside_it(tmp_path: Path) -> None:
    make = maker("gpt2")
    twin: Any = pretrained_twin(make, seed=5)
    twin.transformer.save_pretrained(tmp_path)
    model, keys = loaded(make, tmp_path)
    assert keys == ([], [])
    assert differing(model, twin) == []


def test_names_that_are_asked_for_are_not_converted_again(tmp_path: Path) -> None:
    make = maker("gpt2")
    pretrained_twin(make).transformer.save_pretrained(tmp_path)  # type: ignore[operator, union-attr]
    with pytest.raises(RuntimeError, match=r'Unexpected key\(s\) in state_dict: "h\.0'):
        loaded(make, tmp_path, rename={})


def test_what_its_models_ignore_is_not_unexpected(tmp_path: Path) -> None:
    """As the masks in GPT-2's first files."""
    make = maker("gpt2")
    twin: Any = pretrained_twin(make, seed=5)
    twin.save_pretrained(tmp_path)
    tensors = {name: value.detach() for name, value in twin.named_parameters()}
    write_safetensors({**tensors, "h.0.attn.bias": torch.ones(1, 1, 4, 4)}, tmp_path / "model.safetensors")
    model, keys = loaded(make, tmp_path)
    assert keys == ([], [])
    assert differing(model, twin) == []


class Wrapper(nn.Module):
    """Which has no name of its own, as torch.compile() of a model."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self._orig_mod = model


@pytest.mark.parametrize("wrap", [Wrapper, lambda model: zerox.DistributedDataParallel(model)])
def test_a_wrapped_model_is_asked_too(tmp_path: Path, wrap: Callable[[Any], nn.Module]) -> None:
    make = maker("mixtral")
    twin: Any = pretrained_twin(make, seed=5)
    twin.save_pretrained(tmp_path)
    model: Any = pretrained_twin(make, seed=6)
    wrapped = wrap(model)
    optimizer = FusedShardedAdam(wrapped.named_parameters(), model=wrapped)
    assert load_weights(optimizer, tmp_path) == ([], [])
    assert differing(model, twin) == []


def files_of(**shapes: tuple[int, ...]) -> WeightFiles:
    tensors = {name: Stored(torch.float32, shape, ()) for name, shape in shapes.items()}
    return WeightFiles(Kind.SAFETENSORS, Path(), {}, tensors)


def asked(operations: list[Any], sources: list[str], target: str, files: WeightFiles) -> Any:
    """Of a model with one weight, of 4 by 3."""
    loading = pytest.importorskip("transformers.core_model_loading")
    model: Any = nn.Module()
    model.register_parameter(target, nn.Parameter(torch.empty(4, 3)))
    model.base_model_prefix = ""
    converter = loading.WeightConverter(sources, [target], operations=operations)
    return pretrained_names._names(loading, [converter], model, files)


def test_what_is_joined_alone_lies_one_behind_the_other() -> None:
    loading = pytest.importorskip("transformers.core_model_loading")
    found = asked([loading.Concatenate(dim=0)], [r"shard_\d"], "weight", files_of(shard_0=(1, 3), shard_1=(3, 3)))
    assert found == {"shard_0": ("weight", (slice(0, 1),)), "shard_1": ("weight", (slice(1, 4),))}


@pytest.mark.parametrize(
    ("checks", "shape", "is_left"), [(False, (4, 3), False), (True, (4, 3), True), (True, (3, 4), False)]
)
def test_what_it_computes_is_not_taken_as_it_is(checks: bool, shape: tuple[int, ...], is_left: bool) -> None:
    """Also where the file has the weight's name; but where it would be left alone there, too."""
    loading = pytest.importorskip("transformers.core_model_loading")
    transpose = loading.Transpose(0, 1, check_dims=checks)
    assert asked([transpose], ["weight"], "weight", files_of(weight=shape)) == ({} if is_left else {"weight": None})
    assert asked([transpose], ["other"], "weight", files_of(other=shape)) == {}
