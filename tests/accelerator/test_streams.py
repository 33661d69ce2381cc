"""Streams of an accelerator are ordered as Note [Streams] says: seen by a race detector, without hardware."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.accelerator.fake import expect_no_races, machine, on_stream, run_fake_ranks
from tests.bucket_manager.rig import GradsOfModel
from tests.kernels.rule import VARIANT_IDS, VARIANTS
from tests.kernels.shards import group_of
from zerox import _C as C
from zerox.memory.bucket import GradPart
from zerox.ops import Shard
from zerox.ranks.group import Ranks
from zerox.rules.adam import ADAM
from zerox.rules.options_table import OptionsTable
from zerox.rules.reference import AdamState, LionState, SgdState, adam_step, lion_step, sgd_step
from zerox.rules.rule import Rule
from zerox.update.update import shard_of, update

# Hooks keep the node that accumulates, and with it the stream on which a parameter was first used: as DDP's do.
pytestmark = pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match")

NUMEL = 5000
CAP = 8 * NUMEL  # two parameters a bucket
WORLDS = [(1, "alone"), (2, "native"), (3, "native"), (2, "direct"), (3, "direct"), (2, "via host"), (3, "via host")]
GROUP = group_of(ADAM, lr=0.1, weight_decay=0.0)


STEP = {"adam": adam_step, "sgd": sgd_step, "lion": lion_step}
ZEROS = {
    "adam": lambda param: AdamState(param, torch.zeros_like(param), torch.zeros_like(param)),
    "sgd": SgdState,
    "lion": lambda param: LionState(param, torch.zeros_like(param)),
}


@pytest.fixture(autouse=True)
def detector() -> Any:
    machine().take_races()
    return machine()


def parameters(device: torch.device, count: int = 6, seed: int = 0) -> list[nn.Parameter]:
    generator = torch.Generator().manual_seed(seed)
    return [nn.Parameter(torch.randn(NUMEL, generator=generator).to(device)) for _ in range(count)]


# ---- the detector itself


def test_unordered_accesses_are_seen_and_ordered_ones_are_not(detector: Any) -> None:
    values = torch.ones(100, device="fake:0")
    stream = detector.new_stream(0)
    with on_stream(stream):
        read = values * 2
    assert any("read after write" in race for race in detector.take_races())
    with on_stream(stream):
        values.add_(1)
    assert detector.take_races(), "write after write"
    detector.wait_stream(0, 0, stream)
    values.add_(read)
    assert not detector.take_races()


def test_memory_that_is_freed_too_early_is_seen(detector: Any) -> None:
    stream = detector.new_stream(0)
    for waits in (False, True):
        values = torch.ones(12345, device="fake:0")
        detector.wait_stream(0, stream, 0)
        with on_stream(stream):
            values * 2
        if waits:
            detector.wait_stream(0, 0, stream)
        del values
        torch.zeros(12345, device="fake:0")  # the same memory
        assert bool(detector.take_races()) is not waits
        detector.wait_stream(0, 0, stream)


def test_a_host_that_waits_is_seen(detector: Any) -> None:
    values = torch.ones(3, device="fake:0")
    detector.take_waits(0)
    assert float(values.sum()) == 3.0
    values.cpu()
    torch.tensor([1.0]).to("fake:0")
    assert detector.take_waits(0) == ["aten::_local_scalar_dense", *["copy between host and device"] * 2]


# ---- zerox


def shard_at(ours: GradsOfModel, index: int) -> Shard:
    grad, bucket = ours.grads.shard(index), ours.buckets[index]
    assert grad is not None
    of = GradPart(grad, 0, 0, bucket.segments)
    return shard_of(bucket.part(of), of, ours.grads.present(index))


def train(ranks: Ranks, stage: int, plan: str, rule: Rule = ADAM, group: Mapping[str, Any] = GROUP) -> list[Tensor]:
    """Some steps; returns the parameters. ``plan`` says which streams do what."""
    device = ranks.device
    params = parameters(device)
    side = machine().new_stream(device.index)
    # Autograd accumulates a gradient on the stream on which the parameter was first used.
    machine().wait_stream(device.index, side, 0)
    with on_stream(side if plan == "two producers" else 0, device.index):
        first_uses = [param.view_as(param) for param in params[1::2]]
    ours = GradsOfModel(ranks, params, CAP, stage, rule=rule, group=group)
    table = OptionsTable(rule, device)
    main = machine().new_stream(device.index) if plan == "non-default stream" else 0
    machine().wait_stream(device.index, main, 0)
    for step in range(4):
        with on_stream(main, device.index):
            losses = []
            for index, param in enumerate(params):
                # Every other parameter is used on a stream of its own, so that a bucket's gradients come from two.
                if plan == "two producers" and index % 2:
                    machine().wait_stream(device.index, side, main)
                    with on_stream(side, device.index):
                        losses.append((param * param * (step + 1 + ranks.rank)).sum())
                    machine().wait_stream(device.index, main, side)
                else:
                    losses.append((param * param * (step + 1 + ranks.rank)).sum())
            machine().take_waits(device.index)
            torch.stack(losses).sum().backward()
            if plan == "zero_grad() at once" and step == 1:
                ours.grads.zero(True)
                continue
            ours.sync()
            every = range(len(ours.buckets))
            for run in [every] if step % 2 else [[index] for index in every]:
                update(rule, [shard_at(ours, index) for index in run], table.refresh([dict(group)]), None)
                for index in run:
                    ours.manager.params.start(index)
            ours.manager.params.finish()
            ours.grads.zero(plan != "zeroed in place")
            waits = machine().take_waits(device.index)
            assert ranks.via_host or not waits, f"the host waited for the device: {waits}"
    del first_uses
    machine().wait_stream(device.index, 0, main)
    return [param.detach().cpu() for param in params]


def train_on_cpu(world_size: int, plan: str, rule: Rule = ADAM, group: Mapping[str, Any] = GROUP) -> list[Tensor]:
    """The same steps by the rule in plain torch."""
    states = [ZEROS[rule.name](param.detach()) for param in parameters(torch.device("cpu"))]
    for step in range(4):
        factor = sum(step + 1 + rank for rank in range(world_size)) / world_size
        if not (plan == "zero_grad() at once" and step == 1):
            for state in states:
                options = {key: value for key, value in group.items() if key != "amsgrad"}
                STEP[rule.name](state, 2 * factor * state.param, **options)
    return [state.param for state in states]


@pytest.mark.parametrize("plan", ["one stream", "two producers", "non-default stream", "zero_grad() at once"])
@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world_size", "kind"), WORLDS)
def test_training_has_no_race(world_size: int, kind: str, stage: int, plan: str) -> None:
    for params in run_fake_ranks(train, world_size, kind, stage, plan):
        for ours, expected in zip(params, train_on_cpu(world_size, plan), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    expect_no_races()


@pytest.mark.parametrize(("rule", "config"), VARIANTS[2:], ids=VARIANT_IDS[2:])
@pytest.mark.parametrize(("world_size", "kind"), [world for world in WORLDS if world[0] != 3])
def test_training_by_other_rules_has_no_race(world_size: int, kind: str, rule: Rule, config: Any) -> None:
    """They keep fewer states, and SGD counts no step without momentum."""
    group = group_of(rule, lr=0.01, **config)
    for params in run_fake_ranks(train, world_size, kind, 2, "one stream", rule, group):
        for ours, expected in zip(params, train_on_cpu(world_size, "one stream", rule, group), strict=True):
            torch.testing.assert_close(ours, expected, rtol=1e-5, atol=1e-6)
    expect_no_races()


def accumulate(ranks: Ranks, stage: int) -> None:
    """Two synchronising backwards add up, one inside no_sync() goes with the next, one discarded on its way."""
    params = parameters(ranks.device)
    ours = GradsOfModel(ranks, params, CAP, stage)
    for _ in range(2):
        for part in range(3):
            loss = torch.stack([(param * (part + 1)).sum() for param in params]).sum()
            if part == 1:
                with ours.grads.no_sync():
                    loss.backward()
            else:
                loss.backward()
        ours.sync()
        ours.expect([torch.full((NUMEL,), 6.0)] * len(params))
        ours.grads.zero(True)


@pytest.mark.parametrize("stage", [1, 2])
@pytest.mark.parametrize(("world_size", "kind"), [world for world in WORLDS if world[0] != 3])
def test_accumulation_has_no_race(world_size: int, kind: str, stage: int) -> None:
    run_fake_ranks(accumulate, world_size, kind, stage)
    expect_no_races()


def read_beside_deletion(ranks: Ranks, told_of: int) -> list[str]:
    """Another stream still reads parameters when all is deleted and the memory is used again; the races. ``told_of``:
    how many of each bucket's two parameters are told about it."""
    device = ranks.device
    params = parameters(device)
    ours = GradsOfModel(ranks, params, CAP)
    torch.stack([(param * param).sum() for param in params]).sum().backward()
    ours.sync()
    side = machine().new_stream(device.index)
    machine().wait_stream(device.index, side, 0)
    with on_stream(side, device.index):
        products = [param.detach() * 2 for param in params]
    told = [param for bucket in ours.buckets for param in bucket.buffer.params[:told_of]]
    for param in told:
        machine().record_stream(param, device.index, side)
    expect_no_races()
    sizes = [bucket.buffer.flat.numel() for bucket in ours.buckets]
    buffers = {bucket.buffer.flat.data_ptr() for bucket in ours.buckets}
    param = None
    del ours, params, told
    again = [torch.zeros(numel, device=device) for numel in sizes]
    assert buffers == {each.data_ptr() for each in again}, "the same memory"
    machine().wait_stream(device.index, 0, side)  # what comes later is another test's
    del products
    return machine().take_races()


@pytest.mark.parametrize("told_of", [0, 1, 2])
def test_a_bucket_is_kept_until_streams_that_parameters_were_told_of_have_read_them(told_of: int) -> None:
    """Tensor.record_stream() counts though torch's allocator does not know a parameter's storage."""
    [races] = run_fake_ranks(read_beside_deletion, 1, "alone", told_of)
    assert bool(races) == (told_of == 0), races[:3]


def test_what_is_done_to_a_parameter_is_seen(detector: Any) -> None:
    """Its storage lies inside its bucket's: the detector would be blind if it knew the bucket's start only."""

    def write_elsewhere(ranks: Ranks) -> None:
        params = parameters(ranks.device)
        ours = GradsOfModel(ranks, params, CAP)
        side = machine().new_stream(ranks.device.index)
        with on_stream(side, ranks.device.index), torch.no_grad():
            ours.buckets[0].buffer.params[1].add_(1)
        machine().wait_stream(ranks.device.index, 0, side)  # what comes later is another test's

    run_fake_ranks(write_elsewhere, 1, "alone")
    assert detector.take_races()


def places_of_gradients(ranks: Ranks) -> tuple[int, int]:
    """At how many addresses gradients lay in a backward of 32 parameters, and bytes that stay after reduction."""
    params = parameters(ranks.device, count=32)
    ours = GradsOfModel(ranks, params, CAP, 2)
    before = machine().live_bytes()
    addresses = set()
    total = torch.zeros((), device=ranks.device)
    for param in params:
        total = total + (param * total.detach().exp()).sum()
        param.register_post_accumulate_grad_hook(lambda p: addresses.add(p.grad.data_ptr()))
    total.backward()
    ours.sync()
    shards = sum(bucket.plan.layout.shard_numel for bucket in ours.buckets) * 4
    del total
    return len(addresses), machine().live_bytes() - before - shards


def test_gradients_are_freed_while_backward_runs() -> None:
    # Live bytes are the whole machine's, and what tests before have left may come to life in the first of these.
    for _ in range(2):
        addresses, left = run_fake_ranks(places_of_gradients, 1, "alone")[0]
    # Two parameters a bucket; those of two buckets that are packed, of one on its way there, of one being filled.
    assert addresses <= 2 * 5
    assert left < NUMEL * 4, "exchange buffers and gradients are free once all has been reduced"


def whole_optimizer(ranks: Ranks, weighs: bool) -> list[Tensor]:
    """``weighs``: with a count and factors that lie on the device, and a norm of some parameters."""
    from zerox import engine as module
    from zerox.optimizers import FusedShardedAdam

    params = parameters(ranks.device)
    found, checked = module.find_ranks, module.check_params
    module.find_ranks = lambda *_, **__: ranks
    module.check_params = lambda *_, **__: None  # knows no such device
    try:
        optimizer = FusedShardedAdam(params, lr=0.1, bucket_cap_mb=CAP / 2**20)
    finally:
        module.find_ranks, module.check_params = found, checked
    count = torch.full((1,), 4, dtype=torch.int64, device=ranks.device)
    factor = torch.full((), 0.5, device=ranks.device)
    machine().take_waits(ranks.device.index)
    for _ in range(3):
        torch.stack([(param * param).sum() for param in params]).sum().backward()
        if weighs:
            optimizer.mean_over(count)
            optimizer.scale_grads_(factor)
            optimizer.unscale_grads_(factor)  # as GradScaler does
            optimizer.clip_grad_norm_(1.0, parameters=params[1:4])
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
        optimizer.zero_grad()
    waits = machine().take_waits(ranks.device.index)
    assert not waits, f"the host waited for the device: {waits}"
    return [param.detach().cpu() for param in params]


@pytest.mark.parametrize("weighs", [False, True])
def test_the_optimizer_with_clip_has_no_race_and_never_waits_for_the_device(weighs: bool) -> None:
    ours = run_fake_ranks(whole_optimizer, 1, "alone", weighs)[0]
    params = parameters(torch.device("cpu"))
    optimizer = torch.optim.AdamW(params, lr=0.1, foreach=False)
    for _ in range(3):
        torch.stack([(param * param).sum() for param in params]).sum().backward()
        if weighs:
            torch._foreach_mul_([param.grad for param in params], 0.0625)
            torch.nn.utils.clip_grad_norm_(params[1:4], 1.0)
        torch.nn.utils.clip_grad_norm_(params, 1.0)
        optimizer.step()
        optimizer.zero_grad()
    for mine, theirs in zip(ours, params, strict=True):
        torch.testing.assert_close(mine, theirs.detach(), rtol=1e-5, atol=1e-6)
    expect_no_races()


def test_a_digest_of_values_on_a_device_copies_them(detector: Any) -> None:
    """The host can't read them where they are."""
    values = torch.ones(NUMEL, device="fake:0")
    detector.take_copied(0)
    assert C.digest(values) == C.digest(torch.ones(NUMEL))
    to_host, _ = detector.take_copied(0)
    assert to_host == values.nbytes
