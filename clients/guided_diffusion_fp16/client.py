"""guided-diffusion in float16: the optimizer has flat float32 copies of the parameters, which no wrapper knows."""

from __future__ import annotations

from clients.client import Client
from clients.guided_diffusion.client import COMMAND, make_data

CLIENT = Client(
    name="guided_diffusion_fp16",
    repository="openai/guided-diffusion",
    commit="22e0df8",
    command=[*COMMAND, "--use_fp16=True", "--lr_anneal_steps=15"],
    make_data=make_data,
    most=2e-4,
    environment={"OPENAI_LOGDIR": "logs"},
    stand_ins="clients.guided_diffusion.stand_ins",
)
