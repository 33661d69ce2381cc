"""Accelerate's loops train with zerox as with DistributedDataParallel and AdamW: in one process, on 1 rank and on 2."""

from __future__ import annotations

import pytest
import torch

from tests.frameworks.loops import Case, train
from tests.hugging_face import ALONE, run_anywhere

CASES = {
    "plain": Case(),
    "stage 1": Case(stage=1, clip=0.05),
    "stage 3": Case(stage=3, clip=0.05, accumulate=3, of_zerox={"bucket_cap_mb": 0.02}),
    "clip": Case(clip=0.05),
    "large limit": Case(clip=1e6),
    "clip value": Case(clip_value=1e-3),
    "accumulate, last one uneven": Case(accumulate=3, clip=0.05),
    # Means are added up here, and torch averages mean + gradient: AdamW makes much of the last bit of a small gradient.
    "accumulate, each is sent": Case(accumulate=3, sync_each_batch=True, most=2e-6),
    "accumulate, each is sent, float64": Case(accumulate=3, sync_each_batch=True, dtype=torch.float64, most=1e-14),
    "bf16": Case(precision="bf16", clip=0.05),
    "scaler": Case(overflow=2, clip=0.05),
    "scaler, both clips": Case(overflow=2, clip=0.05, clip_value=1e-4),
    "scaler, stage 1": Case(overflow=2, stage=1),
    "scaler, accumulate": Case(overflow=2, accumulate=3, clip_value=1e-3),
    "optimizer first": Case(order="optimizer first", accumulate=3),
    "model first": Case(order="model first", accumulate=3, clip=0.05),
    "buffers": Case(buffers=True),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("world_size", [ALONE, 1, 2])
def test_a_loop_gives_ddp_s_and_adamw_s_numbers(world_size: int, case: str) -> None:
    ours, theirs = (run_anywhere(train, world_size, kind, CASES[case]) for kind in ("zerox", "torch"))
    for own, other in zip(ours, theirs, strict=True):
        assert own.rates == other.rates
        assert own.skipped == other.skipped
        assert any(own.skipped) == (CASES[case].overflow is not None)
        assert own.norms == pytest.approx(other.norms, rel=1e-6, nan_ok=True)
        assert len(own.norms) > 0 or CASES[case].clip is None
        assert own.state.keys() == other.state.keys()
        # Those of rank 0: its buffers are everyone's here after a step, and with DDP in the next forward.
        far = {
            name: float((value.double() - theirs[0].state[name].double()).abs().max())
            for name, value in own.state.items()
        }
        most = 2e-4 if CASES[case].precision == "bf16" else CASES[case].most
        assert max(far.values()) <= most, far
    for own in ours[1:]:
        assert all(torch.equal(value, ours[0].state[name]) for name, value in own.state.items())
