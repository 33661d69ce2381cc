"""Accelerate's example for checkpoints: `save_state()` after each epoch, and `load_state()`."""

from __future__ import annotations

from dataclasses import replace

from clients.accelerate_nlp.client import CLIENT as NLP
from clients.client import Resume

CLIENT = replace(
    NLP,
    name="accelerate_checkpointing",
    command=["examples/by_feature/checkpointing.py", "--cpu"],
    resume=Resume("--checkpointing_steps epoch", "--resume_from_checkpoint epoch_1"),
)
