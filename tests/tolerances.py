"""Every tolerance of the tests, and its unit."""

from __future__ import annotations

import torch
from torch import Tensor

# Against torch.optim, one step from identical state: see assert_one_step_bound.
MOMENT_ULPS = 1
PARAM_ULPS = 1
UPDATE_ULPS = 4
# torch's CUDA kernels square the gradient and then multiply by 1 - beta2; its CPU kernels, and ours on every device,
# multiply first. That is a rounding at another place, and one ulp more where little else is in the sum.
CUDA_MOMENT_ULPS = 2

# Against the rule in float64: relative error of the update that fp32 arithmetic may make, in its own epsilons.
FP64_REFERENCE_EPSILONS = 8

# 8-bit moments beside torch's: half of the widest gap between two magnitudes of the map (0.9 in 64 parts, csrc/math/
# dynamic_map.h), in units of their block's scale. With bf16 ones: the unit in the last place, as they round at random.
HALF_GAP_8BIT = 0.9 / 64 / 2

# Norms of orders other than 1, 2 and infinity go through the device's pow() in float64, whose last bits are its own.
POW_NORM_RTOL = 1e-12

# A norm beside one in float64: its own rounding to float32, and partial sums over 256 elements.
NORM_RTOL = 1e-6

# Losses of the demo's model on a GPU beside the CPU over 20 steps: the order of the sums in matrix products differs.
# On the CPU, fp32 and fp64 differ by 6e-7.
DEVICE_LOSS_RTOL = 1e-4


def ulp(values: Tensor) -> Tensor:
    """The distance from |value| to the next larger number of its dtype, as float64."""
    magnitude = values.abs()
    upward = torch.nextafter(magnitude, torch.full_like(magnitude, torch.inf))
    return (upward.double() - magnitude.double()).clamp(min=torch.finfo(values.dtype).smallest_normal * 2**-52)


def one_step_allowance(before: Tensor, expected: Tensor, decay: float) -> Tensor:
    """How far a parameter may be from torch's ``expected``: see assert_one_step_bound."""
    update = expected - decay * before
    return PARAM_ULPS * ulp(torch.maximum(before.abs(), expected.abs())) + UPDATE_ULPS * ulp(update)


def assert_one_step_bound(
    before: Tensor,
    after: Tensor,
    expected: Tensor,
    moments: dict[str, tuple[Tensor, Tensor]],
    decay: float = 1.0,
    moment_ulps: int = MOMENT_ULPS,
) -> None:
    """Moments within 1 ulp; parameters within 1 ulp of max(|before|, |after|) plus 4 ulp of the update.

    ``expected`` is torch's parameter after the step; ``moments`` maps a name to (ours, torch's). The update is what is
    added to ``decay * before``.
    """
    for name, (ours, theirs) in moments.items():
        off = (ours.double() - theirs.double()).abs() / ulp(theirs)
        assert off.max() <= moment_ulps, f"{name} is {off.max():.0f} ulp off"
    excess = (after.double() - expected.double()).abs() - one_step_allowance(before, expected, decay)
    assert not (excess > 0).any(), f"a parameter is {float(excess.max()):.3g} over the bound"


def assert_stored_bound(name: str, stored: torch.dtype, ours: Tensor, theirs: Tensor, scales: Tensor | None) -> None:
    """Moments as they are stored beside torch's: ``ours`` are decoded, ``scales`` those of 8-bit ones."""
    rounding = torch.zeros(())
    if stored is torch.bfloat16:
        rounding = ulp(torch.maximum(ours.abs(), theirs.abs()).to(torch.bfloat16))
    elif scales is not None:
        rounding = HALF_GAP_8BIT * scales.double().abs().repeat_interleave(256)[: ours.numel()]
        rounding += ulp(ours) / 2  # ours is a product with the scale, which is rounded
    off = (ours.double() - theirs.double()).abs() - rounding.double()
    assert (off <= MOMENT_ULPS * ulp(theirs)).all(), f"{name} is over the bound by {float(off.max()):.3g}"
