"""Trainings have the bits, and send the messages, that were recorded: see tests/bits/__main__.py."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.bits import trainings
from tests.bits.__main__ import RECORDED, differences, found_here, name_of
from tests.bits.recording import train

# torch's own optimizers are compiled for each of these, and for no others have they the same last bits.
ISAS = ("AVX2", "AVX512")
OF_TORCH = ("by torch's", "with a table")  # updated by operators of torch


def has_last_bits_of_torch() -> bool:
    """Whether torch's operators round here as where the bits were recorded. On Intel's processors MKL computes square
    roots, of which some are not the nearest number."""
    some = torch.rand(4096, generator=torch.Generator().manual_seed(0))
    roots_are_exact = torch.equal(some.sqrt(), torch.from_numpy(np.sqrt(some.numpy())))
    return torch.backends.cpu.get_cpu_capability() in ISAS and roots_are_exact


def test_trainings_have_the_bits_that_were_recorded() -> None:
    then, now = json.loads(RECORDED.read_text())["trainings"], found_here()
    if not has_last_bits_of_torch():
        then, now = (
            {name: told for name, told in each.items() if not any(kind in name for kind in OF_TORCH)}
            for each in (then, now)
        )
    assert len(now) > 170
    assert not differences(then, now)


def test_another_rate_has_other_bits(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    asked = (1, 2, "fp32", "clipped")
    name = name_of(*asked)
    then = {name: json.loads(RECORDED.read_text())["trainings"][name]}
    assert not differences(then, {name: [train(0, *asked, str(tmp_path))]})
    monkeypatch.setattr(trainings, "LR", 2.0**-5)
    assert differences(then, {name: [train(0, *asked, str(tmp_path))]})
