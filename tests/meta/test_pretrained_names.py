"""Files whose names, or tensors, transformers converts as it loads them: load_weights() asks it how."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.weight_folders import write_safetensors
from tests.meta.pretrained import SIZES, WORDS, maker, pretrained_twin
from tests.meta.rig import differing, on_meta
from zerox import FusedShardedAdam, load_weights

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


def test_what_transformers_computes_otherwise_keeps_its_name(tmp_path: Path) -> None:
    """Weights that are more than put together; stood for by a converter that transposes."""
    loading = pytest.importorskip("transformers.core_model_loading")
    from zerox.checkpoint import pretrained_names

    converter = loading.WeightConverter(["a.w"], ["b.w"], operations=[loading.Transpose(0, 1)])
    found: dict[str, Any] = {}
    files: Any = None
    pretrained_names._put_together(converter, "b.w", {"a.w": ["a.w"]}, files, found)
    assert found == {}
