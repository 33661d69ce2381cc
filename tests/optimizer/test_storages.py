"""Every parameter has a storage of its own over its place in the bucket, and what people do with storages goes on."""

from __future__ import annotations

import copy
import io
import itertools
import pickle
from multiprocessing.reduction import ForkingPickler

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

from tests.bucket_manager.rig import Awkward, same_bits
from tests.optimizer.models import batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

CAP_MB = 0.02  # some buckets of some parameters


def train_step(model: nn.Module, optimizer: FusedShardedAdam, rank: int, step: int) -> None:
    optimizer.zero_grad()
    model(batch(rank, step)).square().mean().backward()
    optimizer.step()


def storages(params: dict[str, Tensor]) -> dict[str, tuple[int, int]]:
    """Where the storage of each begins, and its bytes: what savers tell tied weights by."""
    return {name: (p.untyped_storage().data_ptr(), p.untyped_storage().nbytes()) for name, p in params.items()}


def awkward_storages(rank: int, world_size: int) -> None:
    model = Awkward(torch.float32)
    model.tied = model.embedding
    strides = [p.stride() for p in model.parameters()]
    optimizer = FusedShardedAdam(model.parameters(), bucket_cap_mb=CAP_MB)
    for step in range(2):
        model(torch.arange(12).reshape(4, 3), extra=True).backward()
        optimizer.step()
        optimizer.zero_grad()
        assert [p.stride() for p in model.parameters()] == strides
        params = dict(model.named_parameters(remove_duplicate=False))
        found = storages(params)
        assert found["tied"] == found["embedding"], "tied weights stay tied"
        del found["tied"]
        for name, (start, nbytes) in found.items():
            assert nbytes == params[name].numel() * 4, (step, name)
            assert start == params[name].data_ptr()
            assert params[name].storage_offset() == 0
        ends = sorted((start, start + nbytes) for start, nbytes in found.values() if nbytes)
        assert all(end <= start for (_, end), (start, _) in itertools.pairwise(ends)), "they overlap"


def test_every_parameter_has_a_storage_of_its_own() -> None:
    run_ranks(awkward_storages, 2)


def saved_bytes(tensor: object) -> int:
    file = io.BytesIO()
    torch.save(tensor, file)
    return len(file.getvalue())


def test_one_parameter_is_saved_and_copied_without_its_bucket() -> None:
    model = make_model()
    optimizer = FusedShardedAdam(model.parameters())
    train_step(model, optimizer, 0, 0)
    plain = make_model()
    assert saved_bytes(model.gain) == saved_bytes(plain.gain) < 2000
    assert saved_bytes(model.state_dict()) == saved_bytes(plain.state_dict())
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert all(map(same_bits, copied.parameters(), model.parameters()))
        assert not {p.data_ptr() for p in copied.parameters()} & {p.data_ptr() for p in model.parameters()}
        assert copied.head.weight is copied.twice.weight


def test_a_storage_of_a_parameter_cant_be_resized() -> None:
    """It would free, or write over, what lies beside it."""
    param = nn.Parameter(torch.ones(8))
    FusedShardedAdam([param, nn.Parameter(torch.ones(8))])
    for numel in (0, 16):
        with pytest.raises(RuntimeError, match="resiz"):
            param.untyped_storage().resize_(4 * numel)


# ---- parameters that change places


def exchanged(rank: int, _: int, cap_mb: float, exchange: bool) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    params = [nn.Parameter(torch.randn(64, 64, generator=generator)) for _ in range(3)]
    optimizer = FusedShardedAdam(params, lr=1e-2, bucket_cap_mb=cap_mb)
    for step in range(3):
        factors = [torch.randn(p.shape, generator=generator) for p in params]
        sum((p * (f + rank)).sum() for p, f in zip(params, factors, strict=True)).backward()
        if step == 1:
            datas = [p.data if exchange else p.data.clone() for p in params]
            for param, data in zip(params, datas[1:] + datas[:1], strict=True):
                param.data = data
        optimizer.step()
        optimizer.zero_grad()
    return [p.detach().clone() for p in params]


@pytest.mark.parametrize("cap_mb", [0.001, 1.0], ids=["each its bucket", "one bucket"])
def test_parameters_that_exchanged_their_storages_are_taken_back_with_their_values(cap_mb: float) -> None:
    ours, wanted = (run_ranks(exchanged, 2, cap_mb, exchange) for exchange in (True, False))
    for mine, theirs in zip(ours, wanted, strict=True):
        assert all(map(same_bits, mine, theirs))


# ---- shared memory


def as_others_see(tensor: Tensor, rank: int) -> list[Tensor]:
    """The tensor of each rank but this one as torch.multiprocessing hands it to this process."""
    sent: list[bytes] = [b""] * dist.get_world_size()
    dist.all_gather_object(sent, bytes(ForkingPickler.dumps(tensor)))
    received = [pickle.loads(each) for other, each in enumerate(sent) if other != rank]
    dist.barrier()  # a file is handed over by the process that made it
    return received


def watched_from_outside(rank: int, _: int, share_when: str, stage: int, overlap: bool) -> list[Tensor]:
    """Some steps while the other rank, as any process might, watches; returns the parameters after each."""
    model = make_model()
    watched: list[list[Tensor]] = []

    def share() -> None:
        model.share_memory()
        for param in model.parameters():
            watched.append(as_others_see(param, rank))

    if share_when == "before the optimizer is built":
        if rank == 1:  # it starts with rank 0's values
            with torch.no_grad():
                torch._foreach_add_(list(model.parameters()), 1.0)
        share()
    optimizer = FusedShardedAdam(model.parameters(), lr=1e-2, stage=stage, bucket_cap_mb=CAP_MB)
    if overlap:
        optimizer.overlap_gather(model)
        optimizer.inside.manager.params.hold_back(True)
    seen = []
    for step in range(4):
        if step == 1 and share_when == "between steps":  # hidden gathers are on their way
            share()
        model(batch(rank, step)).square().mean().backward()
        if step == 1 and share_when == "between backward and step":
            share()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
        dist.barrier()
        if watched:  # the ranks' parameters are the same
            assert all(param.is_shared() for param in model.parameters())
            for param, [copy_of_others] in zip(model.parameters(), watched, strict=True):
                assert same_bits(param, copy_of_others), (step, tuple(param.shape))
        dist.barrier()
        if step == 2:  # what is written there counts
            with torch.no_grad():
                model.gain.mul_(0.5)
        dist.barrier()
        seen += [p.detach().clone() for p in model.parameters()]
    assert bool(watched) == (share_when != "never")
    return seen


@pytest.mark.parametrize(("stage", "overlap"), [(1, False), (2, False), (2, True)])
def test_after_share_memory_another_process_sees_every_later_step(stage: int, overlap: bool) -> None:
    never = run_ranks(watched_from_outside, 2, "never", stage, overlap)
    for when in ("before the optimizer is built", "between steps", "between backward and step"):
        for shared, wanted in zip(run_ranks(watched_from_outside, 2, when, stage, overlap), never, strict=True):
            assert all(map(same_bits, shared, wanted)), when


def test_memory_bytes_counts_shared_memory_too() -> None:
    model = make_model().share_memory()
    optimizer = FusedShardedAdam(model.parameters())
    buffers = sum(bucket.buffer.flat.nbytes for bucket in optimizer.inside.buckets)
    assert optimizer.memory_bytes().parameters == buffers + sum(p.nbytes for p in model.parameters())
