"""Frameworks train a model on the meta device as they train its twin in memory, and give it their checkpoints."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist
from accelerate import Accelerator
from peft import LoraConfig, get_peft_model
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.lightning_rig import trainer
from tests.frameworks.test_fabric import make_fabric
from tests.frameworks.trainers import ZeroxTrainer, arguments, make_data
from tests.hugging_face import accelerators_environment
from tests.meta.pretrained import WORDS, losses, maker, pretrained_twin
from tests.meta.rig import CAP, SEED, differing, on_meta
from tests.ranks import run_ranks
from zerox import FusedShardedAdam, load_weights, save_weights
from zerox.integrations import accelerate
from zerox.integrations.lightning import ZeroxFabricStrategy, ZeroxStrategy

OPTIONS: dict[str, Any] = {"stage": 3, "bucket_cap_mb": CAP, "resident_mb": 0.05}
Make = Callable[[], nn.Module]


def build(model: nn.Module, rank: int) -> FusedShardedAdam:
    torch.manual_seed(SEED + rank)
    return FusedShardedAdam(model.named_parameters(), model=model, lr=1e-2, **OPTIONS)


# ---- Lightning


class Module(pl.LightningModule):
    """Makes its model in configure_model(), as Lightning would have large ones made."""

    def __init__(self, rank: int, is_meta: bool, builds: bool) -> None:
        super().__init__()
        self.net: Any = None
        self.rank, self.is_meta, self.builds = rank, is_meta, builds
        self.losses: list[float] = []

    def configure_model(self) -> None:
        if self.net is None:
            self.net = on_meta(maker("llama")) if self.is_meta else pretrained_twin(maker("llama"))

    def configure_optimizers(self) -> Any:
        torch.manual_seed(SEED + self.rank)
        if self.builds:
            return FusedShardedAdam(self.named_parameters(), model=self, lr=1e-2, **OPTIONS)
        return torch.optim.AdamW(self.parameters(), lr=1e-2)

    def training_step(self, batch: list[Tensor], _: int) -> Tensor:
        loss = self.net(input_ids=batch[0], labels=batch[0]).loss
        self.losses.append(float(loss.detach()))
        return loss

    def train_dataloader(self) -> Any:
        words = torch.randint(WORDS, (8, 12), generator=torch.Generator().manual_seed(2))
        return DataLoader(TensorDataset(words), batch_size=2)


def fit(rank: int, world_size: int, module: Module, epochs: int = 1, **options: Any) -> pl.Trainer:
    strategy = ZeroxStrategy() if module.builds else ZeroxStrategy(**OPTIONS)
    made = trainer(rank, world_size, strategy, max_epochs=epochs)
    made.fit(module, **options)
    return made


def fits_as_its_twin(rank: int, world_size: int, folder: Path, builds: bool) -> None:
    born, other = Module(rank, True, builds), Module(rank, False, builds)
    made = fit(rank, world_size, born)
    fit(rank, world_size, other)
    assert born.losses == other.losses
    assert len(born.losses) == 8 // 2 // world_size
    assert differing(born, other) == []
    made.save_checkpoint(folder / "it.ckpt")
    again, twin = Module(rank, True, builds), Module(rank, False, builds)
    for each in (again, twin):
        fit(rank, world_size, each, 2, ckpt_path=folder / "it.ckpt")
    assert again.losses == twin.losses
    assert again.losses[-1] < born.losses[0]
    assert differing(again, twin) == []


@pytest.mark.parametrize("builds", [False, True])
def test_lightning_fits_it_and_its_checkpoint(tmp_path: Path, builds: bool) -> None:
    run_ranks(fits_as_its_twin, 2, tmp_path, builds)


def validates(rank: int, world_size: int) -> None:
    module = Module(rank, True, False)
    module.validation_step = module.training_step  # type: ignore[method-assign]
    made = trainer(rank, world_size, ZeroxStrategy(**OPTIONS))
    with pytest.raises(ValueError, match=r"Module is on the meta device, where only fit\(\) has an optimizer"):
        made.validate(module, module.train_dataloader())


def test_lightning_validates_none_without_values() -> None:
    run_ranks(validates, 1)


def of_fabric(rank: int, world_size: int) -> None:
    fabric = make_fabric(rank, world_size, ZeroxFabricStrategy())
    model = on_meta(maker("llama"))
    with pytest.raises(ValueError, match=r"LlamaForCausalLM is on the meta device.*then fabric\.setup\(model, optim"):
        fabric.setup(model, torch.optim.AdamW(model.parameters()), move_to_device=False)
    optimizer = build(model, rank)
    other = pretrained_twin(maker("llama"))
    built = build(other, rank)
    model, optimizer = fabric.setup(model, optimizer)
    assert losses(model, optimizer, rank, backward=fabric.backward) == losses(other, built, rank)


def test_fabric_takes_it_with_its_optimizer() -> None:
    run_ranks(of_fabric, 2)


# ---- Accelerate


def prepares(rank: int, world_size: int) -> None:
    with accelerators_environment(rank, world_size):
        accelerator = accelerate.adopt(Accelerator(cpu=True))
        model: Any = on_meta(maker("gpt2"))
        said = r"GPT2LMHeadModel is on the meta device.*then accelerator\.prepare\(model, optimizer\)"
        with pytest.raises(ValueError, match=said):
            accelerator.prepare(model)
        optimizer: Any = build(model, rank)
        other = pretrained_twin(maker("gpt2"))
        built = build(other, rank)
        model, optimizer = accelerator.prepare(model, optimizer)
        assert losses(model, optimizer, rank) == losses(other, built, rank)
        with optimizer.optimizer.whole(), built.whole():
            assert differing(accelerator.unwrap_model(model), other) == []


def test_accelerate_prepares_it_after_its_optimizer() -> None:
    run_ranks(prepares, 2)


# ---- Trainer


class SeededTrainer(ZeroxTrainer):
    zerox_options = OPTIONS

    def create_optimizer(self, model: Any = None) -> Any:
        if self.optimizer is None:
            torch.manual_seed(SEED + self.args.process_index)
        return super().create_optimizer(model)

    def train(self, *args: Any, **kwargs: Any) -> Any:
        torch.manual_seed(SEED)  # of the data's order
        return super().train(*args, **kwargs)


def a_trainer(model: nn.Module, folder: Path, **options: Any) -> SeededTrainer:
    args = arguments(folder, max_steps=options.pop("max_steps", 3), save_strategy="no")
    return SeededTrainer(model=model, args=args, train_dataset=make_data(24), **options)


def logged(one: SeededTrainer) -> list[float]:
    return [each["loss"] for each in one.state.log_history if "loss" in each]


def trains(rank: int, world_size: int, folder: Path) -> None:
    with accelerators_environment(rank, world_size):
        born, other = (a_trainer(model, folder) for model in (on_meta(maker("llama")), pretrained_twin(maker("llama"))))
        born.train()
        other.train()
        assert logged(born) == logged(other)
        assert len(logged(born)) == 3
        assert differing(born.model, other.model) == []


def test_trainer_trains_it(tmp_path: Path) -> None:
    run_ranks(trains, 2, tmp_path)


def trains_from_files(rank: int, world_size: int, folder: Path) -> None:
    with accelerators_environment(rank, world_size):
        whole: Any = pretrained_twin(maker("llama"), seed=5)
        if rank == 0:
            whole.save_pretrained(folder / "in")
        dist.barrier()
        born, other = (a_trainer(model, folder) for model in (on_meta(maker("llama")), whole))
        load_weights(born.create_optimizer(), folder / "in")
        born.train()
        other.train()
        assert logged(born) == logged(other)
        born.save_model(str(folder / "out"))
        save_weights(born.optimizer.optimizer, folder / "written")
        if rank == 0:
            for at in ("out", "written"):
                whole.config.save_pretrained(folder / at)
                assert differing(type(whole).from_pretrained(folder / at), other.model) == []
        dist.barrier()


def test_trainer_begins_with_files(tmp_path: Path) -> None:
    run_ranks(trains_from_files, 2, tmp_path)


def trains_lora(rank: int, world_size: int, folder: Path) -> None:
    """Trainer gives its own optimizer only what is trained."""
    config = LoraConfig(target_modules=["q_proj", "v_proj"], r=4)
    with accelerators_environment(rank, world_size):
        born = a_trainer(get_peft_model(on_meta(maker("llama")), config), folder)
        optimizer = born.create_optimizer()
        with optimizer.whole():
            values = {name: value.detach().clone() for name, value in born.model.state_dict().items()}
        whole = get_peft_model(maker("llama")(), config)
        whole.load_state_dict(values)
        other = a_trainer(whole, folder)
        born.train()
        other.train()
        assert logged(born) == logged(other)
        assert differing(born.model, other.model) == []
        changed = [name for name, value in born.model.state_dict().items() if not torch.equal(value, values[name])]
        assert changed
        assert all("lora_" in name for name in changed)


def test_trainer_trains_lora_over_it(tmp_path: Path) -> None:
    run_ranks(trains_lora, 2, tmp_path)
