"""guided-diffusion in float16: the optimizer has flat float32 copies of the parameters, which no wrapper knows."""

from __future__ import annotations

from dataclasses import replace

from clients.guided_diffusion.client import CLIENT as IN_FLOAT32
from clients.guided_diffusion.client import COMMAND

CLIENT = replace(
    IN_FLOAT32,
    name="guided_diffusion_fp16",
    shares="guided_diffusion",
    command=[*COMMAND, "--use_fp16=True", "--lr_anneal_steps=15"],
    most=2e-4,
)
