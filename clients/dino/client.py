"""DINO: each parameter's gradient is clipped by itself, those of the last layer are thrown away for an epoch, and
another model follows the parameters.

``clip_grad`` is above the norm of the head's 4 million weights, and at times below that of others: torch's sum of so
many squares in float32 is off by 2e-4 on a CPU, and that of zerox in stages 2 and 3 is not.
"""

from __future__ import annotations

from pathlib import Path

from clients import image_folder
from clients.client import LOADS_OBJECTS, Client, Resume


def make_data(folder: Path) -> None:
    image_folder.write(folder / "data", {"train": 16})


SIZES = "arch=vit_tiny patch_size=32 out_dim=64 local_crops_number=2 batch_size_per_gpu=2 epochs=3 num_workers=0"
STEPS = "use_fp16=false lr=0.05 warmup_epochs=0 clip_grad=2.0 freeze_last_layer=1"
REST = "warmup_teacher_temp=0.2 teacher_temp=0.2 data_path=data/train output_dir=out"
CLIENT = Client(
    name="dino",
    repository="facebookresearch/dino",
    commit="7c446df",
    command=["main_dino.py", *(f"--{each}" for each in f"{SIZES} {STEPS} {REST}".split())],
    make_data=make_data,
    environment=LOADS_OBJECTS,
    faults=("beta", "averaging", "frozen"),
    resume=Resume("--epochs=1 --output_dir=kept", "--output_dir=kept"),
)
