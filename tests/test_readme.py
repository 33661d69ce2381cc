"""The README's example does what it says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

from bench import report

README = Path(__file__).parents[1] / "README.md"


def test_the_first_example_trains_over_two_ranks(tmp_path: Path) -> None:
    code = re.search(r"```python\n(.*?)```", README.read_text(), re.S)
    assert code
    script = tmp_path / "train.py"
    script.write_text(code.group(1))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2", str(script)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, capture_output=True, text=True, env=environment, timeout=120)
    assert done.returncode == 0, done.stderr
    said = re.search(r"loss ([\d.]+), ([\d,]+) bytes of moments", done.stdout)
    assert said, done.stdout
    assert float(said.group(1)) < 60.0, "the loss starts at about 64, the variance of a sum of 64"
    numel = 64 * 256 + 256 + 256 + 1
    assert numel * 8 / 2 <= int(said.group(2).replace(",", "")) <= numel * 8 / 2 * 1.1


def test_speed_and_memory_are_those_of_the_result_files() -> None:
    for table in (report.steps(report.RESULTS), report.peaks(report.RESULTS)):
        assert table in README.read_text(), "python -m bench.report prints what should be there"
    commits = {report.load(report.RESULTS, name)["commit"] for name in ("step", "step-bf16-clip", "memory")}
    assert len(commits) == 1
    assert f"commit {commits.pop()[:7]};" in README.read_text().replace("\n", " ")
