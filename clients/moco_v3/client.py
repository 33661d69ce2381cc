"""MoCo v3: a second encoder follows the first without training, by new data for its parameters in each forward.

It runs under torch's scaler in 16 bits.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import Client, Resume


def make_data(folder: Path) -> None:
    image_folder.write(folder / "tiny", {"train": 56})


MODEL = "-a vit_small --stop-grad-conv1 --moco-dim 16 --moco-mlp-dim 32 --moco-m 0.9 --moco-m-cos --moco-t 0.2"
TRAIN = "--optimizer adamw --lr 0.02 -b 4 --epochs 3 --warmup-epochs 1 -j 0 -p 1 --dist-url env://"
CLIENT = Client(
    name="moco_v3",
    repository="facebookresearch/moco-v3",
    commit="c349e6e2",
    command=["main_moco.py", "tiny", *f"{MODEL} {TRAIN}".split()],
    make_data=make_data,
    most=2e-4,
    faults=("beta", "averaging", "frozen"),
    # Beyond, last bits grow by thousands in the unchanged script too. It refuses one rank.
    resume=Resume("--epochs 1", "--resume checkpoint_0000.pth.tar --epochs 2", num_ranks=(2, 3)),
)
