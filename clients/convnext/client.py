"""ConvNeXt: each depth of the model has its own groups and rates, and an average of the weights is evaluated too.

The groups' rates and decays are written before each step, as the script's schedules say.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import LOADS_OBJECTS, Client, Resume


def make_data(folder: Path) -> None:
    image_folder.write(folder / "tiny", {"train": 58, "val": 10}, size=(32, 32))


DATA = "--data_set image_folder --data_path tiny/train --eval_data_path tiny/val --nb_classes 4 --input_size 32"
MODEL = "--model convnext_small --drop_path 0.1 --layer_scale_init_value 0.1 --model_ema true --model_ema_eval true"
TRAIN = "--batch_size 4 --epochs 2 --warmup_epochs 0 --lr 2e-3 --layer_decay 0.8 --weight_decay_end 0.1"
REST = "--model_ema_decay 0.8 --num_workers 0"
CLIENT = Client(
    name="convnext",
    repository="facebookresearch/ConvNeXt",
    commit="048efcea",
    command=["main.py", *f"{DATA} {MODEL} {TRAIN} {REST}".split()],
    make_data=make_data,
    environment=LOADS_OBJECTS,
    resume=Resume("--epochs 1 --output_dir out", "--output_dir out"),
)
