"""A model on meta gets the values of the same init of the whole model, on any number of ranks."""

from __future__ import annotations

import functools
import time
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from tests.mesh.test_two_levels import mesh_of
from tests.meta.rig import SEED, born, differing, on_meta, reset, tensors, twin
from tests.ranks import run_ranks
from tests.residency.rig import WAYS, run_by_way
from zerox import FusedShardedAdam, estimate
from zerox.memory.bucket import members_of
from zerox.optimizer.materialize import Materializer
from zerox.optimizer.planning import Around, Given, make_plan
from zerox.options import OptimizerOptions
from zerox.ranks.group import Ranks
from zerox.rules.known import rules_of

KINDS: dict[str, Any] = {
    "Linear": lambda: nn.Linear(30, 50),
    "Bilinear": lambda: nn.Bilinear(7, 9, 30),
    "Conv2d": lambda: nn.Conv2d(8, 16, 3),
    "ConvTranspose2d": lambda: nn.ConvTranspose2d(8, 16, 3),
    "Embedding": lambda: nn.Embedding(50, 24, padding_idx=3),
    "LayerNorm": lambda: nn.LayerNorm(24),
    "BatchNorm2d": lambda: nn.BatchNorm2d(24),
    "GroupNorm": lambda: nn.GroupNorm(4, 24),
    "LSTM": lambda: nn.LSTM(20, 24, num_layers=2, bidirectional=True),
    "MultiheadAttention": lambda: nn.MultiheadAttention(24, 4, add_bias_kv=True),
    "PReLU": lambda: nn.PReLU(24),
    "TransformerEncoderLayer": lambda: nn.TransformerEncoderLayer(24, 4, 48),
}
# Constructors draw in another order, and some several times: docs/sharded-parameters.md.
NOT_AS_CONSTRUCTED = {"MultiheadAttention", "TransformerEncoderLayer"}


def three_of(kind: str) -> nn.Module:
    """Modules of other kinds around, so that buckets are not the modules'."""
    return nn.Sequential(nn.Linear(40, 30), *(KINDS[kind]() for _ in range(3)), nn.Linear(30, 40, bias=False))


def of_kinds(rank: int, world_size: int, stage: int, kinds: list[str]) -> None:
    for kind in kinds:
        make = functools.partial(three_of, kind)
        model, optimizer = born(make, rank, stage)
        assert differing(model, twin(make)) == [], kind
        if kind not in NOT_AS_CONSTRUCTED:
            torch.manual_seed(SEED)
            assert differing(model, make()) == [], kind
        del optimizer


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4])
def test_every_kind_of_module(stage: int, world_size: int) -> None:
    run_ranks(of_kinds, world_size, stage, sorted(KINDS))


class Net(nn.Module):
    """Tied, with buffers, norms, a parameter of its own before its parts, and in several dtypes."""

    def __init__(self, dtype: torch.dtype = torch.float32, frozen: bool = False) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(40))
        self.embedding = nn.Embedding(60, 40, dtype=dtype)
        self.blocks = nn.ModuleList(Block(dtype) for _ in range(3))
        self.norm = nn.BatchNorm1d(40)
        self.head = nn.Linear(40, 60, bias=False, dtype=dtype)
        self.tie()
        if frozen:
            self.blocks[:2].requires_grad_(False)

    def tie(self) -> None:
        self.head.weight = self.embedding.weight

    def reset_parameters(self) -> None:
        nn.init.uniform_(self.scale, 0.5, 1.5)

    def forward(self, words: Tensor) -> Tensor:
        x = self.embedding(words).mean(1)
        for block in self.blocks:
            x = x + block(x)
        x = self.norm(x.float()) * self.scale
        return self.head(x.to(self.head.weight.dtype)).float()


class Block(nn.Sequential):
    def __init__(self, dtype: torch.dtype) -> None:
        wide = nn.Linear(40, 130, dtype=dtype)
        super().__init__(nn.LayerNorm(40, dtype=dtype), wide, nn.GELU(), nn.Linear(130, 40, dtype=dtype))


def own_init(module: nn.Module) -> None:
    """As users write it: through .data, for some kinds, and from the parent once more."""
    if isinstance(module, nn.Linear | nn.Embedding):
        module.weight.data.normal_(0, 0.02)
        if getattr(module, "bias", None) is not None:
            module.bias.data.zero_()
    elif isinstance(module, Block):
        module[3].weight.data.normal_(0, 0.001)  # which has had its turn
    elif isinstance(module, Net):
        nn.init.uniform_(module.scale)
        module.blocks[0][1].weight.data.mul_(2)  # long ago
    elif hasattr(module, "reset_parameters"):
        module.reset_parameters()


def losses(model: nn.Module, optimizer: Any, rank: int, steps: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(rank)
    found = []
    for _ in range(steps):
        words = torch.randint(60, (8, 5), generator=generator)
        loss = F.cross_entropy(model(words), torch.randint(60, (8,), generator=generator))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.detach())
    return found


def replacing_init(module: nn.Module) -> None:
    """Gives parameters other memory, as transformers' models of version 4 do in 16 bits."""
    for param in module.parameters(recurse=False):
        param.data = torch.rand(param.shape).to(param.dtype)
    if isinstance(module, nn.BatchNorm1d):
        module.reset_running_stats()


VARIANTS: dict[str, tuple[Any, dict[str, Any]]] = {
    "plain": (Net, {}),
    "at the least limit": (Net, {"resident_mb": 0.05}),
    "all resident": (Net, {"resident_mb": float("inf")}),
    "bfloat16, 8 bits": (functools.partial(Net, torch.bfloat16), {"state_dtype": "8bit"}),
    "float16": (functools.partial(Net, torch.float16), {}),
    "frozen": (functools.partial(Net, frozen=True), {}),
    "own init": (Net, {"init": own_init}),
    "replacing init": (functools.partial(Net, torch.bfloat16, frozen=True), {"init": replacing_init}),
    "own init at the least limit": (Net, {"init": own_init, "resident_mb": 0.05}),
}


def trains_as_its_twin(rank: int, world_size: int, stage: int, variant: str, *mesh: int) -> None:
    make, options = VARIANTS[variant]
    options = {key: value for key, value in options.items() if stage == 3 or key != "resident_mb"}
    if mesh:
        options["process_group"] = mesh_of(*mesh)
    model, optimizer = born(make, rank, stage, **options)
    init = options.pop("init", reset)
    other = twin(make, init)
    assert differing(model, other) == []
    built = FusedShardedAdam(other.named_parameters(), stage=stage, bucket_cap_mb=0.02, lr=1e-2, **options)
    assert losses(model, optimizer, rank) == losses(other, built, rank)
    with optimizer.whole(), built.whole():
        assert differing(model, other) == []


@pytest.mark.parametrize("variant", sorted(VARIANTS))
@pytest.mark.parametrize("stage", [1, 3])
def test_it_trains_as_its_twin(stage: int, variant: str) -> None:
    run_ranks(trains_as_its_twin, 2, stage, variant)


@pytest.mark.parametrize("way", WAYS)
def test_by_every_way(way: str) -> None:
    run_ranks(run_by_way, 4, way, trains_as_its_twin, 3, "own init at the least limit")


def test_on_a_mesh() -> None:
    run_ranks(trains_as_its_twin, 4, 3, "own init", 2, 2)


def test_alone_without_ranks() -> None:
    for variant in VARIANTS:
        trains_as_its_twin(0, 1, 3, variant)


def partly(dtype: torch.dtype = torch.float32) -> nn.Module:
    """Adapters in memory beside a frozen base on meta, in turn, and a head on meta."""
    layers: list[nn.Module] = []
    for _ in range(3):
        layers.append(nn.Linear(40, 40, dtype=dtype).requires_grad_(False))
        layers.append(nn.Linear(40, 40, dtype=dtype, device="cpu"))
    return nn.Sequential(*layers, nn.BatchNorm1d(40, device="cpu"), nn.Linear(40, 60, dtype=dtype))


def beside_parts_in_memory(rank: int, world_size: int, stage: int, init: Any) -> None:
    """These have rank 0's values, as ever, and are not initialised again."""
    torch.manual_seed(rank)
    model = on_meta(partly)
    torch.manual_seed(0)
    expected = on_meta(partly)
    torch.manual_seed(SEED + rank)
    FusedShardedAdam(model.named_parameters(), stage=stage, model=model, bucket_cap_mb=0.02, init=init)
    torch.manual_seed(SEED)
    with torch.no_grad():
        for module in expected:
            if next(module.parameters()).is_meta:
                module.to_empty(device="cpu").reset_parameters()
    assert differing(model, expected) == []


@pytest.mark.parametrize("stage", [1, 3])
@pytest.mark.parametrize("init", [None, reset])
def test_parts_that_are_in_memory_keep_rank_0_s_values(stage: int, init: Any) -> None:
    run_ranks(beside_parts_in_memory, 2, stage, init)


def shared() -> nn.Module:
    inside = nn.Linear(30, 30)
    return nn.Sequential(inside, nn.Linear(30, 9), nn.Sequential(inside, nn.BatchNorm1d(30)))


def with_shared_module(rank: int, world_size: int) -> None:
    model, _ = born(shared, rank)
    other = on_meta(shared).to_empty(device="cpu")
    torch.manual_seed(SEED)
    for module in (other[0], other[1], other[2][1]):
        reset(module)
    assert model[0] is model[2][0]
    assert differing(model, other) == []


def test_a_module_in_two_places_is_initialised_once() -> None:
    run_ranks(with_shared_module, 2)


# ---- a large one


class Large(nn.Module):
    """The shapes of a Llama of 8 B parameters."""

    def __init__(self, width: int = 4096, inner: int = 14336, words: int = 128256) -> None:
        super().__init__()
        self.embedding = nn.Embedding(words, width)
        sizes = [(width, width), (width, 1024), (width, 1024), (width, width)]
        sizes += [(width, inner), (width, inner), (inner, width)]
        self.layers = nn.ModuleList(
            nn.Sequential(nn.RMSNorm(width), *(nn.Linear(*size, bias=False) for size in sizes), nn.RMSNorm(width))
            for _ in range(32)
        )
        self.head = nn.Linear(width, words, bias=False)


def test_8_billion_parameters_are_planned_at_once() -> None:
    model = on_meta(Large)
    assert sum(param.numel() for param in model.parameters()) > 8e9
    start = time.perf_counter()
    members = list(members_of([{"params": list(model.parameters())}]))
    materializer = Materializer(model, None, members, Ranks.alone(torch.device("cpu"), ""))
    materializer.look()
    around = Around(OptimizerOptions(stage=3), rules_of("adam"), "gloo", [8], True)
    plan = make_plan(around, [Given(each.name, each.param, {"lr": 1.0, "amsgrad": False}) for each in members])
    materializer.check_room(plan, members, 3 * 2**30)
    assert estimate(model.named_parameters(), 8, stage=3).parameters < 32e9 / 3
    assert time.perf_counter() - start < 20, "seconds; it takes less than one"
    assert all(param.is_meta for param in model.parameters())


# ---- what stays


def what_stays(rank: int, world_size: int) -> None:
    model = on_meta(Net)
    ids = {name: id(param) for name, param in model.named_parameters()}
    calls: list[str] = []
    model.head.weight.register_hook(lambda grad: calls.append("gradient"))
    model.scale.register_post_accumulate_grad_hook(lambda param: calls.append("accumulated"))
    torch.manual_seed(SEED + rank)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, model=model, bucket_cap_mb=0.02)
    assert ids == {name: id(param) for name, param in model.named_parameters()}
    assert model.head.weight is model.embedding.weight
    losses(model, optimizer, rank, steps=1)
    assert sorted(calls) == ["accumulated", "gradient"]
    assert not any(each.is_meta for each in tensors(model).values())


def test_parameters_stay_the_same_objects_with_their_hooks_and_ties() -> None:
    run_ranks(what_stays, 2)


def random_numbers(rank: int, world_size: int) -> tuple[list[float], list[float]]:
    """What ranks draw next: rank 2 has been seeded as rank 0."""
    torch.manual_seed(SEED + rank % 2)
    expected = torch.rand(1).tolist()
    torch.manual_seed(SEED + rank % 2)
    model = on_meta(Net)
    optimizer = FusedShardedAdam(model.named_parameters(), stage=3, model=model)
    del optimizer
    return expected, torch.rand(1).tolist()


def test_ranks_of_another_seed_go_on_with_it() -> None:
    (undrawn, first), (expected, second), (_, third) = run_ranks(random_numbers, 3)
    assert second == expected
    assert first == third != undrawn


def exchanged(rank: int, world_size: int) -> list[str]:
    """Two modules of the twin in another order."""

    def make() -> nn.Module:
        return nn.Sequential(nn.Linear(30, 30), nn.Linear(30, 30))

    other = on_meta(make).to_empty(device="cpu")
    torch.manual_seed(SEED)
    other[1].reset_parameters()
    other[0].reset_parameters()
    model, _ = born(make, rank)
    return differing(model, other)


def test_a_twin_of_another_order_is_found() -> None:
    assert len(run_ranks(exchanged, 2)[0]) == 4


# ---- a rank that draws something else


def draws_alone(rank: int, world_size: int, stage: int) -> str:
    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            reset(module)
            if rank == 1 and module.out_features == 9:
                module.bias.add_(1)

    model = on_meta(lambda: nn.Sequential(nn.Linear(30, 50), nn.Linear(50, 9)))
    with pytest.raises(ValueError, match="first values") as raised:
        FusedShardedAdam(model.named_parameters(), stage=stage, model=model, init=init)
    dist.barrier()
    return str(raised.value)


@pytest.mark.parametrize("stage", [2, 3])
def test_a_rank_that_draws_other_numbers_is_found(stage: int) -> None:
    for said in run_ranks(draws_alone, 2, stage):
        assert "parameter '1.bias'" in said
        assert "draw with torch's generators only" in said
