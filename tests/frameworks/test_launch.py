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
torch.distributed.destroy_process_group()  # a rank with DDP that ends without may abort
"""


def launch(command: list[str], script: str, folder: Path) -> None:
    (folder / "train.py").write_text(script)
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [sys.executable, "-m", *command, "train.py"], cwd=folder, env=environment, capture_output=True, text=True
    )
    assert ended.returncode == 0, ended.stderr[-3000:]


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
        launch(launchers()[launcher], SEED + script + KEEP.format(model=model, name=name), tmp_path)
    before, after, other = (torch.load(tmp_path / name) for name in ("before0", "after0", "after1"))
    assert max(float((a - b).abs().max()) for a, b in zip(after, before, strict=True)) <= MOST
    assert all(torch.equal(a, b) for a, b in zip(after, other, strict=True))
