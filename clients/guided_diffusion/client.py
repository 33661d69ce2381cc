"""guided-diffusion: no_sync() around the forwards of a batch's parts, and a checkpoint function of its own."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

from clients.client import Client, Resume


def make_data(folder: Path) -> None:
    """Pictures of two classes, which the script reads from the beginnings of their names."""
    data = folder / "tiny"
    data.mkdir()
    values = np.random.default_rng(0)
    for index in range(24):
        picture = values.integers(0, 256, (4, 4, 3)).astype(np.uint8)
        Image.fromarray(picture).resize((16, 16)).save(data / f"{'ab'[index % 2]}_{index}.png")


SIZES = "image_size=16 num_channels=32 num_res_blocks=1 channel_mult=1,2 attention_resolutions=8 diffusion_steps=100"
TRAINING = "batch_size=4 microbatch=2 lr=1e-3 weight_decay=0.01 lr_anneal_steps=14 ema_rate=0.9 dropout=0.1"
REST = "data_dir=tiny class_cond=True learn_sigma=True log_interval=4 save_interval=6"
COMMAND = ["scripts/image_train.py", *(f"--{each}" for each in f"{SIZES} {TRAINING} {REST}".split())]
CLIENT = Client(
    name="guided_diffusion",
    repository="openai/guided-diffusion",
    commit="22e0df8",
    command=[*COMMAND, "--use_checkpoint=True"],
    make_data=make_data,
    environment={"OPENAI_LOGDIR": "logs"},
    # As it is, it can't go on on several: of the model rank 0 alone calls bcast(), of the optimizer all ranks do.
    resume=Resume("--lr_anneal_steps=7", "--resume_checkpoint=logs/model000006.pt", num_ranks=(1,)),
)
