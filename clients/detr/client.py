"""DETR: the backbone's first layers and its batch norms are frozen, the rest of it learns ten times slower, and rank 0
alone loads its weights."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
from PIL import Image

from clients.client import LOADS_OBJECTS, Client, Resume

WIDTH, HEIGHT = 64, 48


def make_data(folder: Path) -> None:
    numbers = np.random.default_rng(0)
    for split, count in (("train", 24), ("val", 6)):
        images, annotations = [], []
        to = folder / "coco" / f"{split}2017"
        to.mkdir(parents=True)
        for index in range(1, count + 1):
            name = f"{index:012}.jpg"
            pixels = numbers.integers(0, 64, (HEIGHT, WIDTH, 3), np.uint8)
            images.append({"id": index, "file_name": name, "width": WIDTH, "height": HEIGHT})
            for _ in range(1 + index % 3):
                label = int(numbers.integers(1, 4))
                left, top = int(numbers.integers(0, 40)), int(numbers.integers(0, 28))
                width, height = (int(each) for each in numbers.integers(8, 20, 2))
                pixels[top : top + height, left : left + width, label - 1] += 120
                annotations.append(
                    {
                        "id": len(annotations) + 1,
                        "image_id": index,
                        "category_id": label,
                        "bbox": [left, top, width, height],
                        "area": width * height,
                        "iscrowd": 0,
                    }
                )
            Image.fromarray(pixels).save(to / name)
        path = folder / "coco" / "annotations" / f"instances_{split}2017.json"
        path.parent.mkdir(exist_ok=True)
        categories = [{"id": label, "name": f"class{label}"} for label in (1, 2, 3)]
        path.write_text(json.dumps({"images": images, "annotations": annotations, "categories": categories}))


SIZES = "backbone=resnet18 enc_layers=1 dec_layers=2 hidden_dim=32 nheads=2 dim_feedforward=64 num_queries=8"
REST = "batch_size=2 epochs=2 lr=1e-3 lr_backbone=1e-4 clip_max_norm=0.1 num_workers=0 coco_path=coco"
CLIENT = Client(
    name="detr",
    repository="facebookresearch/detr",
    commit="29901c5",
    command=["main.py", *(f"--{each}" for each in f"{SIZES} {REST}".split())],
    make_data=make_data,
    environment=LOADS_OBJECTS,
    faults=("beta", "averaging", "frozen"),
    resume=Resume("--epochs=1 --output_dir=.", "--output_dir=. --resume=checkpoint.pth"),
)
