"""DLRM: two wrapped parts and, in the same optimizer, tables of which each rank has its own, with sparse gradients."""

from __future__ import annotations

from pathlib import Path

from clients.client import Client


def make_data(_: Path) -> None:
    """The script makes its own."""


SIZES = "--arch-embedding-size=30-20-25-40 --arch-sparse-feature-size=8 --arch-mlp-bot=6-16-8 --arch-mlp-top=18-16-1"
DATA = "--data-generation=random --data-size=128 --mini-batch-size=8 --num-indices-per-lookup=3 --round-targets=True"
TRAINING = "--loss-function=bce --learning-rate=1.0 --test-freq=4 --test-mini-batch-size=16 --dist-backend=gloo"
CLIENT = Client(
    name="dlrm",
    repository="facebookresearch/dlrm",
    commit="090956e",
    command=["dlrm_s_pytorch.py", *f"{SIZES} {DATA} {TRAINING}".split()],
    make_data=make_data,
)
