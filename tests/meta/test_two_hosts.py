"""Two hosts with two ranks each, as far as one machine can make them: with networks and processes of their own.

For root only, where the system has network namespaces.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.meta.on_two_hosts import TIMEOUT_S

ROOT = Path(__file__).parents[2]
RANKS = 4
PORT = 29517


def run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True)


@contextlib.contextmanager
def two_hosts() -> Iterator[list[str]]:
    """Their names. Each has an address in one network, and no other."""
    names = [f"zerox{os.getpid()}{letter}" for letter in "ab"]
    try:
        for name in names:
            run("ip", "netns", "add", name)
        run("ip", "link", "add", "zx", "netns", names[0], "type", "veth", "peer", "name", "zx", "netns", names[1])
        for number, name in enumerate(names, 1):
            inside = ("ip", "-n", name)
            run(*inside, "addr", "add", f"10.99.7.{number}/24", "dev", "zx")
            run(*inside, "link", "set", "zx", "up")
            run(*inside, "link", "set", "lo", "up")
        yield names
    finally:
        for name in names:
            subprocess.run(["ip", "netns", "del", name], check=False, capture_output=True)


def can_make_hosts() -> bool:
    if os.geteuid() != 0 or not shutil.which("ip") or not shutil.which("unshare"):
        return False
    with contextlib.suppress(subprocess.CalledProcessError), two_hosts() as names:
        run("ip", "netns", "exec", names[0], "unshare", "--pid", "--fork", "--mount-proc", "true")
        return True
    return False


def results(folder: Path, case: str) -> list[dict[str, object]]:
    environment = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        "GLOO_SOCKET_IFNAME": "zx",
        "MASTER_ADDR": "10.99.7.1",
        "MASTER_PORT": str(PORT),
        "WORLD_SIZE": str(RANKS),
        "OMP_NUM_THREADS": "1",
    }
    program = f"{sys.executable} -m tests.meta.on_two_hosts {folder} {case}"
    with two_hosts() as names:
        hosts = []
        for number, name in enumerate(names):
            own = " & ".join(f"RANK={2 * number + local} {program}" for local in range(2))
            inside = ["ip", "netns", "exec", name, "unshare", "--pid", "--fork", "--mount-proc", "--kill-child"]
            hosts.append(
                subprocess.Popen(
                    [*inside, "sh", "-c", f"{own} & wait"],
                    env=environment,
                    cwd=ROOT,
                    start_new_session=True,
                    stderr=subprocess.PIPE,
                    text=True,
                )
            )
        said = []
        for host in hosts:
            try:  # a rank that has stopped itself does not end
                said.append(host.communicate(timeout=3 if case == "slow" and said else 90)[1])
            except subprocess.TimeoutExpired:
                os.killpg(host.pid, signal.SIGKILL)
                said.append(host.communicate()[1])
    files = [folder / f"{rank}.json" for rank in range(RANKS)]
    assert all(file.exists() for file in files), "\n".join(said)
    return [json.loads(file.read_text()) for file in files]


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and unshare")
def test_a_model_is_made_loaded_and_trained(tmp_path: Path) -> None:
    found = results(tmp_path, "trained")
    for each in found:
        assert each["neighbours"] == 2, "of the same host"
        assert each["born"]
        assert each["loaded"]
    assert len({str(each["trained"]) for each in found}) == 1


@pytest.mark.skipif(not can_make_hosts(), reason="needs root, ip and unshare")
def test_a_fetch_whose_owner_is_slow_names_it(tmp_path: Path) -> None:
    first = str(results(tmp_path, "slow")[0]["error"])
    assert "rank 3" in first
    assert f"{TIMEOUT_S}" in first
