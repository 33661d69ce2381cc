"""PyTorch's example for ImageNet: SGD with momentum, batch norm, and an evaluation on all ranks after each epoch.

All ranks save to one path, and write the same bytes.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import Client, Resume


def make_data(folder: Path) -> None:
    """One picture for evaluation is left over where ranks divide them: the script has a way of its own for those."""
    image_folder.write(folder / "imagenet" / "tiny", {"train": 56, "val": 17})


CLIENT = Client(
    name="imagenet",
    repository="pytorch/examples",
    commit="77f55b9",
    command=["main.py", *"tiny -a shufflenet_v2_x0_5 --epochs 2 -b 4 -j 0 -p 1 --lr 0.02 --dist-url env://".split()],
    make_data=make_data,
    under="imagenet",
    resume=Resume("--epochs 1", "--resume checkpoint.pth.tar"),
)
