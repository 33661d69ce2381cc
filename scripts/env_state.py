"""Questions of setup_env.sh about the environment that runs this file. Plain Python 3.10 with pip, and quick: torch is
looked up, not imported.

has-torch           exit status: is a torch here that will do?
missing SET...      requirements not met, one a line; a SET is an extra of pyproject.toml, or build-system
clashes SET...      those of them that are met by no version here but are installed, so that pip would replace them
pins                constraints.txt, with what is installed here pinned to the version it has
fingerprint         of everything that a build of the extension depends on; with -werror if warnings are to be errors
built               exit status: is this very folder installed here in editable mode, and its library built?
"""

import hashlib
import json
import os
import sys
import sysconfig
from collections.abc import Callable
from importlib import metadata
from pathlib import Path

import build_cuda
import find_torch

try:
    from packaging.requirements import Requirement
    from packaging.utils import canonicalize_name
except ImportError:
    from pip._vendor.packaging.requirements import Requirement  # type: ignore[assignment]
    from pip._vendor.packaging.utils import canonicalize_name  # type: ignore[assignment]
try:
    import tomllib
except ImportError:  # Python 3.10
    from pip._vendor import tomli as tomllib  # type: ignore[no-redef]

ROOT = Path(__file__).resolve().parent.parent


def name_of(line: str) -> str:
    return canonicalize_name(Requirement(line).name)


def installed() -> dict[str, str]:
    """Of those of one name, the first is the one that is imported."""
    found = reversed([*metadata.distributions()])
    return {canonicalize_name(each.name): each.version for each in found if each.name}


def met(line: str, here: dict[str, str]) -> bool:
    requirement = Requirement(line)
    if requirement.marker and not requirement.marker.evaluate():
        return True
    version = here.get(name_of(line))
    return version is not None and requirement.specifier.contains(version, prereleases=True)


def missing(*sets: str) -> list[str]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    known = {"build-system": project["build-system"]["requires"], **project["project"]["optional-dependencies"]}
    here = installed()
    return list(dict.fromkeys(line for name in sets for line in known[name] if not met(line, here)))


def clashes(*sets: str) -> list[str]:
    here = installed()
    return [" ".join(f"'{line}'" for line in missing(*sets) if name_of(line) in here)]


def pins() -> list[str]:
    here = installed()
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if line and line[0] != "#"]
    fresh = [line for line in lines if name_of(line) not in here]
    return [*(f"{name}=={version}" for name, version in here.items()), *fresh]


def fingerprint() -> list[str]:
    state = hashlib.sha256(repr((sys.prefix, sys.version, metadata.version("torch"))).encode())
    switches = ["ZEROX_CUDA", "FORCE_CUDA", "TORCH_CUDA_ARCH_LIST", *build_cuda.NVCC_VARIABLES]
    switches += ["CXX", "CXXFLAGS", "CFLAGS"]
    state.update(repr([os.environ.get(name) for name in switches]).encode())
    try:
        nvcc = build_cuda.find_nvcc()
        nvcc += build_cuda.ask(nvcc, "--version")
    except build_cuda.BuildError as reason:
        nvcc = str(reason)  # so that one that appears counts too
    state.update(nvcc.encode())
    files = [ROOT / name for name in ("setup.py", "pyproject.toml", "scripts/build_cuda.py", "scripts/find_torch.py")]
    for path in [*files, *sorted(ROOT.glob("csrc/**/*"))]:
        if path.is_file():
            state.update(repr((path.relative_to(ROOT).as_posix(), path.read_bytes())).encode())
    return [state.hexdigest() + ("-werror" if os.environ.get("ZEROX_WERROR") == "1" else "")]


def built() -> bool:
    library = ROOT / "zerox" / f"_C{sysconfig.get_config_var('EXT_SUFFIX')}"
    if not (library.exists() and (ROOT / "zerox/_build_info.py").exists()):
        return False
    try:
        origin = json.loads(metadata.distribution("zerox").read_text("direct_url.json") or "{}")
    except metadata.PackageNotFoundError:
        return False
    # Another clone may be installed in the same environment.
    return origin.get("dir_info", {}).get("editable", False) and origin["url"] == ROOT.as_uri()


ANSWERS: dict[str, Callable[..., list[str]]] = {each.__name__: each for each in (missing, clashes, pins, fingerprint)}


def main() -> int:
    question, *sets = sys.argv[1:]
    if question == "has-torch":
        return 0 if met(find_torch.torch_requirement(), installed()) else 1
    if question == "built":
        return 0 if built() else 1
    print(*ANSWERS[question](*sets), sep="\n")
    return 0


sys.exit(main())
