"""Swin Transformer: gradients of several batches add up with every batch sent, under torch's scaler in float32 too, and
the optimizer is built before the model is wrapped.

DDP averages the sum of earlier means and the new gradients, as stage 1 does. Stages 2 and 3 add up means, so the last
bit may be another.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import LOADS_OBJECTS, Client, Resume


def make_data(folder: Path) -> None:
    image_folder.write(folder / "tiny", {"train": 48, "val": 6}, size=(80, 72))


SIZES = "MODEL.SWIN.DEPTHS [2,2] MODEL.SWIN.NUM_HEADS [2,4] MODEL.SWIN.EMBED_DIM 16 MODEL.SWIN.WINDOW_SIZE 4"
DATA = "DATA.IMG_SIZE 64 DATA.NUM_WORKERS 0 AUG.AUTO_AUGMENT none"
TRAIN = "TRAIN.EPOCHS 2 TRAIN.WARMUP_EPOCHS 0 TRAIN.BASE_LR 0.1 TRAIN.CLIP_GRAD 1.0 TRAIN.AUTO_RESUME False"
CONFIG = "--cfg configs/swin/swin_tiny_patch4_window7_224.yaml --data-path tiny --batch-size 2 --accumulation-steps 2"
CLIENT = Client(
    name="swin",
    repository="microsoft/Swin-Transformer",
    commit="f82860b",
    command=["main.py", *f"{CONFIG} --disable_amp --opts {SIZES} {DATA} {TRAIN}".split()],
    make_data=make_data,
    environment=LOADS_OBJECTS,
    same_bits=False,
    resume=Resume("TRAIN.EPOCHS 1", "MODEL.RESUME output/swin_tiny_patch4_window7_224/default/ckpt_epoch_0.pth"),
)
