"""A stand-in for nvcc, so that the step that drives it is tested anywhere, and in milliseconds."""

from __future__ import annotations

import stat
from pathlib import Path

SCRIPT = """\
#!/bin/sh
case "$*" in
    --version) echo "Cuda compilation tools, release {release}, V{release}.7" ;;
    --list-gpu-code) printf 'sm_{archs}\\n' | tr ' ' '\\n' ;;
    *sm_80a*) echo "nvcc fatal : Unsupported gpu architecture" >&2; exit 1 ;;
    --dryrun*) printf '#$ TOP={home}/bin/..\\n#$ LIBRARIES=  "-L{home}/stubs" "-L{home}/lib"\\n' >&2 ;;
    *)
        echo "$*" >>"{home}/calls"
        if grep -q broken "$2"; then echo "$2(1): error: broken"; exit 2; fi
        echo "ptxas info    : Used 40 registers"
        if grep -q doubtful "$2"; then echo "$2(1): warning: doubtful"; fi
        cp "$2" "$4" ;;
esac
"""


class FakeToolkit:
    def __init__(self, home: Path, release: str = "13.1", archs: str = "80 90 100 120") -> None:
        self.home = home
        (home / "bin").mkdir(parents=True)
        (home / "lib").mkdir()
        (home / "lib/libcudart_static.a").touch()
        self.nvcc = home / "bin/nvcc"
        self.nvcc.write_text(SCRIPT.format(home=home, release=release, archs=archs.replace(" ", "\\nsm_")))
        self.nvcc.chmod(self.nvcc.stat().st_mode | stat.S_IXUSR)

    def compiled(self) -> list[str]:
        """The sources since the last call."""
        calls = self.home / "calls"
        lines = calls.read_text().splitlines() if calls.exists() else []
        calls.unlink(missing_ok=True)
        return sorted(line.split()[1] for line in lines)
