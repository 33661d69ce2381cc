"""What a CUDA graph of step() needs: the same memory at every step, and nothing that only the host does.

Here a captured step() is one that is told it is being captured; a replay is another such call, on the same memory.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests.accelerator.fake import expect_no_races, machine, run_fake_ranks
from tests.accelerator.test_streams import CAP, GROUP, parameters
from tests.kernels.shards import same_bits
from zerox import engine as engine_module
from zerox import ops
from zerox.calls.capture import is_capturing
from zerox.optimizers import FusedShardedAdam
from zerox.options import OptimizerOptions
from zerox.ranks.group import Ranks
from zerox.rules.adam import ADAM
from zerox.rules.options_table import OptionsTable
from zerox.update import update


def build(ranks: Ranks, lr: Tensor, **options: Any) -> FusedShardedAdam:
    return FusedShardedAdam(parameters(ranks.device), lr=lr, bucket_cap_mb=CAP / 2**20, **options)


@pytest.fixture
def any_device(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """FusedShardedAdam takes the fake accelerator's tensors."""
    monkeypatch.setattr(engine_module, "check_params", lambda *_, **__: None)
    return monkeypatch


def addresses(args: tuple[Any, ...]) -> list[int]:
    found = []
    for arg in args:
        if isinstance(arg, tuple | list):
            found += addresses(arg)
        elif isinstance(arg, Tensor):
            found.append(arg.data_ptr())
    return found


@pytest.mark.parametrize("state_dtype", [torch.float32, torch.bfloat16, "8bit"], ids=str)
def test_replays_give_the_bits_of_eager_steps(any_device: pytest.MonkeyPatch, state_dtype: Any) -> None:
    seen: list[list[list[int]]] = []
    plain = update.ops.update_

    def remember(rule: str, shards: Any, *rest: Any) -> None:
        lasting = [shard._replace(present=None) for shard in shards]  # who is present is computed inside the graph
        seen[-1].append(addresses((lasting, *rest)))
        plain(rule, shards, *rest)

    def train(ranks: Ranks) -> list[Tensor]:
        any_device.setattr(engine_module, "find_ranks", lambda *_, **__: ranks)
        lrs = [torch.tensor(0.1, device=ranks.device) for _ in range(2)]
        captured, eager = (build(ranks, lr, capturable=lr is lrs[0], state_dtype=state_dtype) for lr in lrs)
        for step in range(5):
            for optimizer, lr in zip((captured, eager), lrs, strict=True):
                lr.fill_(0.1 / (step + 1))
                optimizer.zero_grad(set_to_none=step != 3)
                params = optimizer.param_groups[0]["params"]
                used = params[:-1] if step == 2 else params  # absent once
                torch.stack([(param * param * (step + 1)).sum() for param in used]).sum().backward()
                if step != 1:
                    optimizer.clip_grad_norm_(0.5)
                if optimizer is captured and step > 0:
                    optimizer.synchronize()
                    seen.append([])
                    with any_device.context() as during_capture:
                        during_capture.setattr(engine_module, "is_capturing", lambda *_: True)
                        during_capture.setattr(
                            optimizer.inside, "sync", lambda *_: pytest.fail("ranks synchronize on the host")
                        )
                        during_capture.setattr(update.ops, "update_", remember)
                        optimizer.step()
                    seen[-1].append([optimizer.inside.grads.present(index).data_ptr() for index in range(3)])
                else:
                    optimizer.step()
        for ours, theirs in zip(captured.param_groups[0]["params"], eager.param_groups[0]["params"], strict=True):
            assert same_bits(ours.detach().cpu(), theirs.detach().cpu())
            assert captured.state[ours]["step"] == eager.state[theirs]["step"]
        return lrs

    run_fake_ranks(train, 1, "alone")
    assert len(seen) == 4
    assert len(seen[0]) == 2, "small buckets are updated together"
    assert all(each == seen[0] for each in seen), "a replay would read other memory"
    expect_no_races()


def test_numbers_of_param_groups_are_refreshed_outside_the_graph() -> None:
    group = GROUP
    options = OptionsTable(ADAM, torch.device("cpu"), keeps_place=True)
    table = options.refresh([group])
    assert table[0, 0] == 0.1
    assert options.refresh([{**group, "lr": 0.2}]) is table
    assert table[0, 0] == 0.2
    assert options.refresh([{**group, "lr": 0.3}], capturing=True) is table
    assert table[0].tolist() == [0.3, 0.9, 0.999, 1e-8, 0.0, 0.0, 1.0, 0.0]
    with pytest.raises(RuntimeError, match="param groups were added"):
        options.refresh([group, group], capturing=True)


def test_capture_without_capturable_and_over_gloo_is_refused(any_device: pytest.MonkeyPatch) -> None:
    any_device.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    alone, gloo = Ranks.alone(torch.device("cuda")), Ranks(0, 2, "gloo", "direct", None, None, torch.device("cuda"))
    optimizer = FusedShardedAdam([torch.nn.Parameter(torch.ones(3))])
    for ranks, capturable, message in [
        (alone, False, "with capturable=True only"),
        (gloo, True, "can't be captured over gloo"),
    ]:
        optimizer.inside.ranks, optimizer.inside.groups.options = ranks, OptimizerOptions(capturable=capturable)
        with pytest.raises(RuntimeError, match=message):
            optimizer.step()
    nccl = Ranks(0, 2, "nccl", "native", None, None, torch.device("cuda"))
    with pytest.raises(RuntimeError, match=r"before the first one.*call synchronize\(\) before it"):
        is_capturing(nccl, True, optimizer.inside.manager, optimizer.inside.calls.record)
    optimizer.inside.ranks, optimizer.inside.groups.options = alone, OptimizerOptions(capturable=True)
    assert is_capturing(alone, True, optimizer.inside.manager, optimizer.inside.calls.record)
    sum(param.sum() for param in optimizer.param_groups[0]["params"]).backward()
    with pytest.raises(RuntimeError, match="backward can't be captured"):
        optimizer.step()


def test_tables_that_a_replay_would_not_find_again_are_refused() -> None:
    flat, source = torch.zeros(8, device="fake:0"), torch.ones(8, device="fake:0")
    pieces, flags = torch.tensor([[0, 0, 0, 8]]), torch.empty(0, dtype=torch.int64)
    machine().set_capturing(True)
    try:
        with pytest.raises(RuntimeError, match=r"only step\(\) can be captured"):
            ops.flatten_(flat, [source], pieces, flags)
    finally:
        machine().set_capturing(False)
    ops.flatten_(flat, [source], pieces, flags)
    assert torch.equal(flat.cpu(), torch.ones(8))
