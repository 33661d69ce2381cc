"""Masked autoencoders: frozen positions, half precision with torch's scaler, several backwards for one update without
no_sync(), and the norm of all gradients by a function of the script's own.

In stages 2 and 3 the means of two backwards are added. torch adds the second gradients to the first mean, and takes the
mean of that: some of the first mean gradients differ in their last bit.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import LOADS_OBJECTS, Client, Resume


def make_data(folder: Path) -> None:
    image_folder.write(folder / "tiny", {"train": 112})


MODEL = "--model tiny --input_size 32 --norm_pix_loss"
TRAINING = "--batch_size 4 --accum_iter 2 --epochs 2 --warmup_epochs 0 --lr 7e-3 --num_workers 0"
CLIENT = Client(
    name="mae",
    repository="facebookresearch/mae",
    commit="efb2a80",
    command=["main_pretrain.py", *f"--data_path tiny {MODEL} {TRAINING}".split()],
    make_data=make_data,
    environment=LOADS_OBJECTS,
    most=2e-4,
    faults=("beta", "averaging", "frozen"),
    same_bits=False,
    resume=Resume("--epochs 1", "--resume output_dir/checkpoint-0.pth"),
)
