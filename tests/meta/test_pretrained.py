"""transformers' models on meta get the values that its own functions give to the whole of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.meta.pretrained import KINDS, WORDS, losses, maker, pretrained_twin
from tests.meta.rig import CAP, SEED, born, differing, on_meta, tensors
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

transformers = pytest.importorskip("transformers")
FLAG = "_is_hf_initialized"


def has_its_twins_values(rank: int, world_size: int, stage: int) -> None:
    for kind in KINDS:
        for tied in (True, False):
            make = maker(kind, tied)
            model, optimizer = born(make, rank, stage)
            assert differing(model, pretrained_twin(make)) == [], (kind, tied)
            assert len([*model.parameters()]) == len([*on_meta(make).parameters()])
            del optimizer


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_architecture_has_its_twins_values(world_size: int, stage: int) -> None:
    run_ranks(has_its_twins_values, world_size, stage)


def trains_as_its_twin(rank: int, world_size: int, stage: int, kind: str, dtype: torch.dtype) -> None:
    make = maker(kind, dtype=dtype)
    options = {"resident_mb": 0.05} if stage == 3 else {}
    model, optimizer = born(make, rank, stage, **options)
    other = pretrained_twin(make)
    built = FusedShardedAdam(other.named_parameters(), stage=stage, bucket_cap_mb=CAP, lr=1e-2, **options)
    assert losses(model, optimizer, rank) == losses(other, built, rank)
    with optimizer.whole(), built.whole():
        assert differing(model, other) == []


@pytest.mark.parametrize(
    ("kind", "stage", "dtype"),
    [("gpt2", 3, torch.float32), ("llama", 3, torch.bfloat16), ("t5", 3, torch.float32), ("bert", 1, torch.float32)],
)
def test_it_trains_as_its_twin(kind: str, stage: int, dtype: torch.dtype) -> None:
    run_ranks(trains_as_its_twin, 2, stage, kind, dtype)


# ---- models in models


class Both(nn.Module):
    """Two models that initialise their modules each in its way, and a layer of torch's."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.other = maker("gpt2")(), maker("t5", tied=False)()
        self.head = nn.Linear(32, 3)


def initialises_each_in_its_way(rank: int, world_size: int) -> None:
    model, _ = born(Both, rank)
    other: Any = on_meta(Both).to_empty(device="cpu")
    torch.manual_seed(SEED)
    for each in (other.one, other.other):
        each.tie_weights()
        each.initialize_weights()
    other.head.reset_parameters()
    assert differing(model, other) == []


def test_each_model_in_a_module_initialises_its_own() -> None:
    run_ranks(initialises_each_in_its_way, 2)


def composite() -> nn.Module:
    """A model of transformers that has two others of it, whose ranges of first values are not its own."""
    vision = transformers.CLIPVisionConfig(
        hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4, image_size=8, patch_size=4
    )
    text = transformers.LlamaConfig(
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=1,
        num_attention_heads=4,
        vocab_size=WORDS,
        initializer_range=0.5,
    )
    return transformers.LlavaForConditionalGeneration(
        transformers.LlavaConfig(vision_config=vision, text_config=text, image_token_index=3)
    )


def initialises_its_models(rank: int, world_size: int) -> None:
    model, _ = born(composite, rank)
    assert differing(model, pretrained_twin(composite)) == []


def test_a_model_of_several_has_each_ones_values() -> None:
    run_ranks(initialises_its_models, 2)


# ---- flags


def is_flagged(rank: int, world_size: int) -> None:
    """As in Accelerate's init_empty_weights(), where transformers initialises the model on meta."""
    make = maker("gpt2")
    model: Any = on_meta(make)
    model.initialize_weights()
    assert all(getattr(module, FLAG) for module in model.modules())
    torch.manual_seed(SEED)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, model=model, bucket_cap_mb=CAP)
    assert differing(model, pretrained_twin(make)) == []
    with optimizer.whole():
        before = tensors(model)
        model.initialize_weights()  # which has been
        assert all(torch.equal(before[name], after) for name, after in tensors(model).items())


def test_a_model_that_was_initialised_on_meta_is_once_more() -> None:
    run_ranks(is_flagged, 2)


def has_its_embedding(rank: int, world_size: int) -> None:
    """T5's initialises the embedding in it."""
    model: Any = on_meta(maker("t5"))
    values = torch.arange(WORDS * 32.0).reshape(WORDS, 32)
    model.set_input_embeddings(nn.Embedding.from_pretrained(values.clone(), freeze=False))
    model.tie_weights()
    torch.manual_seed(SEED)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, model=model, bucket_cap_mb=CAP)
    with optimizer.whole():
        assert torch.equal(model.lm_head.weight, values)
    assert not hasattr(model.shared.weight, FLAG)


def test_what_is_in_memory_keeps_its_values() -> None:
    run_ranks(has_its_embedding, 2)


# ---- what programs call afterwards


def is_tied_and_moved(rank: int, world_size: int, kind: str) -> None:
    model, optimizer = born(maker(kind), rank, resident_mb=0.05)
    other = pretrained_twin(maker(kind))
    built = FusedShardedAdam(other.named_parameters(), stage=3, bucket_cap_mb=CAP, lr=1e-2, resident_mb=0.05)
    ids = {name: id(param) for name, param in model.named_parameters()}
    model.tie_weights()  # type: ignore[operator]
    model.to("cpu")
    model.to(torch.float32)
    assert {name: id(param) for name, param in model.named_parameters()} == ids
    assert losses(model, optimizer, rank) == losses(other, built, rank)
    model.to(torch.bfloat16)
    with pytest.raises(RuntimeError, match=r"torch\.bfloat16 on cpu, but was .* when the optimizer was built; build"):
        losses(model, optimizer, rank)


@pytest.mark.parametrize("kind", ["bert", "llama"])
def test_it_may_be_tied_and_moved_as_any_other(kind: str) -> None:
    run_ranks(is_tied_and_moved, 2, kind)


def is_of_another_dtype(rank: int, world_size: int) -> None:
    def make() -> nn.Module:
        return maker("llama")().to(torch.bfloat16)

    model, optimizer = born(make, rank)
    assert differing(model, pretrained_twin(make)) == []
    assert {param.dtype for param in model.parameters()} == {torch.bfloat16}
    del optimizer


def test_its_dtype_may_change_before() -> None:
    run_ranks(is_of_another_dtype, 2)


@pytest.mark.parametrize("name", ["_initialize_weights", "guard_torch_init_functions"])
def test_a_version_without_its_functions_is_named(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    model = on_meta(maker("llama"))
    owner = transformers.PreTrainedModel if name.startswith("_") else transformers.initialization
    monkeypatch.delattr(owner, name)
    with pytest.raises(
        RuntimeError, match=rf"LlamaForCausalLM has no {name}\(\).*'transformers>=5\.20', or pass init="
    ):
        FusedShardedAdam(model.named_parameters(), model=model)
    assert all(param.is_meta for param in model.parameters())
