"""YOLOv5: rank 0 alone copies, rounds and averages the model; gradients add up without no_sync(); groups are added."""

from __future__ import annotations

import textwrap
from pathlib import Path

import numpy as np
from PIL import Image

from clients.client import Client, Resume

MODEL = """\
    nc: 3
    depth_multiple: 0.33
    width_multiple: 0.125
    anchors:
      - [10,13, 16,30, 33,23]
      - [30,61, 62,45, 59,119]
    backbone:
      - [-1, 1, Conv, [64, 6, 2, 2]]
      - [-1, 1, Conv, [64, 3, 2]]
      - [-1, 1, C3, [64]]
      - [-1, 1, Conv, [64, 3, 2]]
      - [-1, 1, Conv, [64, 3, 2]]
      - [-1, 1, SPPF, [64, 5]]
    head:
      - [-1, 1, nn.Upsample, [None, 2, nearest]]
      - [[-1, 3], 1, Concat, [1]]
      - [-1, 1, C3, [64, False]]
      - [-1, 1, Conv, [64, 3, 2]]
      - [[8, 9], 1, Detect, [nc, anchors]]
"""


def make_data(folder: Path) -> None:
    """Pictures of noise with grey boxes; each has a text file that says where they are."""
    values = np.random.default_rng(0)
    for part in ("train", "val"):
        for kind in ("images", "labels"):
            (folder / "tiny" / kind / part).mkdir(parents=True)
        for index in range(16):
            picture, lines = values.integers(0, 256, (64, 64, 3)).astype(np.uint8), []
            for _ in range(3):
                label, (x, y) = values.integers(3), values.integers(0, 32, 2)
                width, height = values.integers(8, 32, 2)
                picture[y : y + height, x : x + width] = 60 + 60 * label
                sizes = [(x + width / 2) / 64, (y + height / 2) / 64, width / 64, height / 64]
                lines.append(" ".join([str(label), *(f"{each:.4f}" for each in sizes)]))
            Image.fromarray(picture).save(folder / "tiny" / "images" / part / f"{index}.jpg")
            (folder / "tiny" / "labels" / part / f"{index}.txt").write_text("\n".join(lines) + "\n")
    (folder / "tiny.yaml").write_text("path: tiny\ntrain: images/train\nval: images/val\nnames: [a, b, c]\n")
    (folder / "tiny_model.yaml").write_text(textwrap.dedent(MODEL))


DATA = "--data tiny.yaml --cfg tiny_model.yaml --weights= --project out --workers 0 --noplots"
TRAINING = "--imgsz 64 --batch-size 4 --epochs 8"
CLIENT = Client(
    name="yolov5",
    repository="ultralytics/yolov5",
    commit="5081342f0",
    command=["train.py", *f"{DATA} {TRAINING}".split()],
    make_data=make_data,
    environment={"YOLO_CONFIG_DIR": "settings", "YOLO_AUTOINSTALL": "false", "YOLO_OFFLINE": "true"},
    resume=Resume("--batch-size 6 --save-period 3", "--resume out/exp/weights/epoch3.pt"),
)
