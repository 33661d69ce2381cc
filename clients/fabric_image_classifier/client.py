"""Lightning's example for Fabric: a strategy takes the wrapper's place, and makes the optimizer, Adadelta, zerox's."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clients.client import Client


def make_data(folder: Path) -> None:
    """MNIST's four files, with few pictures: bars of ten places."""
    raw = folder / "Datasets" / "MNIST" / "raw"
    raw.mkdir(parents=True)
    for seed, (split, count) in enumerate({"train": 112, "t10k": 36}.items()):
        numbers = np.random.default_rng(seed)
        labels = numbers.integers(0, 10, count).astype(np.uint8)
        images = numbers.integers(0, 128, (count, 28, 28)).astype(np.uint8)
        for image, label in zip(images, labels, strict=True):
            image[4 + 2 * label : 7 + 2 * label, 6:22] = 255
        _write(raw / f"{split}-images-idx3-ubyte", images)
        _write(raw / f"{split}-labels-idx1-ubyte", labels)


def _write(to: Path, values: np.ndarray) -> None:
    """As IDX: zero, zero, eight for bytes, the number of dimensions, their sizes, and the bytes."""
    sizes = np.array(values.shape, ">i4")
    to.write_bytes(bytes([0, 0, 8, values.ndim]) + sizes.tobytes() + values.tobytes())


OPTIONS = "--batch-size 8 --epochs 2 --lr 0.05"
CLIENT = Client(
    name="fabric_image_classifier",
    repository="Lightning-AI/pytorch-lightning",
    commit="7f0c3436cd",
    command=["examples/fabric/image_classifier/train_fabric.py", *OPTIONS.split()],
    make_data=make_data,
    environment={"LT_CLI_USED": "1", "LT_ACCELERATOR": "cpu", "LT_DEVICES": "2"},  # as "fabric run" sets them
)
