"""Tables in stage 3: ranks keep the rows that they own, lookups fetch those that they name, and all else the table."""

from __future__ import annotations

import signal
import threading
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional as F

import zerox
from tests.mortal_ranks import fail_now, start_ranks
from tests.ranks import run_ranks
from tests.residency.rig import WAYS, residents, run_by_way
from tests.rows.tables import NARROW, WIDE, Model, backward, build, ids_of, numbered
from zerox import FusedShardedAdam
from zerox._C import ResidentCounts
from zerox.plan.plan import BLOCK_ROWS, most_rows

ROWS, WIDTH = WIDE
ROW, PAGE = 4 * WIDTH, 4096


def trained(rank: int, size: int, stage: int, kind: str = "", device: str = "cpu", **options: Any) -> list[Tensor]:
    dtype, of_kind = NARROW.get(kind, (torch.float32, {}))
    model = Model(seed=rank).to(dtype).to(device)
    optimizer = build(model, stage=stage, **of_kind, **options)
    losses = []
    for step in range(4):
        if step == 2:
            with optimizer.no_sync():
                backward(model, rank, 9)
        backward(model, rank, step)
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        if rank == step % size:  # one rank alone evaluates
            with torch.inference_mode():
                losses.append(model(ids_of(3, step)).clone())
    with optimizer.whole():
        return [*losses, *(param.detach().clone() for param in model.parameters())]


def as_in_stage_2(rank: int, size: int, *args: Any, **options: Any) -> None:
    """With these arguments of trained()."""
    theirs = trained(rank, size, 2, *args, **options)
    for ours, of_stage_2 in zip(trained(rank, size, 3, *args, **options), theirs, strict=True):
        assert torch.equal(ours, of_stage_2)


@pytest.mark.parametrize("way", WAYS)
def test_a_training_has_the_bits_of_stage_2(way: str) -> None:
    run_ranks(run_by_way, 4 if way == "two machines" else 2, way, as_in_stage_2)


def in_16_bits(rank: int, size: int) -> None:
    for kind in ("bf16", "fp16"):
        as_in_stage_2(rank, size, kind)


@pytest.mark.parametrize("way", WAYS)
def test_so_has_a_training_in_16_bits(way: str) -> None:
    run_ranks(run_by_way, 4 if way == "two machines" else 2, way, in_16_bits)


def counted(optimizer: FusedShardedAdam, call: Callable[[], Any]) -> tuple[int, int]:
    """How many fetches it took, and of how many bytes."""
    before: ResidentCounts = residents(optimizer).counts
    call()
    after = residents(optimizer).counts
    assert after.faults == before.faults
    return after.fetches - before.fetches, after.fetched_bytes - before.fetched_bytes


def look_up(rank: int, size: int, dtype: torch.dtype = torch.float32) -> None:
    row_bytes = WIDTH * dtype.itemsize
    table, optimizer = numbered(dtype, resident_mb=1)
    owners = optimizer.inside.tables[0].owners
    ids = torch.tensor([[5, 999], [5, 700], [130, 6]], dtype=torch.int64 if rank == 0 else torch.int32)
    rows = [5, 6, 130, 700, 999]
    foreign = sum(int(owners.of_block[row // BLOCK_ROWS]) != rank for row in rows) * row_bytes
    for _ in range(2):
        assert residents(optimizer).resident_bytes == 0
        assert counted(optimizer, lambda: table(ids).sum().backward()) == (1, foreign)
        pages = {place // PAGE for row in rows for place in (row * row_bytes, (row + 1) * row_bytes - 1)}
        assert residents(optimizer).resident_bytes == len(pages) * PAGE
        assert counted(optimizer, lambda: table(ids[1:])) == (0, 0), "they stay"
        seventeenth = int(owners.of_block[17 // BLOCK_ROWS]) != rank
        assert counted(optimizer, lambda: table(torch.tensor([5, 17]))) == (1, seventeenth * row_bytes)
        assert counted(optimizer, lambda: table.weight.detach().view(-1).t()) == (0, 0), "a view reads nothing"
        assert counted(optimizer, lambda: (torch.zeros_like(table.weight), table.weight.shape)) == (0, 0)
        with pytest.raises(IndexError):
            table(torch.tensor([ROWS]))
        optimizer.step()  # after which all are forgotten
        optimizer.zero_grad()
        for row in (5, 6, 17):
            assert torch.equal(table(torch.tensor(row)), table.weight.detach()[row])
        residents(optimizer).release_all()
    assert optimizer.memory_bytes().parameters == owners.rows_of(rank).numel() * row_bytes
    assert not residents(optimizer).counts.faults


@pytest.mark.parametrize("way", WAYS)
def test_a_lookup_fetches_the_rows_that_it_names(way: str) -> None:
    run_ranks(run_by_way, 4 if way == "two machines" else 2, way, look_up)


def test_a_lookup_fetches_rows_of_16_bits() -> None:
    run_ranks(look_up, 2, torch.bfloat16)


def bags(rank: int, size: int) -> None:
    """Every mode, with weights whose gradients read the table in backward."""
    torch.manual_seed(0)
    values = torch.randn(ROWS, WIDTH)
    for mode in ("sum", "mean", "max"):
        table, twin = (
            nn.EmbeddingBag.from_pretrained(values.clone(), freeze=False, mode=mode, sparse=mode != "max") for _ in "12"
        )
        optimizer = FusedShardedAdam([{"params": table.parameters(), "sparse": True, "weight_decay": 0.0}], stage=3)
        residents(optimizer).set_hostile(True)
        ids, offsets = torch.tensor([1, 5, 800, 5, 64, 3]), torch.tensor([0, 2, 2])
        found = []
        for each in (table, twin):
            weights = torch.linspace(0, 1, 6, requires_grad=True) if mode == "sum" else None
            out = each(ids, offsets, weights)
            if mode != "max":
                out.square().sum().backward()
            found.append([out, *([] if weights is None else [weights.grad])])
        assert all(torch.equal(ours, theirs) for ours, theirs in zip(*found, strict=True))
        assert 0 < residents(optimizer).counts.fetched_bytes <= 2 * 6 * ROW
        with warnings.catch_warnings():
            warnings.simplefilter("error")
            with torch.no_grad():
                table(ids.view(2, 3))


def test_bags_look_up_rows_forward_and_backward() -> None:
    run_ranks(bags, 2)


READS: dict[str, Callable[[nn.Embedding], Tensor]] = {
    "sum": lambda table: table.weight.sum(),
    "a row": lambda table: table.weight[700].clone(),
    "a lookup in a part": lambda table: F.embedding(torch.tensor([3]), table.weight[600:]),
    "a lookup across": lambda table: F.embedding(torch.tensor([3]), table.weight.t()),
    "a product": lambda table: torch.ones(WIDTH) @ table.weight.t(),
    "a vector": lambda table: nn.utils.parameters_to_vector(table.parameters()),
    "numpy": lambda table: torch.from_numpy(table.weight.detach().numpy().copy()),
    "storage": lambda table: torch.tensor([table.weight.untyped_storage()[700 * ROW + byte] for byte in range(4)]),
}


def read_otherwise(rank: int, size: int, name: str) -> None:
    table, optimizer = numbered(resident_mb=1)
    twin, _ = numbered(process_group="alone")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        table(torch.tensor([3]))  # some rows are here
        for _ in range(2):
            fetches = residents(optimizer).counts.fetches
            with torch.no_grad():
                assert torch.equal(READS[name](table), READS[name](twin))
            assert residents(optimizer).resident == [True]
            assert residents(optimizer).counts.fetches - fetches == 1
            residents(optimizer).release_all()
    said = [str(each.message) for each in caught if "is sharded by rows" in str(each.message)]
    if name not in ("numpy", "storage"):  # these are told of on stderr
        assert len(said) == 1
        assert "reads table 'words'" in said[0]
        assert "so all of it is fetched, 0.24" in said[0]


@pytest.mark.parametrize("name", READS)
def test_whatever_else_reads_a_table_fetches_all_of_it_and_says_so_once(name: str) -> None:
    run_ranks(read_otherwise, 2, name)


def limited(rank: int, size: int) -> int:
    """Rows make room for others; a table that is read whole passes the limit for as long as it is read."""
    table, optimizer = numbered(resident_mb=8 * PAGE / 2**20)
    most = 0
    for start in range(0, ROWS - 64, 64):
        assert torch.equal(table(torch.tensor([start, start + 33]))[:, 0], torch.tensor([start, start + 33.0]))
        most = max(most, residents(optimizer).resident_bytes)
    table.weight.sum()
    assert residents(optimizer).resident_bytes == 0
    return most


def test_rows_make_room_for_others() -> None:
    assert all(0 < most <= 8 * PAGE for most in run_ranks(limited, 2))


def memory(rank: int, size: int) -> None:
    table, head = nn.Embedding(10_000, 16, sparse=True), nn.Linear(16, 300)
    groups = [{"params": head.parameters()}, {"params": table.parameters(), "sparse": True, "weight_decay": 0.0}]
    optimizer = FusedShardedAdam(groups, stage=3)
    head(table(torch.tensor([1, 1, 700]))).sum().backward()
    optimizer.step()
    found, expected = optimizer.memory_bytes(), zerox.estimate(groups, size, stage=3)
    dense = zerox.estimate(head.parameters(), size, stage=3)
    own = optimizer.inside.tables[0].own_rows.numel() * 16 * 4
    shard = sum(each.buffer.own.nbytes for each in optimizer.inside.gather.all) - own
    assert found.parameters == shard + own + residents(optimizer).room_bytes
    limit = 10_000 * 16 * 4 // 8  # which is more than the bucket needs
    assert 0 <= expected.parameters - dense.parameters - own < limit + 2 * 64 * 16 * 4
    assert expected.parameters < zerox.estimate(groups, size, stage=2).parameters
    on_gpus = [zerox.estimate(each, size, stage=3, backend="nccl") for each in (groups, head.parameters())]
    num_kept = most_rows(10_000, size)
    assert on_gpus[0].parameters - on_gpus[1].parameters == (num_kept + 10_000) * 16 * 4, "a lookup's memory too"


@pytest.mark.parametrize("size", [2, 3])
def test_a_rank_holds_the_rows_that_it_owns(size: int) -> None:
    run_ranks(memory, size)


def in_threads(rank: int, size: int) -> None:
    """Lookups and whole reads of one table at once, while rows come and go."""
    table, optimizer = numbered()
    residents(optimizer).set_hostile(True)
    failed: list[BaseException] = []

    def read(seed: int) -> None:
        try:
            generator = torch.Generator().manual_seed(seed)
            for count in range(60):
                ids = torch.randint(0, ROWS, (20,), generator=generator)
                with torch.no_grad():
                    if seed == 0 and count % 10 == 0:
                        assert float(table.weight.sum(0)[0]) == ROWS * (ROWS - 1) / 2
                    assert torch.equal(table(ids)[:, 0], ids.float())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(3)]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
    assert not failed, failed
    dist.barrier()


@pytest.mark.parametrize("way", ["memory", "messages"])
def test_threads_may_look_up_at_once(way: str) -> None:
    run_ranks(run_by_way, 2, way, in_threads)


def in_python(rank: int, size: int) -> None:
    """A function in Python that reads the table, forward and backward, fetches all of it."""

    class Scaled(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, weight: Tensor, ids: Tensor) -> Tensor:
            ctx.save_for_backward(weight, ids)
            return weight.detach()[ids] * 2

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
            weight, ids = ctx.saved_tensors
            values = torch.from_numpy(weight.detach().numpy()[ids.numpy()].copy())
            return torch.sparse_coo_tensor(ids[None], grads[0] * values, weight.shape, check_invariants=False), None

    table, optimizer = numbered()
    residents(optimizer).set_hostile(True)
    out = Scaled.apply(table.weight, torch.tensor([5, 700]))
    out.sum().backward()
    grad = table.weight.grad
    assert grad is not None
    assert torch.equal(grad.coalesce().values()[:, 0], torch.tensor([5.0, 700.0]))
    assert residents(optimizer).counts.faults == 0, "the function was announced, forward and backward"
    optimizer.step()
    assert float(table(torch.tensor([5])).mean()) == 4.5


def test_a_function_in_python_reads_a_table() -> None:
    run_ranks(in_python, 2)


def look_up_until_it_raises(rank: int, size: int) -> str:
    table, optimizer = numbered()
    residents(optimizer).set_hostile(True)  # each lookup fetches again
    dist.barrier()
    if rank == 1:
        fail_now(signal.SIGKILL)
    try:
        for _ in range(1000):
            table(torch.arange(ROWS))
    except RuntimeError as error:
        return str(error)
    return ""


@pytest.mark.parametrize("way", WAYS)
def test_a_rank_that_dies_is_named_by_those_that_look_up_its_rows(way: str, tmp_path: Path) -> None:
    function = look_up_until_it_raises
    ranks = start_ranks(run_by_way, 3, way, function, folder=tmp_path / "ranks", timeout_s=3)
    try:
        for rank in (0, 2):
            said = ranks.answer(rank, within_s=60)
            assert "rows of" in said
            assert "rank 1 is gone" in said
    finally:
        ranks.close()
