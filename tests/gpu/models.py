"""The demo's model, from examples/."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch
from torch import Tensor

EXAMPLES = Path(__file__).parents[2] / "examples"


def demo() -> ModuleType:
    """examples/gpt_model.py, which belongs to no package."""
    name = "zerox_demo_gpt_model"
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / "gpt_model.py")
        assert spec is not None
        assert spec.loader is not None
        sys.modules[name] = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(sys.modules[name])
    return sys.modules[name]


def make_gpt(device: torch.device, seed: int) -> torch.nn.Module:
    """The tiny one; the same parameters on every device."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return demo().GPT(demo().SHAPES["tiny"]).to(device)


def gpt_batch(seed: int, step: int, rows: int = 8) -> tuple[Tensor, Tensor]:
    """Windows of a text in which some letters are more frequent, and often follow each other."""
    generator = torch.Generator().manual_seed(1009 * seed + step)
    context = demo().SHAPES["tiny"].context
    text = torch.randint(97, 123, (rows, context + 1), generator=generator)
    text[:, 1::2] = text[:, 0:-1:2] // 3 + 64
    return text[:, :-1], text[:, 1:]
