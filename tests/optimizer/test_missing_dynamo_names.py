"""Names that Dynamo keeps to itself, and that a later torch may lack: nothing but speed depends on them."""

from __future__ import annotations

from pathlib import Path
from subprocess import CompletedProcess

import pytest

from tests.programs import run_all, run_programs

NAMES = ("_FrameExecStrategy", "_FrameAction", "set_code_exec_strategy")
TRAINS = """
import torch

del torch._C._dynamo.eval_frame.{name}
import zerox

model = torch.nn.Linear(4, 4)
optimizer = zerox.FusedShardedAdam(model.parameters(), lr=0.1)
optimizer.overlap_gather(model)
model(torch.ones(2, 4)).sum().backward()
optimizer.step()
print("trained")
"""
ASKS = """
import runpy
import sys

import torch

{break_it}
sys.argv = ["zerox", "env"]
runpy.run_module("zerox", run_name="__main__")
"""


def run(source: str, folder: Path) -> CompletedProcess[str]:
    script = folder / "script.py"
    script.write_text(source)
    [ended] = run_all(script, [[]])
    return ended


@pytest.mark.parametrize("name", NAMES)
def test_zerox_imports_and_trains_without_a_name_of_dynamo(name: str, tmp_path: Path) -> None:
    found = run(TRAINS.format(name=name), tmp_path)
    assert found.stdout == "trained\n", found.stderr
    assert "UserWarning: zerox: torch 2." in found.stderr
    assert "lacks names by which overlap_gather() tells Dynamo of its hooks" in found.stderr


def test_env_reports_whatever_else_can_t_be_imported(tmp_path: Path) -> None:
    found = run(ASKS.format(break_it="del torch.distributed.algorithms.join.Joinable"), tmp_path)
    assert found.returncode == 1
    assert "extension             loaded" in found.stdout
    assert "package               cannot be used: zerox: AttributeError: module 'torch" in found.stdout
    assert "NVIDIA driver" in found.stdout


def test_every_name_raises_why_zerox_can_t_be_imported(tmp_path: Path) -> None:
    found = run(
        "import torch.distributed.algorithms.join as join\ndel join.Joinable\nimport zerox\nzerox.FusedShardedAdam\n",
        tmp_path,
    )
    assert "ImportError: zerox: AttributeError: module 'torch" in found.stderr
    assert "direct cause" in found.stderr  # with the lines where it happened


# Reads of parameters on their way: by a module that Dynamo leaves alone and whose kernels call no operator, and by
# what it compiles. `held` holds each gather back until somebody waits for it.
COMPILES = """
import sys
import warnings

import torch
import torch.distributed as dist
from torch import nn

rank, store, names, changes = int(sys.argv[1]), sys.argv[2], sys.argv[3].split(","), sys.argv[4]
if names != [""]:
    import torch._dynamo.callback

    for name in names:
        if name == "callback_handler":
            del torch._dynamo.callback.callback_handler
        else:
            delattr(torch._C._dynamo.eval_frame, name)
warnings.simplefilter("ignore")
import zerox.params.overlap_gather
from tests.optimizer import overlap_models
from tests.optimizer.overlap_models import SILENT, WIDTH, Blocks, Compiling, build, layer, train_step

if changes == "no hook":
    zerox.params.overlap_gather.BeforeForward.__call__ = lambda *_: None


class ByHand(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight, self.seen = nn.Parameter(torch.ones(WIDTH, WIDTH)), []

    @torch.compiler.disable
    def forward(self, x):
        torch.autograd._enable_record_function(False)
        self.seen.append(float(self.weight.detach().sum()))
        torch.autograd._enable_record_function(True)
        return x * self.weight.sum()


class Calling(nn.Module):
    def __init__(self):
        super().__init__()
        self.by_hand, self.first = ByHand(), layer()  # in this order each has a bucket of its own

    def forward(self, x, step):
        return self.by_hand(self.first(x))


def blocks():
    model = Blocks()
    for block in model.blocks:
        block.compile(backend=SILENT)
    return model


def whole():
    return torch.compile(Calling(), backend=SILENT)


dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
for make in (Calling, whole) if changes == "no hook" else (Calling, whole, blocks, Compiling):
    trained = []
    for overlap in (False, True):
        model, optimizer = build(make, overlap)
        for step in range(4):
            train_step(model, optimizer, rank, step)
        optimizer.synchronize()
        of_model = [param.detach().clone() for param in model.parameters()]
        seen = [each.seen for each in model.modules() if isinstance(each, ByHand)]
        trained.append((of_model, seen))
    (expected, saw), (found, sees) = trained
    same = saw == sees and all(map(torch.equal, expected, found))
    print(make.__name__, "right" if same else "wrong")
dist.destroy_process_group()
"""
COMPILED = ("Calling", "whole", "blocks", "Compiling")


def test_what_is_read_without_an_operator_is_as_without_a_hidden_gather(tmp_path: Path) -> None:
    assert_all_right("", tmp_path)


@pytest.mark.deep
@pytest.mark.parametrize("names", ["set_code_exec_strategy", "_FrameAction,callback_handler"])
def test_it_is_so_without_names_of_dynamo(names: str, tmp_path: Path) -> None:
    """Fourteen seconds of a core each: every program compiles anew."""
    assert_all_right(names, tmp_path)


def assert_all_right(names: str, tmp_path: Path) -> None:
    for printed in run_programs(COMPILES, tmp_path, names, "nothing"):
        assert printed.splitlines() == [f"{made} right" for made in COMPILED]


def test_a_hook_that_does_not_wait_is_noticed(tmp_path: Path) -> None:
    printed = "\n".join(run_programs(COMPILES, tmp_path, "", "no hook"))
    assert "Calling wrong" in printed
    assert "whole wrong" in printed
