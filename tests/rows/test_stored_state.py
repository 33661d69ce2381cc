"""Moments of tables in 16 and 8 bits: each row is a parameter of its own, whose blocks begin with it."""

from __future__ import annotations

import math
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import zerox
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, ops
from zerox.checkpoint.convert import convert_file
from zerox.memory.forms import convert_, decode, master_of
from zerox.memory.row_owners import CPU
from zerox.memory.stored import Stored
from zerox.options import STATE_FORMS
from zerox.rules.known import KNOWN

KINDS: dict[str, Any] = {"8 bits": "8bit", "bf16": torch.bfloat16, "fp32": torch.float32}
RULES: dict[str, dict[str, Any]] = {
    "adam": {"lr": 0.05, "betas": (0.875, 0.99), "eps": 1e-3},
    "sgd": {"lr": 0.05},  # with momentum tables are refused, and without there is no state
    "lion": {"lr": 0.01, "betas": (0.9, 0.99)},
}


class Tables(nn.Module):
    """Rows shorter than a block of 8-bit state, and of one block and a part."""

    def __init__(self, seed: int = 0) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.words = nn.Embedding(700, 12, sparse=True)
        self.wide = nn.Embedding(40, 300, sparse=True)

    @property
    def tables(self) -> list[nn.Parameter]:
        return [self.words.weight, self.wide.weight]


def ids_of(rank: int, step: int, table: nn.Parameter) -> Tensor:
    generator = torch.Generator().manual_seed(10 * step + rank)
    return torch.randint(0, table.shape[0], (0 if (rank, step) == (1, 1) else 9,), generator=generator)


def backward(model: Tables, rank: int, step: int) -> None:
    for module, table in zip((model.words, model.wide), model.tables, strict=True):
        found = module(ids_of(rank, step, table).to(table.device))
        weights = torch.randn(found.shape, generator=torch.Generator().manual_seed(step)) * 10.0 ** (rank - step)
        (found * weights.to(table.device)).sum().backward()


def build(model: Tables, kind: str, rule: str = "adam", **options: Any) -> FusedShardedAdam:
    of_rule = {"rule": rule, "weight_decay": 0.0, **RULES[rule]}
    names = [(name, param) for name, param in model.named_parameters()]
    return FusedShardedAdam([{"params": names, "sparse": True, **of_rule}], state_dtype=KINDS[kind], **options)


def row_by_row(stored: Stored) -> Tensor:
    """Each row as a dense parameter is decoded."""
    scales = [None] * len(stored.values) if stored.scales is None else list(stored.scales)
    rows = zip(stored.values, scales, strict=True)
    return torch.stack([decode(replace(stored, values=values, scales=of_row)).float() for values, of_row in rows])


class RowTwin:
    """One table on one process: the CPU's dense kernel updates each row that was touched."""

    def __init__(self, table: Tensor, number: int, kind: str, rule: str, group: dict[str, Any]) -> None:
        self.values = table.detach().cpu().clone()
        self.remainder = torch.zeros(table.shape, dtype=torch.int16) if table.dtype is torch.bfloat16 else None
        self.number = number
        self.rule = KNOWN[rule]
        self.group = group
        self.step = torch.zeros(1, dtype=torch.int64)
        form = STATE_FORMS[KINDS[kind]]
        self.state = [Stored.of_rows(spec, form, *table.shape, CPU) for spec in self.rule.wanted_states([group])]

    def update(self, grad: Tensor, touched: Tensor) -> None:
        """SparseAdam's eps is added to a root that is not corrected: the dense rule's is another in each step."""
        group = dict(self.group)
        if self.rule.name == "adam":
            group["eps"] /= math.sqrt(1.0 - self.group["betas"][1] ** (int(self.step) + 1))
        options = torch.tensor([list(map(float, self.rule.row(group)))], dtype=torch.float64)
        before = self.step.clone()
        width = self.values.shape[1]
        for row in touched.tolist():
            self.step.copy_(before)
            coded = any(stored.scales is not None for stored in self.state)
            start = 0 if coded else row * width  # of random bits, which 8 bits do not use
            shard = ops.Shard(
                self.values[row],
                None if self.remainder is None else self.remainder[row],
                grad[row].cpu(),
                [stored.values[row] for stored in self.state],
                [stored.scales[row] for stored in self.state if stored.scales is not None],
                torch.tensor([[0, width, 0, self.number, start]]),
                torch.ones(1, dtype=torch.uint8),
                self.step,
            )
            ops.update_(self.rule.name, [shard], options)

    def check(self, param: Tensor, state: dict[str, Any]) -> None:
        torch.testing.assert_close(param.cpu(), self.values, rtol=0, atol=0)
        if self.remainder is not None:
            assert torch.equal(state["master"].cpu(), master_of(self.values, self.remainder))
        for stored in self.state:
            torch.testing.assert_close(state[stored.spec.key].cpu(), row_by_row(stored), rtol=0, atol=0)


def train(
    rank: int, size: int, stage: int, kind: str, rule: str, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> None:
    model = Tables().to(device, dtype)
    twins = [
        RowTwin(table, number, kind, rule, {**KNOWN[rule].defaults, **RULES[rule], "weight_decay": 0.0})
        for number, table in enumerate(model.tables)
    ]
    optimizer = build(model, kind, rule, stage=stage)
    for step in range(5):
        backward(model, rank, step)
        optimizer.scale_grads_(0.5)
        if dtype is not torch.float32:
            optimizer.clip_grad_value_(0.5)
        grads = [optimizer.full_grad(table) for table in model.tables]
        optimizer.step()
        optimizer.zero_grad()
        for table, twin, grad in zip(model.tables, twins, grads, strict=True):
            touched = torch.cat([ids_of(other, step, table) for other in range(size)]).unique()
            assert grad is not None
            twin.update(grad, touched)
        with optimizer.whole():
            for table, twin in zip(model.tables, twins, strict=True):
                twin.check(table.detach(), optimizer.full_state(table))


@pytest.mark.parametrize(
    ("size", "stage", "kind", "rule"),
    [
        *((size, 2, kind, rule) for size in (1, 3) for kind in ("8 bits", "bf16") for rule in RULES),
        *((2, stage, kind, "adam") for stage in (1, 3) for kind in ("8 bits", "bf16")),
    ],
)
def test_a_row_has_the_bits_of_a_dense_parameter_s_update(size: int, stage: int, kind: str, rule: str) -> None:
    """At any number of ranks: neither blocks nor random bits know who owns a row."""
    run_ranks(train, size, stage, kind, rule)


@pytest.mark.parametrize("kind", ["8 bits", "bf16"])
def test_16_bit_tables_have_masters_beside_such_moments(kind: str) -> None:
    """With clip_grad_value_(), which cuts rows before they are updated."""
    run_ranks(train, 2, 2, kind, "adam", torch.bfloat16)


def near(rank: int, size: int, kind: str) -> float:
    """How far a training is from the same in float32, beside how far it went."""
    trained = []
    for each in (kind, "fp32"):
        model = Tables()
        optimizer = build(model, each)
        for step in range(6):
            backward(model, rank, step % 3)
            optimizer.step()
            optimizer.zero_grad()
        trained.append(torch.cat([table.detach().flatten() for table in model.tables]))
    first = torch.cat([table.detach().flatten() for table in Tables().tables])
    return float((trained[0] - trained[1]).norm() / (trained[1] - first).norm())


@pytest.mark.parametrize(("kind", "most"), [("8 bits", 0.05), ("bf16", 0.01)])
def test_it_is_sparse_adam_but_for_the_rounding_of_its_moments(kind: str, most: float) -> None:
    """8 bits have 7 decades with a hundredth at best; bf16 1/256."""
    [found] = run_ranks(near, 1, kind)
    assert 0 < found < most


def save(rank: int, size: int, path: str, stage: int, kind: str) -> Any:
    model = Tables()
    optimizer = build(model, kind, stage=stage)
    for step in range(3):
        backward(model, rank, step)
        optimizer.step()
        optimizer.zero_grad()
    zerox.save(path, model, optimizer)
    return {number: optimizer.full_state(table) for number, table in enumerate(model.tables)}


def load(rank: int, size: int, path: str, stage: int, kind: str) -> Any:
    """What was loaded, what was said of it, and where the same rows from all ranks lead from there."""
    model = Tables(seed=5)
    optimizer = build(model, kind, stage=stage)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        zerox.load(path, model, optimizer)
    loaded = {number: optimizer.full_state(table) for number, table in enumerate(model.tables)}
    backward(model, 0, 7)
    optimizer.step()
    with optimizer.whole():
        values = [table.detach().clone() for table in model.tables]
    return loaded, [str(each.message) for each in caught if "round" in str(each.message)], values


def assert_equal(one: Any, other: Any) -> None:
    torch.testing.assert_close(one, other, rtol=0, atol=0)


@pytest.mark.parametrize("kind", ["8 bits", "bf16"])
@pytest.mark.parametrize(("saved_by", "loaded_by"), [((2, 1), (3, 3)), ((3, 3), (1, 2))])
def test_a_checkpoint_goes_on_at_any_number_of_ranks(
    kind: str, saved_by: tuple[int, int], loaded_by: tuple[int, int], tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, saved_by[0], path, saved_by[1], kind)[0]
    loaded, said, there = run_ranks(load, loaded_by[0], path, loaded_by[1], kind)[0]
    _, _, here = run_ranks(load, saved_by[0], path, saved_by[1], kind)[0]
    assert_equal(loaded, saved)
    assert not said
    assert_equal(there, here)


@pytest.mark.parametrize(
    ("was", "will_be"), [("8 bits", "fp32"), ("bf16", "8 bits"), ("fp32", "8 bits"), ("fp32", "bf16")]
)
def test_a_checkpoint_is_converted_to_another_form_and_says_so_if_that_rounds(
    was: str, will_be: str, tmp_path: Path
) -> None:
    path = str(tmp_path / "checkpoint")
    saved = run_ranks(save, 2, path, 2, was)[0]
    loaded, said, _ = run_ranks(load, 3, path, 2, will_be)[0]
    assert bool(said) is (will_be != "fp32")
    for number, state in saved.items():
        for spec in KNOWN["adam"].wanted_states([KNOWN["adam"].defaults]):
            wide = state[spec.key]
            own = Stored.of_rows(spec, STATE_FORMS[KINDS[will_be]], *wide.shape, CPU)
            for row in range(len(wide)):  # one by one
                of_row = None if own.scales is None else own.scales[row]
                convert_(replace(own, values=own.values[row], scales=of_row), Stored.given(spec, wide[row]))
            assert_equal(loaded[number][spec.key], row_by_row(own))


def test_the_command_converts_8_bits_for_torch(tmp_path: Path) -> None:
    [saved] = run_ranks(save, 1, str(tmp_path / "checkpoint"), 2, "8 bits")
    convert_file(tmp_path / "checkpoint", tmp_path / "file.pt", False, False, ("model", "optimizer"))
    state = torch.load(tmp_path / "file.pt", weights_only=True)["optimizer"]["state"]
    for number, own in saved.items():
        assert_equal(
            {key: state[number][key] for key in ("exp_avg", "exp_avg_sq")}, {k: own[k] for k in own if k != "step"}
        )


def test_blocks_of_a_dense_parameter_and_of_rows_are_not_taken_for_each_other(tmp_path: Path) -> None:
    path = str(tmp_path / "checkpoint")
    model = Tables()
    zerox.save(path, model, build(model, "8 bits"))
    other = Tables()
    dense = FusedShardedAdam(list(other.named_parameters()), state_dtype="8bit")
    with pytest.raises(zerox.CheckpointError, match=r"words.weight.exp_avg_scale was saved as \[700, 1\]"):
        zerox.load(path, other, dense)
    again = str(tmp_path / "dense")
    zerox.save(again, other, dense)
    with pytest.raises(zerox.CheckpointError, match=r"exp_avg_scale was saved as \[33\], and is \[700, 1\]"):
        zerox.load(again, model, build(model, "8 bits"))


def through_state_dict(rank: int, size: int, kind: str) -> None:
    model = Tables()
    optimizer = build(model, kind)
    backward(model, rank, 0)
    optimizer.step()
    own = optimizer.state_dict()
    other = build(Tables(4), kind)
    other.load_state_dict(own)
    assert_equal([t.kept for t in other.inside.tables], [t.kept for t in optimizer.inside.tables])
    if kind == "8 bits":
        del own["state"][1]["exp_avg_sq_scale"]
        with pytest.raises(ValueError, match="has no exp_avg_sq_scale beside its codes of 8 bits"):
            other.load_state_dict(own)
    whole = optimizer.full_state_dict()
    if size == 1:
        wide = build(Tables(4), "fp32")
        wide.load_state_dict(whole)
        assert_equal(wide.full_state_dict()["state"], whole["state"])


@pytest.mark.parametrize("kind", ["8 bits", "bf16"])
@pytest.mark.parametrize("size", [1, 2])
def test_state_dict_is_this_rank_s_share_and_loads_again(size: int, kind: str) -> None:
    run_ranks(through_state_dict, size, kind)


def test_estimate_knows_their_bytes() -> None:
    for kind, form in (("8 bits", 1), ("bf16", 2), ("fp32", 4)):
        model = Tables()
        optimizer = build(model, kind)
        moments = optimizer.memory_bytes().moments
        group = {"params": model.tables, "sparse": True, "weight_decay": 0.0}
        assert zerox.estimate([group], world_size=1, state_dtype=KINDS[kind]).moments == moments
        scales = 4 * (700 + 40 * 2) if kind == "8 bits" else 0
        assert moments == 2 * (form * (700 * 12 + 40 * 300) + scales)


def test_a_nan_spoils_its_row_only() -> None:
    model = Tables()
    optimizer = build(model, "8 bits")
    backward(model, 0, 0)
    optimizer.step()
    optimizer.zero_grad()
    before = optimizer.full_state(model.words.weight)["exp_avg"]
    rows = ids_of(0, 0, model.words.weight)[:2]
    values = torch.ones(2, 12)
    values[0, 3] = math.nan
    model.words.weight.grad = torch.sparse_coo_tensor(rows[None], values, (700, 12))
    optimizer.step()
    after = optimizer.full_state(model.words.weight)["exp_avg"]
    assert after[rows[0]].isnan().all()
    assert not after[rows[1]].isnan().any()
    others = torch.ones(700, dtype=torch.bool)
    others[rows] = False
    assert torch.equal(after[others], before[others])
