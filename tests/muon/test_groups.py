"""zerox.muon_groups(): what goes to Muon and what to AdamW, what is said of it, and what is refused."""

from __future__ import annotations

import contextlib
import io
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    MixtralConfig,
    MixtralForCausalLM,
    ViTConfig,
    ViTForImageClassification,
)

from tests.kernels.shards import same_bits
from tests.ranks import run_ranks
from tests.tolerances import assert_one_step_bound
from zerox import FusedShardedAdam, FusedShardedMuon, muon_groups

WORDS, WIDTH, CONTEXT = 64, 32, 24
LLAMA = {
    "vocab_size": WORDS,
    "hidden_size": WIDTH,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
}
RATES: dict[str, Any] = {"lr": 0.02, "adamw_lr": 1e-3}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.gate = nn.Linear(WIDTH, 4)
        self.qkv = nn.Linear(WIDTH, 3 * WIDTH)
        self.down = nn.Linear(WORDS, WIDTH)
        self.up = nn.Linear(WIDTH, WORDS)  # as wide as the vocabulary, and no head

    def forward(self, x: Tensor) -> Tensor:
        queries, keys, values = self.qkv(self.norm(x)).chunk(3, dim=-1)
        return x + self.down(self.up(queries * keys.tanh() + values)) * self.gate(x).mean(-1, keepdim=True)


class Plain(nn.Module):
    """A GPT in few lines, whose head has a name of its own."""

    def __init__(self, tied: bool = False) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Embedding(CONTEXT, WIDTH)
        self.mix = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.to_words = nn.Linear(WIDTH, WORDS, bias=False)
        self.value = nn.Linear(WIDTH, WIDTH)
        if tied:
            self.to_words.weight = self.words.weight

    def forward(self, words: Tensor) -> Tensor:
        x = self.mix(self.words(words) + self.places(torch.arange(words.shape[1])))
        for block in self.blocks:
            x = block(x)
        return self.to_words(x + self.value(x))


def of_blocks(*names: str) -> set[str]:
    return {f"blocks.{index}.{name}.weight" for index in (0, 1) for name in names}


HIDDEN = {"mix.weight", "value.weight"} | of_blocks("qkv", "up", "down")


def names_of(groups: list[dict[str, Any]], rule: str) -> set[str]:
    return {name for group in groups if group["rule"] == rule for name, _ in group["params"]}


def by_muon(model: nn.Module, **options: Any) -> set[str]:
    """Checks that all parameters are in one group each, under their own names."""
    groups = muon_groups(model, **RATES, verbose=False, **options)
    params = dict(model.named_parameters())
    listed = [(name, param) for group in groups for name, param in group["params"]]
    assert sorted(name for name, _ in listed) == sorted(params)
    assert all(params[name] is param for name, param in listed)
    return names_of(groups, "muon")


@pytest.mark.parametrize("tied", [False, True])
def test_matrices_of_hidden_layers_go_to_muon(tied: bool) -> None:
    assert by_muon(Plain(tied)) == HIDDEN


def test_a_head_that_shares_an_embedding_s_memory_goes_with_it() -> None:
    model = Plain()
    model.blocks[0].up.weight = nn.Parameter(model.words.weight.data)
    assert by_muon(model) == HIDDEN - {"blocks.0.up.weight"}


def test_a_model_on_meta_and_frozen_parameters_go_where_they_would() -> None:
    with torch.device("meta"):
        model = Plain(tied=True)
    model.mix.requires_grad_(False)
    model.words.requires_grad_(False)
    assert by_muon(model) == HIDDEN


OF_LLAMA = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj")
OF_MLP = ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
OF_GPT2 = ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")
OF_VIT = ("attention.q_proj", "attention.k_proj", "attention.v_proj", "attention.o_proj", "mlp.fc1", "mlp.fc2")


def make_gpt2(tied: bool) -> nn.Module:
    config = GPT2Config(
        vocab_size=WORDS, n_embd=WIDTH, n_layer=2, n_head=2, n_positions=CONTEXT, bos_token_id=0, eos_token_id=0
    )
    config.tie_word_embeddings = tied
    return GPT2LMHeadModel(config)


def make_vit() -> nn.Module:
    config = ViTConfig(num_labels=20, image_size=80, patch_size=16, hidden_size=WIDTH, intermediate_size=48)
    config.num_hidden_layers, config.num_attention_heads = 2, 2
    return ViTForImageClassification(config)


MODELS: dict[str, tuple[Callable[[], nn.Module], str, tuple[str, ...]]] = {
    "Llama": (lambda: LlamaForCausalLM(LlamaConfig(**LLAMA)), "model.layers.{}.{}.weight", OF_LLAMA + OF_MLP),
    "tied Llama": (
        lambda: LlamaForCausalLM(LlamaConfig(**LLAMA, tie_word_embeddings=True)),
        "model.layers.{}.{}.weight",
        OF_LLAMA + OF_MLP,
    ),
    "GPT-2": (lambda: make_gpt2(True), "transformer.h.{}.{}.weight", OF_GPT2),
    "untied GPT-2": (lambda: make_gpt2(False), "transformer.h.{}.{}.weight", OF_GPT2),
    "ViT": (make_vit, "vit.layers.{}.{}.weight", OF_VIT),
}


@pytest.mark.parametrize("kind", MODELS)
def test_models_of_transformers(kind: str) -> None:
    """In a ViT the position embedding has 3 dimensions, as a stack, and 26 rows."""
    make, pattern, names = MODELS[kind]
    assert by_muon(make()) == {pattern.format(index, name) for index in (0, 1) for name in names}


class Told(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)])

    def get_output_embeddings(self) -> nn.Module:
        return self.layers[1]


def test_a_model_may_say_what_its_head_is() -> None:
    """Also a part of it."""
    assert by_muon(nn.ModuleList([Told(), Told()])) == {"0.layers.0.weight", "1.layers.0.weight"}


def test_stacks_of_experts_go_to_muon_and_a_small_router_does_not() -> None:
    found = by_muon(MixtralForCausalLM(MixtralConfig(**LLAMA, num_local_experts=4)))
    assert {name for name in found if "mlp" in name} == {
        f"model.layers.{index}.mlp.experts.{name}" for index in (0, 1) for name in ("gate_up_proj", "down_proj")
    }


class Odd(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.long = nn.Conv1d(16, 16, 16)  # 3 dimensions, as a stack
        self.image = nn.Conv2d(16, 16, 16)
        self.pos_embed = nn.Parameter(torch.zeros(1, 20, 16))
        self.narrow = nn.Linear(15, 40)
        self.flat = nn.Linear(40, 15)
        self.square = nn.Linear(16, 16)
        self.score = nn.Linear(16, 16)
        self.last = nn.Linear(16, 16)


def test_convolutions_embeddings_without_a_module_narrow_matrices_and_heads_go_to_adamw() -> None:
    assert by_muon(Odd()) == {"square.weight"}


def test_in_a_model_without_embeddings_the_last_linear_layer_is_the_head() -> None:
    assert by_muon(nn.Sequential(nn.Linear(20, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 20))) == {
        "0.weight",
        "2.weight",
    }


def test_layers_that_repeat_have_no_head() -> None:
    model = Plain()
    del model.to_words  # as if the forward multiplied by the embedding itself
    assert by_muon(model) == HIDDEN
    expected = {f"{index}.{name}.weight" for index in (0, 1) for name in ("qkv", "up", "down")}
    assert by_muon(nn.Sequential(Block(), Block())) == expected


OVERRULED: dict[str, tuple[Mapping[str, Any], set[str]]] = {
    "a name": ({"adamw": "mix.weight"}, HIDDEN - {"mix.weight"}),
    "patterns": ({"adamw": ("blocks.*.up.*", "mix.*")}, HIDDEN - {"mix.weight"} - of_blocks("up")),
    "a head to Muon": ({"muon": ("to_words.weight",)}, HIDDEN | {"to_words.weight"}),
    "narrow ones to Muon": ({"muon": "blocks.*.gate.weight"}, HIDDEN | of_blocks("gate")),
    "both": ({"muon": ["places.*"], "adamw": ["value.*"]}, (HIDDEN | {"places.weight"}) - {"value.weight"}),
}


@pytest.mark.parametrize("case", OVERRULED)
def test_the_rule_is_overruled(case: str) -> None:
    options, expected = OVERRULED[case]
    assert by_muon(Plain(), **options) == expected


def test_a_tied_parameter_is_overruled_by_any_of_its_names() -> None:
    assert by_muon(Plain(tied=True), muon="to_words.weight") == HIDDEN | {"words.weight"}


def test_groups_have_the_options_that_were_given_and_no_others() -> None:
    muon, adamw = muon_groups(Plain(), **RATES, verbose=False)
    assert muon.keys() == adamw.keys() == {"params", "rule", "lr"}
    assert (muon["lr"], adamw["lr"]) == (0.02, 1e-3)
    more = {"weight_decay": 0.3, "adamw_weight_decay": 0.0, "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-5}
    muon, adamw = muon_groups(Plain(), **RATES, **more, verbose=False)
    assert (muon["weight_decay"], adamw["weight_decay"]) == (0.3, 0.0)
    assert (adamw["betas"], adamw["eps"]) == ((0.8, 0.9), 1e-5)


def test_matrices_that_are_cut_alike_are_a_group() -> None:
    cut = {"split_sizes": {"*.qkv.weight": (32, 32, 32)}, "num_heads": {"mix.weight": 2, "value.*": 2}}
    groups = muon_groups(Plain(), **RATES, **cut, verbose=False)
    assert len(groups) == 4
    assert names_of(groups[:1], "muon") == of_blocks("up", "down")
    found = {
        (group.get("split_sizes"), group.get("num_heads")): names_of([group], "muon")
        for group in groups
        if group["rule"] == "muon"
    }
    assert found[(32, 32, 32), None] == of_blocks("qkv")
    assert found[None, 2] == {"mix.weight", "value.weight"}


def test_both_optimizers_update_them_as_torch_s_two() -> None:
    words = torch.arange(2 * CONTEXT).view(2, CONTEXT) % WORDS
    twin = Plain(tied=True)
    params = dict(twin.named_parameters())
    before = {name: param.detach().clone() for name, param in params.items()}
    rest = [param for name, param in params.items() if name not in HIDDEN]
    twin(words).square().mean().backward()
    torch.optim.Muon([params[name] for name in params if name in HIDDEN], lr=0.02, weight_decay=0.3).step()
    torch.optim.AdamW(rest, lr=1e-3, betas=(0.8, 0.9), eps=1e-5, weight_decay=0.2).step()
    for kind in (FusedShardedMuon, FusedShardedAdam):
        model = Plain(tied=True)
        options = {"weight_decay": 0.3, "adamw_weight_decay": 0.2, "adamw_betas": (0.8, 0.9), "adamw_eps": 1e-5}
        optimizer = kind(muon_groups(model, **RATES, **options, verbose=False))
        model(words).square().mean().backward()
        optimizer.step()
        for name, param in model.named_parameters():
            ours, theirs = param.detach(), params[name].detach()
            if name in HIDDEN:
                assert same_bits(ours, theirs), name
            else:
                assert_one_step_bound(before[name], ours, theirs, {}, decay=1 - 1e-3 * 0.2)


SAID = """zerox.muon_groups(): Muon gets matrices, and stacks of them, of at least 16 rows and columns; \
AdamW gets embeddings, heads, convolutions, and all else
  Muon, lr=0.02:
    matrices:
      mix.weight: 32 x 32, frozen
      blocks.*.down.weight (2): 32 x 64
      blocks.*.up.weight (2): 64 x 32
      value.weight: 32 x 32
  Muon, lr=0.02, num_heads=3:
    matrices:
      blocks.*.qkv.weight (2): 96 x 32
  AdamW, lr=0.001:
    biases, norms and other shapes:
      mix.bias: 32, frozen
      blocks.*.norm.weight (2): 32
      blocks.*.norm.bias (2): 32
      blocks.*.gate.bias (2): 4
      blocks.*.qkv.bias (2): 96
      blocks.*.down.bias (2): 32
      blocks.*.up.bias (2): 64
      value.bias: 32
    embeddings:
      words.weight: 64 x 32, also to_words.weight
    matrices of under 16 rows or columns:
      blocks.*.gate.weight (2): 4 x 32
    named by adamw=:
      places.weight: 24 x 32
  muon= and adamw= move what they name so (* stands for anything), and verbose=False prints nothing
"""


def test_what_went_where_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    model = Plain(tied=True)
    model.mix.requires_grad_(False)
    muon_groups(model, **RATES, adamw="places.*", num_heads={"*.qkv.weight": 3})
    assert capsys.readouterr() == ("", SAID)
    muon_groups(model, **RATES, verbose=False)
    assert capsys.readouterr() == ("", "")


def said_on(rank: int, world_size: int) -> str:
    said = io.StringIO()
    with contextlib.redirect_stderr(said):
        muon_groups(Plain(), **RATES)
    return said.getvalue()


def test_one_rank_prints(monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = run_ranks(said_on, 2)
    assert "Muon" in first
    assert not second
    monkeypatch.setenv("RANK", "1")  # of torchrun, before the process group is there
    assert not said_on(0, 1)


REFUSED: dict[str, tuple[Mapping[str, Any], str]] = {
    "an unknown name": ({"adamw": "mux.weight"}, r"adamw='mux.weight' fits no parameter"),
    "one pattern of two": ({"muon": ("mix.weight", "heads.*")}, r"muon='heads\.\*' fits no parameter"),
    "both": ({"muon": "mix.weight", "adamw": "mix.*"}, r"muon= and adamw= both name 'mix\.weight'"),
    "a bias": ({"muon": "mix.*"}, r"'mix\.bias': Muon only supports 2D parameters .*\[32\]"),
    "a cut that does not fit": ({"num_heads": {"mix.weight": 5}}, r"'mix\.weight': num_heads=5 does not divide"),
    "sizes that do not fit": ({"split_sizes": {"mix.weight": (3, 4)}}, r"'mix\.weight': split_sizes=\(3, 4\) are 7"),
    "no sizes": ({"split_sizes": {"mix.weight": 32}}, r"'mix\.weight': split_sizes must be numbers of rows"),
    "a cut of AdamW's": ({"num_heads": {"*.gate.*": 2}}, r"Muon has nothing to cut: num_heads='\*\.gate\.\*' fits no"),
    "two cuts": (
        {"num_heads": {"mix.weight": 2}, "split_sizes": {"mix.*": (16, 16)}},
        r"'mix\.weight' is to be cut twice: \{'split_sizes': \(16, 16\)\} and num_heads=2",
    ),
    "nothing for Muon": ({"adamw": "*.weight"}, r"Plain has no parameter for Muon.*FusedShardedAdam.*muon="),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_does_not_fit_is_refused(case: str) -> None:
    options, said = REFUSED[case]
    with pytest.raises(ValueError, match=f"(?s)^zerox.muon_groups.*{said}"):
        muon_groups(Plain(), **RATES, **options, verbose=False)


def test_parameters_are_no_model() -> None:
    for given in (Plain().parameters(), [Plain()], Plain().state_dict()):
        with pytest.raises(TypeError, match=r"zerox.muon_groups\(\) takes the model itself, .* got \w+"):
            muon_groups(given, **RATES)  # type: ignore[arg-type]


PAGE = Path(__file__).parents[2] / "docs/muon.md"


def test_the_page_s_first_lines_train() -> None:
    [recipe] = re.findall(r"^```python\n(import torch.*?)^```", PAGE.read_text(), re.S | re.M)
    assert len(recipe.splitlines()) <= 12
    torch.manual_seed(0)
    names: dict[str, Any] = {}
    exec(recipe, names)
    x = torch.randn(256, 64)
    loss = float((names["model"](x) - x.sum(1, keepdim=True)).square().mean().detach())
    assert loss < 50.0, "it starts at about 64, the variance of a sum of 64"


class ManyHeads(nn.Module):
    """A head for each codebook, in a list, beside positions as many as a hidden layer is wide."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(100, 32)
        self.positions = nn.Embedding(64, 32)
        self.heads = nn.ModuleList(nn.Linear(32, 100, bias=False) for _ in range(3))
        self.hidden = nn.Linear(32, 64, bias=False)


def test_heads_in_a_list_are_heads_and_a_layer_as_wide_as_there_are_positions_is_none() -> None:
    muon, adamw = muon_groups(ManyHeads(), lr=0.1, adamw_lr=0.1, verbose=False)
    assert [name for name, _ in muon["params"]] == ["hidden.weight"]
    assert {name for name, _ in adamw["params"]} >= {f"heads.{index}.weight" for index in range(3)}
