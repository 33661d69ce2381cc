"""Models that Accelerate and PEFT made on the meta device, and what is refused of them."""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import cpu_offload, init_empty_weights, load_checkpoint_and_dispatch
from peft import LoraConfig, get_peft_model
from peft.tuners.lora import LoraLayer
from torch import nn
from transformers import AutoModelForCausalLM

from tests.meta.pretrained import losses, maker, pretrained_twin
from tests.meta.rig import CAP, SEED, differing, on_meta, tensors
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load_weights
from zerox.optimizer.on_meta import children_first


def build(model: nn.Module, rank: int = 0, **options: Any) -> FusedShardedAdam:
    torch.manual_seed(SEED + rank)
    given = {"stage": 3, "bucket_cap_mb": CAP, "resident_mb": 0.05, "lr": 1e-2, **options}
    return FusedShardedAdam(model.named_parameters(), model=model, **given)


# ---- Accelerate


def is_empty(rank: int, world_size: int, buffers: bool, tied: bool) -> None:
    make = maker("llama", tied)
    with init_empty_weights(include_buffers=buffers):
        model: Any = make()
    model.tie_weights()
    optimizer = build(model, rank)
    assert differing(model, pretrained_twin(make)) == []
    del optimizer


@pytest.mark.parametrize("buffers", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_init_empty_weights(buffers: bool, tied: bool) -> None:
    run_ranks(is_empty, 2, buffers, tied)


def test_ties_that_it_has_undone_are_named() -> None:
    with init_empty_weights(include_buffers=False):
        model = maker("llama")()
    with pytest.raises(ValueError, match=r"init_empty_weights\(\) call model\.tie_weights\(\) first"):
        build(model)


def offloaded(folder: Path) -> nn.Module:
    model = pretrained_twin(maker("llama"))
    cpu_offload(model, execution_device=torch.device("cpu"))
    return model


def dispatched(folder: Path) -> nn.Module:
    make = maker("gpt2", tied=False)
    pretrained_twin(make).save_pretrained(folder / "in")  # type: ignore[operator]
    with init_empty_weights(include_buffers=False):
        model = make()
    where = {"transformer": "cpu", "lm_head": "disk"}
    load_checkpoint_and_dispatch(model, folder / "in", device_map=where, offload_folder=folder / "out")  # type: ignore
    return model


def mapped(folder: Path) -> nn.Module:
    pretrained_twin(maker("llama")).save_pretrained(folder)  # type: ignore[operator]
    return AutoModelForCausalLM.from_pretrained(folder, device_map="meta")  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (offloaded, "Accelerate keeps the values of module 'model.embed_tokens'"),
        (dispatched, "Accelerate keeps the values of module 'lm_head'"),
        (mapped, r"was loaded onto the meta device, where from_pretrained\(\) loses the values"),
    ],
)
def test_values_elsewhere_are_named(tmp_path: Path, make: Callable[[Path], nn.Module], said: str) -> None:
    model = make(tmp_path)
    with pytest.raises(ValueError, match=said) as raised:
        build(model)
    assert "zerox.load_weights()" in str(raised.value)


def test_from_pretrained_under_meta_is_refused_by_transformers(tmp_path: Path) -> None:
    pretrained_twin(maker("llama")).save_pretrained(tmp_path)  # type: ignore[operator]
    with pytest.raises(RuntimeError, match="with `from_config`"):
        on_meta(lambda: AutoModelForCausalLM.from_pretrained(tmp_path))


# ---- PEFT


def adapted(kind: str = "llama", base: nn.Module | None = None, **options: Any) -> Any:
    names = ["c_attn", "wte"] if kind == "gpt2" else ["q_proj", "v_proj"]
    config = LoraConfig(target_modules=names, r=4, fan_in_fan_out=kind == "gpt2", **options)
    return get_peft_model(on_meta(maker(kind)) if base is None else base, config)


def adapted_twin(kind: str, begins: Any) -> nn.Module:
    """The whole model in memory: its base as transformers has it, module by module, and then each layer's adapters."""
    model = adapted(kind, init_lora_weights=begins).to_empty(device="cpu")
    base = model.get_base_model()
    base.tie_weights()
    torch.manual_seed(SEED)
    inside = {each for layer in model.modules() if isinstance(layer, LoraLayer) for each in adapter_modules(layer)}
    with torch.no_grad():
        for _, module in children_first(base):
            if module not in inside:
                base._init_weights(module)
            if isinstance(module, LoraLayer) and begins is not False:
                module.reset_lora_parameters("default", begins)
            elif isinstance(module, LoraLayer):
                for each in (module.lora_A, module.lora_B):
                    each["default"].reset_parameters()
    return model


def adapter_modules(layer: Any) -> set[nn.Module]:
    return {each for name in layer.adapter_layer_names for each in getattr(layer, name).modules()}


def is_adapted(rank: int, world_size: int, kind: str, begins: Any, is_meta: bool) -> None:
    base = on_meta(maker(kind))
    model = on_meta(lambda: adapted(kind, base, init_lora_weights=begins)) if is_meta else adapted(kind, base)
    assert all(param.is_meta for param in model.parameters())
    optimizer, other = build(model, rank), adapted_twin(kind, begins)
    assert differing(model, other) == []
    frozen = [param.requires_grad for param in model.parameters()]
    assert 0 < sum(frozen) < len(frozen)
    built = build(other)
    found, expected = losses(model, optimizer, rank), losses(other, built, rank)
    assert found == expected
    assert found[0] != found[-1]
    with optimizer.whole(), built.whole():
        assert differing(model, other) == []


@pytest.mark.parametrize(
    ("kind", "begins", "is_meta"),
    [("llama", True, False), ("llama", "gaussian", True), ("llama", False, True), ("gpt2", True, False)],
)
def test_lora_over_a_base_that_is_born_sharded(kind: str, begins: Any, is_meta: bool) -> None:
    run_ranks(is_adapted, 2, kind, begins, is_meta)


def keeps_adapters(rank: int, world_size: int) -> None:
    model = adapted()
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            for each in (layer.lora_A["default"], layer.lora_B["default"]):
                each.weight = nn.Parameter(torch.full(each.weight.shape, 0.25))
    optimizer = build(model, rank)
    with optimizer.whole():
        ours = [value for name, value in tensors(model).items() if "lora_" in name]
        assert all(bool((value == 0.25).all()) for value in ours)
        assert len(ours) == 8


def test_adapters_in_memory_keep_their_values() -> None:
    run_ranks(keeps_adapters, 2)


def has_an_own_adapter(rank: int, world_size: int) -> None:
    """By transformers' own method, without a class of PEFT's around the model."""
    model: Any = on_meta(maker("llama"))
    model.add_adapter(LoraConfig(target_modules=["q_proj", "v_proj"], r=4, init_lora_weights="gaussian"))
    optimizer = build(model, rank)
    other: Any = adapted_twin("llama", "gaussian").get_base_model()
    assert differing(model, other) == []
    assert losses(model, optimizer, rank) == losses(other, build(other), rank)


def test_an_adapter_that_transformers_added() -> None:
    run_ranks(has_an_own_adapter, 2)


def loads_its_base(rank: int, world_size: int, folder: Path) -> None:
    whole: Any = pretrained_twin(maker("llama", tied=False), seed=5)
    if rank == 0:
        whole.save_pretrained(folder)
    dist.barrier()
    model = adapted(base=on_meta(maker("llama", tied=False)))
    optimizer = build(model, rank)
    layers = {name for name, module in model.get_base_model().named_modules() if isinstance(module, LoraLayer)}

    def renamed(name: str) -> str:
        module, _, last = name.rpartition(".")
        return f"base_model.model.{module}.{'base_layer.' if module in layers else ''}{last}"

    keys = load_weights(optimizer, folder, rename=renamed, strict=False)
    assert keys.unexpected_keys == []
    assert all("lora_" in name for name in keys.missing_keys)
    other = adapted(base=copy.deepcopy(whole))
    with optimizer.whole():
        values = {name: value for name, value in tensors(model).items() if "lora_" in name}
        other.load_state_dict(values, strict=False)
        assert differing(model, other) == []
    assert losses(model, optimizer, rank) == losses(other, build(other), rank)


def test_a_base_loads_its_files(tmp_path: Path) -> None:
    run_ranks(loads_its_base, 2, tmp_path)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"use_dora": True}, r"adapter 'default' of module '\S+q_proj' \(Linear\) is on the meta device.*no DoRA"),
        ({"init_lora_weights": "eva"}, "begins by init_lora_weights='eva', and only a plain LoRA"),
        ({"modules_to_save": ["lm_head"]}, "PEFT trains a copy of module 'base_model.model.lm_head'"),
    ],
)
def test_adapters_that_need_values_are_named(options: dict[str, Any], said: str) -> None:
    model = adapted(**options)
    with pytest.raises(ValueError, match=said):
        build(model)
    assert all(param.is_meta for param in model.parameters())
