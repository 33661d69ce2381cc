"""CUDA tensors that this build has no kernels for are refused with the reason and the way out; imports never fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from zerox import FusedShardedAdam, _ext


def parameter(device: str) -> torch.nn.Parameter:
    """On a device that this machine may lack."""
    with FakeTensorMode():
        return torch.nn.Parameter(torch.empty(3, device=device))


def build_with(monkeypatch: pytest.MonkeyPatch, nvcc: str | bool, of_torch: str | None) -> None:
    info: dict[str, Any] = _ext.build_info() | {"cuda": nvcc}
    monkeypatch.setattr(_ext, "build_info", lambda: info)
    monkeypatch.setattr(torch.version, "cuda", of_torch)


@pytest.mark.parametrize(
    ("nvcc", "of_torch", "reason"),
    [
        (
            False,
            "13.0",
            "CPU kernels only: put nvcc on the PATH and run `ZEROX_CUDA=1 pip install ",
        ),
        (
            "12.8.93",
            "13.0",
            r"built by nvcc 12\.8\.93, and torch .* CUDA 13\.0: put an nvcc of CUDA 13 on the PATH and",
        ),
    ],
)
def test_cuda_parameters_are_refused(
    nvcc: str | bool, of_torch: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    build_with(monkeypatch, nvcc, of_torch)
    with pytest.raises(ValueError, match=rf"parameter 'param 0' is on cuda:0: .*{reason}"):
        FusedShardedAdam([parameter("cuda")])


@pytest.mark.parametrize("of_torch", ["13.0", "13.3", None])
def test_kernels_of_the_same_major_release_are_taken(of_torch: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    build_with(monkeypatch, "13.1.7", of_torch)
    assert _ext.cuda_refusal() is None


def test_rocm_calls_its_devices_cuda_and_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    build_with(monkeypatch, "13.1.7", None)
    monkeypatch.setattr(torch.version, "hip", "7.1")
    with pytest.raises(ValueError, match="no kernels for ROCm"):
        FusedShardedAdam([parameter("cuda")])


def test_other_devices_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'param 0' is on xpu:0: zerox has kernels for cpu and cuda"):
        FusedShardedAdam([parameter("xpu")])
