"""k-diffusion: an Accelerator prepares two models, one of them a moving average, and its main process saves what all
have asked for. A run goes on from the last checkpoint of its name.
"""

from __future__ import annotations

import json
from pathlib import Path

from clients import image_folder
from clients.client import Client, Resume

CONFIG = {
    "model": {
        "type": "image_v1",
        "input_channels": 3,
        "input_size": [16, 16],
        "patch_size": 2,
        "mapping_out": 32,
        "depths": [1, 1],
        "channels": [32, 64],
        "self_attn_depths": [False, False],
        "loss_config": "karras",
        "loss_weighting": "soft-min-snr",
        "dropout_rate": 0.05,
        "augment_wrapper": True,
        "augment_prob": 0.12,
        "sigma_data": 0.5,
        "sigma_min": 1e-2,
        "sigma_max": 80,
        "sigma_sample_density": {"type": "cosine-interpolated"},
    },
    "dataset": {"type": "imagefolder", "location": "tiny"},
    "optimizer": {"type": "adamw", "lr": 2e-3, "betas": [0.9, 0.99], "eps": 1e-6, "weight_decay": 1e-2},
    "lr_sched": {"type": "constant", "warmup": 0.0},
    "ema_sched": {"type": "inverse", "power": 0.6667, "max_value": 0.9999},
}


def make_data(folder: Path) -> None:
    image_folder.write(folder / "tiny", {"train": 60})
    (folder / "tiny.json").write_text(json.dumps(CONFIG))


RUN = "--config tiny.json --batch-size 4 --num-workers 1 --evaluate-every 0"
CLIENT = Client(
    name="k_diffusion",
    repository="crowsonkb/k-diffusion",
    commit="4601bf0",
    command=["train.py", *f"{RUN} --end-step 14 --start-method fork".split()],
    make_data=make_data,
    environment={"ACCELERATE_USE_CPU": "true"},
    resume=Resume("--end-step 7 --name kept", "--name kept"),
)
