"""A machine whose own name does not resolve, as in many containers: made of Linux namespaces, for one command."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

# Only this command sees the name and the hosts file.
SCRIPT = """
set -e
hostname nowhere-zerox
mount --bind "$0" /etc/hosts
exec "$@"
"""


RESOLVES = "import socket\ntry: print(socket.gethostbyname(socket.gethostname()))\nexcept OSError: print('no')"


def prefix(folder: Path) -> list[str]:
    """Words to put before a command, none if this machine's own name does not resolve; ``folder`` is for a file.

    Skips the test, with the reason, if this user may make no namespaces.
    """
    if ask([]).stdout == "no\n":
        return []
    hosts = folder / "hosts"
    hosts.write_text("127.0.0.1 localhost\n")
    words = ["unshare", "--map-root-user", "--uts", "--mount", "bash", "-c", SCRIPT, str(hosts)]
    try:
        done = ask(words)
    except FileNotFoundError:
        pytest.skip("no unshare on this machine: that a name does not resolve can't be tried")
    if done.returncode:
        pytest.skip(f"no namespaces here, so that a name does not resolve can't be tried: {done.stderr.strip()}")
    if done.stdout != "no\n":
        pytest.skip(f"here any name resolves, the nameless host's to {done.stdout.strip()}")
    return words


def ask(words: list[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*words, sys.executable, "-c", RESOLVES], capture_output=True, text=True)
