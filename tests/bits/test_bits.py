"""Trainings have the bits, and send the messages, that were recorded: see tests/bits/__main__.py."""

from __future__ import annotations

import json

import pytest
import torch

from tests.bits.__main__ import RECORDED, differences, found_here

# torch's own optimizers are compiled for each of these, and for no others have they the same last bits.
ISAS = ("AVX2", "AVX512")


def test_trainings_have_the_bits_that_were_recorded() -> None:
    then, now = json.loads(RECORDED.read_text())["trainings"], found_here()
    if torch.backends.cpu.get_cpu_capability() not in ISAS:
        then, now = ({name: told for name, told in each.items() if "by torch's" not in name} for each in (then, now))
    assert len(now) > 170
    assert not differences(then, now)


def test_another_rate_has_other_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    then = json.loads(RECORDED.read_text())["trainings"]
    monkeypatch.setattr("tests.bits.trainings.LR", 2.0**-5)
    now = found_here("1 ranks, stage 2, fp32, clipped")
    assert now
    assert differences({name: then[name] for name in now}, now)
