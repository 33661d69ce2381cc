"""Scripts of the pages on two ranks that `accelerate launch` and torchrun start."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.frameworks.test_docs import PAGES, blocks, sides

ROOT = Path(__file__).parents[2]
MOST = 2e-7
SEED = "import torch\ntorch.manual_seed(0)\n"
# What each rank has in the end goes to its own file.
KEEP = """
import os
torch.save([param.detach() for param in {model}.parameters()], "{name}" + os.environ["RANK"])
assert os.environ["WORLD_SIZE"] == "2", os.environ["WORLD_SIZE"]
"""
# DDP keeps its group after destroy_process_group(). If a thread of gloo is late, it still has the tensors of Trainer's
# last all-gather. To free them it asks for the interpreter, which is ending, and the process aborts. With zerox the
# group ends where it is destroyed, so that side has to end as any program does.
END = {
    "before": "torch.distributed.barrier()\nos._exit(0)\n",
    "after": "torch.distributed.destroy_process_group()\n",
}


def launch(command: list[str], name: str, script: str, folder: Path) -> None:
    (folder / "train.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "PYTHONFAULTHANDLER": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", *command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    # The fault handler also names all extension modules, in one line that is longer than all else.
    said = re.sub(r"^Extension modules: .*\n", "", ended.stderr, flags=re.M)
    assert ended.returncode == 0, f"the script {name} the change:\n{said[-6000:]}"


def launchers() -> dict[str, list[str]]:
    """The commands as docs/accelerate.md has them, less the script."""
    found = {}
    for line in re.findall(r"^(?:accelerate launch|torchrun) .*$", PAGES["accelerate"], re.M):
        words = shlex.split(line)
        assert words.pop() == "train.py"
        if words[0] == "torchrun":
            found["torchrun"] = ["torch.distributed.run", "--standalone", *words[1:]]
        else:
            found["accelerate launch"] = ["accelerate.commands.launch", *words[2:]]
    return found


@pytest.mark.parametrize("launcher", ["accelerate launch", "torchrun"])
@pytest.mark.parametrize(("page", "model"), [("accelerate", "accelerator.unwrap_model(model)"), ("trainer", "model")])
def test_two_ranks_give_ddp_s_numbers(page: str, model: str, launcher: str, tmp_path: Path) -> None:
    [diff] = [block for name, block in blocks("diff") if name == page]
    # Of 20 steps rounding adds up to 2 units in the last place of a value above 1, which are more than MOST.
    diff = diff.replace("max_steps=20", "max_steps=5")
    for name, script in zip(("before", "after"), sides(diff), strict=True):
        whole = SEED + script + KEEP.format(model=model, name=name) + END[name]
        launch(launchers()[launcher], name, whole, tmp_path)
    before, after, other = (torch.load(tmp_path / name) for name in ("before0", "after0", "after1"))
    assert max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)) <= MOST
    assert all(torch.equal(a, b) for a, b in zip(after, other, strict=True))
