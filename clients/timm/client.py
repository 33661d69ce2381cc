"""timm: it makes optimizers from a table of names and wraps in a task, accumulates with no_sync(), clips by torch, and
averages batch norm's running statistics and a moving average of the model by itself.

The moving average is copied from the model before that is wrapped, when ranks still have unequal parameters. With a
larger eps, gradients that are zero but for rounding move nothing.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import Client, Resume


def make_data(folder: Path) -> None:
    """13 batches on each rank, so the last update of an epoch is of one batch alone."""
    image_folder.write(folder / "tiny", {"train": 104, "validation": 22})


MODEL = "--model test_efficientnet --num-classes 4 --img-size 96 --model-ema --model-ema-decay 0.8"
OPTIMIZER = "--opt adamw --lr 1e-3 --opt-eps 1e-3 --weight-decay 0.05"
TRAINING = "--clip-grad 1.0 --grad-accum-steps 2 -b 4 --epochs 2 --warmup-epochs 0"
CLIENT = Client(
    name="timm",
    repository="huggingface/pytorch-image-models",
    commit="aa4b5850",
    command=["train.py", *f"--data-dir tiny --device cpu -j 1 --log-interval 1 {MODEL} {OPTIMIZER} {TRAINING}".split()],
    make_data=make_data,
    resume=Resume("--epochs 1 --output out --experiment a", "--output out --experiment b --resume out/a/last.pth.tar"),
)
