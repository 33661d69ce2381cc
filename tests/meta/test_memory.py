"""No rank holds more than its shards, the resident limit and one module's buckets while a model on meta is made."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from bench.allocator import Allocator, build
from tests.memory.test_peak_sharded import free_what_is_left
from tests.meta.pretrained import pretrained_twin
from tests.meta.rig import SEED, on_meta
from tests.ranks import pool, run_ranks
from zerox import FusedShardedAdam, FusedShardedSGD, estimate
from zerox._C import most_room_bytes, room_bytes

MIB = 2**20
LAYERS, WIDTH = 40, 512  # a MiB each
LIMIT_MB = 3
WITHIN = 1.02


@pytest.fixture(scope="module", autouse=True)
def fresh_ranks() -> None:
    """Those of other files may have optimizers that live on, and would be waited for."""
    pool.close()


class Deep(nn.Module):
    """``wide``: parameters of one module in two buckets of three MiB."""

    def __init__(self, wide: bool = False) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS))
        if wide:
            self.wide = nn.Bilinear(WIDTH, 3, WIDTH)
            self.wide.bias = nn.Parameter(torch.empty(3 * WIDTH * WIDTH))
            self.wide.reset_parameters = lambda: [nn.init.ones_(each) for each in self.wide.parameters()]  # type: ignore


def peak(rank: int, world_size: int, library: Path, wide: bool) -> tuple[int, int, int]:
    """Bytes of rooms and of other memory at most, and of parameters."""
    allocator = Allocator(library)
    free_what_is_left()
    model, made = on_meta(lambda: Deep(wide)), []
    base, rooms = allocator.now, room_bytes()
    most_room_bytes()
    most = allocator.peak_of(lambda: made.append(built(model)))
    return most_room_bytes() - rooms, most - base, sum(param.nbytes for param in model.parameters())


def built(model: nn.Module) -> FusedShardedSGD:
    return FusedShardedSGD(
        model.named_parameters(), stage=3, model=model, bucket_cap_mb=1, resident_mb=LIMIT_MB, lr=0.1
    )


def test_rooms_stay_within_the_limit() -> None:
    for rooms, other, params in run_ranks(peak, 4, build(), False):
        assert rooms <= LIMIT_MB * MIB
        assert other <= params / 4 * WITHIN + MIB


def test_with_a_module_that_is_larger_they_have_its_buckets_too() -> None:
    for rooms, other, params in run_ranks(peak, 2, build(), True):
        assert LIMIT_MB * MIB < rooms <= 2 * LIMIT_MB * MIB
        assert other <= params / 2 * WITHIN + MIB


# Of stage, whether a module is larger than the limit, whether Adam's moments are kept.
ESTIMATED = [(3, False, True), (3, True, False), (3, True, True), (2, False, True), (1, True, False)]


def estimated(rank: int, world_size: int, library: Path, stage: int, wide: bool, adam: bool) -> tuple[int, int, int]:
    """Bytes at most of rooms and of other memory, and by zerox.estimate()."""
    allocator = Allocator(library)
    free_what_is_left()
    model, made = on_meta(lambda: Deep(wide)), []
    options = {"stage": stage, "model": model, "bucket_cap_mb": 1, "resident_mb": LIMIT_MB if stage == 3 else None}
    formula = estimate(model.named_parameters(), world_size, rule="adam" if adam else "sgd", **options)
    assert all(param.is_meta for param in model.parameters())
    kind: Any = FusedShardedAdam if adam else FusedShardedSGD
    base, rooms = allocator.now, room_bytes()
    most_room_bytes()
    most = allocator.peak_of(lambda: made.append(kind(model.named_parameters(), lr=0.1, **options)))
    return most_room_bytes() - rooms, most - base, formula.peak_of_construction


@pytest.mark.parametrize(("stage", "wide", "adam"), ESTIMATED)
def test_the_estimate_has_the_peak_of_construction(stage: int, wide: bool, adam: bool) -> None:
    """Of rooms and state the maxima may come at other moments: state is made when the last module has its values."""
    for rooms, other, formula in run_ranks(estimated, 2, build(), stage, wide, adam):
        most = max(other + min(rooms, LIMIT_MB * MIB), (0 if adam else other) + rooms)
        assert formula / WITHIN - MIB <= most <= formula * WITHIN + MIB, (rooms, other, formula)


def test_the_estimate_is_of_what_is_on_meta_and_refuses_as_the_constructor() -> None:
    whole, model = nn.Linear(3, 3), on_meta(lambda: nn.Sequential(nn.Linear(3, 3)))
    assert estimate(whole.parameters(), 2, stage=3, model=whole).peak_of_construction == 0
    assert estimate(model.parameters(), 2, stage=3).peak_of_construction == 0
    with pytest.raises(ValueError, match="init is for parameters on the meta device, and none is there"):
        estimate(whole.parameters(), 2, model=whole, init=nn.init.ones_)
    model[0].reset_parameters = None  # type: ignore[index]
    with pytest.raises(
        ValueError, match=r"module '0' \(Linear\) has a parameter of shape .* on the meta device and no"
    ):
        estimate(model.parameters(), 2, stage=3, model=model)


def peak_of_redrawn(rank: int, world_size: int) -> int:
    """The parent writes what has had its turn, in buckets that are released meanwhile."""
    free_what_is_left()
    model = on_meta(Deep)
    before = room_bytes()
    most_room_bytes()
    optimizer = FusedShardedSGD(
        model.named_parameters(),
        stage=3,
        model=model,
        bucket_cap_mb=1,
        resident_mb=LIMIT_MB,
        lr=0.1,
        init=lambda module: [nn.init.ones_(each) for each in module.parameters()],
    )
    del optimizer
    return most_room_bytes() - before


def test_what_writes_older_parameters_stays_within_the_limit_too() -> None:
    for rooms in run_ranks(peak_of_redrawn, 2):
        assert rooms <= LIMIT_MB * MIB


def warned(rank: int, world_size: int) -> list[str]:
    with pytest.warns(UserWarning, match="first values") as found:
        built(on_meta(lambda: Deep(wide=True)))
    return [str(each.message) for each in found]


def test_that_module_is_named_with_its_bytes() -> None:
    for said in run_ranks(warned, 2):
        assert re.search(r"module 'wide' \(Bilinear\) has parameters in buckets of 6\.0 MiB", "\n".join(said))


DTYPES = (torch.float32, torch.bfloat16, torch.float16)


class Crossed(nn.Module):
    """The first modules share buckets with the last ones, one for each dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.ModuleList(nn.Linear(700, 500, bias=False, dtype=dtype) for dtype in DTYPES)
        self.middle = nn.Linear(WIDTH, WIDTH, bias=False)
        self.last = nn.ModuleList(nn.Linear(20, 20, bias=False, dtype=dtype) for dtype in DTYPES)

    def pairs(self) -> list[tuple[str, nn.Parameter]]:
        pairs = [pair for both in zip(self.first, self.last, strict=True) for pair in both]
        return [(str(place), each.weight) for place, each in enumerate([self.middle, *pairs])]


def crossed(rank: int, world_size: int) -> str:
    model = on_meta(Crossed)
    assert isinstance(model, Crossed)
    options: dict[str, Any] = {"stage": 3, "model": model, "bucket_cap_mb": 1.4, "lr": 0.1}
    with pytest.raises(ValueError, match="resident_mb") as raised:
        FusedShardedSGD(model.pairs(), resident_mb=1.5, **options)
    assert all(param.is_meta for param in model.parameters())
    FusedShardedSGD(model.pairs(), resident_mb=2.8, **options)
    return str(raised.value)


def test_a_limit_that_can_not_be_kept_is_refused() -> None:
    for said in run_ranks(crossed, 2):
        assert re.search(r"2\.67\d MiB of buckets are whole beside one module's, and resident_mb allows 1\.500", said)


# ---- a model that goes back to modules which had their turn, as GPT-2 of transformers does to its projections


def gpt2() -> nn.Module:
    import transformers

    sizes = {"vocab_size": 64, "n_positions": 32, "n_embd": 256, "n_layer": 12, "n_head": 4}
    return transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes, bos_token_id=0, eos_token_id=0))


def peak_of_gpt2(rank: int, world_size: int, library: Path) -> tuple[int, int, int]:
    allocator = Allocator(library)
    free_what_is_left()
    model, made = on_meta(gpt2), []
    base, rooms = allocator.now, room_bytes()
    most_room_bytes()
    most = allocator.peak_of(lambda: made.append(built(model)))
    return most_room_bytes() - rooms, most - base, sum(param.nbytes for param in model.parameters())


def test_rooms_of_a_model_of_transformers_stay_within_the_limit() -> None:
    pytest.importorskip("transformers")
    for rooms, other, params in run_ranks(peak_of_gpt2, 2, build()):
        assert params > 10 * LIMIT_MB * MIB
        assert rooms <= LIMIT_MB * MIB
        assert other <= params / 2 * WITHIN + 2 * MIB


def generates(rank: int, world_size: int) -> int:
    """As many tokens as each rank likes, with the whole model's: returns the most bytes of rooms."""
    model: Any = on_meta(gpt2).eval()
    before = room_bytes()
    torch.manual_seed(SEED)
    optimizer = built(model)
    most_room_bytes()
    count, prompt = 4 + 3 * rank, torch.tensor([[1, 2, 3]])
    sizes = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    tokens = model.generate(prompt, **sizes)
    most = most_room_bytes() - before
    twin: Any = pretrained_twin(gpt2).eval()
    assert tokens.shape == (1, 3 + count)
    assert torch.equal(tokens, twin.generate(prompt, **sizes))
    del optimizer
    return most


def test_text_is_generated_within_the_limit() -> None:
    pytest.importorskip("transformers")
    for rooms in run_ranks(generates, 2):
        assert rooms <= LIMIT_MB * MIB
