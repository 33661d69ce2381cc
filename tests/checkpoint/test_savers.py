"""Other libraries' savers keep every weight, though these tell tied weights by their storage: on one rank and on two.

Nothing is downloaded. What is saved beside the model (optimizer state of several ranks) is not for these savers.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from huggingface_hub import load_torch_model, save_torch_model
from safetensors.torch import load_file, load_model, save_model
from torch import nn

from tests.bucket_manager.rig import same_bits
from tests.hugging_face import accelerators_environment
from tests.optimizer.models import backward, batch, make_model
from tests.ranks import run_ranks
from zerox import FusedShardedAdam

Way = Callable[..., None]  # (model, folder), and for Accelerate the accelerator in between


def wait_for_all() -> None:
    if dist.is_initialized():
        dist.barrier()


def save_state(model: nn.Module, folder: Path, accelerator: Any) -> None:
    accelerator.save_state(str(folder))


def load_state(model: nn.Module, folder: Path, accelerator: Any) -> None:
    accelerator.load_state(str(folder))


def accelerates_save_model(model: nn.Module, folder: Path, accelerator: Any) -> None:
    accelerator.save_model(model, str(folder))


def safetensors_save_model(model: nn.Module, folder: Path, accelerator: Any) -> None:
    if accelerator.is_main_process:
        folder.mkdir()
        save_model(model, str(folder / "model.safetensors"))


def safetensors_load_model(model: nn.Module, folder: Path, accelerator: Any) -> None:
    assert load_model(model, folder / "model.safetensors") == (set(), [])


def hubs_save_model(model: nn.Module, folder: Path, accelerator: Any) -> None:
    if accelerator.is_main_process:
        folder.mkdir()
        save_torch_model(model, folder)


def hubs_load_model(model: nn.Module, folder: Path, accelerator: Any) -> None:
    load_torch_model(model, folder)


WAYS: dict[str, tuple[Way, Way]] = {
    "accelerate state": (save_state, load_state),
    "accelerate model": (accelerates_save_model, safetensors_load_model),
    "safetensors": (safetensors_save_model, safetensors_load_model),
    "hub": (hubs_save_model, hubs_load_model),
}


class Awkward(nn.Module):
    """A model with more: channels-last weights, an empty and a frozen parameter, and a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mixed = make_model()
        self.convolution = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
        self.norm = nn.BatchNorm1d(72)
        self.empty = nn.Parameter(torch.zeros(0, 3))
        self.frozen = nn.Parameter(torch.ones(5), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(self.mixed(x)) + self.convolution.weight.square().sum() + self.convolution.bias.sum()


def there_and_back(rank: int, world_size: int, folder: Path) -> None:
    with accelerators_environment(rank, world_size):
        accelerator = Accelerator(cpu=True)
        assert accelerator.num_processes == world_size
        torch.manual_seed(0)
        model = Awkward()
        optimizer = FusedShardedAdam(model.named_parameters(), lr=1e-2, bucket_cap_mb=0.05)
        accelerator.prepare_model(model, evaluation_mode=True)  # else it is put into DDP
        if world_size == 1:
            accelerator.prepare_optimizer(optimizer)

        def step(number: int) -> None:
            backward(model, batch(rank, number))
            optimizer.step()
            optimizer.zero_grad()
            optimizer.broadcast_buffers(model)  # rank 0's are saved

        step(0)
        for way, (save, load) in WAYS.items():
            saved = {name: value.clone() for name, value in model.state_dict().items()}
            places = [p.data_ptr() for p in model.parameters()]
            save(model, folder / way, accelerator)
            wait_for_all()
            [file] = (folder / way).glob("*.safetensors")
            missing = saved.keys() - load_file(file).keys()
            assert len(missing) == 1, f"{way}: tied weights are saved once, all others too: {missing}"
            assert missing < {"mixed.head.weight", "mixed.twice.weight"}
            step(1)
            assert not all(same_bits(value, saved[name]) for name, value in model.state_dict().items()), way
            load(model, folder / way, accelerator)
            for name, value in model.state_dict().items():
                assert same_bits(value, saved[name]), (way, name)
            assert [p.data_ptr() for p in model.parameters()] == places
            wait_for_all()
        if world_size == 1:
            goes_on_from(model, optimizer, step, accelerator, folder)


def goes_on_from(
    model: nn.Module, optimizer: FusedShardedAdam, step: Callable[[int], None], accelerator: Any, folder: Path
) -> None:
    """In one process Accelerate restores the optimizer too: the same steps give the same bits."""
    accelerator.save_state(str(folder / "to go on"))
    ends = []
    for _ in range(2):
        step(2)
        step(3)
        ends.append([p.detach().clone() for p in model.parameters()])
        accelerator.load_state(str(folder / "to go on"))
    assert all(map(same_bits, *ends))


@pytest.mark.parametrize("world_size", [1, 2])
def test_what_other_savers_save_has_every_weight_and_loads_again(world_size: int, tmp_path: Path) -> None:
    run_ranks(there_and_back, world_size, tmp_path)
