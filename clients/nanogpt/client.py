"""nanoGPT: accumulation by an attribute of the wrapper, torch's scaler and clip, and rank 0 evaluates alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from clients.client import Client, Resume


def make_data(folder: Path) -> None:
    data = folder / "data" / "tiny"
    data.mkdir(parents=True)
    for seed, name in enumerate(("train", "val")):
        np.random.default_rng(seed).integers(0, 64, 4096).astype(np.uint16).tofile(data / f"{name}.bin")


MODEL = "n_layer=2 n_head=2 n_embd=32 block_size=32 batch_size=4 gradient_accumulation_steps=4 max_iters=23"
EVALUATION = "eval_interval=8 eval_iters=2"
REST = "warmup_iters=2 learning_rate=1e-2 dataset=tiny dtype=float32 compile=False dropout=0.1"
OF_1_TO_3 = "--gradient_accumulation_steps=6"  # ranks
CLIENT = Client(
    name="nanogpt",
    repository="karpathy/nanoGPT",
    commit="3adf61e1",
    command=["train.py", *(f"--{each}" for each in f"{MODEL} {EVALUATION} {REST}".split())],
    make_data=make_data,
    resume=Resume(f"{OF_1_TO_3} --max_iters=8", f"{OF_1_TO_3} --init_from=resume"),
)
