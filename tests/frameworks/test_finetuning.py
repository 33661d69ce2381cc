"""Lightning's BaseFinetuning, which unfreezes parameters in a later epoch, and on a resume replaces param groups."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import BaseFinetuning, ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader, TensorDataset

from tests.frameworks.lightning_rig import Module, data, difference, run, trainer, values

# Beside one process with the whole batch: sums over it are in another order.
TOLERANCE = 2e-6


class Unfreezing(BaseFinetuning):
    """Trains the first layer from epoch 1 on. ``thaws``: also in a resume, which Lightning starts with it frozen."""

    def __init__(self, thaws: bool) -> None:
        super().__init__()
        self.thaws = thaws

    def freeze_before_training(self, module: Any) -> None:
        self.freeze(module.net[0])

    def finetune_function(self, module: Any, epoch: int, optimizer: torch.optim.Optimizer) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group(module.net[0], optimizer, lr=0.005)
        elif epoch > 1 and self.thaws:
            self.make_trainable(module.net[0])


class Finetuned(Module):
    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW([p for p in self.parameters() if p.requires_grad], lr=0.01, weight_decay=0.1)


def epochs(
    rank: int, world_size: int, strategy: str, folder: Path, num_epochs: int, ckpt: str | None, thaws: bool
) -> tuple[list[Tensor], list[list[float]]]:
    keep = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, save_on_train_epoch_end=True)
    options = {"callbacks": [keep, Unfreezing(thaws)], "enable_checkpointing": True, "max_epochs": num_epochs}
    module = Finetuned()
    fitted = trainer(rank, world_size, strategy, use_distributed_sampler=False, **options)
    x, y = (each[rank :: max(world_size, 1)] for each in data().dataset.tensors)
    rows = DataLoader(TensorDataset(x, y), batch_size=4 // max(world_size, 1))  # each step's are the same on any ranks
    fitted.fit(module, rows, ckpt_path=ckpt)
    groups = fitted.optimizers[0].param_groups
    return values(module), [[float(group["lr"]), float(len(group["params"]))] for group in groups]


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("thaws", [True, False])
def test_a_run_that_was_unfrozen_goes_on_as_with_adamw(stage: int, thaws: bool, tmp_path: Path) -> None:
    """Also from its checkpoint under the other one, and once more from the resumed run's."""
    for strategy, world_size in (("auto", 0), (f"zerox_stage_{stage}", 2)):
        run(epochs, world_size, strategy, tmp_path / strategy, 2, None, thaws)
    for before in ("auto", f"zerox_stage_{stage}"):
        path = str(tmp_path / before / "epoch=1.ckpt")
        theirs, their_groups = run(epochs, 0, "auto", tmp_path / "theirs" / before, 3, path, thaws)[0]
        for ours, groups in run(epochs, 2, f"zerox_stage_{stage}", tmp_path / "ours" / before, 3, path, thaws):
            assert groups == their_groups
            assert difference(ours, theirs) <= TOLERANCE, before
        # What waits for a parameter that is frozen now is saved on, as with AdamW.
        paths = [tmp_path / side / before / "epoch=2.ckpt" for side in ("ours", "theirs")]
        ours, theirs = (torch.load(path, weights_only=True)["optimizer_states"][0]["state"] for path in paths)
        assert ours.keys() == theirs.keys()
        for number, state in theirs.items():
            assert difference([ours[number][key] for key in state], list(state.values())) <= TOLERANCE
