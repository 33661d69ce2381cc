"""Pictures in folders named by their classes, as several scripts read them."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write(folder: Path, counts: dict[str, int], num_classes: int = 4, size: tuple[int, int] = (40, 32)) -> None:
    """``counts``: of pictures by the name of a split. Those of one class have a color of their own."""
    numbers = np.random.default_rng(0)
    colors = numbers.integers(40, 216, (num_classes, 3))
    for split, count in counts.items():
        for index in range(count):
            label = index % num_classes
            coarse = (colors[label] + numbers.normal(0, 30, (4, 5, 3))).clip(0, 255).astype(np.uint8)
            to = folder / split / f"class{label}"
            to.mkdir(parents=True, exist_ok=True)
            Image.fromarray(coarse).resize(size, Image.Resampling.BICUBIC).save(to / f"{index:03}.jpg")
